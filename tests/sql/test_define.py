"""define_workflow and activate_version: what is registered, and what is refused and why."""

import itertools
import json
import threading
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Database
from tests.services.process import wait_until
from tests.sql.helpers import Engine, failing, task

DEFAULTS: dict[str, Any] = {
    "after": [],
    "handler": "w.a",
    "queue": "default",
    "map": None,
    "when": "all_succeeded",
    "priority": 0,
    "retry": {"max_attempts": 1, "delay": 1, "backoff": 2, "max_delay": 3600, "jitter": 0.25},
    "lease": None,
    "time_limit": None,
    "start_within": None,
    "max_reaps": 2,
}


def define(engine: Engine, spec: Any) -> tuple[str, int, bool]:
    row = engine.row("select * from flowforge.define_workflow(%s)", Jsonb(spec))
    return row.workflow, row.version, row.created


def workflow(*tasks: Any, **more: Any) -> dict[str, Any]:
    return {"name": "w", "tasks": list(tasks), **more}


def test_every_default_is_filled_in(engine: Engine) -> None:
    assert define(engine, workflow({"name": "a"})) == ("w", 1, True)
    spec = engine.value("select spec from flowforge.workflow_version where version = 1")
    assert spec == {"name": "w", "tasks": [{"name": "a", **DEFAULTS}]}


def test_settings_are_stored_in_their_units(engine: Engine) -> None:
    retry = {"max_attempts": 3, "delay": 0.5, "backoff": 1.5, "max_delay": 60, "jitter": 0}
    durations = {"lease": 0.1, "time_limit": 90, "start_within": 86400}
    a = task("a", handler="h", queue="q", priority=-7, retry=retry, max_reaps=0, **durations)
    define(engine, workflow(a, task("b", "a", map="a", when="none_failed")))
    stored = engine.row(
        "select t.*, q.name as queue from flowforge.task t join flowforge.queue q using (queue_id)"
        " where t.name = 'a'"
    )
    assert (stored.handler, stored.queue, stored.priority, stored.max_reaps) == ("h", "q", -7, 0)
    assert (stored.max_attempts, stored.retry_delay, stored.retry_backoff) == (3, 0.5, 1.5)
    assert (stored.retry_max_delay, stored.retry_jitter) == (60, 0)
    seconds = [each.total_seconds() for each in (stored.lease, stored.time_limit, stored.start_within)]
    assert seconds == [0.1, 90, 86400]
    b = engine.row("select * from flowforge.task where name = 'b'")
    assert (b.map_task_id, b.rule, b.upstream_count) == (stored.task_id, "none_failed", 1)


@pytest.mark.parametrize(
    "again",
    [
        pytest.param([task("b", "a"), task("a")], id="other order of tasks"),
        pytest.param([task("a"), task("b", "a", "a")], id="a dependency named twice"),
        pytest.param(
            [task("a", priority=0.0, max_reaps=2.0), task("b", "a")], id="other writing of a number"
        ),
        pytest.param([task("a", queue="default", lease=None), task("b", "a")], id="defaults written out"),
    ],
)
def test_known_content_changes_nothing(engine: Engine, again: list[Any]) -> None:
    define(engine, workflow(task("a"), task("b", "a")))
    define(engine, workflow(task("a")))
    with engine.changes_nothing():
        # Not even which version is current.
        assert define(engine, workflow(*again)) == ("w", 1, False)


def test_new_content_becomes_current_and_runs_keep_their_version(engine: Engine) -> None:
    define(engine, workflow(task("a")))
    old = engine.trigger()
    assert define(engine, workflow(task("a"), task("b"))) == ("w", 2, True)
    assert define(engine, workflow(task("a"), description="the same, described")) == ("w", 3, True)
    new = engine.trigger(version=2)
    assert [engine.states(run) for run in (old, new)] == [
        {"a": "pending"},
        {"a": "pending", "b": "pending"},
    ]


def test_activate_version(engine: Engine) -> None:
    define(engine, workflow(task("a")))
    define(engine, workflow(task("b")))
    assert engine.call("activate_version", "w", 1) is True
    assert engine.states(engine.trigger()) == {"a": "pending"}
    with engine.changes_nothing():
        assert engine.call("activate_version", "w", 1) is False
    for arguments in [("w", 3), ("w", None), ("w", 0), ("x", 1), (None, 1)]:
        with engine.refuses("WF002"):
            engine.call("activate_version", *arguments)


@pytest.mark.parametrize(
    ("tasks", "named"),
    [
        ([task("a", "a")], ["'a' of workflow 'w' depends on itself"]),
        ([task("a", map="a")], ["'a' of workflow 'w' depends on itself"]),
        ([task("a", "b"), task("b", "a")], ["'a' -> 'b' -> 'a'", "'b' -> 'a' -> 'b'"]),
        (
            [task("a", "c"), task("b", "a"), task("c", "b")],
            ["'a' -> 'b' -> 'c'", "'b' -> 'c' -> 'a'", "'c' -> 'a' -> 'b'"],
        ),
        (
            [task("x"), task("y", "x"), task("a", "b"), task("b", map="a")],
            ["'b' -> 'a' -> 'b'", "'a' -> 'b' -> 'a'"],
        ),
        # What hangs below a cycle or above it is not part of the path.
        (
            [task("top"), task("a", "b", "top"), task("b", "a"), task("low", "b"), task("lower", "low")],
            ["cycle: 'b' -> 'a' -> 'b'", "cycle: 'a' -> 'b' -> 'a'"],
        ),
        ([task("a", "b")], ["'a' of workflow 'w' depends on the unknown task 'b'"]),
        ([task("a"), task("b", map="c")], ["'b' of workflow 'w' depends on the unknown task 'c'"]),
        ([task("a"), task("a", queue="q")], ["duplicate task 'a' and 'a'"]),
        ([task("Load"), task("load")], ["duplicate task 'Load' and 'load'"]),
        ([task("caf\u00e9"), task("cafe\u0301")], ["duplicate task"]),
        ([], ["has no tasks"]),
    ],
)
def test_impossible_graphs_are_refused_by_name(engine: Engine, tasks: list[Any], named: list[str]) -> None:
    """HD-33: nothing is stored, and the message names what is wrong."""
    with engine.refuses("WF003") as caught:
        define(engine, workflow(*tasks))
    assert any(words in str(caught.value) for words in named), caught.value


def test_a_cycle_of_ten_thousand_is_found_and_its_path_cut_short(engine: Engine) -> None:
    tasks = [task(f"t{i}", f"t{(i or 10_000) - 1}") for i in range(10_000)]
    with engine.refuses("WF003", "-> ... (10000 tasks)"):
        define(engine, workflow(*tasks))


def test_the_edge_table_itself_accepts_neither_cycles_nor_foreign_edges(engine: Engine) -> None:
    """HD-33: constraints hold for direct inserts too."""
    define(engine, workflow(task("a"), task("b", "a")))
    define(engine, workflow(task("c"), name="other"))
    ids = {row.name: row for row in engine.rows("select * from flowforge.task")}
    insert = "insert into flowforge.task_dependency values (%s, %s, %s)"
    version, other = ids["a"].workflow_version_id, ids["c"].workflow_version_id
    for code, values in [
        ("23514", (version, ids["a"].task_id, ids["a"].task_id)),  # itself
        ("23514", (version, ids["a"].task_id, ids["b"].task_id)),  # would close a cycle
        ("23503", (version, ids["c"].task_id, ids["a"].task_id)),  # between versions
        ("23503", (other, ids["c"].task_id, ids["a"].task_id)),
        ("23505", (version, ids["b"].task_id, ids["a"].task_id)),  # a second time
    ]:
        with engine.refuses(code):
            engine.rows(insert, *values)


# Of the second of two tasks.
BAD_TASKS: list[tuple[dict[str, Any], str]] = [
    ({"extra": 1}, "WF003"),
    ({"name": 1}, "WF003"),
    ({"name": "a\n"}, "WF001"),
    ({"name": " a"}, "WF001"),
    ({"name": "n" * 201}, "WF005"),
    ({"handler": ""}, "WF001"),
    ({"handler": 1}, "WF003"),
    ({"handler": "h" * 256}, "WF005"),
    ({"queue": None}, "WF003"),
    ({"queue": "dead"}, "WF003"),
    ({"queue": "q" * 201}, "WF005"),
    ({"after": "b"}, "WF003"),
    ({"after": None}, "WF003"),
    ({"after": {"b": 1}}, "WF003"),
    ({"after": [1]}, "WF003"),
    ({"after": [None]}, "WF003"),
    ({"map": 1}, "WF003"),
    ({"when": "all_succeeded"}, "WF003"),  # a rule without upstreams
    ({"after": ["b"], "when": "sometimes"}, "WF003"),
    ({"after": ["b"], "when": None}, "WF003"),
    ({"priority": "1"}, "WF003"),
    ({"priority": 0.5}, "WF003"),
    ({"priority": 1_000_001}, "WF003"),
    ({"priority": None}, "WF003"),
    ({"retry": None}, "WF003"),
    ({"retry": 3}, "WF003"),
    ({"retry": {"attempts": 3}}, "WF003"),
    ({"retry": {"max_attempts": 0}}, "WF003"),
    ({"retry": {"max_attempts": 2.5}}, "WF003"),
    ({"retry": {"delay": -1}}, "WF003"),
    ({"retry": {"backoff": 0.9}}, "WF003"),
    ({"retry": {"max_delay": 1e300}}, "WF003"),
    ({"retry": {"jitter": 11}}, "WF003"),
    ({"lease": 0}, "WF003"),
    ({"lease": "30 s"}, "WF003"),
    ({"time_limit": -1}, "WF003"),
    ({"start_within": True}, "WF003"),
    ({"max_reaps": -1}, "WF003"),
]
BAD_VALUES: list[tuple[Any, str]] = [
    (None, "WF003"),
    ("w", "WF003"),
    ([], "WF003"),
    ({}, "WF001"),
    ({"name": 5, "tasks": [{"name": "a"}]}, "WF003"),
    ({"name": "", "tasks": [{"name": "a"}]}, "WF001"),
    ({"name": "w"}, "WF003"),
    ({"name": "w", "tasks": {}}, "WF003"),
    ({"name": "w", "tasks": None}, "WF003"),
    ({"name": "w", "tasks": ["a"]}, "WF003"),
    ({"name": "w", "tasks": [None]}, "WF003"),
    ({"name": "w", "tasks": [{}]}, "WF001"),
    ({"name": "w", "tasks": [{"name": "a"}], "extra": 1}, "WF003"),
    ({"name": "w", "tasks": [{"name": "a"}], "description": 1}, "WF003"),
    *((workflow({"name": "b"}, {"name": "a"} | wrong), code) for wrong, code in BAD_TASKS),
]


@pytest.mark.parametrize(("spec", "code"), BAD_VALUES, ids=[json.dumps(spec)[:60] for spec, _ in BAD_VALUES])
def test_a_wrong_definition_is_refused(engine: Engine, spec: Any, code: str) -> None:
    with engine.refuses(code):
        define(engine, spec)


def test_no_definition(engine: Engine) -> None:
    with engine.refuses("WF003"):
        engine.rows("select flowforge.define_workflow(null)")


def test_limits(engine: Engine) -> None:
    engine.call("set_limit", "max_tasks", 2)
    engine.call("set_limit", "max_dependencies", 1)
    engine.call("set_limit", "max_payload_bytes", 1024)
    with engine.refuses("WF005", "3 tasks; at most 2"):
        define(engine, workflow(task("a"), task("b"), task("c")))
    with engine.refuses("WF005", "more than 1 dependencies"):
        define(engine, workflow(task("a", "b", "b")))
    with engine.refuses("WF005", "1024 are allowed"):
        define(engine, workflow(task("a"), description="x" * 1024))


@pytest.mark.parametrize(("tasks", "answer"), [(["a"], ("w", 1, False)), (["b"], ("w", 2, True))])
def test_two_at_the_same_time_take_turns(
    db: Database, tasks: list[str], answer: tuple[str, int, bool]
) -> None:
    define = "select * from flowforge.define_workflow(%s)"
    answers = []

    def call() -> None:
        with db.connect(application_name="second") as connection:
            spec = Jsonb(workflow(*map(task, tasks)))
            answers.append(connection.execute(define, (spec,)).fetchone())

    with db.connect(autocommit=False) as first, db.connect() as looker:
        first.execute(define, (Jsonb(workflow(task("a"))),))
        thread = threading.Thread(target=call)
        thread.start()
        waiting = """select count(*) from pg_stat_activity
            where application_name = 'second' and wait_event_type = 'Lock'"""
        wait_until(lambda: looker.execute(waiting).fetchone() == (1,), "the second definition to wait")
        first.commit()
        thread.join()
    assert answers == [answer]


# Large graphs: HD-34.


def test_ten_thousand_independent_tasks_and_their_join(committing: Engine) -> None:
    names = [f"t{i}" for i in range(10_000)]
    committing.define(*map(task, names), task("join", *names))
    committing.call("configure_queue", "default", window_size=10_000)
    run_id = committing.trigger()
    while committing.call("dispatch_ready", 10_000):
        pass
    claims = committing.claim_next(10_000)
    assert len(claims) == 10_000
    assert set(committing.finish_all(claims[:-1])) == {"accepted"}
    while committing.call("settle_finished"):
        pass
    assert committing.task_run(run_id, "join").unmet == 1
    assert committing.finish(claims[-1]) == "accepted"
    committing.drive()
    assert committing.run_state(run_id) == "succeeded"


def test_a_chain_of_ten_thousand(committing: Engine) -> None:
    committing.define(*(task(f"t{i}", *[f"t{i - 1}"] * (i > 0)) for i in range(10_000)))
    run_id = committing.trigger()
    committing.drive(failing("t0"))
    skipped = committing.value("select skipped from flowforge.run_status where run_id = %s", run_id)
    assert (committing.run_state(run_id), skipped) == ("failed", 9_999)
    assert committing.call("retry_run", run_id) == 10_000
    assert committing.call("cancel_run", run_id) is True
    assert committing.run_state(run_id) == "cancelled"


def test_a_million_dependencies_are_refused_by_a_named_limit(engine: Engine) -> None:
    layers = [[f"t{layer}-{i}" for i in range(100)] for layer in range(100)]
    tasks = [task(name) for name in layers[0]]
    for above, layer in itertools.pairwise(layers):
        tasks += [task(name, *above) for name in layer]
    with engine.refuses("WF005", "dependencies"):
        define(engine, workflow(*tasks))


def test_twenty_stacked_diamonds(engine: Engine) -> None:
    tasks = [task("d0")]
    for i in range(20):
        tasks += [task(f"l{i}", f"d{i}"), task(f"r{i}", f"d{i}"), task(f"d{i + 1}", f"l{i}", f"r{i}")]
    engine.define(*tasks)
    run_id = engine.trigger()
    engine.drive()
    assert set(engine.states(run_id).values()) == {"succeeded"}
    assert engine.run_state(run_id) == "succeeded"


def test_there_are_no_more_queues_than_are_allowed(engine: Engine) -> None:
    """Each costs the scheduler a look."""
    engine.call("set_limit", "max_queues", 3)
    engine.define(*(task(f"t{i}", queue=f"q{i}") for i in range(3)))
    spec = {"name": "more", "tasks": [task("a", queue="q0"), task("b", queue="q3")]}
    with engine.refuses("WF005", "more than 3 queues", "more"):
        engine.call("define_workflow", spec)
    engine.define(task("a", queue="q2"), name="more")
