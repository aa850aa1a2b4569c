"""HD-26: somebody holds an old snapshot, and no dead row can be removed.

Costs are pages of the buffer cache that a call touches, as in test_buffers.py. Whatever goes by key costs
what it did, and so does a look for work whose index begins with the time from which there is something to be
found. Where it begins with a queue or a run, the look passes dead entries over in the index, and their rows
not at all: that grows by a hundredth of a page for each task run done, and is bounded here.
benchmarks/held_snapshot.py measures it.
"""

import uuid
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Clock, Database
from tests.sql.test_buffers import CHANCE, HIGHER_TREES, IDLE, WORKFLOW, Meter, Pages

DONE, BATCH = 4000, 500

BY_KEY = (
    *("trigger", "mark", "claim", "claim of what is running", "renew", "finish", "finish what was reaped"),
    *("idle: expand", "idle: next due", "idle: cancel leftovers"),
)
LOOKS = (
    *("dispatch", "fetch", "claim next", "settle", "reap", "sweep"),
    *("idle: settle", "idle: dispatch", "idle: reap", "idle: re-dispatch", "idle: fail", "idle: sweep"),
    *("idle: fetch", "idle: claim next"),
)
# Pages that a look may touch more for each task run done since.
SHARE = 0.01


def work(meter: Meter) -> None:
    """As many task runs as make a batch, from the trigger to the sweep."""

    def call(query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return meter.rows(f"select * from flowforge.{query}", *arguments)

    call("trigger_many('w', array_fill('{}'::jsonb, array[%s]))", BATCH)
    call("dispatch_ready(%s)", BATCH)
    with meter.connection.transaction():
        orders = call("fetch_outbox(%s)", BATCH)
        call("mark_published(%s)", [order[0] for order in orders])
    deliveries = [order[1] for order in orders], [order[2] for order in orders]
    claims = call("claim_task_runs(%s, %s, 'w', %s, '1 s')", *deliveries, uuid.uuid4())
    held, tokens = [row[2] for row in claims], [row[4] for row in claims]
    call("renew_leases(%s, %s, '1 s')", held, tokens)
    outputs, nulls = [Jsonb({})] * BATCH, [None] * BATCH
    call(
        "finish_task_runs(%s, %s, %s, %s, %s, %s)",
        held, tokens, ["succeeded"] * BATCH, outputs, nulls, [True] * BATCH,
    )  # fmt: skip
    call("settle_finished(%s)", 2 * BATCH)
    call("sweep_outbox()")
    # Published orders leave the table at once.
    assert meter.rows("select count(*) from flowforge.outbox") == [(0,)]


def round_of_all(meter: Meter) -> Pages:
    meter.pages = {}
    meter.round(IDLE)
    return meter.pages


@pytest.mark.timeout(300)
def test_hd_26_what_is_dead_costs_little(db: Database, clock: Clock) -> None:
    with db.connect() as connection, db.connect(autocommit=False) as holder:
        connection.execute("alter table flowforge.run disable trigger user")
        connection.execute("alter table flowforge.task_run disable trigger user")
        connection.execute("select flowforge.define_workflow(%s)", (Jsonb(WORKFLOW),))
        connection.execute("select flowforge.configure_queue('default', %s)", (BATCH,))
        meter = Meter(connection)
        work(meter)
        round_of_all(meter)
        connection.execute("vacuum (analyze)")
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select count(*) from flowforge.run")
        before = round_of_all(meter)
        for _ in range(DONE // BATCH):
            work(meter)
        # The fault: vacuum removes none of what is dead, which is more than what lives.
        connection.execute("vacuum flowforge.task_run, flowforge.outbox")
        connection.execute("create extension pgstattuple")
        dead = "select dead_tuple_count, tuple_count from pgstattuple('flowforge.task_run')"
        ((dead_rows, live_rows),) = meter.rows(dead)
        assert dead_rows > 2 * live_rows > 2 * DONE
        # It was done some time ago.
        for _ in range(2):
            clock.advance("3 minutes")
            meter.rows("select flowforge.advance_frontiers()")
        after = round_of_all(meter)
        assert {*BY_KEY, *LOOKS} == set(before)
        assert {
            name: (before[name], after[name])
            for name in BY_KEY
            # Trees that had been a page or two have grown by a level, or two.
            if after[name] > before[name] * 2
        } == {}
        assert {
            name: (before[name], after[name])
            for name in LOOKS
            if after[name] > before[name] * HIGHER_TREES + CHANCE + SHARE * DONE
        } == {}
        holder.rollback()


def test_hd_26_a_renewal_writes_the_lease_and_nothing_else(db: Database) -> None:
    """One column of one row, and no other table."""
    with db.connect() as connection:
        meter = Meter(connection)
        connection.execute("select flowforge.define_workflow(%s)", (Jsonb(WORKFLOW),))
        connection.execute("select flowforge.trigger('w'), flowforge.dispatch_ready()")
        claim = "select task_run_id, fencing_token from flowforge.claim_next('{default}', 'w', %s, '1 min')"
        ((held, token),) = meter.rows(claim, uuid.uuid4())
        row = "select to_jsonb(tr) from flowforge.task_run tr"
        # Counted since the session's last report, so two looks in one transaction.
        written = """
            select relname, pg_stat_get_xact_tuples_inserted(oid) + pg_stat_get_xact_tuples_updated(oid)
                + pg_stat_get_xact_tuples_deleted(oid)
            from pg_class where relnamespace = 'flowforge'::regnamespace and relkind = 'r'
        """
        with connection.transaction():
            ((before,),), earlier = meter.rows(row), dict(meter.rows(written))
            meter.rows("select * from flowforge.renew_leases(%s, %s, '1 min')", [held], [token])
            ((after,),), later = meter.rows(row), dict(meter.rows(written))
        assert {name for name in before if before[name] != after[name]} == {"lease_expires_at"}
        assert {name: later[name] - earlier[name] for name in later if later[name] != earlier[name]} == {
            "task_run": 1
        }
