"""cancel_run and cancel_leftovers: a run is given up, and what runs is told, not killed."""

import concurrent.futures
import threading

import pytest

from tests.services.database import Database
from tests.sql.helpers import Claim, Engine, Failure, failing, task


def three_states(engine: Engine) -> tuple[int, Claim]:
    """A run with a running, a ready, a delayed and a blocked task run, and one that has succeeded."""
    engine.define(
        *(task("done"), task("running"), task("later", retry={"max_attempts": 2}), task("ready", "done")),
        task("blocked", "ready", "running"),
    )
    run_id = engine.trigger()
    engine.schedule()
    claims = {claim.task: claim for claim in engine.claim_next()}
    engine.finish(claims["done"])
    engine.finish(claims["later"], "failed")
    engine.schedule()
    return run_id, claims["running"]


def test_what_waits_is_cancelled_and_what_runs_goes_on(engine: Engine) -> None:
    run_id, running = three_states(engine)
    assert engine.call("cancel_run", run_id, "no longer needed") is True
    waiting = dict.fromkeys(("later", "ready", "blocked"), "cancelled")
    assert engine.states(run_id) == {"done": "succeeded", "running": "running", **waiting}
    run = engine.row("select * from flowforge.run")
    assert (run.state, run.cancel_reason, run.unsettled) == ("running", "no longer needed", 1)
    assert engine.value("select state from flowforge.run_status") == "cancelling"
    assert engine.finish(running) == "accepted"
    engine.schedule()
    assert engine.run_state(run_id) == "cancelled"
    assert engine.task_run(run_id, "running").state == "succeeded"


def test_asking_again_changes_nothing(engine: Engine) -> None:
    run_id, running = three_states(engine)
    engine.call("cancel_run", run_id, "first")
    with engine.changes_nothing():
        assert engine.call("cancel_run", run_id, "second") is False
    engine.finish(running, "cancelled")
    engine.schedule()
    with engine.changes_nothing():
        assert engine.call("cancel_run", run_id) is False


def test_a_run_that_nothing_was_taken_from_ends_as_it_would_have(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    claim = engine.claim_one()
    assert engine.call("cancel_run", run_id) is True
    engine.finish(claim)
    engine.schedule()
    assert engine.run_state(run_id) == "succeeded"


def test_what_has_finished_is_counted_first(engine: Engine) -> None:
    """A finish that committed first stays, and what it made skip is skipped, not cancelled."""
    run_id = engine.start(task("a"), task("b", "a"), task("c", "b"))
    engine.work(failing("a"))
    assert engine.call("cancel_run", run_id) is False  # by then the run has ended
    assert engine.states(run_id) == {"a": "failed", "b": "skipped", "c": "skipped"}
    assert engine.run_state(run_id) == "failed"


@pytest.mark.parametrize("outcome", ["failed", "reaped", "released"])
def test_nothing_of_it_is_offered_again(engine: Engine, outcome: str) -> None:
    """HD-31: the claim that won ends cancelled, whatever way it comes back."""
    run_id = engine.start(task("a", retry={"max_attempts": 9, "delay": 0}))
    claim = engine.claim_one()
    engine.call("cancel_run", run_id)
    (renewal,) = engine.table("renew_leases", [claim.task_run_id], [claim.fencing_token], "30 s")
    assert renewal.outcome == "cancel"
    if outcome == "failed":
        engine.finish(claim, "failed")
    elif outcome == "reaped":
        engine.advance("31 s")
        engine.reap()
    else:
        engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "shutdown")
    assert engine.task_run(run_id, "a").state == "cancelled"
    engine.schedule()
    assert engine.run_state(run_id) == "cancelled"


def test_its_orders_are_never_fetched_and_its_messages_answered(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b"))
    a, _ = engine.messages()
    engine.rows("select flowforge.mark_published(array[%s])", a.outbox_id)  # in flight
    engine.call("cancel_run", run_id)
    assert engine.table("fetch_outbox", 10) == []
    assert [engine.claim(order).outcome for order in engine.messages()] == ["cancelled"] * 2
    assert engine.call("sweep_outbox") == 2


def test_a_marked_run_whose_rows_are_not_cancelled_yet_is_not_published(engine: Engine) -> None:
    engine.start(task("a"))
    engine.rows("update flowforge.run set cancel_requested_at = now()")
    assert engine.table("fetch_outbox", 10) == []


def test_cancel_and_finish_meet(db: Database, committing: Engine) -> None:
    """Cancel does not wait for a task run that is finishing, nor the other way round."""
    run_id = committing.start(task("a"), task("b", "a"))
    claim = committing.claim_one()
    with db.connect(autocommit=False) as worker:
        finish = "select flowforge.finish_task_run(%s, %s, 'succeeded')"
        assert worker.execute(finish, (claim.task_run_id, claim.fencing_token)).fetchone() == ("accepted",)
        assert committing.call("cancel_run", run_id) is True
        worker.commit()
    committing.schedule()
    assert committing.states(run_id) == {"a": "succeeded", "b": "cancelled"}
    assert committing.run_state(run_id) == "cancelled"


def test_cancel_and_claim_at_the_same_moment(db: Database, committing: Engine) -> None:
    """HD-31: refused, or won and told at the next renewal; never overwritten, never lost."""
    committing.define(task("a"))
    outcomes = set()
    with db.connect() as client, concurrent.futures.ThreadPoolExecutor(1) as thread:
        for _ in range(100):
            run_id = committing.trigger()
            committing.schedule()
            order = committing.messages()[-1]
            barrier = threading.Barrier(2)

            def cancel(run_id: int = run_id, barrier: threading.Barrier = barrier) -> bool:
                barrier.wait()
                row = client.execute("select flowforge.cancel_run(%s)", (run_id,)).fetchone()
                return row == (True,)

            cancelled = thread.submit(cancel)
            barrier.wait()
            claim = committing.claim(order)
            assert cancelled.result() is True
            outcomes.add(claim.outcome)
            if claim.outcome == "claimed":
                held = [claim.task_run_id], [claim.fencing_token]
                assert committing.table("renew_leases", *held, "30 s")[0].outcome == "cancel"
                assert committing.finish(claim, "cancelled") == "accepted"
                committing.schedule()
            assert committing.run_state(run_id) == "cancelled"
    assert outcomes <= {"claimed", "cancelled"}


# What is put back in line after the cancel


@pytest.mark.parametrize("state", ["pending", "ready"])
def test_leftovers_are_swept(engine: Engine, state: str) -> None:
    """A failed finish or a release that did not see the cancel puts its task run back in line."""
    engine.define(task("a"), task("b", "a"))
    runs = [engine.trigger() for _ in range(3)]
    if state == "ready":
        engine.schedule()
    asked = "update flowforge.run set cancel_requested_at = flowforge._clock()"
    engine.rows(f"{asked} where run_id <> %s", runs[2])
    assert engine.call("cancel_leftovers", 1) == 2
    assert engine.call("cancel_leftovers", 1) == 2
    with engine.changes_nothing():
        assert engine.call("cancel_leftovers") == 0
    assert [engine.run_state(run) for run in runs] == ["cancelled", "cancelled", "running"]


def test_the_longer_a_cancel_takes_the_more_seldom_it_is_looked_at(engine: Engine) -> None:
    """The walk through a large run costs, and what comes back in line does so soon or never."""
    run_id = engine.start(task("a"), task("b"))
    engine.claim_one()
    engine.call("cancel_run", run_id)
    looks = []
    for second in range(300):
        before = engine.value("select cancel_sweep_at from flowforge.run")
        engine.call("cancel_leftovers")
        if engine.value("select cancel_sweep_at from flowforge.run") != before:
            looks.append(second)
        engine.advance("1 s")
    assert looks == [0, 1, 2, 4, 8, 16, 32, 64, 124, 184, 244]
    # A clock that was ahead does not put it off.
    engine.rows("update flowforge.run set cancel_sweep_at = flowforge._clock() + interval '1 hour'")
    engine.call("cancel_leftovers")
    assert engine.value(
        "select cancel_sweep_at < flowforge._clock() + interval '2 minutes' from flowforge.run"
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [((None,), "WF002"), ((-1,), "WF002"), ((None, "why"), "WF002"), (("run", "x" * 1001), "WF005")],
)
def test_wrong_arguments_are_refused(engine: Engine, arguments: tuple[object, ...], code: str) -> None:
    run_id = engine.start(task("a"))
    with engine.refuses(code):
        engine.call("cancel_run", *(run_id if each == "run" else each for each in arguments))


def test_a_failure_before_the_cancel_is_not_covered_up(engine: Engine) -> None:
    """The run is cancelled, since the cancel took something; the failed task keeps its error."""
    run_id = engine.start(task("a"), task("b"))

    def behave(claim: Claim) -> None:
        raise Failure("boom")

    engine.work(behave, max_rows=1)
    engine.call("cancel_run", run_id)
    assert engine.states(run_id) == {"a": "failed", "b": "cancelled"}
    assert (engine.run_state(run_id), engine.task_run(run_id, "a").error) == ("cancelled", "boom")


def test_a_leftover_that_somebody_has_locked_holds_up_no_other(db: Database, committing: Engine) -> None:
    """It is passed over, and nothing is waited for: the scheduler does all its work in one loop."""
    committing.define(task("a"))
    runs = [committing.trigger() for _ in range(3)]
    committing.schedule()
    committing.rows("update flowforge.run set cancel_requested_at = flowforge._clock()")
    with db.connect(autocommit=False) as other:
        other.execute("select from flowforge.task_run where run_id = %s for update", [runs[0]])
        committing.rows("set lock_timeout = '1 s'")
        assert committing.call("cancel_leftovers") == 2
    committing.advance("1 minute")
    assert committing.call("cancel_leftovers") == 1
    assert [committing.run_state(run) for run in runs] == ["cancelled"] * 3
