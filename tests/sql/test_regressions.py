"""Mistakes that random calls have found, each by the shortest sequence that shows it."""

import uuid

import pytest
from psycopg.types.json import Jsonb

from tests.sql.helpers import Engine, task


@pytest.mark.parametrize(
    "call",
    [
        "claim_task_runs('{1}', '{}', 'worker', gen_random_uuid(), '30 s')",
        "renew_leases('{1}', '{1, 2}', '30 s')",
        "traceparents('{1}', '{1, 2}')",
        "finish_task_runs('{1}', '{1}', '{succeeded, failed}', '{null}', '{null}', '{true}')",
        "mark_refused('{1}', '{}')",
    ],
)
def test_arrays_of_different_lengths_are_refused(engine: Engine, call: str) -> None:
    with engine.refuses("WF001"):
        engine.rows(f"select * from flowforge.{call}")


def test_repeated_claim_next_gets_a_fresh_lease(engine: Engine) -> None:
    """Its reply was lost for as long as the lease: who asks again must not hold an expired one."""
    engine.start(task("a"))
    arguments = (["default"], "worker", uuid.uuid4(), "30 s")
    [first] = engine.table("claim_next", *arguments)
    engine.advance("31 s")
    [again] = engine.table("claim_next", *arguments)
    assert (again.outcome, again.fencing_token) == ("claimed", first.fencing_token)
    assert (again.lease_expires_at - first.lease_expires_at).total_seconds() == 31
    assert engine.reap() == 0


@pytest.mark.parametrize("other", [-1, 1])
def test_a_token_that_holds_is_accepted_beside_one_that_does_not(engine: Engine, other: int) -> None:
    """One batch may bring two executions of one task run; the order of the tokens decides nothing."""
    engine.start(task("a"))
    claim = engine.claim_one()
    tokens = [claim.fencing_token + other, claim.fencing_token]
    rows = engine.table(
        "finish_task_runs",
        *([claim.task_run_id] * 2, tokens, ["succeeded"] * 2, [Jsonb(1)] * 2, ["", ""], [True] * 2),
    )
    assert [row.answer for row in rows] == ["fenced", "accepted"]


def test_the_delay_of_another_offer_governs_an_order_still_unpublished(engine: Engine) -> None:
    """A message went out, its mark was lost: that order serves again, but not before the delay is over."""
    engine.start(task("a"))
    [order] = engine.table("fetch_outbox", 10)  # published, and the mark lost
    message = order.task_run_id, order.dispatch_id
    for reaps in (1, 2):
        [claim] = engine.table("claim_task_run", *message, "worker", uuid.uuid4(), "1 s")
        assert claim.outcome == "claimed"
        engine.advance("2 s")
        assert engine.reap() == 1
        assert len(engine.table("fetch_outbox", 10)) == (reaps == 1)
    engine.advance("5 minutes")
    [again] = engine.table("fetch_outbox", 10)
    assert (again.task_run_id, again.dispatch_id) == message


@pytest.mark.parametrize("function", ["pause_queue", "resume_queue", "configure_queue"])
@pytest.mark.parametrize("paused", [False, True])
def test_an_unknown_queue_is_named_whatever_the_plan(engine: Engine, function: str, paused: bool) -> None:
    """What raises must not stand in a condition that a plan may leave unevaluated."""
    engine.define(task("a"))
    engine.rows("analyze flowforge.queue")
    for _ in range(6):  # from the sixth call on the plan is one for any queue
        engine.call(function, "default")
    if paused:
        engine.call("pause_queue", "default")
    with engine.refuses("WF002", "nobody"):
        engine.call(function, "nobody")
