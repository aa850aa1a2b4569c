"""Scenarios of one execution: workers against one another, and against whoever takes a task run away."""

import uuid
from typing import Any

from tests.sql.explore import Body, meets
from tests.sql.programs import (
    assert_and_finish,
    batch_claim,
    batch_finish,
    claim,
    finish,
    refusable,
    release,
    renew,
)
from tests.sql.stepping import COMMIT, ROLLBACK, Laboratory, Program, Run, call


def _claimed(lab: Laboratory, workflow: str, task: str = "a") -> tuple[Run, object]:
    run = lab.start(workflow)
    return run, lab.claim(run[task])


def _unpublished(lab: Laboratory, run: Run) -> int:
    return int(
        lab.value(
            "select count(*)"
            " from flowforge.outbox o join flowforge.task_run tr using (task_run_id, dispatch_id)"
            " where tr.run_id = %s and tr.state = 'ready' and o.published_at is null",
            run.id,
        )
    )


# --- the claim ---


@meets("claim_task_run", "claim_task_run")
def claim_claim(lab: Laboratory) -> Body:
    """One message delivered twice: one winner, and the other learns that it runs."""
    run = lab.start("one")
    answers = yield [claim(run["a"], "w1"), claim(run["a"], "w2")]
    assert sorted(each.outcome for each in answers) == ["claimed", "running"]
    assert run["a"].fencing_token == 1


@meets("claim_task_run", "claim_task_run")
def claim_repeated(lab: Laboratory) -> Body:
    """A call is repeated while the call itself, given up for lost, is under way: both get the one claim."""
    run = lab.start("one")
    claim_id = uuid.uuid4()
    answers = yield [claim(run["a"], "w1", claim_id), claim(run["a"], "w1", claim_id)]
    assert [(each.outcome, each.fencing_token) for each in answers] == [("claimed", 1), ("claimed", 1)]


@meets("claim_task_run", "claim_task_run")
def claim_rolled_back(lab: Laboratory) -> Body:
    """Who comes second to a claim that is rolled back has not lost its message: it waits, and wins."""
    run = lab.start("one")

    def rolls_back() -> Program:
        yield from claim(run["a"], "w1")
        yield ROLLBACK

    _, answer = yield [rolls_back(), claim(run["a"], "w2")]
    assert answer.outcome == "claimed"


@meets("claim_task_runs", "claim_task_run")
def claim_twice_in_one_call(lab: Laboratory) -> Body:
    """Two deliveries of one dispatch in one call, against a third: one of the three positions wins."""
    run = lab.start("one")
    a = run["a"]
    twice, once = yield [batch_claim([a, a], "w1"), claim(a, "w2")]
    assert sorted([*twice, once.outcome]) == ["claimed", "running", "running"]


@meets("claim_task_run", "cancel_run")
def claim_cancel(lab: Laboratory) -> Body:
    """HD-31: the claim is refused, or it wins and the next renewal tells of the cancel."""
    run = lab.start("one")
    claimed, cancelled = yield [claim(run["a"]), call("cancel_run", run.id)]
    assert cancelled is True
    assert claimed.outcome in ("claimed", "cancelled")
    if claimed.outcome == "claimed":
        renewal = "select outcome from flowforge.renew_leases(array[%s::bigint], array[1::bigint], '30 s')"
        assert lab.value(renewal, claimed.task_run_id) == "cancel"
    assert not lab.rows("select * from flowforge.fetch_outbox(10)")
    yield None
    # What still comes is accepted, and then the cancel took nothing.
    assert run.state == ("succeeded" if claimed.outcome == "claimed" else "cancelled")


@meets("claim_task_run", "reap_expired_leases")
def claim_reap(lab: Laboratory) -> Body:
    """A doubled message arrives while the lease of a lost worker is reaped: no execution without a reap."""
    run, _ = _claimed(lab, "one")
    lab.expire()
    answer, reaped = yield [claim(run["a"], "w2"), call("reap_expired_leases")]
    assert reaped == 1
    assert run["a"].reaps == 1
    assert answer.outcome in ("claimed", "running")
    assert run["a"].fencing_token == (2 if answer.outcome == "claimed" else 1)
    assert answer.outcome == "claimed" or _unpublished(lab, run) == 1


@meets("claim_task_run", "release_task_run")
def claim_release(lab: Laboratory) -> Body:
    """A doubled message arrives while its owner gives the task run back."""
    run, owner = _claimed(lab, "one")
    answer, released = yield [claim(run["a"], "w2"), release(owner, "unstarted")]
    assert released == "released"
    assert (answer.outcome, run["a"].fencing_token) in [("claimed", 2), ("running", 1)]
    assert answer.outcome == "claimed" or _unpublished(lab, run) == 1


@meets("claim_task_run", "finish_task_run")
def claim_finish(lab: Laboratory) -> Body:
    """A doubled message arrives while the execution fails and the next attempt follows: nobody claims."""
    run, owner = _claimed(lab, "again")
    answer, finished = yield [claim(run["a"], "w2"), finish(owner, "failed")]
    assert finished == "accepted"
    assert answer.outcome in ("running", "superseded")
    assert (run["a"].attempt, run["a"].state, run["a"].fencing_token) == (2, "pending", 1)


@meets("claim_task_runs", "claim_task_runs", "claim_task_run")
def claim_across(lab: Laboratory) -> Body:
    """Two batches name the same task runs in crossing order and wait for the middle one: no deadlock."""
    run = lab.start("three")
    a, b, c = run["a"], run["b"], run["c"]
    first, second, third = yield [batch_claim([a, b, c], "w1"), batch_claim([c, b, a], "w2"), claim(b, "w3")]
    answers = [[first[0], second[2]], [first[1], second[1], third.outcome], [first[2], second[0]]]
    assert all(each.count("claimed") == 1 and set(each) == {"claimed", "running"} for each in answers)


# --- the finish ---


@meets("finish_task_run", "finish_task_run")
def finish_repeated(lab: Laboratory) -> Body:
    """A finish is repeated while the finish itself is under way: accepted once."""
    run, owner = _claimed(lab, "chain")
    answers = yield [finish(owner), finish(owner)]
    assert sorted(answers) == ["accepted", "repeated"]
    assert run["a"].state == "succeeded"


@meets("finish_task_run", "finish_task_run")
def finish_failed_repeated(lab: Laboratory) -> Body:
    """The same of a failure that leads to the next attempt: it is counted once."""
    run, owner = _claimed(lab, "again")
    answers = yield [finish(owner, "failed"), finish(owner, "failed")]
    assert sorted(answers) == ["accepted", "repeated"]
    assert (run["a"].attempt, run["a"].failures) == (2, 1)


@meets("finish_task_runs", "finish_task_runs", "finish_task_run")
def finish_across(lab: Laboratory) -> Body:
    """Two batches finish the same executions in crossing order and wait for the middle one: no deadlock."""
    run = lab.start("three")
    a, b, c = (lab.claim(row) for row in run.rows())
    first, second, third = yield [batch_finish([a, b, c]), batch_finish([c, b, a]), finish(b)]
    answers = [*first, *second, third]
    assert (answers.count("accepted"), answers.count("repeated")) == (3, 4)


@meets("finish_task_run", "reap_expired_leases")
def finish_reap(lab: Laboratory) -> Body:
    """HD-18: a late finish and the reaper: one of them has the task run, and the other nothing."""
    run, owner = _claimed(lab, "chain")
    before = run["a"]
    lab.expire()
    answer, reaped = yield [finish(owner), call("reap_expired_leases")]
    assert (answer, reaped) in [("accepted", 0), ("fenced", 1)]
    after = run["a"]
    assert after.state == ("succeeded" if answer == "accepted" else "ready")
    assert (after.dispatch_id, after.reaps) == (before.dispatch_id, reaped)


@meets("finish_task_run", "reap_expired_leases")
def finish_failed_reap(lab: Laboratory) -> Body:
    """The same of a failure with an attempt left: the next attempt, or the same once more."""
    run, owner = _claimed(lab, "again")
    lab.expire()
    answer, reaped = yield [finish(owner, "failed"), call("reap_expired_leases")]
    assert (answer, reaped, run["a"].attempt) in [("accepted", 0, 2), ("fenced", 1, 1)]


@meets("finish_task_run", "reap_expired_leases")
def finish_time_limit(lab: Laboratory) -> Body:
    """A finish past the time limit and the reaper: accepted, or a timed-out attempt, never both."""
    run, owner = _claimed(lab, "limited")
    lab.expire()
    answer, reaped = yield [finish(owner), call("reap_expired_leases")]
    assert (answer, reaped) in [("accepted", 0), ("fenced", 1)]
    yield None
    assert run.state == ("succeeded" if answer == "accepted" else "failed")


@meets("finish_task_run", "reap_expired_leases")
def finish_last_reap(lab: Laboratory) -> Body:
    """The reaper gives up for good while the finish comes: what it fails stays failed, and is settled."""
    run, owner = _claimed(lab, "fragile")
    lab.expire()
    answer, reaped = yield [finish(owner), call("reap_expired_leases")]
    assert (answer, reaped) in [("accepted", 0), ("fenced", 1)]
    yield None
    assert run.states() == {"a": "succeeded" if answer == "accepted" else "failed", "b": "succeeded"}


@meets("finish_task_run", "cancel_run")
def finish_cancel(lab: Laboratory) -> Body:
    """A success is accepted whenever it comes, and the cancel takes what waits."""
    run, owner = _claimed(lab, "chain")
    answer, cancelled = yield [finish(owner), call("cancel_run", run.id)]
    assert (answer, cancelled) == ("accepted", True)
    yield None
    assert run.states() == {"a": "succeeded", "b": "cancelled"}
    assert run.state == "cancelled"


@meets("finish_task_run", "cancel_run")
def finish_failed_cancel(lab: Laboratory) -> Body:
    """A failure with an attempt left, put back in line just as the run is cancelled, does not run again."""
    run, owner = _claimed(lab, "again")
    answer, cancelled = yield [finish(owner, "failed"), call("cancel_run", run.id)]
    assert (answer, cancelled) == ("accepted", True)
    yield None
    assert run.states() == {"a": "cancelled", "b": "cancelled"}
    assert (run["a"].fencing_token, run.state) == (1, "cancelled")


# --- the lease ---


@meets("renew_leases", "reap_expired_leases")
def renew_reap(lab: Laboratory) -> Body:
    """A renewal that comes late: the lease lives on, or the reaper has it and the worker is told so."""
    run, owner = _claimed(lab, "one")
    lab.expire()
    outcome, reaped = yield [renew(owner), call("reap_expired_leases")]
    assert (outcome, reaped) in [("held", 0), ("lost", 1), ("busy", 1)]
    extended = lab.value("select %s > flowforge._clock()", run["a"].lease_expires_at)
    assert extended is (True if outcome == "held" else None)


@meets("renew_leases", "finish_task_run")
def renew_finish(lab: Laboratory) -> Body:
    """A renewal neither delays a finish nor brings back what has ended."""
    run, owner = _claimed(lab, "one")
    outcome, answer = yield [renew(owner), finish(owner)]
    assert answer == "accepted"
    assert outcome in ("held", "busy", "lost")
    assert run["a"].state == "succeeded"
    assert 1 not in lab.blocked


@meets("renew_leases", "assert_lease finish_task_run")
def renew_handler_transaction(lab: Laboratory) -> Body:
    """A renewal does not wait for a handler inside its own transaction, nor calls it lost before it ends."""
    _, owner = _claimed(lab, "one")
    outcome, answer = yield [renew(owner), assert_and_finish(owner)]
    assert answer == "accepted"
    assert outcome in ("held", "busy", "lost")
    assert 1 not in lab.blocked
    committed = lab.trace.index("2: commit")
    assert outcome != "lost" or committed < max(i for i, at in enumerate(lab.trace) if "renew_leases" in at)


@meets("assert_lease finish_task_run", "reap_expired_leases")
def handler_transaction_reap(lab: Laboratory) -> Body:
    """A handler's own transaction and the reaper: its writes are there if and only if its finish is."""
    run, owner = _claimed(lab, "one")
    lab.expire()
    answer, reaped = yield [refusable(assert_and_finish(owner), "WF006"), call("reap_expired_leases")]
    assert (answer, reaped) in [("accepted", 0), ("WF006", 1)]
    effects = lab.value(
        "select count(*) from flowforge_test.effect where task_run_id = %s", run["a"].task_run_id
    )
    assert effects == 1 - reaped


@meets("assert_lease finish_task_run", "cancel_run")
def handler_transaction_cancel(lab: Laboratory) -> Body:
    """A handler's own transaction holds its row; cancel does not wait for it."""
    run, owner = _claimed(lab, "chain")
    answer, cancelled = yield [assert_and_finish(owner), call("cancel_run", run.id)]
    assert (answer, cancelled) == ("accepted", True)
    yield None
    assert run.states() == {"a": "succeeded", "b": "cancelled"}


@meets("release_task_run", "reap_expired_leases")
def release_reap(lab: Laboratory) -> Body:
    """A crash that the parent reports and the reaper finds too counts once."""
    run, owner = _claimed(lab, "one")
    lab.expire()
    answer, reaped = yield [release(owner, "crashed"), call("reap_expired_leases")]
    assert (answer, reaped) in [("released", 0), ("fenced", 1)]
    assert run["a"].reaps == 1
    assert _unpublished(lab, run) == 1


@meets("release_task_run", "cancel_run")
def release_cancel(lab: Laboratory) -> Body:
    """What is given back as its run is cancelled is not offered again."""
    run, owner = _claimed(lab, "chain")
    answer, cancelled = yield [release(owner, "shutdown"), call("cancel_run", run.id)]
    assert cancelled is True
    assert answer in ("released", "cancelled")
    yield None
    assert run.states() == {"a": "cancelled", "b": "cancelled"}
    assert run["a"].fencing_token == 1


@meets("reap_expired_leases", "cancel_run")
def reap_cancel(lab: Laboratory) -> Body:
    """The same of what the reaper takes back."""
    run, _ = _claimed(lab, "chain")
    lab.expire()
    reaped, cancelled = yield [call("reap_expired_leases"), call("cancel_run", run.id)]
    assert (reaped, cancelled) == (1, True)
    yield None
    assert run.states() == {"a": "cancelled", "b": "cancelled"}
    assert run["a"].fencing_token == 1


@meets("assert_lease finish_task_run", "reap_expired_leases")
def reap_handler_transactions(lab: Laboratory) -> Body:
    """Two executions end in crossing order inside transactions of their own while the reaper takes both."""
    run = lab.start("two")
    owners = [lab.claim(run["a"]), lab.claim(run["b"])]
    lab.expire()

    def both() -> Program:
        answers = []
        for owner in reversed(owners):
            answers.append((yield from refusable(assert_and_finish(owner), "WF006")))
            yield COMMIT
        return answers

    answers, reaped = yield [both(), call("reap_expired_leases")]
    assert answers.count("WF006") == reaped


@meets("report_progress", "report_progress")
def progress_progress(lab: Laboratory) -> Body:
    """Two reports of one execution: one row, of whichever came last."""
    run, owner = _claimed(lab, "one")
    reported = yield [_report(owner, 0.25), _report(owner, 0.5)]
    assert reported == [True, True]
    last = 0.5 if lab.before("1: commit", "2: commit") else 0.25
    assert (
        lab.value("select fraction from flowforge.progress where task_run_id = %s", run["a"].task_run_id)
        == last
    )


def _report(claimed: Any, fraction: float) -> Program:
    return call("report_progress", claimed.task_run_id, claimed.fencing_token, fraction, None)
