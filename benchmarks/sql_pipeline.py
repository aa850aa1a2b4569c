"""What a task run costs in SQL: the functions of the pipeline, without broker, daemons and handlers.

    ./dev run python -m benchmarks.sql_pipeline [--pg 18|15|DSN] [--task-runs N] [--rounds N] [--json]

Three tables: microseconds a task run of each function on one connection, for several shapes of graph, in the
batches that the daemons use; the same for single tasks while an old snapshot holds every dead row, first and
last; and task runs claimed and finished one by one, a second, on 2 and 8 connections, beside two bare UPDATEs
by primary key, the machine's own limit, so that the ratio can be compared between machines.

It runs on a private server with PostgreSQL's default settings, durability included, unless a DSN names a
database; that must be migrated and hold no runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.table import Table

from flowforge.migrate import migrate
from tests.services import postgres

Connection = psycopg.Connection[tuple[Any, ...]]
Row = tuple[Any, ...]
Costs = dict[str, float]

TRIGGER, DISPATCH, DELIVER, CLAIM, SETTLE, SWEEP, PRUNE = 1000, 500, 500, 50, 1000, 2000, 1000
FUNCTIONS = (
    *("trigger", "settle", "expand", "dispatch", "fetch", "mark", "claim", "claim_next", "finish", "sweep"),
    "prune",
)


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def exhaust(connection: Connection, call: str) -> None:
    while connection.execute(f"select flowforge.{call}").fetchone() != (0,):
        pass


def task(name: str, *after: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "after": list(after), "queue": "bench", **more}


WIDTH = 1000
WIDE = [f"b{n}" for n in range(WIDTH)]
# In each, the task named a is the one that a map may be over.
SHAPES: dict[str, list[dict[str, Any]]] = {
    "single": [task("a")],
    "chain of 10": [task(f"t{n}", *([f"t{n - 1}"] if n else [])) for n in range(10)],
    "diamond of 5": [task("a"), task("b", "a"), task("c", "a"), task("d", "a"), task("e", "b", "c", "d")],
    "fan-out": [task("a"), *(task(name, "a") for name in WIDE), task("c", *WIDE)],
    "map": [task("a"), task("m", map="a"), task("c", "m")],
}


class Pipeline:
    """Drives the functions on one connection; adds up the seconds by function, and the task runs finished."""

    def __init__(self, dsn: str) -> None:
        self.connection: Connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        self.seconds: Costs = {}
        self.finished = 0

    def define(self, shape: str) -> None:
        definition = {"name": shape, "tasks": SHAPES[shape]}
        self.connection.execute("select flowforge.define_workflow(%s)", (Jsonb(definition),))
        self.connection.execute("select flowforge.configure_queue('bench', 1000000)")

    def call(self, what: str, call: str, *arguments: Any) -> list[Row]:
        query = f"select * from flowforge.{call}"  # noqa: S608 - the calls are written in this file
        started = time.perf_counter()
        rows = self.connection.execute(query, arguments).fetchall()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - started
        return rows

    def exhaust(self, what: str, call: str, *arguments: Any) -> None:
        while self.call(what, call, *arguments) != [(0,)]:
            pass

    def deliver(self) -> list[Row]:
        """Fetch and mark every order; return the rows."""
        delivered: list[Row] = []
        while True:
            with self.connection.transaction():
                rows = self.call("fetch", "fetch_outbox(%s)", DELIVER)
                if not rows:
                    return delivered
                self.call("mark", "mark_published(%s)", [row[0] for row in rows])
            delivered += rows

    def execute(self, broker: bool) -> bool:
        """Claim and finish all that is dispatched; whether there was anything."""
        finished = self.finished
        if broker:
            for rows in chunks(self.deliver(), CLAIM):
                ids, dispatches = [row[1] for row in rows], [row[2] for row in rows]
                call = "claim_task_runs(%s, %s, 'bench', %s, '30 s')"
                self.finish(self.call("claim", call, ids, dispatches, uuid.uuid4()))
        else:
            call = "claim_next(array['bench'], 'bench', %s, '30 s', %s)"
            while claimed := self.call("claim_next", call, uuid.uuid4(), CLAIM):
                self.finish(claimed)
        return self.finished > finished

    def finish(self, claimed: list[Row]) -> None:
        count = len(claimed)
        self.call(
            "finish",
            "finish_task_runs(%s, %s, %s, %s, %s, %s)",
            [row[2] for row in claimed],
            [row[4] for row in claimed],
            ["succeeded"] * count,
            [Jsonb([0] * WIDTH if (row[7], row[8]) == ("map", "a") else None) for row in claimed],
            [None] * count,
            [True] * count,
        )
        self.finished += count

    def run(self, shape: str, runs: int, broker: bool) -> Costs:
        """Take so many runs from trigger to end; return the microseconds a task run, by function."""
        self.seconds, self.finished = {}, 0
        for inputs in chunks([Jsonb({})] * runs, TRIGGER):
            self.call("trigger", "trigger_many(%s, %s)", shape, inputs)
        working = True
        while working:
            self.exhaust("settle", "settle_finished(%s)", SETTLE)
            self.exhaust("expand", "expand_map()")
            self.exhaust("dispatch", "dispatch_ready(%s)", DISPATCH)
            working = self.execute(broker)
            self.exhaust("sweep", "sweep_outbox(%s)", SWEEP)
        return {what: seconds / self.finished * 1e6 for what, seconds in self.seconds.items()}

    def prune(self) -> float:
        self.seconds = {}
        self.exhaust("prune", "prune('0', %s)", PRUNE)
        return self.seconds["prune"] / self.finished * 1e6


def by_function(dsn: str, task_runs: int, rounds: int) -> dict[str, Costs]:
    """Microseconds a task run by shape and function, the medians of the rounds."""
    pipeline = Pipeline(dsn)
    result: dict[str, Costs] = {}
    for shape, tasks in SHAPES.items():
        pipeline.define(shape)
        found: dict[str, list[float]] = {}
        width = WIDTH if shape == "map" else len(tasks)
        for number in range(2 * rounds):
            costs = pipeline.run(shape, max(1, task_runs // width), broker=number % 2 == 0)
            costs["prune"] = pipeline.prune()
            for what, cost in costs.items():
                found.setdefault(what, []).append(cost)
        result[shape] = {what: statistics.median(costs) for what, costs in found.items()}
    pipeline.connection.close()
    return result


def under_a_held_snapshot(dsn: str, task_runs: int) -> dict[str, Costs]:
    """Microseconds a task run by function, for the first and the last tenth while a snapshot is held."""
    pipeline = Pipeline(dsn)
    pipeline.define("single")
    pipeline.run("single", 1000, broker=True)
    with psycopg.connect(dsn) as holder:
        holder.execute("set transaction isolation level repeatable read")
        holder.execute("select count(*) from flowforge.workflow")
        tenths = [
            [pipeline.run("single", 1000, broker=True) for _ in range(max(1, task_runs // 10_000))]
            for _ in range(10)
        ]
    pipeline.prune()
    pipeline.connection.close()
    return {
        when: {what: statistics.fmean(costs[what] for costs in tenth) for what in tenth[0]}
        for when, tenth in (("first tenth", tenths[0]), ("last tenth", tenths[-1]))
    }


# --- one by one, on several connections ---

# The least that a claim and a fenced finish can be: two UPDATEs by primary key.
LIMIT_TABLE = """
    drop table if exists bench_limit;
    create table bench_limit (id bigint primary key, state text, token bigint) with (fillfactor = 80);
    insert into bench_limit select n, 'ready', 0 from generate_series(1, {count}) n;
"""
LIMIT_WORK = "select id, null from bench_limit where id %% %s = %s"
LIMIT_CLAIM = """
    update bench_limit set state = 'running', token = token + 1
    where id = %(id)s and state = 'ready' returning id, token
"""
LIMIT_FINISH = """
    update bench_limit set state = 'succeeded' where id = %(id)s and state = 'running' and token = %(token)s
"""
WORK = (
    "select task_run_id, dispatch_id from flowforge.task_run where state = 'ready' and task_run_id %% %s = %s"
)
CLAIM_ONE = """
    select task_run_id, fencing_token
    from flowforge.claim_task_run(%(id)s, %(dispatch_id)s, 'bench', %(claim_id)s, '30 s')
"""
FINISH_ONE = "select flowforge.finish_task_run(%(id)s, %(token)s, 'succeeded', '{}')"


def claim_and_finish(dsn: str, limit: bool, share: int, of: int, start: Barrier) -> None:
    """The work of one connection, in a process of its own."""
    claim, finish = (LIMIT_CLAIM, LIMIT_FINISH) if limit else (CLAIM_ONE, FINISH_ONE)
    with psycopg.connect(dsn, autocommit=True, prepare_threshold=0) as connection:
        work = connection.execute(LIMIT_WORK if limit else WORK, (of, share)).fetchall()
        start.wait()
        for number, dispatch_id in work:
            arguments = {"id": number, "dispatch_id": dispatch_id, "claim_id": uuid.uuid4()}
            for claimed, token in connection.execute(claim, arguments).fetchall():
                connection.execute(finish, {"id": claimed, "token": token})


def rate(dsn: str, connections: int, count: int, limit: bool) -> float:
    """Task runs a second."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        if limit:
            connection.execute(LIMIT_TABLE.format(count=count))
        else:
            connection.execute("select flowforge.trigger_many('single', %s)", ([Jsonb({})] * count,))
            exhaust(connection, "dispatch_ready(1000)")
        context = multiprocessing.get_context("spawn")
        start = context.Barrier(connections + 1)
        processes = [
            context.Process(target=claim_and_finish, args=(dsn, limit, share, connections, start))
            for share in range(connections)
        ]
        for process in processes:
            process.start()
        start.wait()
        started = time.perf_counter()
        for process in processes:
            process.join()
        seconds = time.perf_counter() - started
        if limit:
            connection.execute("drop table bench_limit")
        else:
            for call in ("settle_finished(1000)", "sweep_outbox(2000)", "prune('0')"):
                exhaust(connection, call)
            left = connection.execute("select count(*) from flowforge.run").fetchone()
            if left != (0,):
                sys.exit(f"benchmark: not every task run was claimed and finished; runs left: {left}")
    return count / seconds


def one_by_one(dsn: str, connections: int, count: int, rounds: int) -> Costs:
    pairs = [
        (rate(dsn, connections, count, False), rate(dsn, connections, count, True)) for _ in range(rounds)
    ]
    return {
        "FlowForge": statistics.median(flowforge for flowforge, _ in pairs),
        "two UPDATEs": statistics.median(limit for _, limit in pairs),
        "ratio": statistics.median(flowforge / limit for flowforge, limit in pairs),
    }


# --- the report ---


def print_costs(console: Console, title: str, columns: dict[str, Costs]) -> None:
    table = Table(title=title)
    table.add_column("function")
    for column in columns:
        table.add_column(column, justify="right")
    for function in FUNCTIONS:
        if any(function in costs for costs in columns.values()):
            table.add_row(function, *(f"{costs.get(function, 0):.1f}" for costs in columns.values()))
    console.print(table)


def report(result: dict[str, Any]) -> None:
    console = Console()
    version = result["postgresql"]
    print_costs(console, f"PostgreSQL {version}: microseconds a task run", result["by function"])
    print_costs(console, "The same while a snapshot is held", result["held snapshot"])
    table = Table(title="Claimed and finished one by one, a second")
    for heading in ("connections", "FlowForge", "two UPDATEs", "ratio"):
        table.add_column(heading, justify="right")
    for connections, rates in result["one by one"].items():
        table.add_row(
            connections, f"{rates['FlowForge']:.0f}", f"{rates['two UPDATEs']:.0f}", f"{rates['ratio']:.2f}"
        )
    console.print(table)


@contextmanager
def database(where: str) -> Iterator[tuple[str, str]]:
    """Version and connection string of a migrated database."""
    if where not in ("15", "18"):
        with psycopg.connect(where) as connection:
            version = str(connection.info.server_version // 10_000)
        yield version, where
        return
    with postgres.PostgresServer(*postgres.binaries(where), durable=True) as server:
        server.create_database("bench")
        migrate(server.dsn("bench"))
        yield where, server.dsn("bench")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sql_pipeline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pg", default="18", help="18, 15 or a connection string (default: 18)")
    parser.add_argument("--task-runs", type=int, default=10_000, help="of each round (default: 10000)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    with database(options.pg) as (version, dsn):
        result = {
            "postgresql": version,
            "by function": by_function(dsn, options.task_runs, options.rounds),
            "held snapshot": under_a_held_snapshot(dsn, 10 * options.task_runs),
            "one by one": {
                str(count): one_by_one(dsn, count, options.task_runs // 2, options.rounds) for count in (2, 8)
            },
        }
    if options.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    else:
        report(result)


if __name__ == "__main__":
    main()
