"""Scenarios of three sessions, where two of them alone are right whatever the order.

Most are of an owner that has lost its task run without knowing, as somebody else takes it over: between the
look of a stale call and its change a reap and a claim have room.
"""

from typing import Any

from tests.sql.explore import Body, meets
from tests.sql.programs import (
    assert_and_finish,
    batch_finish,
    claim,
    finish,
    publish,
    refusable,
    release,
    renew,
)
from tests.sql.stepping import COMMIT, Laboratory, Program, Run, call


def _lost(lab: Laboratory, workflow: str = "one") -> tuple[Run, Any, Any]:
    """A run whose a is executed by a worker that has vanished; its message, and that execution."""
    run = lab.start(workflow)
    message = run["a"]
    owner = lab.claim(message)
    lab.expire()
    return run, message, owner


def _take_over(message: Any) -> Program:
    """The broker delivers the message again, to a worker that gets a longer lease."""
    return claim(message, "w2", lease="50 s")


@meets("finish_task_run", "reap_expired_leases", "claim_task_run")
def finish_reap_claim(lab: Laboratory) -> Body:
    """A late finish while the task run is taken back and over: the old owner's result, or the new one's."""
    run, message, owner = _lost(lab)
    answer, reaped, taken = yield [
        finish(owner, output="late"),
        call("reap_expired_leases"),
        _take_over(message),
    ]
    assert (answer, reaped) in [("accepted", 0), ("fenced", 1)]
    assert taken.outcome in (("finished", "running") if answer == "accepted" else ("claimed", "running"))
    assert run["a"].output == ("late" if answer == "accepted" else None)
    assert run["a"].fencing_token == (2 if taken.outcome == "claimed" else 1)


@meets("renew_leases", "reap_expired_leases", "claim_task_run")
def renew_reap_claim(lab: Laboratory) -> Body:
    """A late renewal does not touch the lease of who has taken over."""
    _, message, owner = _lost(lab)
    outcome, reaped, taken = yield [renew(owner), call("reap_expired_leases"), _take_over(message)]
    assert (outcome, reaped) in [("held", 0), ("lost", 1), ("busy", 1)]
    if taken.outcome == "claimed":
        length, expires = lab.rows(
            "select lease_length::text as length, lease_expires_at - flowforge._clock() = '50 s' as expires"
            " from flowforge.task_run where task_run_id = %s",
            message.task_run_id,
        )[0]
        assert (length, expires) == ("00:00:50", True)


@meets("release_task_run", "reap_expired_leases", "claim_task_run")
def release_reap_claim(lab: Laboratory) -> Body:
    """A late release does not take the task run from who has taken over."""
    run, message, owner = _lost(lab)
    answer, reaped, taken = yield [
        release(owner, "shutdown"),
        call("reap_expired_leases"),
        _take_over(message),
    ]
    assert (answer, reaped) in [("released", 0), ("fenced", 1)]
    assert run["a"].state == ("running" if taken.outcome == "claimed" else "ready")


@meets("assert_lease finish_task_run", "reap_expired_leases", "claim_task_run")
def handler_transaction_reap_claim(lab: Laboratory) -> Body:
    """A handler's own transaction that comes too late leaves nothing behind, whoever has the task run."""
    run, message, owner = _lost(lab)
    answer, reaped, taken = yield [
        refusable(assert_and_finish(owner), "WF006"),
        call("reap_expired_leases"),
        _take_over(message),
    ]
    assert (answer, reaped) in [("accepted", 0), ("WF006", 1)]
    effects = lab.value(
        "select count(*) from flowforge_test.effect where task_run_id = %s", message.task_run_id
    )
    assert effects == (answer == "accepted")
    assert run["a"].state == (
        "succeeded" if answer == "accepted" else "running" if taken.outcome == "claimed" else "ready"
    )


@meets("report_progress", "finish_task_run settle_finished", "prune")
def progress_finish_prune(lab: Laboratory) -> Body:
    """A report of progress as its run ends, and is pruned at once: it is told, or comes too late."""
    run = lab.start("one")
    owner = lab.claim(run["a"])

    def finish_and_settle() -> Program:
        answer = yield from finish(owner)
        yield COMMIT
        yield from call("settle_finished")
        yield "update flowforge_test.clock set reading = reading + interval '1 s'"
        return answer

    def prune() -> Program:
        # The call itself begins by reading the clock.
        yield "select 'late'"
        return (yield from call("prune", "0"))

    reported, answer, _ = yield [
        call("report_progress", owner.task_run_id, owner.fencing_token, 0.5, None),
        finish_and_settle(),
        prune(),
    ]
    assert (type(reported), answer) == (bool, "accepted")
    left = lab.value("select count(*) from flowforge.progress where task_run_id = %s", owner.task_run_id)
    assert left == (reported if run.rows() else 0)


@meets("fetch_outbox mark_published", "redispatch", "sweep_outbox")
def publish_redispatch_sweep(lab: Laboratory) -> Body:
    """An order armed again while a publisher holds the earlier one is there still after a sweep."""
    lab.start("one")
    published, armed, swept = yield [publish(), call("redispatch", "default"), call("sweep_outbox")]
    assert (armed, swept) == (1, 0)
    unpublished = lab.value("select count(*) from flowforge.outbox where published_at is null")
    assert unpublished == 1 or lab.before("2: commit", "1: fetch_outbox 1")
    assert len(published) in (0, 1, 2)


@meets("dispatch_ready", "cancel_run", "settle_finished")
def dispatch_cancel_settle(lab: Laboratory) -> Body:
    """What a settle just puts in line is cancelled before its dispatch, or after it, and never runs."""
    run = lab.start("chain")
    lab.finish(lab.claim(run["a"]))
    dispatched, cancelled, settled = yield [
        call("dispatch_ready"),
        call("cancel_run", run.id),
        call("settle_finished"),
    ]
    assert cancelled is True
    assert settled in (0, 1)
    assert dispatched in (0, 1)
    yield None
    assert run.states() == {"a": "succeeded", "b": "cancelled"}
    assert run.state == "cancelled"


@meets("retry_run", "settle_finished", "claim_task_run")
def retry_settle_claim(lab: Laboratory) -> Body:
    """A part of a join is retried as it is settled, and the message of the failed attempt comes late."""
    run = lab.start("join")
    message = run["b"]
    lab.finish(lab.claim(message), "failed")
    lab.finish(lab.claim(run["c"]))
    reset, _, taken = yield [call("retry_run", run.id), call("settle_finished"), claim(message, "w2")]
    # With b what was skipped because of it.
    assert reset == 2
    assert taken.outcome in ("finished", "superseded")
    assert (run["b"].attempt, run["b"].state, run["d"].unmet) == (2, "pending", 1)
    yield None
    assert set(run.states().values()) == {"succeeded"}


@meets("finish_task_runs", "settle_finished", "finish_task_runs")
def batch_finish_settle_batch_finish(lab: Laboratory) -> Body:
    """The parents of a join finish in one batch, repeated in another order, and a settle comes between."""
    run = lab.start("join")
    b, c = lab.claim(run["b"]), lab.claim(run["c"])
    first, settled, second = yield [batch_finish([b, c]), call("settle_finished"), batch_finish([c, b])]
    assert sorted([first[0], second[1]]) == sorted([first[1], second[0]]) == ["accepted", "repeated"]
    assert settled in (0, 2)
    assert run["d"].unmet == 2 - settled


@meets("expand_map", "settle_finished", "cancel_run")
def expand_settle_cancel(lab: Laboratory) -> Body:
    """A map is expanded, or cancelled, as its upstream's sibling is counted: whole or not at all."""
    run = lab.start("maps")
    a, b = lab.claim(run["a"]), lab.claim(run["b"])
    lab.finish(a, "succeeded", [1, 2])
    lab.value("select flowforge.settle_finished()")
    lab.finish(b)
    expanded, settled, cancelled = yield [
        call("expand_map"),
        call("settle_finished"),
        call("cancel_run", run.id),
    ]
    assert cancelled is True
    assert settled in (0, 1)
    assert len(run.rows("m")) == 1 + 2 * expanded
    yield None
    assert {row.state for row in (*run.rows("m"), run["z"])} == {"cancelled"}
    assert run.state == "cancelled"


@meets("redispatch_lost", "claim_task_run", "fail_undeliverable")
def lost_claim_undeliverable(lab: Laboratory) -> Body:
    """A message is thought lost, comes after all, and is too late: one of the three has the task run."""
    run = lab.start("prompt")
    message = run["a"]
    lab.value("select flowforge.mark_published(array(select f.outbox_id from flowforge.fetch_outbox(1) f))")
    lab.expire()
    lost, taken, failed = yield [
        call("redispatch_lost"),
        claim(message),
        call("fail_undeliverable"),
    ]
    assert lost + failed < 3
    assert run["a"].state == ("failed" if failed else "running")
    assert taken.outcome in (("finished", "running") if failed else ("claimed",))
    assert run["a"].fencing_token == 1 - failed
