"""Scenarios of the way from dispatch to claim: orders to publish, messages, and claims without a message."""

import uuid
from typing import Any

from tests.sql.explore import Body
from tests.sql.programs import (
    batch_claim,
    batch_finish,
    claim,
    claim_next,
    publish,
    refusable,
    release,
)
from tests.sql.stepping import COMMIT, Laboratory, Program, Run, call, table


def _orders(lab: Laboratory) -> tuple[int, int]:
    """How many orders have been published, and how many are yet to be."""
    (orders,) = lab.rows("select count(published_at) as published, count(*) as all from flowforge.outbox")
    return orders.published, orders.all - orders.published


def _deliver_all(lab: Laboratory) -> None:
    lab.value("select flowforge.mark_published(array(select f.outbox_id from flowforge.fetch_outbox(100) f))")


def _parked(lab: Laboratory) -> Run:
    """A run whose one message can never be published."""
    run = lab.start("one")
    (order,) = lab.rows("select * from flowforge.fetch_outbox(1)")
    lab.value("select flowforge.mark_unpublishable(%s, 'too large')", order.outbox_id)
    return run


# --- the publisher ---


def publish_publish(lab: Laboratory) -> Body:
    """Two publishers share the orders: each is published by one of them."""
    lab.start("two")
    lab.start("one")
    first, second = yield [publish(), publish()]
    assert len({*first, *second}) == len(first) + len(second) == 3
    assert _orders(lab) == (3, 0)


def publish_redispatch(lab: Laboratory) -> Body:
    """An order armed again while the publisher holds an earlier one is not swallowed by the late mark."""
    lab.start("one")
    _, armed = yield [publish(), call("redispatch", "default")]
    assert armed == 1
    # Nothing is left to be published only if the publisher fetched after it had been armed again.
    assert _orders(lab)[1] == 1 or lab.before("2: commit", "1: fetch_outbox 1")


def refuse_redispatch(lab: Laboratory) -> Body:
    """An order that the broker refuses is armed again meanwhile: it is kept, and its delay with it."""
    lab.start("one")

    def refused() -> Program:
        orders = yield from table("fetch_outbox", 1)
        if orders:
            yield from call("mark_refused", [orders[0].outbox_id], ["no queue"])
        return len(orders)

    fetched, armed = yield [refused(), call("redispatch", "default")]
    assert armed == 1
    tries = lab.rows("select tries from flowforge.outbox order by outbox_id")
    assert [each.tries for each in tries] in ([[1], [1, 0]] if fetched else [[0]])
    assert _orders(lab) == (0, len(tries))
    waits = yield None
    assert waits in (0, 1)


def park_redispatch(lab: Laboratory) -> Body:
    """An order that can never be published is armed again meanwhile: one more try, or it fails for good."""
    run = lab.start("one")

    def parks() -> Program:
        orders = yield from table("fetch_outbox", 1)
        if orders:
            yield from call("mark_unpublishable", orders[0].outbox_id, "too large")

    _, armed = yield [parks(), call("redispatch", "default")]
    assert armed == 1
    another = lab.value("select count(*) from flowforge.outbox where parked_at is null")
    assert another == 1 or lab.before("2: commit", "1: fetch_outbox 1")
    yield None
    assert run.state == ("succeeded" if another else "failed")


def publish_redispatch_lost(lab: Laboratory) -> Body:
    """The scheduler looks for lost messages while one is on its way: it is not lost."""
    run = lab.start("one")
    lab.expire()
    published, lost = yield [publish(), call("redispatch_lost")]
    assert len(published) == 1
    assert lost == 0
    assert run["a"].redispatches == 0


def publish_release(lab: Laboratory) -> Body:
    """What is given back while the publisher holds its order gets an order of its own."""
    run = lab.start("one")
    owner = lab.claim(run["a"])
    published, released = yield [publish(), release(owner, "unstarted")]
    assert released == "released"
    assert _orders(lab)[1] == 1 or lab.before("2: commit", "1: fetch_outbox 1")
    assert len(published) == _orders(lab)[0]


def publish_claim_release(lab: Laboratory) -> Body:
    """The same of what is claimed, by an earlier message, and given back meanwhile."""
    run = lab.start("one")

    def claims_and_releases() -> Program:
        owner = yield from claim(run["a"])
        yield COMMIT
        return (yield from release(owner, "unstarted"))

    _, released = yield [publish(), claims_and_releases()]
    assert released == "released"
    given_back = max(at for at, step in enumerate(lab.trace) if step == "2: commit")
    assert _orders(lab)[1] == 1 or given_back < lab.trace.index("1: fetch_outbox 1")


def publish_reap(lab: Laboratory) -> Body:
    """The same of what is reaped."""
    run = lab.start("one")
    lab.claim(run["a"])
    lab.expire()
    published, reaped = yield [publish(), call("reap_expired_leases")]
    assert reaped == 1
    assert _orders(lab)[1] == 1 or lab.before("2: commit", "1: fetch_outbox 1")
    assert len(published) == _orders(lab)[0]


def publish_claim(lab: Laboratory) -> Body:
    """A claim waits for nothing that the publisher holds."""
    run = lab.start("one")
    _, answer = yield [publish(), claim(run["a"])]
    assert answer.outcome == "claimed"
    assert not lab.blocked


def publish_claim_next(lab: Laboratory) -> Body:
    """Nor does a claim without a message, which takes the order away where it can."""
    lab.start("one")
    _, (answer,) = yield [publish(), claim_next()]
    assert answer.outcome == "claimed"
    assert not lab.blocked


def publish_cancel(lab: Laboratory) -> Body:
    """Once a cancel has returned, nothing of the run is fetched; what was is answered at its claim."""
    run = lab.start("one")
    row = run["a"]
    published, cancelled = yield [publish(), call("cancel_run", run.id)]
    assert cancelled is True
    assert published == [] or not lab.before("2: commit", "1: fetch_outbox 1")
    (answer,) = lab.rows(
        "select * from flowforge.claim_task_run(%s, %s, 'w', gen_random_uuid(), '30 s')",
        *(row.task_run_id, row.dispatch_id),
    )
    assert answer.outcome == "cancelled"


def publish_sweep(lab: Laboratory) -> Body:
    """The sweep leaves the orders of live dispatches alone, and waits for no publisher."""
    run = lab.start("two")
    lab.finish(lab.claim(run["a"]))
    published, _ = yield [publish(), call("sweep_outbox")]
    assert len(published) == 1
    assert _orders(lab)[0] == 1
    assert not lab.blocked


# --- orders and task runs in step ---


def sweep_release(lab: Laboratory) -> Body:
    """A task run is given back while the sweep takes its old order for useless: an order remains."""
    run = lab.start("one")
    owner = lab.claim(run["a"])
    _, released = yield [call("sweep_outbox"), release(owner, "unstarted")]
    assert released == "released"
    assert _orders(lab) in [(0, 1), (0, 2)]


def sweep_redispatch(lab: Laboratory) -> Body:
    """What cannot be published is armed again while the sweep looks at the parked order: one is left."""
    _parked(lab)
    swept, armed = yield [call("sweep_outbox"), call("redispatch", "default")]
    assert armed == 1
    unparked = lab.value("select count(*) from flowforge.outbox where parked_at is null")
    assert (unparked, lab.value("select count(*) from flowforge.outbox")) == (1, 2 - swept)


def undeliverable_redispatch(lab: Laboratory) -> Body:
    """What cannot be published fails, or is armed again: with both, it fails."""
    run = _parked(lab)
    failed, armed = yield [call("fail_undeliverable"), call("redispatch", "default")]
    assert (failed, armed) in [(1, 0), (0, 1)]
    assert run["a"].state == ("failed" if failed else "ready")
    yield None
    assert run.state == ("failed" if failed else "succeeded")


def undeliverable_claim(lab: Laboratory) -> Body:
    """What is not started in time fails, or starts at the last moment."""
    run = lab.start("prompt")
    lab.expire()
    failed, answer = yield [call("fail_undeliverable"), claim(run["a"])]
    assert (failed, answer.outcome) in [(1, "finished"), (0, "claimed"), (1, "running")]
    assert run["a"].state == ("failed" if failed else "running")
    yield None
    assert run.state == ("failed" if failed else "succeeded")


def undeliverable_cancel(lab: Laboratory) -> Body:
    """What fails so as its run is cancelled: one of them has it, and the run ends."""
    run = lab.start("prompt")
    lab.expire()
    failed, cancelled = yield [call("fail_undeliverable"), call("cancel_run", run.id)]
    assert cancelled is True or failed == 1
    yield None
    assert run.state == ("failed" if failed else "cancelled")


def lost_claim(lab: Laboratory) -> Body:
    """A message thought lost is claimed as it is sent again: the second one is recognised."""
    run = lab.start("one")
    _deliver_all(lab)
    lab.expire()
    lost, answer = yield [call("redispatch_lost"), claim(run["a"])]
    assert answer.outcome == "claimed"
    assert lost in (0, 1)
    assert _orders(lab) == (1, lost)


def lost_redispatch(lab: Laboratory) -> Body:
    """The scheduler and an operator arm the same lost message: one order more is enough."""
    run = lab.start("one")
    _deliver_all(lab)
    lab.expire()
    lost, armed = yield [call("redispatch_lost"), call("redispatch", "default")]
    assert lost + armed in (1, 2)
    assert _orders(lab) == (1, 1)
    assert run["a"].redispatches == lost


# --- claims without a message ---


def claim_next_claim_next(lab: Laboratory) -> Body:
    """Two workers take what is next in line: each something else."""
    run = lab.start("two")
    first, second = yield [claim_next(), claim_next()]
    assert sorted(each.task for each in [*first, *second]) == ["a", "b"]
    assert len(first) == 1
    assert not lab.blocked
    assert [row.fencing_token for row in run.rows()] == [1, 1]
    assert lab.value("select count(*) from flowforge.outbox") == 0


def claim_next_repeated(lab: Laboratory) -> Body:
    """A call repeated while the call itself is under way: the same claims, and no more."""
    lab.start("three")
    claim_id = uuid.uuid4()
    first, second = yield [claim_next(2, claim_id), claim_next(2, claim_id)]
    assert [(each.task_run_id, each.fencing_token) for each in first] == [
        (each.task_run_id, each.fencing_token) for each in second
    ]
    assert len(first) == 2


def claim_next_repeated_reap(lab: Laboratory) -> Body:
    """A repeat comes while the reaper takes the claims back: they are given again, or are gone."""
    run = lab.start("one")
    claim_id = uuid.uuid4()
    lab.rows("select * from flowforge.claim_next(array['default'], 'w1', %s, '30 s')", claim_id)
    lab.expire()
    again, reaped = yield [claim_next(1, claim_id), call("reap_expired_leases")]
    assert reaped in (0, 1)
    # Given again with a fresh lease, or chosen anew once it was ready again, or nothing.
    assert [each.fencing_token for each in again] in ([[1]] if not reaped else [[], [2]])
    assert run["a"].fencing_token == (again[0].fencing_token if again else 1)


def claim_next_claim(lab: Laboratory) -> Body:
    """A claim with a message and one without meet at one task run."""
    run = lab.start("one")
    without, answer = yield [claim_next(), claim(run["a"])]
    assert (len(without), answer.outcome) in [(1, "running"), (0, "claimed")]


def claim_next_cancel(lab: Laboratory) -> Body:
    """HD-31 without a message."""
    run = lab.start("two")
    claimed, cancelled = yield [claim_next(2), call("cancel_run", run.id)]
    assert cancelled is True
    assert len(claimed) in (0, 2)
    yield None
    assert set(run.states().values()) == {"succeeded" if claimed else "cancelled"}
    assert run.state == ("succeeded" if claimed else "cancelled")


def claim_next_reap(lab: Laboratory) -> Body:
    """What the reaper gives back is taken at once, or later, with the next token."""
    run = lab.start("one")
    lab.claim(run["a"])
    lab.expire()
    claimed, reaped = yield [claim_next(), call("reap_expired_leases")]
    assert reaped == 1
    assert run["a"].fencing_token == 1 + len(claimed)


# --- batches against whoever holds the run ---


def _half_done(lab: Laboratory) -> tuple[Run, list[Any], list[Any]]:
    """A run of which a and c have failed, unsettled, and b runs; their messages, and their executions."""
    run = lab.start("three")
    messages = run.rows()
    claims = [lab.claim(row) for row in messages]
    lab.finish(claims[0], "failed")
    lab.finish(claims[2], "failed")
    return run, messages, claims


def batch_claim_retry(lab: Laboratory) -> Body:
    """A batch of late messages, in another order than the retry locks: it locks none of them."""
    run, messages, _ = _half_done(lab)
    outcomes, reset = yield [batch_claim(messages[::-1]), call("retry_run", run.id)]
    assert reset == 2
    assert outcomes[1] == "running"
    assert {outcomes[0], outcomes[2]} <= {"finished", "superseded"}
    assert not lab.blocked


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


def batch_claim_cancel(lab: Laboratory) -> Body:
    """A batch claims two task runs of a run as it is cancelled: both, or none."""
    run = lab.start("two")
    outcomes, cancelled = yield [batch_claim(run.rows()[::-1]), call("cancel_run", run.id)]
    assert cancelled is True
    assert outcomes in (["claimed"] * 2, ["cancelled"] * 2)


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
    assert run.states() == {"a": "failed" if failed else "cancelled", "b": "cancelled", "c": "cancelled"}


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


def claim_next_batch_claim(lab: Laboratory) -> Body:
    """A claim by priority and a claim by messages want the same in other orders: no deadlock."""
    run = lab.start("three")
    without, outcomes = yield [claim_next(2), batch_claim(run.rows()[::-1])]
    assert len(without) + outcomes.count("claimed") == 3


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
