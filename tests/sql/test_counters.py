"""HD-27: no counter and no sequence is narrower than a bigint, anywhere on its way."""

import uuid
from types import SimpleNamespace

import pytest
from psycopg.types.json import Jsonb

from tests.sql.helpers import Engine, task

INT4 = 2**31 - 2
INT8 = 2**63 - 2


def by_messages(engine: Engine) -> None:
    """Drive a run through every kind of call that names an id; b fails once, others answer an array."""
    engine.schedule()
    while orders := engine.table("fetch_outbox", 100):
        engine.call("mark_refused", [order.outbox_id for order in orders[:1]], ["x"])
        engine.call("mark_published", [order.outbox_id for order in orders])
        ids, dispatch_ids = [each.task_run_id for each in orders], [each.dispatch_id for each in orders]
        for claim in engine.table("claim_task_runs", ids, dispatch_ids, "w", uuid.uuid4(), "9 s"):
            held = (claim.task_run_id, claim.fencing_token)
            (renewed,) = engine.table("renew_leases", [held[0]], [held[1]], "9 s")
            assert (claim.outcome, renewed.outcome) == ("claimed", "held")
            engine.call("assert_lease", *held)
            engine.call("report_progress", *held, 0.5)
            if claim.task == "b" and claim.attempt == 1:
                assert engine.finish(claim, "failed") == "accepted"
            else:
                assert engine.finish(claim, output=Jsonb([claim.task_run_id])) == "accepted"
        engine.schedule()
        engine.call("sweep_outbox")


@pytest.mark.parametrize("last", [INT4, INT8 - 1000])
def test_hd_27_sequences(committing: Engine, last: int) -> None:
    """Not in a transaction that is rolled back, since sequences do not roll back."""
    sequences = committing.rows(
        """select c.oid::regclass::text as name from pg_class c
        where c.relkind = 'S' and c.relnamespace = 'flowforge'::regnamespace"""
    )
    assert len(sequences) >= 7
    for sequence in sequences:
        committing.rows("select setval(%s, %s)", sequence.name, last)
    committing.define(
        *(task("a"), task("b", "a", retry={"max_attempts": 2, "delay": 0}), task("m", map="a")),
        task("c", "b", "m"),
    )
    run_id = committing.trigger()
    assert run_id > last
    by_messages(committing)
    assert committing.run_state(run_id) == "succeeded"
    assert committing.call("retry_run", run_id, "b") == 2
    assert committing.call("cancel_run", run_id) is True
    committing.advance("1 s")
    assert committing.call("prune", "0") == 1


def set_counters(engine: Engine, value: int, where: str = "true") -> None:
    """The tests' own trigger, which lets tokens grow by one only, is off meanwhile."""
    engine.rows("set local session_replication_role = replica")
    engine.rows(
        f"""update flowforge.task_run set attempt = %s, fencing_token = %s, redispatches = %s, generation = %s
        where {where}""",
        *(value,) * 4,
    )
    engine.rows("set local session_replication_role = origin")


@pytest.mark.parametrize("value", [INT4, INT8])
def test_hd_27_counters_at_their_last_value_but_one(engine: Engine, value: int) -> None:
    run_id = engine.start(task("a"), task("m", map="a"), task("b", "m"))
    set_counters(engine, value)
    claim = engine.claim_one()
    assert (claim.attempt, claim.fencing_token) == (value, value + 1)
    (renewal,) = engine.table("renew_leases", [claim.task_run_id], [claim.fencing_token], "30 s")
    assert renewal.outcome == "held"
    assert engine.finish(claim, output=Jsonb([1])) == "accepted"
    engine.drive()
    assert engine.run_state(run_id) == "succeeded"
    assert engine.call("retry_run", run_id, "a") == 3  # attempt and generation reach their last value
    row = engine.task_run(run_id, "m")
    assert (engine.task_run(run_id, "a").attempt, row.generation) == (value + 1, value + 1)


@pytest.mark.parametrize("column", ["failures", "reaps", "redispatches"])
def test_hd_27_bounded_counters_at_their_last_value_but_one(engine: Engine, column: str) -> None:
    run_id = engine.start(task("a", max_reaps=1_000_000, retry={"max_attempts": 1_000_000}))
    value = INT8 if column == "redispatches" else 999_998
    engine.rows(f"update flowforge.task_run set {column} = %s", value)
    if column == "redispatches":
        engine.rows("select flowforge.mark_published(array_agg(outbox_id)) from flowforge.outbox")
        engine.advance("1 day")
        assert engine.call("redispatch_lost") == 1
    else:
        claim = engine.claim_one()
        if column == "failures":
            engine.finish(claim, "failed")
        else:
            engine.advance("31 s")
            engine.reap()
    row = engine.task_run(run_id, "a")
    assert (getattr(row, column), row.state in ("pending", "ready")) == (value + 1, True)


def test_hd_27_a_row_at_its_end_fails_alone(engine: Engine) -> None:
    """A batch that names it raises, and is repeated one by one; who chooses passes over it. It fails by a
    clear error."""
    run_id = engine.start(task("a"), task("b"), task("c"))
    spent, good, _ = engine.messages()
    set_counters(engine, 2**63 - 1, f"task_run_id = {spent.task_run_id}")
    for orders in ([spent, good], [spent]):
        ids, dispatch_ids = [each.task_run_id for each in orders], [each.dispatch_id for each in orders]
        with engine.refuses("22003", "bigint out of range"):
            engine.table("claim_task_runs", ids, dispatch_ids, "w", uuid.uuid4(), "9 s")
    assert engine.claim(good).outcome == "claimed"
    assert [each.task for each in engine.claim_next()] == ["c"]
    assert engine.call("fail_undeliverable") == 1
    row = engine.task_run(run_id, "a")
    assert (row.state, row.error) == (
        "failed", "cannot be claimed: its fencing token has reached its last value",
    )  # fmt: skip


@pytest.mark.parametrize("value", [-(2**63), -1, 0, 2**31, 2**63 - 1])
def test_hd_27_any_bigint_is_an_id_that_may_be_asked_for(engine: Engine, value: int) -> None:
    engine.start(task("a"))
    engine.claim_one()
    with engine.changes_nothing():
        assert engine.claim(SimpleNamespace(task_run_id=value, dispatch_id=uuid.uuid4())).outcome == "unknown"
        assert engine.call("finish_task_run", value, value, "succeeded") == "fenced"
        assert engine.call("release_task_run", value, value, "shutdown") == "fenced"
        assert engine.call("report_progress", value, value, 0.5) is False
        assert engine.call("mark_published", [value]) == 0
