"""retry_run: a part of a run again, and nothing but that part."""

import threading
from typing import Any

import pytest

from tests.services.database import Database
from tests.services.process import wait_until
from tests.sql.helpers import Behaviour, Claim, Engine, Failure, failing, task


def failing_before(attempt: int, *tasks: str) -> Behaviour:
    """These tasks fail until this attempt."""

    def behave(claim: Claim) -> str:
        if claim.task in tasks and claim.attempt < attempt:
            raise Failure(f"{claim.task} failed")
        return f"{claim.task}{claim.attempt}"

    return behave


def diamond(engine: Engine, *failed: str) -> int:
    """A → {B, C} → D → E, driven to its end, with C failing unless told otherwise."""
    run_id = engine.start(task("A"), task("B", "A"), task("C", "A"), task("D", "B", "C"), task("E", "D"))
    engine.drive(failing(*(failed or ("C",))))
    engine.advance("1 hour")
    return run_id


def test_the_failed_part_runs_again_and_nothing_else(engine: Engine) -> None:
    """HD-32."""
    run_id = diamond(engine)
    assert (engine.run_state(run_id), engine.states(run_id)["E"]) == ("failed", "skipped")
    untouched = [engine.task_run(run_id, name) for name in "AB"]
    old = engine.task_run(run_id, "C")
    assert engine.call("retry_run", run_id) == 3
    run = engine.row("select * from flowforge.run")
    assert (run.state, run.finished_at, run.unsettled) == ("running", None, 3)
    assert engine.states(run_id) == {"A": "succeeded", "B": "succeeded", **dict.fromkeys("CDE", "pending")}
    engine.schedule()
    new = engine.task_run(run_id, "C")
    assert (new.state, new.attempt, new.fencing_token) == ("ready", 2, old.fencing_token)
    assert new.dispatch_id not in (None, old.dispatch_id)
    assert engine.claim(old).outcome == "superseded"  # a late message of the first attempt
    engine.drive()
    assert engine.run_state(run_id) == "succeeded"
    assert [engine.task_run(run_id, name) for name in "AB"] == untouched  # same finish time, same fence


def test_from_a_named_task_everything_below_runs_again(engine: Engine) -> None:
    run_id = engine.start(task("A"), task("B", "A"), task("C", "A"), task("D", "B", "C"))
    engine.drive(failing_before(1))
    untouched = [engine.task_run(run_id, name) for name in "AC"]
    assert engine.call("retry_run", run_id, "B") == 2
    engine.drive(failing_before(1))
    assert [engine.call("task_output", run_id, name) for name in "BD"] == ["B2", "D2"]
    assert [engine.task_run(run_id, name) for name in "AC"] == untouched
    # What it reset is recorded, successes too.
    recorded = engine.rows("select attempt, outcome, answered from flowforge.attempt order by task_run_id")
    assert recorded == [(1, "succeeded", True), (1, "succeeded", True)]


def test_nothing_to_retry(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b", "a"))
    assert engine.call("retry_run", run_id) == 0
    engine.drive()
    before = engine.row("select * from flowforge.run"), engine.rows("select * from flowforge.task_run")
    assert engine.call("retry_run", run_id) == 0
    assert (
        engine.row("select * from flowforge.run"),
        engine.rows("select * from flowforge.task_run"),
    ) == before


def test_attempt_numbers_go_on_and_budgets_start_anew(engine: Engine) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 2, "delay": 0}, max_reaps=1))
    engine.drive(failing("a"))
    row = engine.task_run(run_id, "a")
    assert (row.state, row.attempt, row.fencing_token) == ("failed", 2, 2)
    engine.call("retry_run", run_id)
    row = engine.task_run(run_id, "a")
    assert (row.attempt, row.failures, row.reaps, row.error, row.last_owner) == (3, 0, 0, None, "worker")
    for state in ("ready", "failed"):  # its reaps
        engine.schedule()
        engine.claim_one()
        engine.advance("31 s")
        engine.reap()
        assert engine.task_run(run_id, "a").state == state
    engine.schedule()
    engine.call("retry_run", run_id)
    assert engine.task_run(run_id, "a").reaps == 0
    engine.drive(failing("a"))
    row = engine.task_run(run_id, "a")
    assert (row.attempt, row.fencing_token, row.failures) == (5, 6, 2)


def test_a_run_that_goes_on_is_retried_in_part(engine: Engine) -> None:
    """What has failed is retried while other branches still run."""
    run_id = engine.start(
        task("bad"), task("slow"), task("b", "bad"), task("j", "b", "slow", when="all_done")
    )
    bad, slow = engine.claim_next()
    engine.finish(bad, "failed")
    engine.schedule()
    assert engine.states(run_id)["b"] == "skipped"
    assert engine.call("retry_run", run_id) == 2
    engine.schedule()
    assert engine.task_run(run_id, "j").unmet == 2
    engine.drive()
    engine.finish(slow)
    engine.drive()
    assert engine.run_state(run_id) == "succeeded"


def test_what_waits_below_for_its_time_waits_for_the_retried_again(engine: Engine) -> None:
    run_id = engine.start(
        task("a"), task("b", "a", when="all_done", retry={"max_attempts": 2, "delay": 60}), task("c")
    )
    a, c = engine.claim_next()
    engine.finish(a, "failed")
    engine.schedule()
    engine.finish(engine.claim_one(), "failed")
    assert engine.task_run(run_id, "b").stage == "delayed"
    assert engine.call("retry_run", run_id) == 1
    assert (engine.task_run(run_id, "b").stage, engine.task_run(run_id, "b").unmet) == ("blocked", 1)
    engine.drive()
    assert engine.task_run(run_id, "b").stage == "delayed"
    engine.advance("90 s")
    engine.drive()
    engine.finish(c)
    engine.schedule()
    assert engine.run_state(run_id) == "succeeded"


def test_what_a_retry_leaves_with_nothing_unmet_is_judged_at_once(engine: Engine) -> None:
    """Otherwise it would never be: no upstream of it will finish again."""
    run_id = engine.start(
        *(task("a"), task("f"), task("x", "a", "f", when="all_done"), task("y", "x")),
    )
    engine.drive(failing("f", "x"))
    assert engine.states(run_id) == {"a": "succeeded", "f": "failed", "x": "failed", "y": "skipped"}
    assert engine.call("retry_run", run_id, "x") == 2
    assert engine.task_run(run_id, "x").stage == "eligible"
    engine.drive(failing("x"))
    assert engine.call("retry_run", run_id, "y") == 1
    # Against its rule still: skipped again, and the run ends again, in the same call.
    assert (engine.task_run(run_id, "y").state, engine.run_state(run_id)) == ("skipped", "failed")


def test_skips_with_another_cause_come_out_the_same_again(engine: Engine) -> None:
    run_id = engine.start(
        *(
            task("ok"),
            task("never", "ok", when="any_failed"),
            task("bad", "ok"),
            task("both", "never", "bad"),
        ),
    )
    engine.drive(failing("bad"))
    assert engine.call("retry_run", run_id) == 2
    engine.drive()
    assert engine.states(run_id) == {
        "ok": "succeeded",
        "never": "skipped",
        "bad": "succeeded",
        "both": "skipped",
    }


def test_a_cancelled_run_is_taken_up_again(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b", "a"), task("c"))
    engine.work(max_rows=1)
    engine.schedule()
    engine.call("cancel_run", run_id, "mistake")
    assert engine.run_state(run_id) == "cancelled"
    assert engine.call("retry_run", run_id) == 2
    run = engine.row("select * from flowforge.run")
    assert (run.state, run.cancel_requested_at, run.cancel_reason) == ("running", None, None)
    engine.drive()
    assert engine.run_state(run_id) == "succeeded"
    assert [engine.task_run(run_id, name).attempt for name in "abc"] == [1, 2, 2]


# Refusals


def test_refuses_while_the_run_is_being_cancelled(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b"))
    claim = engine.claim_one()
    engine.call("cancel_run", run_id)
    for named in (None, "b"):
        with engine.refuses("WF007", f"run {run_id}", "being cancelled"):
            engine.call("retry_run", run_id, named)
    engine.finish(claim)
    assert engine.call("retry_run", run_id) == 1  # it settles first


@pytest.mark.parametrize(("dispatched", "state"), [(False, "ready"), (True, "running")])
@pytest.mark.parametrize("named", ["a", "b"])
def test_refuses_while_the_task_or_something_below_is_under_way(
    engine: Engine, dispatched: bool, state: str, named: str
) -> None:
    run_id = engine.start(task("a"), task("b", "a"))
    engine.work()
    engine.schedule()
    if dispatched:
        engine.claim_one()
    with engine.refuses("WF007", f"task 'b' is {state}"):
        engine.call("retry_run", run_id, named)


def test_refuses_when_something_below_a_failed_task_is_under_way(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b", "a", when="all_done"))
    engine.work(failing("a"))
    engine.schedule()
    with engine.refuses("WF007", "task 'b' is ready"):
        engine.call("retry_run", run_id)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((None,), "WF002"),
        ((-1,), "WF002"),
        (("run", "x"), "WF002"),
        (("run", ""), "WF002"),
        (("run", None, ""), "WF001"),
        (("run", None, "a\nb"), "WF001"),
        (("run", None, "r" * 256), "WF005"),
    ],
)
def test_wrong_arguments_are_refused(engine: Engine, arguments: tuple[Any, ...], code: str) -> None:
    run_id = diamond(engine)
    with engine.refuses(code):
        engine.call("retry_run", *(run_id if each == "run" else each for each in arguments))


# Asked twice


def test_the_same_request_answers_the_same(engine: Engine) -> None:
    run_id = diamond(engine)
    assert engine.call("retry_run", run_id, request_id="r") == 3
    with engine.changes_nothing():
        assert engine.call("retry_run", run_id, request_id="r") == 3
    engine.drive(failing("C"))
    with engine.changes_nothing():
        assert engine.call("retry_run", run_id, request_id="r") == 3
    assert engine.call("retry_run", run_id, request_id="s") == 3
    other = diamond(engine)
    assert engine.call("retry_run", other, request_id="r") == 3  # a request belongs to its run


@pytest.mark.parametrize(("request_id", "second"), [(None, 0), ("r", 3)])
def test_twice_at_the_same_time_is_once(
    db: Database, committing: Engine, request_id: str | None, second: int
) -> None:
    """HD-32: the second waits for the first, then finds nothing failed, or its request answered."""
    run_id = diamond(committing)
    answers: list[int] = []
    retry = "select flowforge.retry_run(%s, null, %s)"

    def call() -> None:
        with db.connect(application_name="second") as connection:
            row = connection.execute(retry, (run_id, request_id)).fetchone()
            assert row is not None
            answers.append(row[0])

    with db.connect(autocommit=False) as first:
        assert first.execute(retry, (run_id, request_id)).fetchone() == (3,)
        thread = threading.Thread(target=call)
        thread.start()
        waiting = """select count(*) from pg_stat_activity
            where application_name = 'second' and wait_event_type = 'Lock'"""
        wait_until(lambda: committing.value(waiting) == 1, "the second retry to wait")
        first.commit()
        thread.join()
    assert answers == [second]
    assert [committing.task_run(run_id, name).attempt for name in "ABCDE"] == [1, 1, 2, 1, 1]
    committing.drive()
    assert committing.run_state(run_id) == "succeeded"
