"""Scenarios of batches, which lock several task runs, against others and against who holds their run."""

import uuid
from typing import Any

from tests.sql.explore import Body, guided, meets
from tests.sql.programs import batch_claim, batch_finish, claim, claim_next, refusable, release
from tests.sql.stepping import COMMIT, Laboratory, Program, Run, call, table


def _half_done(lab: Laboratory) -> tuple[Run, list[Any], list[Any]]:
    """A run of which a and c have failed, unsettled, and b runs; their messages, and their executions."""
    run = lab.start("three")
    messages = run.rows()
    claims = [lab.claim(row) for row in messages]
    lab.finish(claims[0], "failed")
    lab.finish(claims[2], "failed")
    return run, messages, claims


@meets("claim_task_runs", "retry_run")
def batch_claim_retry(lab: Laboratory) -> Body:
    """A batch of late messages, in another order than the retry locks: it locks none of them."""
    run, messages, _ = _half_done(lab)
    outcomes, reset = yield [batch_claim(messages[::-1]), call("retry_run", run.id)]
    assert reset == 2
    assert outcomes[1] == "running"
    assert {outcomes[0], outcomes[2]} <= {"finished", "superseded"}
    assert not lab.blocked


@meets("claim_task_runs", "retry_run")
def batch_claim_retry_from(lab: Laboratory) -> Body:
    """The same with a retry that first settles, and so locks, a lower task, then goes back to an upper."""
    run = lab.start("chain")
    a = run["a"]
    lab.finish(lab.claim(a))
    lab.tick()
    b = run["b"]
    lab.finish(lab.claim(b), "failed")
    outcomes, reset = yield [batch_claim([a, b]), call("retry_run", run.id, "a")]
    assert reset == 2
    assert set(outcomes) <= {"finished", "superseded"}
    assert not lab.blocked


@meets("finish_task_runs", "retry_run")
def batch_finish_retry_from(lab: Laboratory) -> Body:
    """The same of late answers."""
    run = lab.start("chain")
    a = lab.claim(run["a"])
    lab.finish(a)
    lab.tick()
    b = lab.claim(run["b"])
    lab.finish(b, "failed")
    answers, reset = yield [batch_finish([a, b]), call("retry_run", run.id, "a")]
    assert reset == 2
    assert answers == ["repeated", "repeated"]
    assert not lab.blocked


@meets("claim_task_runs", "cancel_run")
def batch_claim_cancel(lab: Laboratory) -> Body:
    """A batch claims two task runs of a run as it is cancelled: both, or none."""
    run = lab.start("two")
    outcomes, cancelled = yield [batch_claim(run.rows()[::-1]), call("cancel_run", run.id)]
    assert cancelled is True
    assert outcomes in (["claimed"] * 2, ["cancelled"] * 2)


@meets("claim_task_run", "claim_task_runs", "cancel_run fail_undeliverable")
def batch_claim_fail_cancel(lab: Laboratory) -> Body:
    """A batch waits for its first task run while its last one fails and the run is cancelled: no deadlock.

    A statement that waits for a row keeps the locks that it has, on rows too that it then passes over."""
    run = lab.start("late")
    messages = run.rows()
    lab.expire()

    def fail_and_cancel() -> Program:
        failed = yield from call("fail_undeliverable")
        yield COMMIT
        cancelled = yield from call("cancel_run", run.id)
        return failed, cancelled

    first, outcomes, (failed, cancelled) = yield [
        claim(messages[0]),
        batch_claim(messages, "w2"),
        fail_and_cancel(),
    ]
    assert cancelled is True
    answers = {"claimed", "running", "finished", "cancelled"}
    assert {first.outcome, *outcomes} <= answers
    assert failed == 1 or outcomes[2] == "claimed"
    yield None
    assert run["c"].state == ("failed" if failed else "succeeded")


@meets("claim_task_runs", "claim_task_runs", "cancel_leftovers fail_undeliverable")
def batch_claim_fail_leftovers(lab: Laboratory) -> Body:
    """The same of what is left over: the batch waits in another run, then holds what has failed."""
    other = lab.start("one")
    run = lab.start("early")
    a, b, c = run.rows()
    lab.expire()
    lab.value(
        "update flowforge.run set cancel_requested_at = flowforge._clock() where run_id = %s returning true",
        run.id,
    )

    def fail_and_cancel() -> Program:
        failed = yield from call("fail_undeliverable")
        yield COMMIT
        yield from call("cancel_leftovers")
        return failed

    first, second, failed = yield [
        batch_claim([other["a"], c], "w1"),
        batch_claim([other["a"], a, b], "w2"),
        fail_and_cancel(),
    ]
    assert sorted([first[0], second[0]]) == ["claimed", "running"]
    yield None
    # What a claim held was passed over by both, and comes to its end by the one or the other.
    lab.value("update flowforge.run set cancel_sweep_at = null where run_id = %s returning true", run.id)
    lab.value("select flowforge.cancel_leftovers()")
    assert run["a"].state in ({"failed"} if failed else {"failed", "cancelled"})
    assert (run["b"].state, run["c"].state) == ("cancelled", "cancelled")


def _retry_between_its_locks(lab: Laboratory, enabled: list[int]) -> int:
    """The first batch holds up the second until the retry is where it would lock a second time."""
    first, second, retry = (lab.sessions[number] for number in (1, 2, 3))
    if first.position.startswith("_claim_pairs"):
        return 1
    if second.steps == 0:
        return 2
    if not retry.done and retry.position != "_lock_for_retry 3":
        return 3
    return enabled[0]


@guided(_retry_between_its_locks)
@meets("claim_task_runs", "claim_task_runs", "fail_undeliverable retry_run settle_finished")
def batch_claim_fail_retry(lab: Laboratory) -> Body:
    """The same with a retry, which resets what had been settled before and what it settles itself."""
    other = lab.start("one")
    run = lab.start("soon")
    a, b = run.rows()
    lab.expire()

    def fail_and_retry() -> Program:
        for step in (("fail_undeliverable", 1), ("settle_finished",), ("fail_undeliverable", 1)):
            yield from call(*step)
            yield COMMIT
        return (yield from call("retry_run", run.id))

    first, second, reset = yield [
        batch_claim([other["a"]], "w1"),
        batch_claim([other["a"], a, b], "w2"),
        fail_and_retry(),
    ]
    assert sorted([first[0], second[0]]) == ["claimed", "running"]
    assert reset == 2 - second.count("claimed") + (second[0] == "claimed")


@meets("claim_task_runs", "retry_run", "cancel_run")
def batch_claim_retry_cancel(lab: Laboratory) -> Body:
    """Two late and one doubled message, a retry and a cancel at once: no deadlock, and the run ends."""
    run, messages, _ = _half_done(lab)
    outcomes, reset, cancelled = yield [
        batch_claim(messages[::-1]),
        refusable(call("retry_run", run.id), "WF007"),
        call("cancel_run", run.id),
    ]
    assert cancelled is True
    assert reset in (2, "WF007")
    assert "claimed" not in outcomes
    yield None
    assert run["b"].state == "succeeded"


@meets("claim_task_runs", "release_task_run")
def batch_claim_batch_release(lab: Laboratory) -> Body:
    """Doubled messages of two task runs that are given back one after the other, from the last."""
    run = lab.start("two")
    messages = run.rows()
    owners = [lab.claim(row) for row in messages]

    def releases() -> Program:
        for owner in reversed(owners):
            yield from release(owner, "shutdown")
            yield COMMIT

    outcomes, _ = yield [batch_claim(messages), releases()]
    assert set(outcomes) <= {"claimed", "running"}
    assert [row.fencing_token for row in run.rows()] == [1 + (each == "claimed") for each in outcomes]


@meets("claim_next", "claim_task_runs")
def claim_next_batch_claim(lab: Laboratory) -> Body:
    """A claim by priority and a claim by messages want the same in other orders: no deadlock."""
    run = lab.start("three")
    without, outcomes = yield [claim_next(2), batch_claim(run.rows()[::-1])]
    assert len(without) + outcomes.count("claimed") == 3


@meets("renew_leases", "claim_task_runs")
def renew_batch_claim_repeated(lab: Laboratory) -> Body:
    """A renewal passes over what a repeated claim has locked, and says so."""
    run = lab.start("two")
    messages = run.rows()
    claim_id = uuid.uuid4()
    claimed = lab.rows(
        "select * from flowforge.claim_task_runs(%s, %s, 'w1', %s, '30 s')",
        *([row.task_run_id for row in messages], [row.dispatch_id for row in messages], claim_id),
    )
    ids, tokens = [row.task_run_id for row in claimed], [row.fencing_token for row in claimed]
    renewed, outcomes = yield [
        table("renew_leases", ids[::-1], tokens[::-1], "30 s"),
        batch_claim(messages, "w1", claim_id),
    ]
    assert outcomes == ["claimed", "claimed"]
    assert {each.outcome for each in renewed} <= {"held", "busy"}
