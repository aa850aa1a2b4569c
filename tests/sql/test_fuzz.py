"""Hostile calls of every public function, in the middle of a run, by what its signature says.

A call answers, and every invariant holds, or it is refused by an error that names what was wrong: WF… or 22….
What has been taken harms nobody later: the scheduler's duties and the views do their work after it.
FLOWFORGE_TEST_EXAMPLES=1000 tries so many calls of each function, others each time.
"""

import json
import os
import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from tests.sql.helpers import Engine, task
from tests.sql.test_arguments import functions

# Of each function, with every change; always the same ones.
EXAMPLES = 25

HOSTILE_TEXTS = (
    *(
        "",
        " ",
        "\t",
        "\x01\x1f\x7f\x9f",
        "\u202e",
        "👩‍🚀" * 60,
        "\U0010ffff",
        "%s %I {} $1 \\",
        "'; select 1; --",
    ),
    *("x" * 255, "x" * 256, "é" * 128, "x" * 100_000, "null", "NaN", "{}", "a,b", "A", "ﬁ"),
)
KNOWN_TEXTS = (
    *("w", "a", "b", "m", "default", "worker", "succeeded", "failed", "cancelled", "unstarted", "shutdown"),
    *("crashed", "unknown_handler", "max_tasks", "notify", "max_payload_bytes", "key"),
)
# By argument (or element of one), so that what is hostile about a call is mostly one other; what is missing
# here may be null.
RIGHT = {
    "workflow": ("w",),
    "worker": ("worker",),
    "queue": ("default",),
    "name": ("max_tasks", "notify"),
    "outcome": ("succeeded", "failed", "cancelled"),
    "reason": ("unstarted", "shutdown", "crashed", "unknown_handler"),
    "task": ("a", "d", "u"),
    "from_task": ("a", "d", "u"),
    "spec": ('{"name": "w", "tasks": [{"name": "a"}, {"name": "b", "after": ["a"]}]}',),
    "input": ("{}", "1"),
    "output": ("[1]", '"x"'),
    "labels": ("{}",),
    "error": ("no luck", ""),
    "message": ("half",),
    "retryable": ("t", "f"),
    "one_by_one": ("t", "f"),
    "asleep": ("f",),
    "fraction": ("0.5",),
    "lease": ("30 s",),
    "redispatch_delay": ("10 s", "40 s"),
    "older_than": ("1 s",),
    "delay": ("0", "5 s"),
    "claim_id": ("11111111-1111-1111-1111-111111111111",),
    "max_rows": ("1", "10"),
    "max_runs": ("1", "10"),
    "capacity": ("4",),
    "window_size": ("1", "1000"),
    "version": ("1",),
    "priority": ("0", "7"),
    "value": ("100",),
}
INTERVALS = (
    *(
        "0",
        "30 s",
        "-1 s",
        "0.1 s",
        "7 days",
        "1 mon -30 days",
        "-1 mon 31 days",
        "0.000001 s",
        "99999999 hours",
    ),
    *("178000000 years", "-178000000 years", "2147483647 mons 2147483647 days", "1 mon"),
)
NUMBERS = (0, 1, -1, 2, 2**31 - 1, 2**31, 2**53, 2**63 - 1, -(2**63), 10**6, 10**9)
FRACTIONS = (
    "0",
    "1",
    "0.5",
    "-0",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e308",
    "-1e308",
    "5e-324",
    "1.0000000000000002",
)
UUIDS = ("00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff")

_leaves = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from([0.5, -1e-300, 1e308, 10**400]),
    st.sampled_from([each for each in (*HOSTILE_TEXTS, *KNOWN_TEXTS) if len(each) < 1000]),
)  # fmt: skip
_json = st.recursive(
    _leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KNOWN_TEXTS[:4]), inner, max_size=3)
    ),
    max_leaves=8,
)
TASK_KEYS = (
    *(
        "name",
        "after",
        "handler",
        "queue",
        "map",
        "when",
        "priority",
        "retry",
        "lease",
        "time_limit",
        "max_reaps",
    ),
    *("start_within", "unknown"),
)
_hostile_task = st.builds(
    lambda name, changes: {"name": name, **changes},
    st.sampled_from("abcd"),
    st.dictionaries(
        st.sampled_from(TASK_KEYS),
        _json
        | st.lists(st.sampled_from("abcd"), max_size=3)
        | st.dictionaries(
            st.sampled_from(["max_attempts", "delay", "backoff", "max_delay", "jitter"]), _leaves, max_size=3
        ),
        max_size=2,
    ),
)
_definitions = st.builds(
    lambda changes, tasks: {"name": "w", "tasks": tasks, **changes},
    st.dictionaries(st.sampled_from(["name", "tasks", "description", "x"]), _json, max_size=1),
    st.lists(_hostile_task, max_size=4),
)


def _quoted(element: str | None) -> str:
    return "NULL" if element is None else '"' + re.sub(r'(["\\])', r"\\\1", element) + '"'


def _array(elements: list[str | None], shape: str) -> str:
    """The text of an array in one of PostgreSQL's shapes."""
    inner = "{" + ",".join(map(_quoted, elements)) + "}"
    if not elements or shape == "flat":
        return inner
    if shape == "nested":
        return "{" + inner + "," + inner + "}"
    start = int(shape)
    return f"[{start}:{start + len(elements) - 1}]={inner}"


class Values:
    """Strategies by type, each of the texts that PostgreSQL reads; null may stand for any. Half of what they
    draw is of the run that is there."""

    def __init__(self, engine: Engine) -> None:
        rows = engine.rows("select * from flowforge.task_run")
        numbers = {value for row in rows for value in (row.task_run_id, row.run_id, row.fencing_token)}
        numbers |= {row.outbox_id for row in engine.messages()}
        ids = {str(value) for row in rows for value in (row.dispatch_id, row.claim_id) if value}
        self._of: dict[str, st.SearchStrategy[str]] = {
            "bigint": (st.sampled_from(sorted(numbers)) | st.sampled_from(NUMBERS)).map(str),
            "boolean": st.sampled_from(["t", "f"]),
            "double precision": st.sampled_from(FRACTIONS),
            "interval": st.sampled_from(INTERVALS),
            "jsonb": (_json | _definitions).map(json.dumps) | st.just("[" * 400 + "]" * 400),
            "text": st.sampled_from(KNOWN_TEXTS) | st.sampled_from(HOSTILE_TEXTS),
            "uuid": st.sampled_from([*sorted(ids), *UUIDS]),
        }
        if engine.connection.info.server_version >= 170_000:
            self._of["interval"] |= st.sampled_from(["infinity", "-infinity"])

        offered = next(row for row in engine.messages() if row.handler.endswith("a"))
        leased = next(row for row in rows if row.state == "running")
        # Those that go together: of what is offered where a call names a dispatch, else of what runs.
        self._offered = {
            "task_run_id": (str(offered.task_run_id),),
            "dispatch_id": (str(offered.dispatch_id),),
        }
        self._leased = {
            "task_run_id": (str(leased.task_run_id),),
            "fencing_token": (str(leased.fencing_token),),
            "run_id": (str(leased.run_id),),
            "outbox_id": (str(offered.outbox_id),),
        }

    def _right(self, function: Any, argument: str, kind: str) -> st.SearchStrategy[str | None]:
        name = argument.removesuffix("s") if kind.endswith("[]") else argument
        dispatched = any(each.startswith("dispatch_id") for each in function.arguments)
        there = {**RIGHT, **self._leased, **(self._offered if dispatched else {})}.get(name)
        if there is None:
            return st.none()
        return st.sampled_from([_array([each], "flat") if kind.endswith("[]") else each for each in there])

    def _any(self, kind: str) -> st.SearchStrategy[str | None]:
        if kind.endswith("[]"):
            elements = st.lists(st.none() | self._of[kind[:-2]], max_size=3)
            given_some = st.lists(self._of[kind[:-2]], min_size=1, max_size=3)
            shapes = st.sampled_from(["flat", "flat", "flat", "nested", "0", "2", "-3"])
            return st.one_of(st.none(), *[st.builds(_array, each, shapes) for each in (elements, given_some)])
        return st.one_of(self._of[kind], self._of[kind], self._of[kind], st.none())

    def call(self, function: Any) -> st.SearchStrategy[tuple[Any, list[str | None]]]:
        """Mostly with one hostile argument, each in its turn; now and then with more."""
        places = range(len(function.arguments))
        right = [
            self._right(function, *each) for each in zip(function.arguments, function.types, strict=True)
        ]
        one = [
            st.tuples(*[self._any(function.types[at]) if at == place else right[at] for at in places])
            for place in places
        ]
        any_of_them = st.tuples(*[right[at] | self._any(function.types[at]) for at in places])
        return st.tuples(st.just(function), st.one_of(*one, any_of_them).map(list))


def _middle(engine: Engine) -> None:
    """A run with something in every state: ready, running, failed, to be expanded, waiting."""
    engine.define(
        *(task(name) for name in "abcdu"), task("e", "d", when="all_done"), task("m", "u", map="u"), name="w"
    )
    engine.trigger("w", idempotency_key="key")
    engine.schedule()
    messages = {row.handler[-1]: row for row in engine.messages()}
    engine.finish(engine.claim(messages["u"]), output="[1, 2]")
    engine.call("settle_finished")
    engine.claim(messages["c"])
    engine.finish(engine.claim(messages["d"]), "failed", retryable=False)
    engine.advance("35 s")
    engine.rows("update flowforge.scheduler set reaper_ticked_at = flowforge._clock()")


# What an error calls an argument whose name says less.
WHAT_IT_IS = {"define_workflow": {"definition", "workflow"}, "set_limit": {"limit"}}


def _names_what_was_wrong(function: Any, message: str) -> bool:
    """Whether an error tells which argument it is about, or of what."""
    words = {word.removesuffix("s") for each in function.arguments for word in each.split("_")} - {
        "id",
        "max",
    }
    words |= WHAT_IT_IS.get(function.name, set())
    return any(word in message.lower() for word in words)


# What was taken is within the bounds that are documented.
OUT_OF_BOUNDS = """
    select 'queue' from flowforge.queue
    where window_size not between 1 and 1000000 or redispatch_delay not between '0.1 s' and '1 day'
    union all
    select 'lease' from flowforge.task_run where lease_length not between '0.1 s' and '7 days'
    union all
    select 'priority' from flowforge.run where priority not between -1000000 and 1000000
    union all
    select 'limit' from flowforge.limits where value not between minimum and maximum
"""


def _try(engine: Engine, function: Any, arguments: list[str | None]) -> None:
    note(f"{function.name}({', '.join(str(each)[:200] for each in arguments)})")
    places = ", ".join(f"%s::{each}" for each in function.types)
    try:
        with engine.connection.transaction():
            engine.rows(f"select * from flowforge.{function.name}({places})", *arguments)
            broken = engine.rows("select * from flowforge.violations()") + engine.rows(OUT_OF_BOUNDS)
    except psycopg.Error as error:
        note(f"{error.sqlstate} {error}")
        clean = (error.sqlstate or "")[:2] in ("WF", "22") and _names_what_was_wrong(function, str(error))
    else:
        clean = not broken
    assert clean


VIEWS = (
    "run_status",
    "task_run_status",
    "dead_letters",
    "queue_status",
    "worker_status",
    "workflow_status",
    "health",
)


def _afterwards(engine: Engine) -> None:
    """The duties and the views, an hour later."""
    engine.advance("1 hour")
    for duty in (
        *("settle_finished", "expand_map", "dispatch_ready", "reap_expired_leases", "cancel_leftovers"),
        *("redispatch_lost", "fail_undeliverable", "sweep_outbox", "settle_finished", "next_due"),
    ):
        engine.rows(f"select flowforge.{duty}()")
    assert not engine.rows("select * from flowforge.violations()")
    for view in VIEWS:
        engine.rows(f"select * from flowforge.{view}")


@pytest.mark.timeout(3600)
def test_hostile_calls(engine: Engine) -> None:
    longer = os.environ.get("FLOWFORGE_TEST_EXAMPLES")
    engine.rows("set local statement_timeout = '10 s'")
    _middle(engine)
    values = Values(engine)
    every = functions(engine)
    anything = st.sampled_from(every).flatmap(values.call)

    def fuzz(function: Any) -> Callable[[], None]:
        @settings(
            max_examples=int(longer) if longer else EXAMPLES,
            derandomize=not longer,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(values.call(function), st.lists(anything, max_size=2))
        def hostile(first: Any, more: list[Any]) -> None:
            with engine.connection.transaction(force_rollback=True):
                for call in (first, *more):
                    _try(engine, *call)
                _afterwards(engine)

        return hostile

    for function in every:
        fuzz(function)()
