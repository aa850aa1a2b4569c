"""Definitions in Python: what they turn into, what is refused where it is written, and that types survive."""

import inspect
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any, assert_type, cast

import pytest

from flowforge import Client, Context, Retry, Workflow
from flowforge.errors import FlowForgeError, InvalidDefinition
from tests.services.database import Database

NO_CONTEXT = cast(Context, None)


def test_spec_says_what_was_written() -> None:
    """The definition holds what was given and nothing else: the database knows the defaults."""
    etl = Workflow("etl", description="nightly")

    @etl.task
    def extract(ctx: Context) -> list[int]:
        return [1, 2]

    @etl.task(
        map=extract,
        queue="heavy",
        retry=Retry(max_attempts=3, delay=timedelta(milliseconds=500)),
        lease=timedelta(minutes=1),
        time_limit=90,
        start_within=2.5,
        max_reaps=0,
        priority=-5,
    )
    def parse(ctx: Context) -> int:
        return 1

    @etl.task(name="load it", after=[parse, "extract"], when="all_done", handler="loader")
    def load(ctx: Context) -> None: ...

    assert etl.spec() == {
        "name": "etl",
        "description": "nightly",
        "tasks": [
            {"name": "extract"},
            {
                "name": "parse",
                "queue": "heavy",
                "map": "extract",
                "priority": -5,
                "retry": {"max_attempts": 3, "delay": 0.5, "backoff": 2, "max_delay": 3600, "jitter": 0.25},
                "lease": 60,
                "time_limit": 90,
                "start_within": 2.5,
                "max_reaps": 0,
            },
            {"name": "load it", "after": ["parse", "extract"], "handler": "loader", "when": "all_done"},
        ],
    }
    assert list(etl.tasks) == ["extract", "parse", "load it"]
    assert dict(etl.handlers) == {"etl.extract": extract, "etl.parse": parse, "loader": load}
    assert parse.upstream == ("extract",)


def test_task_may_depend_on_one_defined_later() -> None:
    flow = Workflow("flow")
    flow.task(name="second", after="first")(lambda ctx: None)
    flow.task(name="first")(lambda ctx: None)
    assert [task["name"] for task in flow.spec()["tasks"]] == ["second", "first"]


@pytest.mark.parametrize("same", [30, 30.0, timedelta(seconds=30)])
def test_equal_durations_are_equal_definitions(same: float | timedelta) -> None:
    """Else the same workflow, written differently, would be a new version."""
    flow = Workflow("flow")
    flow.task(name="t", lease=same)(lambda ctx: None)
    assert repr(flow.spec()["tasks"][0]["lease"]) == "30"


def test_handlers_stay_functions_with_their_types() -> None:
    """A unit test calls a handler as if it were not decorated; a type checker knows what it returns."""
    flow = Workflow("flow")

    @flow.task
    def plain(ctx: Context, factor: int = 2) -> int:
        """Doubles."""
        return 21 * factor

    @flow.task(retry=Retry(2))
    async def later(ctx: Context) -> str:
        return "done"

    assert_type(plain(NO_CONTEXT), int)
    assert_type(later(NO_CONTEXT), Coroutine[Any, Any, str]).close()
    assert plain(NO_CONTEXT) == 42
    assert plain(NO_CONTEXT, factor=3) == 63
    assert plain.name == "plain"
    assert plain.__doc__ == "Doubles."
    assert inspect.iscoroutinefunction(inspect.unwrap(later))


def lone_task(**options: Any) -> Workflow:
    flow = Workflow("flow")
    flow.task(name="t", **options)(lambda ctx: None)
    return flow


def same_name_twice() -> None:
    lone_task().task(name="t")(lambda ctx: None)


def same_handler_for_two() -> None:
    lone_task(handler="h").task(name="other", handler="h")(lambda ctx: 1)


def task_of_another_workflow() -> None:
    lone_task(after=lone_task().tasks["t"])


def name_as_only_argument() -> None:
    Workflow("flow").task("t")  # type: ignore[call-overload]


def two_required_arguments() -> None:
    Workflow("flow").task(name="t")(lambda ctx, other: None)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Workflow(""), "name"),
        (lambda: Workflow(cast(str, None)), "None"),
        (lambda: Workflow("flow").spec(), "no task"),
        (same_name_twice, "already has a task 't'"),
        (same_handler_for_two, "'h'"),
        (task_of_another_workflow, "not a task of workflow 'flow'"),
        (name_as_only_argument, "cannot be called"),
        (two_required_arguments, "one argument"),
        (lambda: lone_task(after="missing").spec(), "'missing', which is not one of its tasks: t"),
        (lambda: lone_task(map="missing").spec(), "'missing'"),
        (lambda: lone_task(after=[7]), "not 7"),
        (lambda: lone_task(after=7), "after must be tasks or names of tasks, not 7"),
        (lambda: lone_task(retry=3), r"retry must be a Retry\(…\), .*, not 3"),
        (lambda: lone_task(retries=3), "no option 'retries'; did you mean retry\\?"),
        (lambda: lone_task(colour="red"), "no option 'colour'; there are name, after, map, "),
        (lambda: lone_task(lease="30s"), "lease"),
        (lambda: lone_task(time_limit=float("nan")), "time_limit"),
        (lambda: lone_task(retry=Retry(2, delay=cast(float, True))), r"retry\.delay"),
    ],
)
def test_obvious_mistakes_are_refused_where_they_are_made(wrong: Callable[[], object], says: str) -> None:
    with pytest.raises(InvalidDefinition, match=says) as refusal:
        wrong()
    assert isinstance(refusal.value, ValueError)
    assert isinstance(refusal.value, FlowForgeError)


def test_cycle_is_told_with_its_path() -> None:
    """Before anything is started, as `flowforge up` would for it."""
    flow = Workflow("flow")
    flow.task(name="a", after="c")(lambda ctx: None)
    flow.task(name="b", after="a")(lambda ctx: None)
    flow.task(name="c", after="b")(lambda ctx: None)
    with pytest.raises(InvalidDefinition, match=r"'flow' form a cycle: \w → \w → \w → \w$"):
        flow.spec()


def test_defaults_are_those_of_the_database(db: Database) -> None:
    """What Retry fills in equals what the database fills in, so both are one version."""

    def flow(**options: Any) -> Workflow:
        made = Workflow("flow")
        made.task(name="t", **options)(lambda ctx: None)
        return made

    with Client(db.dsn) as client:
        first = client.define(flow())
        assert first.created
        assert not client.define(flow(retry=Retry(max_attempts=1), queue="default")).created
        assert client.define(flow(retry=Retry(max_attempts=1, delay=7))).version == first.version + 1


def test_database_is_the_authority(db: Database) -> None:
    """What passes Python and is refused by the database is the same kind of error."""
    flow = Workflow("flow")
    flow.task(name="a", priority=10**9)(lambda ctx: None)
    with Client(db.dsn) as client, pytest.raises(InvalidDefinition, match="priority") as refusal:
        client.define(flow)
    assert refusal.value.sqlstate == "WF003"
