"""Scenarios of one run: what counts, cancels, retries, expands and dispatches, against one another."""

import itertools

from tests.sql.explore import Body, meets
from tests.sql.programs import claim_next, finish, finish_and_settle, refusable, release
from tests.sql.stepping import Laboratory, Run, call

_NUMBERS = itertools.count()


def _joining(lab: Laboratory, b: str, c: str, workflow: str = "join") -> Run:
    """A run whose b and c have ended so and are not settled."""
    run = lab.start(workflow)
    lab.finish(lab.claim(run["b"]), b)
    lab.finish(lab.claim(run["c"]), c)
    return run


def _failed(lab: Laboratory) -> Run:
    """A run of the chain that has ended, since its first task failed."""
    run = lab.start("chain")
    lab.finish(lab.claim(run["a"]), "failed")
    lab.tick()
    assert run.state == "failed"
    return run


# --- the join ---


@meets("finish_task_run settle_finished", "finish_task_run settle_finished")
def join_finish_finish(lab: Laboratory) -> Body:
    """HD-01: two parents finish together, each followed by a settle: the child is dispatched once."""
    run = lab.start("join")
    b, c = lab.claim(run["b"]), lab.claim(run["c"])
    answers = yield [finish_and_settle(b), finish_and_settle(c)]
    assert answers == ["accepted", "accepted"]
    lab.value("select flowforge.settle_finished()")
    assert (run["d"].unmet, run["d"].stage) == (0, "eligible")
    lab.tick()
    assert run["d"].state == "ready"
    orders = lab.rows("select * from flowforge.outbox where task_run_id = %s", run["d"].task_run_id)
    assert [each.dispatch_id for each in orders] == [run["d"].dispatch_id]


@meets("finish_task_run", "finish_task_run", "settle_finished")
def join_finish_finish_settle(lab: Laboratory) -> Body:
    """HD-01 with a scheduler of its own: nothing is counted twice, nothing is lost."""
    run = lab.start("join")
    b, c = lab.claim(run["b"]), lab.claim(run["c"])
    *answers, settled = yield [finish(b), finish(c), call("settle_finished")]
    assert answers == ["accepted", "accepted"]
    assert run["d"].unmet == 2 - settled


@meets("finish_task_run", "settle_finished")
def finish_settle(lab: Laboratory) -> Body:
    """A sibling finishes while the other one is counted."""
    run = lab.start("join")
    lab.finish(lab.claim(run["b"]))
    c = lab.claim(run["c"])
    answer, settled = yield [finish(c), call("settle_finished")]
    assert answer == "accepted"
    assert run["d"].unmet == 2 - settled


@meets("settle_finished", "settle_finished")
def settle_settle(lab: Laboratory) -> Body:
    """Two schedulers settle the same run: each finish is counted once."""
    run = _joining(lab, "succeeded", "succeeded")
    counts = yield [call("settle_finished"), call("settle_finished")]
    assert sum(counts) == 2
    assert (run["d"].unmet, run["d"].stage) == (0, "eligible")


@meets("settle_finished", "settle_finished")
def settle_settle_runs(lab: Laboratory) -> Body:
    """Two schedulers settle two runs, of which each may get one: no deadlock."""
    runs = [lab.start("rules") for _ in range(2)]
    for run in runs:
        lab.finish(lab.claim(run["b"]))
        lab.finish(lab.claim(run["c"]), "failed")
    counts = yield [call("settle_finished"), call("settle_finished")]
    # Of each run b, c and good; bad waits to be dispatched.
    assert sum(counts) == 6
    yield None
    for run in runs:
        states = {"b": "succeeded", "c": "failed", "bad": "succeeded", "good": "skipped", "end": "succeeded"}
        assert run.states() == states


@meets("settle_finished", "cancel_run")
def settle_cancel(lab: Laboratory) -> Body:
    """A cancel counts what has finished before it cancels the rest, whoever settles meanwhile."""
    run = _joining(lab, "succeeded", "succeeded")
    _, cancelled = yield [call("settle_finished"), call("cancel_run", run.id)]
    assert cancelled is True
    assert run.states() == {"b": "succeeded", "c": "succeeded", "d": "cancelled"}
    assert run.state == "cancelled"


@meets("settle_finished", "retry_run")
def settle_retry(lab: Laboratory) -> Body:
    """A retry settles first: it sees what is to be skipped as skipped, and resets it with what failed."""
    run = _joining(lab, "failed", "succeeded", "rules")
    _, reset = yield [call("settle_finished"), call("retry_run", run.id)]
    # b, which failed, and good, which was skipped because of it; bad is eligible.
    assert reset == 2
    assert run["b"].attempt == 2
    assert {run["bad"].unmet, run["good"].unmet, run["end"].unmet} == {1, 2}
    yield None
    states = {"b": "succeeded", "c": "succeeded", "bad": "skipped", "good": "succeeded", "end": "succeeded"}
    assert run.states() == states


@meets("finish_task_run settle_finished", "retry_run")
def finish_settle_retry(lab: Laboratory) -> Body:
    """A sibling finishes, and is settled, while the other is retried: the join is counted right."""
    run = lab.start("join")
    lab.finish(lab.claim(run["b"]), "failed")
    c = lab.claim(run["c"])
    answer, reset = yield [finish_and_settle(c), call("retry_run", run.id)]
    assert answer == "accepted"
    # d was skipped, and is reset with b, if c had been settled.
    assert reset in (1, 2)
    yield None
    assert run.states() == {"b": "succeeded", "c": "succeeded", "d": "succeeded"}


# --- cancel and retry ---


@meets("cancel_run", "cancel_run")
def cancel_cancel(lab: Laboratory) -> Body:
    """Two cancels: one of them began it."""
    run = lab.start("join")
    began = yield [call("cancel_run", run.id, "first"), call("cancel_run", run.id, "second")]
    assert sorted(began) == [False, True]
    assert run.state == "cancelled"
    reason = lab.value("select cancel_reason from flowforge.run where run_id = %s", run.id)
    assert reason == ["first", "second"][began.index(True)]


@meets("cancel_run", "retry_run")
def cancel_retry(lab: Laboratory) -> Body:
    """A retry and a cancel of an ended run: the cancel comes too late, or cancels the retry."""
    run = _failed(lab)
    cancelled, reset = yield [call("cancel_run", run.id), call("retry_run", run.id)]
    assert reset == 2
    yield None
    assert run.state == ("cancelled" if cancelled else "succeeded")


@meets("cancel_run", "retry_run")
def cancel_retry_running(lab: Laboratory) -> Body:
    """A retry and a cancel of a run of which something runs: the retry is refused, or cancelled."""
    run = lab.start("join")
    lab.finish(lab.claim(run["b"]), "failed")
    lab.claim(run["c"])
    cancelled, reset = yield [call("cancel_run", run.id), refusable(call("retry_run", run.id), "WF007")]
    assert cancelled is True
    assert reset in (1, "WF007")
    yield None
    assert run["b"].state == ("cancelled" if reset == 1 else "failed")
    assert run.state == "cancelled"


@meets("retry_run", "retry_run")
def retry_retry(lab: Laboratory) -> Body:
    """Two operators retry: the part that failed is reset once."""
    run = _failed(lab)
    counts = yield [call("retry_run", run.id), call("retry_run", run.id)]
    assert sorted(counts) == [0, 2]
    assert run["a"].attempt == 2


@meets("retry_run", "retry_run")
def retry_repeated(lab: Laboratory) -> Body:
    """A retry repeated under its request id while it is under way: one retry, one answer."""
    run = _failed(lab)
    counts = yield [call("retry_run", run.id, None, "again"), call("retry_run", run.id, None, "again")]
    assert counts == [2, 2]
    assert run["a"].attempt == 2


@meets("retry_run", "finish_task_run")
def retry_finish(lab: Laboratory) -> Body:
    """A retry from a task that is just finishing is refused, or resets what has finished."""
    run = lab.start("chain")
    a = lab.claim(run["a"])
    reset, answer = yield [refusable(call("retry_run", run.id, "a"), "WF007"), finish(a)]
    assert answer == "accepted"
    assert reset in (1, "WF007")
    assert (run["a"].state, run["a"].attempt) == (("pending", 2) if reset == 1 else ("succeeded", 1))
    yield None
    assert run.state == "succeeded"


@meets("retry_run", "finish_task_run")
def retry_failing(lab: Laboratory) -> Body:
    """A retry of what has failed while one more fails: that one belongs to it, or is left as it is."""
    run = lab.start("two")
    a, b = [lab.claim(row) for row in run.rows()]
    lab.finish(a, "failed")
    reset, answer = yield [call("retry_run", run.id), finish(b, "failed")]
    assert answer == "accepted"
    assert reset in (1, 2)
    yield None
    assert run.states() == {"a": "succeeded", "b": "failed" if reset == 1 else "succeeded"}


@meets("retry_run", "reap_expired_leases")
def retry_reap(lab: Laboratory) -> Body:
    """A retry from a task that the reaper just gives up is refused, or resets what has failed."""
    run = lab.start("fragile")
    lab.claim(run["a"])
    lab.expire()
    reset, reaped = yield [refusable(call("retry_run", run.id, "a"), "WF007"), call("reap_expired_leases")]
    assert reaped == 1
    # Where it had been settled, b was in line because of it.
    assert (run["a"].state, run["a"].attempt) == (("failed", 1) if reset == "WF007" else ("pending", 2))
    yield None
    assert run.states() == {"a": "failed" if reset == "WF007" else "succeeded", "b": "succeeded"}


@meets("retry_run", "prune")
def retry_prune(lab: Laboratory) -> Body:
    """A retry and a prune of an ended run: it is gone whole, or runs on whole."""
    run = _failed(lab)
    lab.clock.advance("1 hour")
    reset, pruned = yield [refusable(call("retry_run", run.id), "WF002"), call("prune", "30 min")]
    gone = not run.rows()
    assert reset == ("WF002" if gone else 2)
    assert gone is (
        pruned > 0 and lab.value("select count(*) from flowforge.run where run_id = %s", run.id) == 0
    )


def _ended(lab: Laboratory) -> Run:
    """A run that has ended long ago, and whose order nobody has swept."""
    run = lab.start("one")
    lab.finish(lab.claim(run["a"]))
    lab.tick()
    lab.clock.advance("1 hour")
    return run


@meets("prune", "prune")
def prune_prune(lab: Laboratory) -> Body:
    """Two operators prune: each run goes once."""
    run = _ended(lab)
    counts = yield [call("prune", "30 min"), call("prune", "30 min")]
    assert sorted(counts) == [0, 1]
    assert not run.rows()


@meets("prune", "cancel_run")
def prune_cancel(lab: Laboratory) -> Body:
    """A cancel that comes too late for a run that is just pruned."""
    run = _ended(lab)
    pruned, cancelled = yield [
        call("prune", "30 min"),
        refusable(call("cancel_run", run.id), "WF002"),
    ]
    assert cancelled in (False, "WF002")
    assert pruned == 1 - len(run.rows())


@meets("prune", "sweep_outbox")
def prune_sweep(lab: Laboratory) -> Body:
    """The order of an ended run is swept, whether the run is there or not."""
    run = _ended(lab)
    pruned, swept = yield [call("prune", "30 min"), call("sweep_outbox")]
    assert (pruned, swept) == (1, 1)
    assert not run.rows()


# --- what is left of a cancelled run ---


def _left_over(lab: Laboratory) -> Run:
    """A run being cancelled of which a task run is ready: a release overlooked the cancel under way."""
    run = lab.start("two")
    lab.claim(run["b"])
    lab.value(
        "update flowforge.run set cancel_requested_at = flowforge._clock() where run_id = %s returning true",
        run.id,
    )
    return run


@meets("cancel_leftovers", "cancel_leftovers")
def leftovers_leftovers(lab: Laboratory) -> Body:
    """Two schedulers cancel what is left over once."""
    run = _left_over(lab)
    counts = yield [call("cancel_leftovers"), call("cancel_leftovers")]
    assert sum(counts) == 1
    yield None
    assert run.states() == {"a": "cancelled", "b": "succeeded"}


@meets("cancel_leftovers", "claim_next")
def leftovers_claim_next(lab: Laboratory) -> Body:
    """What is left over cannot be claimed on the way, nor does its claim disturb the sweep."""
    run = _left_over(lab)
    cancelled, claimed = yield [call("cancel_leftovers"), claim_next()]
    assert claimed == []
    yield None
    assert run.states() == {"a": "cancelled", "b": "succeeded"}
    assert cancelled in (0, 1)


@meets("release_task_run", "release_task_run", "cancel_leftovers")
def leftovers_release(lab: Laboratory) -> Body:
    """What is given back to a run being cancelled is cancelled at once, and settled."""
    run = lab.start("two")
    a, b = lab.claim(run["a"]), lab.claim(run["b"])
    lab.value("select flowforge.cancel_run(%s)", run.id)
    answers = yield [release(a, "shutdown"), release(b, "crashed"), call("cancel_leftovers")]
    assert answers == ["cancelled", "cancelled", 0]
    yield None
    assert run.state == "cancelled"
