"""trigger and trigger_many: one run for one request, whole or not at all."""

import threading
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Clock, Database
from tests.services.process import wait_until
from tests.sql.helpers import Engine, task

TRIGGER = "select flowforge.trigger('w', %s, %s)"


def inputs(*values: Any) -> list[Jsonb]:
    return [Jsonb(value) for value in values]


def runs(engine: Engine) -> list[Any]:
    return engine.rows("select * from flowforge.run order by run_id")


@pytest.fixture
def w(engine: Engine) -> Engine:
    engine.define(task("a", priority=3), task("b", "a", queue="other"))
    return engine


def test_creates_the_run_and_every_task_run_as_pending_and_stops(w: Engine) -> None:
    labels = {"team": "blue"}
    run_id = w.trigger(input=Jsonb([1]), priority=4, labels=Jsonb(labels))
    run = w.row("select * from flowforge.run")
    assert (run.run_id, run.state, run.unsettled, run.input, run.labels) == (
        run_id,
        "running",
        2,
        [1],
        labels,
    )
    a, b = w.task_run(run_id, "a"), w.task_run(run_id, "b")
    assert [(each.state, each.stage, each.unmet, each.attempt) for each in (a, b)] == [
        ("pending", "eligible", 0, 1),
        ("pending", "blocked", 1, 1),
    ]
    assert (a.priority, b.priority) == (7, 4)
    assert not w.rows("select from flowforge.outbox")
    state = w.value("select state from flowforge.run_status")
    assert state == "pending"


@pytest.mark.parametrize("value", [None, 0, "text", [], {}, {"a": [None]}])
def test_input_is_any_json_value(w: Engine, value: Any) -> None:
    w.trigger(input=Jsonb(value))
    assert runs(w)[0].input == value


def test_a_delay_holds_back_the_whole_run(w: Engine) -> None:
    run_id = w.trigger(delay="1 day 1 hour")
    w.schedule()
    assert w.task_run(run_id, "a").stage == "delayed"
    w.advance("24:59:59")
    w.schedule()
    assert w.task_run(run_id, "a").state == "pending"
    w.advance("1 s")
    w.schedule()
    assert w.task_run(run_id, "a").state == "ready"


# Idempotent triggers (HD-45)


def test_the_same_key_and_input_is_the_same_run(w: Engine) -> None:
    run_id = w.trigger(input=Jsonb({"a": 1, "b": 2}), idempotency_key="k")
    w.drive()
    with w.changes_nothing():
        assert w.trigger(input=Jsonb({"b": 2, "a": 1}), idempotency_key="k") == run_id


def test_the_same_key_with_other_input_is_an_error_that_names_the_first_run(w: Engine) -> None:
    run_id = w.trigger(input=Jsonb(1), idempotency_key="k")
    with w.refuses("WF004", "'k'", f"run {run_id}"):
        w.trigger(input=Jsonb(2), idempotency_key="k")


def test_a_key_belongs_to_its_workflow_and_lives_until_the_run_is_pruned(w: Engine) -> None:
    w.define(task("a"), name="other")
    first = w.trigger(idempotency_key="k")
    assert w.trigger("other", idempotency_key="k") != first
    w.call("cancel_run", first)
    assert w.trigger(idempotency_key="k") == first
    w.advance("1 s")
    w.call("prune", "0")
    assert w.trigger(idempotency_key="k") != first


def test_fifty_concurrent_calls_with_one_key_make_one_run(db: Database) -> None:
    with db.connect() as connection:
        Engine(connection).define(task("a"), task("b", "a"))
    barrier = threading.Barrier(50)
    answers: list[int] = []

    def call() -> None:
        with db.connect() as connection:
            barrier.wait()
            row = connection.execute(TRIGGER, (Jsonb({}), "k")).fetchone()
            assert row is not None
            answers.append(row[0])

    threads = [threading.Thread(target=call) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 50
    assert len(set(answers)) == 1
    with db.connect() as connection:
        counts = connection.execute(
            "select (select count(*) from flowforge.run), (select count(*) from flowforge.task_run)"
        ).fetchone()
    assert counts == (1, 2)


@pytest.mark.parametrize("committed", [True, False])
def test_a_client_that_dies_before_the_answer_may_ask_again(db: Database, committed: bool) -> None:
    with db.connect() as connection:
        Engine(connection).define(task("a"))
    with db.connect(autocommit=False) as lost:
        lost.execute(TRIGGER, (Jsonb({}), "k"))
        if committed:
            lost.commit()
        lost.close()  # a half-done transaction is rolled back by the server
    with db.connect() as again:
        again.execute(TRIGGER, (Jsonb({}), "k"))
        ids = again.execute(
            "select r.run_id, count(*) from flowforge.run r join flowforge.task_run using (run_id) group by 1"
        )
        assert [count for _, count in ids.fetchall()] == [1]


def test_a_key_whose_first_run_is_rolled_back_is_free(db: Database) -> None:
    with db.connect() as other, db.connect(autocommit=False) as caller:
        Engine(other).define(task("a"))
        caller.execute(TRIGGER, (Jsonb(1), "k"))
        caller.rollback()
        assert other.execute("select count(*) from flowforge.run").fetchone() == (0,)
        other.execute(TRIGGER, (Jsonb(2), "k"))
        assert other.execute("select input from flowforge.run").fetchall() == [(2,)]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_works_at_any_isolation_level(db: Database, level: str) -> None:
    with db.connect() as other, db.connect(autocommit=False) as caller:
        Engine(other).define(task("a"), task("b", "a"))
        caller.execute(f"set transaction isolation level {level}".encode())
        caller.execute(TRIGGER, (Jsonb({}), "k"))
        caller.commit()
        assert other.execute("select count(*) from flowforge.task_run").fetchone() == (2,)
        # A key that was taken after this transaction's snapshot cannot be answered: retry the transaction.
        caller.execute(f"set transaction isolation level {level}".encode())
        caller.execute("select from flowforge.run")
        other.execute(TRIGGER, (Jsonb({}), "l"))
        with pytest.raises(psycopg.errors.SerializationFailure):
            caller.execute(TRIGGER, (Jsonb({}), "l"))


# Many at once.


def test_trigger_many_answers_in_the_order_of_the_inputs(w: Engine) -> None:
    first = w.trigger(input=Jsonb("old"), idempotency_key="old")
    ids = w.call("trigger_many", "w", inputs(1, "old", 2, 1), ["z", "old", None, "z"])
    assert (ids[1], ids[3]) == (first, ids[0])
    assert {run.run_id: run.input for run in runs(w)} == {first: "old", ids[0]: 1, ids[2]: 2}
    with w.changes_nothing():
        assert w.call("trigger_many", "w", inputs(1, "old"), ["z", "old"]) == ids[:2]


def test_trigger_many_without_keys_and_with_nothing(w: Engine) -> None:
    ids = w.call("trigger_many", "w", inputs(*range(100)))
    assert [run.run_id for run in runs(w)] == ids
    assert [run.input for run in runs(w)] == list(range(100))
    assert w.call("trigger_many", "w", inputs()) == []


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("WF001", (None, inputs(1))),
        ("WF001", ("w", None)),
        ("WF001", ("w", [Jsonb(1), None])),
        ("WF001", ("w", inputs(1), ["a", "b"])),
        ("WF001", ("w", inputs(1), [""])),
        ("WF001", ("w", [inputs(1), inputs(2)])),
        ("WF001", ("w", inputs(1, 2), [["a"], ["b"]])),
        ("WF002", ("x", inputs(1))),
        ("WF004", ("w", inputs(1, 2), ["k", "k"])),
        ("WF004", ("w", inputs(1, 2), ["k", "taken"])),
    ],
)
def test_trigger_many_creates_all_or_none(w: Engine, code: str, arguments: tuple[Any, ...]) -> None:
    w.trigger(input=Jsonb(0), idempotency_key="taken")
    with w.refuses(code):
        w.call("trigger_many", *arguments)


def test_keys_in_crossing_order_do_not_deadlock(db: Database) -> None:
    """Two calls wait for a key that a third holds; when it is free, neither waits for the other."""
    with db.connect() as looker, db.connect(autocommit=False) as holder:
        Engine(looker).define(task("a"))
        holder.execute(TRIGGER, (Jsonb({}), "m"))
        failures: list[psycopg.Error] = []

        def call(keys: list[str]) -> None:
            with db.connect(application_name="crossing") as connection:
                try:
                    connection.execute(
                        "select flowforge.trigger_many('w', %s, %s)", ([Jsonb({})] * len(keys), keys)
                    )
                except psycopg.Error as error:
                    failures.append(error)

        threads = [threading.Thread(target=call, args=(keys,)) for keys in (["a", "m", "z"], ["z", "m", "a"])]
        for thread in threads:
            thread.start()
        waiting = """select count(*) from pg_stat_activity
            where application_name = 'crossing' and wait_event_type = 'Lock'"""
        wait_until(lambda: looker.execute(waiting).fetchone() == (2,), "both calls to wait")
        holder.rollback()
        for thread in threads:
            thread.join()
        assert not failures
        assert looker.execute("select count(*) from flowforge.run").fetchone() == (3,)


def test_what_has_waited_for_its_key_comes_in_line_when_it_comes(
    db: Database, clock: Clock, committing: Engine
) -> None:
    """Not before: looks for work begin a minute ago."""
    committing.define(task("a"))
    with db.connect(autocommit=False) as holder, db.connect(application_name="second") as second:
        holder.execute(TRIGGER, (Jsonb({}), "k"))
        thread = threading.Thread(target=second.execute, args=(TRIGGER, (Jsonb({}), "k")))
        thread.start()
        waiting = """select count(*) from pg_stat_activity
            where application_name = 'second' and wait_event_type = 'Lock' and datname = current_database()"""
        wait_until(lambda: committing.value(waiting) == 1, "the second call to wait")
        clock.advance("1 hour")
        holder.rollback()
        thread.join()
    assert committing.value("select available_at = flowforge._clock() from flowforge.task_run")


# What is refused.


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("WF001", {"workflow": None}),
        ("WF001", {"workflow": ""}),
        ("WF002", {"workflow": "x"}),
        ("WF005", {"workflow": "x" * 201}),
        ("WF001", {"input": None}),
        ("WF001", {"idempotency_key": ""}),
        ("WF001", {"idempotency_key": "a\nb"}),
        ("WF005", {"idempotency_key": "k" * 256}),
        ("WF002", {"version": 0}),
        ("WF002", {"version": 2}),
        ("WF001", {"priority": None}),
        ("WF001", {"priority": 1_000_001}),
        ("WF001", {"priority": -(2**63)}),
        ("WF001", {"delay": None}),
        ("WF001", {"delay": "-1 s"}),
        ("WF001", {"delay": "11 years"}),
        ("WF001", {"labels": None}),
        ("WF001", {"labels": Jsonb([])}),
        ("WF001", {"labels": Jsonb({"traceparent": "x" * 20_000})}),
        ("WF001", {"labels": Jsonb({"traceparent": 1})}),
    ],
)
def test_wrong_arguments_are_refused(w: Engine, code: str, named: dict[str, Any]) -> None:
    with w.refuses(code):
        w.call("trigger", **{"workflow": "w", **named})


def test_limits(w: Engine) -> None:
    w.call("set_limit", "max_payload_bytes", 1024)
    w.call("set_limit", "max_labels_bytes", 1024)
    w.call("set_limit", "max_trigger_runs", 2)
    w.call("set_limit", "max_trigger_task_runs", 3)
    large = Jsonb("x" * 1100)
    for named in ({"input": large}, {"labels": Jsonb({"large": "x" * 1100})}):
        with w.refuses("WF005", "at most 1024"):
            w.call("trigger", workflow="w", **named)
    with w.refuses("WF005", "3 inputs; at most 2"):
        w.call("trigger_many", "w", inputs(1, 2, 3))
    with w.refuses("WF005", "2 runs of 2 tasks"):
        w.call("trigger_many", "w", inputs(1, 2))
    with w.refuses("WF005", "at most 1024"):
        w.call("trigger_many", "w", [large])


def test_the_trace_context_does_not_count_as_labels(w: Engine) -> None:
    """It has a length of its own, and callers do not know that their client adds it."""
    w.call("set_limit", "max_labels_bytes", 1024)
    context = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    as_large_as_allowed = {"large": "x" * (1024 - len('{"large": ""}'))}
    while w.value(
        "select flowforge._bytes(%s) > 1024", as_large_as_allowed
    ):  # which is a little more in memory
        as_large_as_allowed["large"] = as_large_as_allowed["large"][1:]
    w.call("trigger", workflow="w", labels=Jsonb(as_large_as_allowed | context))
    with w.refuses("WF005", "at most 1024"):
        w.call("trigger", workflow="w", labels=Jsonb({"large": as_large_as_allowed["large"] + "x"} | context))


def test_a_payload_is_measured_as_it_is_in_memory(w: Engine) -> None:
    """One that comes from a table may be stored compressed."""
    w.call("set_limit", "max_payload_bytes", 1_000_000)
    w.rows("create temporary table document (content jsonb) on commit drop")
    w.rows("insert into document values (to_jsonb(repeat('x', 1000001)))")
    with w.refuses("WF005", "at most 1000000"):
        w.rows("select flowforge.trigger('w', d.content) from document d")
