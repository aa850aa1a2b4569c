"""What a call costs does not grow with what has been done, nor with what waits for its time.

Costs are pages of the buffer cache that a call touches, counted by PostgreSQL: the same on a busy machine.
Between 10,000 and 1,000,000 finished runs the B-trees grow by one level, so each look-up by key may touch one
page more: at most a third of what it touched. Beyond that, and a few pages of chance, nothing may be added.
"""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.types.json import Jsonb
from pytest_postgresql.executors import NoopExecutor

from tests.services.database import Database
from tests.services.postgres import Connection, PostgresServer

Pages = dict[str, int]

HIGHER_TREES = 4 / 3
CHANCE = 10
A_HANDFUL = 40
ROWS = 20

WORKFLOW = {"name": "w", "tasks": [{"name": "a", "retry": {"max_attempts": 2, "delay": 0}}]}
BATCH = 50

FINISHED = """
    insert into flowforge.run (workflow_id, workflow_version_id, state, priority, unsettled, created_at,
        finished_at, labels, input)
    select v.workflow_id, v.workflow_version_id,
        case when mod(n, 100) = 0 then 'failed' else 'succeeded' end::flowforge.run_state, 0, 0,
        now() - interval '1 day', now() - interval '1 day' + n * interval '1 ms', '{}', '{}'
    from flowforge.workflow_version v cross join generate_series(1, %s::bigint) n;
"""
FINISHED_TASKS = """
    insert into flowforge.task_run (run_id, task_id, queue_id, priority, unmet, fencing_token, dispatch_id,
        available_at, ready_at, started_at, finished_at, state, stage, last_owner, output)
    select r.run_id, t.task_id, t.queue_id, 0, 0, 1, gen_random_uuid(), r.created_at, r.created_at,
        r.created_at, r.finished_at, r.state::text::flowforge.task_run_state, 'settled', 'w', '{}'
    from flowforge.run r join flowforge.task t using (workflow_version_id)
    where r.run_id > (select coalesce(max(run_id), 0) from flowforge.task_run);
"""
DELAYED = """
    insert into flowforge.run (workflow_id, workflow_version_id, priority, unsettled, created_at, labels,
        input)
    select v.workflow_id, v.workflow_version_id, 0, 1, now(), '{}', '{}'
    from flowforge.workflow_version v cross join generate_series(1, %s::bigint);
"""
DELAYED_TASKS = """
    insert into flowforge.task_run (run_id, task_id, queue_id, priority, unmet, available_at, stage)
    select r.run_id, t.task_id, t.queue_id, 0, 0, now() + interval '1 day', 'delayed'
    from flowforge.run r join flowforge.task t using (workflow_version_id)
    where r.run_id > (select max(run_id) from flowforge.task_run);
"""

IDLE = {
    "idle: settle": "settle_finished()",
    "idle: expand": "expand_map()",
    "idle: dispatch": "dispatch_ready()",
    "idle: next due": "next_due()",
    "idle: reap": "reap_expired_leases()",
    "idle: re-dispatch": "redispatch_lost()",
    "idle: fail": "fail_undeliverable()",
    "idle: cancel leftovers": "cancel_leftovers()",
    "idle: sweep": "sweep_outbox()",
    "idle: fetch": "fetch_outbox(500)",
    "idle: claim next": "claim_next(array['default'], 'w', gen_random_uuid(), '30 s', 50)",
}
VIEWS = {
    "view: the last runs": "run_status order by run_id desc limit 20",
    "view: a page of runs": "run_status where run_id < 5000 order by run_id desc limit 20",
    "view: the last runs of a workflow": "run_status where workflow = 'w' order by run_id desc limit 20",
    "view: a run": "run_status where run_id = 5000",
    "view: task runs of a run": "task_run_status where run_id = 5000",
    "view: dead letters": "dead_letters order by finished_at desc limit 20",
    "view: queues": "queue_status",
    "view: workers": "worker_status",
    "view: result": "run_result(5000)",
    "view: output": "task_output(5000, 'a')",
}
ACTIVE = {"active: health": "health", "active: violations": "violations()"}


class Meter:
    """Counts the pages that calls touch, on one connection, warm after the first round."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pages: Pages = {}

    def rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(query, arguments).fetchall()

    def count(self, name: str, source: str, *arguments: Any) -> None:
        """Touch: `select * from flowforge.` and the source; the least of all rounds is kept."""
        ((plan,),) = self.rows(
            f"explain (analyze, buffers, format json) select * from flowforge.{source}", *arguments
        )
        touched = plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
        self.pages[name] = min(touched, self.pages.get(name, touched))

    def finish(self, name: str, claims: list[tuple[Any, ...]]) -> None:
        ids, tokens = [claim[0] for claim in claims], [claim[1] for claim in claims]
        arguments = (ids, tokens, ["succeeded"] * BATCH, [Jsonb({})] * BATCH, [None] * BATCH, [True] * BATCH)
        self.count(name, "finish_task_runs(%s, %s, %s, %s, %s, %s)", *arguments)

    def round(self, sources: dict[str, str]) -> None:
        for name, source in sources.items():
            self.count(name, source)
        self.count("trigger", "trigger_many('w', array_fill('{}'::jsonb, array[100]))")
        self.count("dispatch", "dispatch_ready(100)")
        with self.connection.transaction():
            self.count("fetch", "fetch_outbox(100)")
            orders = self.rows("select outbox_id from flowforge.outbox")
            self.count("mark", "mark_published(%s)", [order[0] for order in orders])
        ready = self.rows(
            "select task_run_id, dispatch_id from flowforge.task_run where stage = 'dispatched'"
        )
        assert len(ready) == len(orders) == 2 * BATCH
        deliveries = [row[0] for row in ready[:BATCH]], [row[1] for row in ready[:BATCH]]
        for name in ("claim", "claim of what is running"):
            self.count(name, "claim_task_runs(%s, %s, 'w', %s, '30 s')", *deliveries, uuid.uuid4())
        claims = self.rows(
            "select task_run_id, fencing_token from flowforge.task_run where lease_expires_at is not null"
        )
        self.count("renew", "renew_leases(%s, %s, '30 s')", [c[0] for c in claims], [c[1] for c in claims])
        self.finish("finish", claims)
        self.count("claim next", "claim_next(array['default'], 'w', %s, '30 s', 50)", uuid.uuid4())
        self.connection.execute(
            "update flowforge.task_run set lease_expires_at = now() where lease_expires_at is not null"
        )
        self.count("reap", "reap_expired_leases()")
        self.connection.execute(
            "select flowforge.claim_next(array['default'], 'w', %s, '30 s', 50)", (uuid.uuid4(),)
        )
        self.finish(
            "finish what was reaped",
            self.rows(
                "select task_run_id, fencing_token from flowforge.task_run where lease_expires_at is not null"
            ),
        )
        self.count("settle", "settle_finished()")
        self.count("sweep", "sweep_outbox()")
        ((left,),) = self.rows("select count(*) from flowforge.outbox")
        assert left == 0


def measured(connection: Connection, *inserts: str, count: int, sources: dict[str, str]) -> Pages:
    with connection.transaction():
        # The rows are sound; checking a million of them by triggers would take minutes.
        connection.execute("set local session_replication_role = replica")
        for insert in inserts:
            connection.execute(insert, (count,) if "%s" in insert else None)
    connection.execute("select flowforge.trigger('idle')")
    connection.execute("vacuum (analyze) flowforge.run")
    connection.execute("vacuum (analyze) flowforge.task_run")
    meter = Meter(connection)
    for _ in range(3):
        meter.round(sources)
    return meter.pages


@pytest.fixture(scope="module")
def pages(pg_server: PostgresServer, template: NoopExecutor) -> Iterator[dict[str, Pages]]:
    """Pages by call as a database grows: 10,000 finished runs, 1,000,000, and 500,000 delayed ones."""
    database = Database(pg_server, template.template_dbname)
    with database.connect() as connection:
        connection.execute("alter table flowforge.run disable trigger user")
        connection.execute("alter table flowforge.task_run disable trigger user")
        connection.execute("select flowforge.define_workflow(%s)", (Jsonb(WORKFLOW),))
        # A page of runs has one that has begun nothing yet; much memory tempts into hashing all there is.
        connection.execute("set work_mem = '64MB'")
        idle = {"name": "idle", "tasks": [{"name": "a", "queue": "idle"}]}
        connection.execute("select flowforge.define_workflow(%s)", (Jsonb(idle),))
        connection.execute("select flowforge.pause_queue('idle')")
        # Views of workers look at what each of them runs.
        connection.execute("select flowforge.announce_worker('w', '{default}', 50)")
        always = IDLE | VIEWS
        finished = FINISHED, FINISHED_TASKS
        result = {
            "few": measured(connection, *finished, count=10_000, sources=always),
            "many": measured(connection, *finished, count=990_000, sources=always | ACTIVE),
            "delayed": measured(connection, DELAYED, DELAYED_TASKS, count=500_000, sources=always),
        }
    yield result
    database.drop()


def expensive(pages: Pages, kind: str, limit: int) -> Pages:
    return {name: touched for name, touched in pages.items() if name.startswith(kind) and touched > limit}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["many", "delayed"])
def test_work_costs_the_same_whatever_lies_behind_it(pages: dict[str, Pages], when: str) -> None:
    assert {
        name: (few, pages[when][name])
        for name, few in pages["few"].items()
        if ":" not in name and pages[when][name] > few * HIGHER_TREES + CHANCE
    } == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["few", "many", "delayed"])
def test_a_call_that_finds_nothing_touches_a_handful_of_pages(pages: dict[str, Pages], when: str) -> None:
    assert expensive(pages[when], "idle:", A_HANDFUL) == {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["many", "delayed"])
def test_a_page_of_a_view_does_not_read_history(pages: dict[str, Pages], when: str) -> None:
    assert expensive(pages[when], "view:", ROWS * A_HANDFUL // 2) == {}


@pytest.mark.timeout(600)
def test_what_looks_at_all_active_runs_does_not_read_history(pages: dict[str, Pages]) -> None:
    assert expensive(pages["many"], "active:", ROWS * A_HANDFUL // 2) == {}
