"""Hot statements keep the shape of their plan whatever the statistics say.

A tour calls every function that daemons, workers and clients call often, through its branches: on tables
whose statistics are those of empty ones, stale or full, and in a session whose plans were cached while the
tables were empty. Every statement inside, the checks of foreign keys included, must reach the tables by the
same indexes through the same columns each time.
"""

import uuid
from typing import Any

import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.services.database import Database
from tests.services.postgres import Connection
from tests.sql.explain import Plan, access_paths, recorded

# What grows with the work or with its history.
TABLES = ("run", "task_run", "outbox", "attempt", "progress", "run_retry", "task", "task_dependency")

RETRIED = {"retry": {"max_attempts": 2, "delay": 60}, "time_limit": 3600, "start_within": 3600}
WORKFLOWS = (
    {
        "name": "diamond",
        "tasks": [
            {"name": "a", **RETRIED},
            {"name": "b", "after": ["a"], **RETRIED},
            {"name": "c", "after": ["a"], **RETRIED},
            {"name": "d", "after": ["b", "c"], **RETRIED},
            {"name": "e", "after": ["d"], "when": "any_failed"},
        ],
    },
    {"name": "map", "tasks": [{"name": "a"}, {"name": "m", "map": "a"}, {"name": "z", "after": ["m"]}]},
)

# By function: the indexes that its statements go by, and the columns that each index is asked for. With () a
# partial index, which holds only what is looked for, is walked from its start, or the outbox, whose rows live
# shortly.
PATHS = {
    "_claim_pairs_unlocked": (
        "task_run_pkey(task_run_id) update:run_pkey(run_id) update:task_pkey(task_id) "
        "update:task_run_pkey(task_run_id)"
    ),
    "advance_frontiers": (
        "outbox_pkey(outbox_id) outbox_unpublished(next_attempt_at) task_run_delayed(available_at) "
        "task_run_in_line(available_at) task_run_lease(lease_expires_at) task_run_reoffered(available_at) "
        "task_run_to_settle(finished_at) task_run_unclaimed(redispatch_at)"
    ),
    "assert_lease": "task_run_pkey(task_run_id) update:task_run_pkey(task_run_id)",
    "cancel_leftovers": (
        "run_cancelling() run_pkey(run_id) task_dependency_downstream(upstream_task_id) "
        "task_pkey(task_id) task_run_of_run(run_id) task_run_of_run(run_id,task_id,map_index) "
        "task_run_pkey(task_run_id) update:run_pkey(run_id) update:task_run_of_run(run_id) "
        "update:task_run_of_run(run_id,map_index) "
        "update:task_run_pkey(task_run_id)"
    ),
    "cancel_run": (
        "run_pkey(run_id) task_dependency_downstream(upstream_task_id) task_pkey(task_id) "
        "task_run_of_run(run_id) task_run_of_run(run_id,task_id,map_index) task_run_pkey(task_run_id) "
        "update:run_pkey(run_id) update:task_run_of_run(run_id,map_index) "
        "update:task_run_pkey(task_run_id)"
    ),
    "claim_next": (
        "delete:outbox_of_task_run(task_run_id) delete:outbox_pkey(outbox_id) run_pkey(run_id) "
        "task_dependency_pkey(task_id) task_pkey(task_id) task_run_claim(claim_id) "
        "task_run_in_window(stage,redispatch_at) task_run_of_run(run_id,task_id,map_index) "
        "task_run_pkey(task_run_id) update:run_pkey(run_id) update:task_pkey(task_id) "
        "update:task_run_pkey(task_run_id)"
    ),
    "claim_task_runs": (
        "attempt_pkey(task_run_id) run_pkey(run_id) task_dependency_pkey(task_id) task_pkey(task_id) "
        "task_run_of_run(run_id,task_id,map_index) task_run_pkey(task_run_id) update:run_pkey(run_id) "
        "update:task_pkey(task_id) update:task_run_pkey(task_run_id)"
    ),
    "dispatch_ready": (
        "insert:run_pkey(run_id) insert:task_pkey(task_id) insert:task_run_pkey(task_run_id) "
        "run_pkey(run_id) task_pkey(task_id) task_run_delayed(available_at,available_at) "
        "task_run_in_line(queue_id,available_at) task_run_in_window(stage,redispatch_at) "
        "task_run_reoffered(available_at,available_at) "
        "task_run_reoffered_of_queue(stage) update:run_pkey(run_id) "
        "update:task_pkey(task_id) update:task_run_pkey(task_run_id)"
    ),
    "expand_map": (
        "run_pkey(run_id) task_pkey(task_id) task_run_expand() task_run_of_run(run_id,task_id,map_index) "
        "task_run_pkey(task_run_id) update:run_pkey(run_id) update:task_run_pkey(task_run_id)"
    ),
    "fail_undeliverable": (
        "outbox_of_task_run(task_run_id) outbox_parked() task_run_unclaimed(redispatch_at) "
        "task_run_pkey(task_run_id) update:outbox_of_task_run(task_run_id) update:task_pkey(task_id) "
        "update:task_run_pkey(task_run_id)"
    ),
    "fetch_outbox": (
        "outbox_unpublished(next_attempt_at,next_attempt_at) run_pkey(run_id) task_run_pkey(task_run_id)"
    ),
    "finish_task_runs": (
        "attempt_pkey(task_run_id,fencing_token) insert:task_run_pkey(task_run_id) run_pkey(run_id) "
        "task_pkey(task_id) task_run_pkey(task_run_id) update:task_run_pkey(task_run_id)"
    ),
    "mark_published": "update:outbox_pkey(outbox_id)",
    "mark_refused": "update:outbox_pkey(outbox_id)",
    "mark_unpublishable": "update:outbox_pkey(outbox_id)",
    "next_due": "task_run_delayed(available_at) task_run_reoffered(available_at)",
    "prune": (
        "delete:attempt_pkey(task_run_id) delete:progress_pkey(task_run_id) delete:run_pkey(run_id) "
        "delete:run_retry_pkey(run_id) delete:task_run_pkey(task_run_id) "
        "run_finished(finished_at,finished_at) run_pkey(run_id) task_run_of_run(run_id)"
    ),
    "reap_expired_leases": (
        "insert:run_pkey(run_id) insert:task_pkey(task_id) insert:task_run_pkey(task_run_id) "
        "outbox_of_task_run(task_run_id) run_pkey(run_id) task_pkey(task_id) "
        "task_run_lease(lease_expires_at,lease_expires_at) task_run_pkey(task_run_id) "
        "update:task_pkey(task_id) "
        "update:task_run_pkey(task_run_id)"
    ),
    "redispatch": (
        "insert:run_pkey(run_id) insert:task_pkey(task_id) insert:task_run_pkey(task_run_id) "
        "outbox_of_task_run(task_run_id) task_run_in_window(stage) task_run_pkey(task_run_id) "
        "update:task_run_pkey(task_run_id)"
    ),
    "redispatch_lost": (
        "insert:run_pkey(run_id) insert:task_pkey(task_id) insert:task_run_pkey(task_run_id) "
        "outbox_of_task_run(task_run_id) task_run_in_window(stage,redispatch_at) "
        "task_run_unclaimed(redispatch_at) "
        "task_run_unclaimed(redispatch_at,redispatch_at) "
        "task_run_lease(lease_expires_at) task_run_pkey(task_run_id) update:task_run_pkey(task_run_id)"
    ),
    "release_task_run": (
        "insert:run_pkey(run_id) insert:task_pkey(task_id) insert:task_run_pkey(task_run_id) "
        "outbox_of_task_run(task_run_id) run_pkey(run_id) task_pkey(task_id) task_run_pkey(task_run_id) "
        "update:task_pkey(task_id) update:task_run_pkey(task_run_id)"
    ),
    "renew_leases": (
        "run_pkey(run_id) task_run_pkey(task_run_id) update:task_pkey(task_id) "
        "update:task_run_pkey(task_run_id)"
    ),
    "report_progress": "task_run_pkey(task_run_id)",
    "retry_run": (
        "insert:task_run_pkey(task_run_id) run_pkey(run_id) run_retry_pkey(run_id,request_id) "
        "task_dependency_downstream(upstream_task_id) task_dependency_pkey(task_id) task_pkey(task_id) "
        "task_run_of_run(run_id) task_run_of_run(run_id,map_index) task_run_of_run(run_id,task_id) "
        "task_run_of_run(run_id,task_id,map_index) task_run_pkey(task_run_id) "
        "task_workflow_version_id_name_key(workflow_version_id,name) update:run_pkey(run_id) "
        "update:task_pkey(task_id) update:task_run_pkey(task_run_id)"
    ),
    "run_result": (
        "run_pkey(run_id) task_dependency_downstream(upstream_task_id) task_pkey(task_id) "
        "task_run_of_run(run_id,map_index) task_run_pkey(task_run_id)"
    ),
    "settle_finished": (
        "run_pkey(run_id) task_dependency_downstream(upstream_task_id) task_dependency_pkey(task_id) "
        "task_pkey(task_id) task_run_of_run(run_id,task_id,map_index) "
        "task_run_of_run(run_id,task_id,map_index,generation) task_run_pkey(task_run_id) "
        "task_run_to_settle(finished_at) task_run_to_settle(run_id) task_run_to_settle(run_id,finished_at) "
        "task_run_to_settle(run_id,task_run_id) "
        "update:run_pkey(run_id) "
        "update:task_pkey(task_id) update:task_run_of_run(run_id,map_index) "
        "update:task_run_of_run(run_id,task_id,map_index,generation) update:task_run_pkey(task_run_id)"
    ),
    "sweep_outbox": (
        "delete:outbox_of_task_run(task_run_id) delete:outbox_pkey(outbox_id) "
        "delete:task_run_pkey(task_run_id) outbox_pkey(outbox_id) task_run_pkey(task_run_id)"
    ),
    "task_output": (
        "run_pkey(run_id) task_run_of_run(run_id,task_id,map_index) "
        "task_workflow_version_id_name_key(workflow_version_id,name)"
    ),
    "traceparents": "run_pkey(run_id) task_run_pkey(task_run_id)",
    "trigger": (
        "insert:task_workflow_version_id_task_id_key(workflow_version_id) run_pkey(run_id) task_pkey(task_id)"
    ),
    "trigger_many": (
        "insert:task_workflow_version_id_task_id_key(workflow_version_id) "
        "run_idempotency_key(idempotency_key) run_pkey(run_id) task_pkey(task_id)"
    ),
}

Claims = list[tuple[int, int]]


class Tour:
    """Calls the functions on one connection and keeps, by function, the plans of the statements inside."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.plans: dict[str, list[Plan]] = {}

    def call(self, call: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Call a function, written with %s for its arguments, and record it under its name."""
        with recorded(self.connection) as plans:
            rows = self.connection.execute(f"select * from flowforge.{call}", arguments).fetchall()
        self.plans.setdefault(call.partition("(")[0], []).extend(plans)
        return rows

    def exhaust(self, call: str) -> None:
        while self.call(call) != [(0,)]:
            pass

    def trigger(self, workflow: str, count: int) -> list[int]:
        """Runs that go before all others."""
        return [self.call("trigger(%s, priority => 100)", workflow)[0][0] for _ in range(count)]

    def of(self, run_ids: list[int], task: str) -> list[tuple[int, uuid.UUID]]:
        """Task run and dispatch id of a task in each of the runs."""
        return self.connection.execute(
            "select tr.task_run_id, tr.dispatch_id"
            " from flowforge.task_run tr join flowforge.task t using (task_id)"
            " where tr.run_id = any (%s) and t.name = %s and tr.map_index is null order by 1",
            (run_ids, task),
        ).fetchall()

    def claim(self, deliveries: list[tuple[int, uuid.UUID]], claim_id: uuid.UUID | None = None) -> Claims:
        rows = self.call(
            "claim_task_runs(%s, %s, 'w', %s, '30 s')",
            [task_run_id for task_run_id, _ in deliveries],
            [dispatch_id for _, dispatch_id in deliveries],
            claim_id or uuid.uuid4(),
        )
        return [(row[2], row[4]) for row in rows if row[1] == "claimed"]

    def claim_next(self, count: int) -> Claims:
        rows = self.call("claim_next(array['default'], 'w', %s, '30 s', %s)", uuid.uuid4(), count)
        assert len(rows) == count
        return [(row[2], row[4]) for row in rows]

    def finish(
        self, claims: Claims, outcome: str = "succeeded", output: Any = None, *, retryable: bool = True
    ) -> None:
        self.call(
            "finish_task_runs(%s, %s, %s, %s, %s, %s)",
            [task_run_id for task_run_id, _ in claims],
            [token for _, token in claims],
            [outcome] * len(claims),
            [Jsonb(output)] * len(claims),
            ["an error"] * len(claims),
            [retryable] * len(claims),
        )

    def settle(self) -> None:
        self.exhaust("settle_finished()")
        self.exhaust("expand_map()")

    def past(self, column: str, condition: str, table: str = "task_run") -> None:
        """Put a time into the past, as if it had gone by; and the frontiers, which no clock lets pass it."""
        self.connection.execute("delete from flowforge.frontier")
        self.connection.execute("insert into flowforge.frontier default values")
        self.connection.execute(
            f"update flowforge.{table} set {column} = now() - interval '1 hour' where {condition}"
        )

    def take(self) -> None:
        """Every function, through its branches."""
        # Trigger. Runs without priority come last, so that the refused and the parked orders are not claimed.
        keys = [str(uuid.uuid4()) for _ in range(40)]
        for _ in ("once", "again"):
            self.call("trigger_many('diamond', %s, %s)", [Jsonb({})] * 40, keys)
        diamonds, maps = self.trigger("diamond", 6), self.trigger("map", 4)
        (delayed,) = self.call("trigger('map', delay => '1 hour')")[0]
        self.call("next_due()")
        self.past("available_at", f"run_id = {delayed} and stage = 'delayed'")

        # Dispatch, deliver.
        self.exhaust("dispatch_ready()")
        with self.connection.transaction():
            orders = [row[0] for row in self.call("fetch_outbox(50)")]
            self.call("mark_refused(%s, %s)", orders[-2:], ["refused", "refused"])
            self.call("mark_unpublishable(%s, 'too large')", orders[-3])
            self.call("mark_published(%s)", orders[:-3])

        # Claim: won, repeated, lost to another claim, and to none.
        deliveries = self.of(diamonds, "a") + self.of(maps, "a")
        claim_id = uuid.uuid4()
        claims = self.claim(deliveries, claim_id)
        assert self.claim(deliveries, claim_id) == claims
        assert self.claim([*deliveries, (deliveries[0][0], uuid.uuid4())]) == []
        with self.connection.transaction():
            # The second round, for what becomes ready in the midst of a claim; with the claim's settings.
            for setting in ("plan_cache_mode = force_generic_plan", "enable_seqscan = off", "jit = off"):
                self.connection.execute(f"set local {setting}")
            self.call(
                "_claim_pairs_unlocked(%s, %s, 'w', %s, '30 s')",
                [task_run_id for task_run_id, _ in deliveries],
                [dispatch_id for _, dispatch_id in deliveries],
                uuid.uuid4(),
            )
        self.call("renew_leases(%s, %s, '30 s')", [c[0] for c in claims], [c[1] for c in claims])
        self.call("traceparents(%s, %s)", [c[0] for c in claims], [c[1] for c in claims])
        self.call("assert_lease(%s, %s)", *claims[0])
        for fraction in (0.1, 0.2):
            self.call("report_progress(%s, %s, %s)", *claims[0], fraction)

        # Finish: for good, for another attempt, with success, and once more.
        self.finish(claims[0:1], "failed", retryable=False)
        self.finish(claims[1:2], "failed")
        self.finish(claims[2:4])
        self.finish(claims[6:9], output=[1, 2, 3])
        self.finish(claims[9:10], output="not an array")
        self.finish(claims[:4] + claims[6:])

        # Give back; reap: after a gap, an expired lease, a passed time limit.
        held = claims[4:6]
        for reason in ("unstarted", "shutdown", "unknown_handler", "crashed"):
            assert self.call("release_task_run(%s, %s, %s)", *held[0], reason) == [("released",)], reason
            held[:1] = self.claim(deliveries[4:5])
        self.past("reaper_ticked_at", "true", "scheduler")
        self.call("reap_expired_leases()")
        self.connection.execute(
            'update flowforge.scheduler set gaps = \'{["2020-01-01 00:00", "2020-01-01 01:00")}\''
        )
        self.past("lease_expires_at", "state = 'running'")
        self.past("deadline", f"task_run_id = {held[1][0]}")
        assert self.call("reap_expired_leases()") == [(2,)]

        # Settle, expand, promote, dispatch; three times, so that the maps come to their end.
        self.settle()
        self.past("available_at", f"run_id = {diamonds[1]} and stage = 'delayed'")
        for _ in range(3):
            self.exhaust("dispatch_ready()")
            self.finish(self.claim_next(15))
            self.settle()
        self.call("run_result(%s)", maps[0])
        self.call("task_output(%s, 'm')", maps[0])

        # The broker lost its messages; an order that is parked; a task run not started in time; the sweep.
        self.past("redispatch_at", "state = 'ready'")
        self.connection.execute("update flowforge.queue set sampled_at = null")
        self.past("published_at", "published_at is not null", "outbox")
        self.exhaust("redispatch_lost()")
        self.call("redispatch('default')")
        self.connection.execute(
            "delete from flowforge.outbox where parked_at is null and task_run_id in"
            " (select task_run_id from flowforge.outbox where parked_at is not null)"
        )
        self.connection.execute(
            "update flowforge.task_run set start_deadline = now() where task_run_id ="
            " (select max(task_run_id) from flowforge.task_run where state = 'ready')"
        )
        assert self.call("fail_undeliverable()") == [(2,)]
        self.exhaust("sweep_outbox()")

        # Cancel, and what can still come in a run that is being cancelled.
        running = self.trigger("diamond", 4)
        self.exhaust("dispatch_ready()")
        claims = self.claim(self.of(running, "a"))
        for run_id in running:
            self.call("cancel_run(%s, 'a reason')", run_id)
        self.finish(claims[0:1], "cancelled")
        self.finish(claims[1:2], "failed")
        self.finish(claims[2:3])
        self.call("release_task_run(%s, %s, 'unstarted')", *claims[3])
        (lost,) = self.trigger("diamond", 1)
        self.past("cancel_requested_at", f"run_id = {lost}", "run")
        self.past("cancel_sweep_at", "cancel_requested_at is not null", "run")
        assert self.call("cancel_leftovers()") == [(5,)]
        self.settle()

        # Retry, prune.
        assert self.call("retry_run(%s)", diamonds[0]) == [(5,)]
        assert self.call("retry_run(%s, 'a', 'key')", maps[0]) == [(3,)]
        assert self.call("retry_run(%s, 'a', 'key')", maps[0]) == [(3,)]
        self.call("prune('0', 3)")
        self.call("advance_frontiers()")

    def leave_nothing(self) -> None:
        """Delete every run, so that the tables are empty again but for their statistics."""
        for (run_id,) in self.connection.execute("select run_id from flowforge.run").fetchall():
            self.connection.execute("select flowforge.cancel_run(%s)", (run_id,))
        self.past("lease_expires_at", "state = 'running'")
        for call in ("reap_expired_leases", "settle_finished", "sweep_outbox", "prune"):
            argument = "'0'" if call == "prune" else ""
            while self.connection.execute(f"select flowforge.{call}({argument})").fetchone() != (0,):
                pass
        assert self.connection.execute("select count(*) from flowforge.task_run").fetchone() == (0,)


def vacuum(connection: Connection) -> None:
    for table in TABLES:
        connection.execute(sql.SQL("vacuum (analyze) flowforge.{}").format(sql.Identifier(table)))


def feed(connection: Connection) -> None:
    """10,000 task runs, without new statistics."""
    for workflow, runs in (("diamond", 1250), ("map", 1250)):
        connection.execute("select flowforge.trigger_many(%s, %s)", (workflow, [Jsonb({})] * runs))


@pytest.mark.parametrize("statistics", ["empty", "stale", "full", "cached"])
def test_every_statement_goes_by_its_index(db: Database, statistics: str) -> None:
    with db.connect() as setup:
        for table in TABLES:
            # Neither autovacuum's statistics nor the statements of the tests' own triggers.
            setup.execute(
                sql.SQL(
                    "alter table flowforge.{} set (autovacuum_enabled = off), disable trigger user"
                ).format(sql.Identifier(table))
            )
        for workflow in WORKFLOWS:
            setup.execute("select flowforge.define_workflow(%s)", (Jsonb(workflow),))
        setup.execute("select flowforge.configure_queue('default', 100000)")
        vacuum(setup)
        if statistics in ("stale", "full"):
            feed(setup)
        if statistics == "full":
            vacuum(setup)
    with db.connect() as connection:
        tour = Tour(connection)
        if statistics == "cached":
            tour.take()
            tour.leave_nothing()
            vacuum(connection)
            tour.take()
            tour.leave_nothing()
            feed(connection)
            tour.plans = {}
        tour.take()
    found = {function: access_paths(plans, TABLES) for function, plans in tour.plans.items()}
    expected = {function: set(paths.split()) for function, paths in PATHS.items()}
    # What is too much and what is missing, function by function: the whole would be too long to read.
    assert {
        function: (found.get(function, set()) - paths, paths - found.get(function, set()))
        for function, paths in expected.items()
        if found.get(function) != paths
    } == {}
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("when", ["statistics of the backlog", "backlog without statistics"])
def test_settling_a_backlog_reads_what_it_settles(db: Database, when: str) -> None:
    """Not the history, nor the rest of the backlog: whatever share of the table is unsettled."""
    with db.connect() as connection:
        connection.execute("alter table flowforge.task_run disable trigger user")
        connection.execute("alter table flowforge.run disable trigger user")
        connection.execute("select flowforge.define_workflow(%s)", (Jsonb(WORKFLOWS[0]),))
        name = WORKFLOWS[0]["name"]
        for _ in range(2):
            connection.execute("select flowforge.trigger_many(%s, %s)", (name, [Jsonb({})] * 2000))
            # The first half is history, the second one waits to be settled.
            connection.execute(
                """
                update flowforge.task_run
                set state = 'succeeded', finished_at = now(), unmet = 0,
                    stage = case stage when 'unsettled' then 'settled' else 'unsettled' end
                        ::flowforge.task_run_stage
                """
            )
        connection.execute(
            "update flowforge.run set state = 'succeeded', unsettled = 0, finished_at = now()"
            " where run_id <= 2000"
        )
        if when == "statistics of the backlog":
            vacuum(connection)
        with recorded(connection) as plans:
            assert connection.execute("select flowforge.settle_finished(1000)").fetchone() == (1000,)
        locking = [plan for plan in plans if "LockRows" in str(plan) and "Recursive Union" not in str(plan)]
        (choice,) = [plan for plan in locking if "task_run_to_settle" in str(plan)]
        assert access_paths([choice], ["task_run"]) == {"task_run_to_settle(run_id)"}
        assert "Sort" not in str(choice)
