"""Scenarios of the way from dispatch to claim: orders to publish, messages, and claims without a message."""

import uuid

from tests.sql.explore import Body, meets
from tests.sql.programs import (
    claim,
    claim_next,
    publish,
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


@meets("fetch_outbox mark_published", "fetch_outbox mark_published")
def publish_publish(lab: Laboratory) -> Body:
    """Two publishers share the orders: each is published by one of them."""
    lab.start("two")
    lab.start("one")
    first, second = yield [publish(), publish()]
    assert len({*first, *second}) == len(first) + len(second) == 3
    assert _orders(lab) == (3, 0)


@meets("fetch_outbox mark_published", "redispatch")
def publish_redispatch(lab: Laboratory) -> Body:
    """An order armed again while the publisher holds an earlier one is not swallowed by the late mark."""
    lab.start("one")
    _, armed = yield [publish(), call("redispatch", "default")]
    assert armed == 1
    # Nothing is left to be published only if the publisher fetched after it had been armed again.
    assert _orders(lab)[1] == 1 or lab.before("2: commit", "1: fetch_outbox 1")


@meets("fetch_outbox mark_refused", "redispatch")
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


@meets("fetch_outbox mark_unpublishable", "redispatch")
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


@meets("fetch_outbox mark_published", "redispatch_lost")
def publish_redispatch_lost(lab: Laboratory) -> Body:
    """The scheduler looks for lost messages while one is on its way: it is not lost."""
    run = lab.start("one")
    lab.expire()
    published, lost = yield [publish(), call("redispatch_lost")]
    assert len(published) == 1
    assert lost == 0
    assert run["a"].redispatches == 0


@meets("fetch_outbox mark_published", "release_task_run")
def publish_release(lab: Laboratory) -> Body:
    """What is given back while the publisher holds its order gets an order of its own."""
    run = lab.start("one")
    owner = lab.claim(run["a"])
    published, released = yield [publish(), release(owner, "unstarted")]
    assert released == "released"
    assert _orders(lab)[1] == 1 or lab.before("2: commit", "1: fetch_outbox 1")
    assert len(published) == _orders(lab)[0]


@meets("fetch_outbox mark_published", "claim_task_run release_task_run")
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


@meets("fetch_outbox mark_published", "reap_expired_leases")
def publish_reap(lab: Laboratory) -> Body:
    """The same of what is reaped."""
    run = lab.start("one")
    lab.claim(run["a"])
    lab.expire()
    published, reaped = yield [publish(), call("reap_expired_leases")]
    assert reaped == 1
    assert _orders(lab)[1] == 1 or lab.before("2: commit", "1: fetch_outbox 1")
    assert len(published) == _orders(lab)[0]


@meets("fetch_outbox mark_published", "claim_task_run")
def publish_claim(lab: Laboratory) -> Body:
    """A claim waits for nothing that the publisher holds."""
    run = lab.start("one")
    _, answer = yield [publish(), claim(run["a"])]
    assert answer.outcome == "claimed"
    assert not lab.blocked


@meets("fetch_outbox mark_published", "claim_next")
def publish_claim_next(lab: Laboratory) -> Body:
    """Nor does a claim without a message, which takes the order away where it can."""
    lab.start("one")
    _, (answer,) = yield [publish(), claim_next()]
    assert answer.outcome == "claimed"
    assert not lab.blocked


@meets("fetch_outbox mark_published", "cancel_run")
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


@meets("fetch_outbox mark_published", "sweep_outbox")
def publish_sweep(lab: Laboratory) -> Body:
    """The sweep leaves the orders of live dispatches alone, and waits for no publisher."""
    run = lab.start("two")
    lab.finish(lab.claim(run["a"]))
    published, _ = yield [publish(), call("sweep_outbox")]
    assert len(published) == 1
    assert _orders(lab)[0] == 1
    assert not lab.blocked


# --- orders and task runs in step ---


@meets("sweep_outbox", "release_task_run")
def sweep_release(lab: Laboratory) -> Body:
    """A task run is given back while the sweep takes its old order for useless: an order remains."""
    run = lab.start("one")
    owner = lab.claim(run["a"])
    _, released = yield [call("sweep_outbox"), release(owner, "unstarted")]
    assert released == "released"
    assert _orders(lab) in [(0, 1), (0, 2)]


@meets("sweep_outbox", "redispatch")
def sweep_redispatch(lab: Laboratory) -> Body:
    """What cannot be published is armed again while the sweep looks at the parked order: one is left."""
    _parked(lab)
    swept, armed = yield [call("sweep_outbox"), call("redispatch", "default")]
    assert armed == 1
    unparked = lab.value("select count(*) from flowforge.outbox where parked_at is null")
    assert (unparked, lab.value("select count(*) from flowforge.outbox")) == (1, 2 - swept)


@meets("fail_undeliverable", "redispatch")
def undeliverable_redispatch(lab: Laboratory) -> Body:
    """What cannot be published fails, or is armed again: with both, it fails."""
    run = _parked(lab)
    failed, armed = yield [call("fail_undeliverable"), call("redispatch", "default")]
    assert (failed, armed) in [(1, 0), (0, 1)]
    assert run["a"].state == ("failed" if failed else "ready")
    yield None
    assert run.state == ("failed" if failed else "succeeded")


@meets("fail_undeliverable", "claim_task_run")
def undeliverable_claim(lab: Laboratory) -> Body:
    """What is not started in time fails, or starts at the last moment."""
    run = lab.start("prompt")
    lab.expire()
    failed, answer = yield [call("fail_undeliverable"), claim(run["a"])]
    assert (failed, answer.outcome) in [(1, "finished"), (0, "claimed"), (1, "running")]
    assert run["a"].state == ("failed" if failed else "running")
    yield None
    assert run.state == ("failed" if failed else "succeeded")


@meets("fail_undeliverable", "cancel_run")
def undeliverable_cancel(lab: Laboratory) -> Body:
    """What fails so as its run is cancelled: one of them has it, and the run ends."""
    run = lab.start("prompt")
    lab.expire()
    failed, cancelled = yield [call("fail_undeliverable"), call("cancel_run", run.id)]
    assert cancelled is True or failed == 1
    yield None
    assert run.state == ("failed" if failed else "cancelled")


@meets("redispatch_lost", "claim_task_run")
def lost_claim(lab: Laboratory) -> Body:
    """A message thought lost is claimed as it is sent again: the second one is recognised."""
    run = lab.start("one")
    _deliver_all(lab)
    lab.expire()
    lost, answer = yield [call("redispatch_lost"), claim(run["a"])]
    assert answer.outcome == "claimed"
    assert lost in (0, 1)
    assert _orders(lab) == (1, lost)


@meets("redispatch_lost", "redispatch")
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


@meets("claim_next", "claim_next")
def claim_next_claim_next(lab: Laboratory) -> Body:
    """Two workers take what is next in line: each something else."""
    run = lab.start("two")
    first, second = yield [claim_next(), claim_next()]
    assert sorted(each.task for each in [*first, *second]) == ["a", "b"]
    assert len(first) == 1
    assert not lab.blocked
    assert [row.fencing_token for row in run.rows()] == [1, 1]
    assert lab.value("select count(*) from flowforge.outbox") == 0


@meets("claim_next", "claim_next")
def claim_next_repeated(lab: Laboratory) -> Body:
    """A call repeated while the call itself is under way: the same claims, and no more."""
    lab.start("three")
    claim_id = uuid.uuid4()
    first, second = yield [claim_next(2, claim_id), claim_next(2, claim_id)]
    assert [(each.task_run_id, each.fencing_token) for each in first] == [
        (each.task_run_id, each.fencing_token) for each in second
    ]
    assert len(first) == 2


@meets("claim_next", "reap_expired_leases")
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


@meets("claim_next", "claim_task_run")
def claim_next_claim(lab: Laboratory) -> Body:
    """A claim with a message and one without meet at one task run."""
    run = lab.start("one")
    without, answer = yield [claim_next(), claim(run["a"])]
    assert (len(without), answer.outcome) in [(1, "running"), (0, "claimed")]


@meets("claim_next", "cancel_run")
def claim_next_cancel(lab: Laboratory) -> Body:
    """HD-31 without a message."""
    run = lab.start("two")
    claimed, cancelled = yield [claim_next(2), call("cancel_run", run.id)]
    assert cancelled is True
    assert len(claimed) in (0, 2)
    yield None
    assert set(run.states().values()) == {"succeeded" if claimed else "cancelled"}
    assert run.state == ("succeeded" if claimed else "cancelled")


@meets("claim_next", "reap_expired_leases")
def claim_next_reap(lab: Laboratory) -> Body:
    """What the reaper gives back is taken at once, or later, with the next token."""
    run = lab.start("one")
    lab.claim(run["a"])
    lab.expire()
    claimed, reaped = yield [claim_next(), call("reap_expired_leases")]
    assert reaped == 1
    assert run["a"].fencing_token == 1 + len(claimed)
