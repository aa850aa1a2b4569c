"""No-op tasks a second from the outbox to the settled run, beside hand-made limits of the same machine.

    ./dev run python -m benchmarks.end_to_end [--tasks N] [--rounds N] [--concurrency N] [--json]

One scheduler, one publisher and two worker processes, as installed, over RabbitMQ (quorum queue) and on
PostgreSQL alone; PostgreSQL with its default settings, durability included. In turn with them, in the same
run:

- L1: claim and fenced finish as two UPDATEs and two commits a task, by pgbench on 2 connections.
- H1: a hand-written worker of FlowForge's shape over RabbitMQ, two processes taking one message at a time
  (prefetch 1, claim by id, fenced finish, acknowledge), from a queue that was filled before.

The backlog is triggered while the queue is paused; the clock runs from resume_queue until the last run has
ended. The chain is of 100 tasks, one run at a time. Figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pika
import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks import noop
from flowforge import Client
from flowforge.migrate import migrate
from tests.services import postgres
from tests.services.rabbitmq import RabbitServer

HAND_MADE = """
    drop table if exists hand_made;
    create table hand_made (
        id bigint primary key, state text not null default 'ready', token bigint not null default 0,
        owner text, lease timestamptz, output jsonb);
"""
CLAIM = """
    update hand_made
    set state = 'running', token = token + 1, owner = 'w', lease = clock_timestamp() + interval '30 s'
    where id = {id} and state = 'ready'
"""
FINISH = """
    update hand_made set state = 'succeeded', owner = null, lease = null, output = 'null'
    where id = {id} and state = 'running' and token = 1
"""


def hand_made_rows(dsn: str, rows: int) -> None:
    """A table of that many ready tasks, vacuumed."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        for statement in filter(str.strip, HAND_MADE.split(";")):
            conn.execute(statement)
        conn.execute("insert into hand_made (id) select generate_series(1, %s)", [rows])
        conn.execute("vacuum analyze hand_made")


def limit_l1(programs: Path, library_path: str, dsn: str, seconds: int) -> float:
    """Tasks a second of two commits each, on 2 connections."""
    hand_made_rows(dsn, 200_000)
    script = f"\\set i :i + 1\n\\set id :i * 2 + :client_id - 1\n{CLAIM};\n{FINISH};\n".replace("{id}", ":id")
    script = script.replace("\n    ", " ")
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        environment = dict(os.environ) | {"LD_LIBRARY_PATH": library_path}
        done = subprocess.run(
            [programs / "pgbench", "-n", "-M", "prepared", "-c", "2", "-j", "2", "-T", str(seconds),
             "-D", "i=0", "-f", file.name, dsn],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    [line] = [line for line in done.stdout.splitlines() if line.startswith("tps")]
    return float(line.split()[2])


def _hand_written_worker(dsn: str, url: str, queue: str) -> None:
    conn = psycopg.connect(dsn, autocommit=True)
    channel = pika.BlockingConnection(pika.URLParameters(url)).channel()
    channel.basic_qos(prefetch_count=1)
    claim, finish = CLAIM.replace("{id}", "%s"), FINISH.replace("{id}", "%s")
    for method, _, body in channel.consume(queue, inactivity_timeout=1.0):
        if method is None:
            break
        task = int(body)
        if conn.execute(claim, [task], prepare=True).rowcount:
            conn.execute(finish, [task], prepare=True)
        channel.basic_ack(method.delivery_tag)


def limit_h1(dsn: str, rabbit: RabbitServer, tasks: int) -> float:
    """Tasks a second of two hand-written workers."""
    hand_made_rows(dsn, tasks)
    queue = f"hand_made_{time.monotonic_ns()}"
    rabbit.declare(queue)
    with rabbit.channel() as channel:
        channel.confirm_delivery()  # a queue that was just declared may have no leader yet, and lose them
        for n in range(1, tasks + 1):
            channel.basic_publish("", queue, str(n).encode(), pika.BasicProperties(delivery_mode=2))
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_hand_written_worker, args=(dsn, rabbit.url, queue)) for _ in range(2)]
    for worker in workers:
        worker.start()
    with psycopg.connect(dsn, autocommit=True) as conn:
        count = "select count(*) from hand_made where state = 'succeeded'"
        while not (started := conn.execute(count).fetchone()[0]):  # type: ignore[index]
            time.sleep(0.01)
        began = time.monotonic()
        while (done := conn.execute(count).fetchone()[0]) < tasks:  # type: ignore[index]
            time.sleep(0.05)
        elapsed = time.monotonic() - began
    for worker in workers:
        worker.join()
    rabbit.delete_queue(queue)
    return float((done - started) / elapsed)


@contextmanager
def daemons(dsn: str, amqp_url: str | None, concurrency: int) -> Iterator[None]:
    """The installed daemons as processes; stopped in order at the end."""
    environment = dict(os.environ) | {
        "FLOWFORGE_DATABASE_URL": dsn,
        "FLOWFORGE_AMQP_URL": amqp_url or "",
        "FLOWFORGE_LOG_LEVEL": "warning",
    }
    program = str(Path(sys.executable).with_name("flowforge"))
    commands = [
        ["scheduler"],
        ["worker", "benchmarks.noop", "-c", str(concurrency)],
        ["worker", "benchmarks.noop", "-c", str(concurrency)],
    ]
    if amqp_url:
        commands.append(["publisher"])
    processes = [subprocess.Popen([program, *command], env=environment) for command in commands]
    try:
        with psycopg.connect(dsn, autocommit=True) as conn:
            while conn.execute("select count(*) from flowforge.worker_status where alive").fetchone() != (2,):
                time.sleep(0.05)
        yield
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in processes]
        if any(codes):
            raise RuntimeError(f"daemons ended with {codes}")


def throughput(dsn: str, tasks: int) -> float:
    """No-op tasks a second, from resume_queue to the last run's end."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select flowforge.pause_queue('default')")
        for first in range(0, tasks, 5000):
            conn.execute(
                "select flowforge.trigger_many('bench_single', array_fill('{}'::jsonb, array[%s]))",
                [min(5000, tasks - first)],
            )
        began = time.monotonic()
        conn.execute("select flowforge.resume_queue('default')")
        while conn.execute("select 1 from flowforge.run where finished_at is null limit 1").fetchone():
            time.sleep(0.02)
        elapsed = time.monotonic() - began
        if conn.execute("select count(*) from flowforge.violations()").fetchone() != (0,):
            raise RuntimeError("violations() is not empty")
        conn.execute("select flowforge.prune('0', 100000)")
        conn.execute("vacuum analyze")
    return tasks / elapsed


def hop(client: Client) -> float:
    """Milliseconds a hop of a chain of 100."""
    result = client.wait(client.trigger("bench_chain"), timeout=60)
    if result.state != "succeeded":
        raise RuntimeError(f"the chain ended {result.state}")
    finished = result.finished_at
    assert finished is not None  # noqa: S101 - it has ended
    return (finished - result.created_at).total_seconds() * 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=20_000, help="no-op tasks a round (default 20000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=64, help="slots of each worker (default 64)")
    parser.add_argument("--pg", default="18", help="18, 15 or a directory of binaries")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    figures: dict[str, list[float]] = {}

    def record(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)
        sys.stderr.write(f"{name}: {value:,.1f}\n")

    programs, library_path = postgres.binaries(options.pg)
    with (
        postgres.PostgresServer(programs, library_path, durable=True) as server,
        RabbitServer() as rabbit,
    ):
        dsn = server.dsn("postgres")
        migrate(dsn)
        with Client(dsn) as client:
            client.define(noop.single)
            client.define(noop.chain)
            for _ in range(options.rounds):
                record("L1, tasks/s", limit_l1(programs, library_path, dsn, 5))
                record("H1, tasks/s", limit_h1(dsn, rabbit, 5000))
                for name, url in (("RabbitMQ", rabbit.url), ("PostgreSQL alone", None)):
                    with daemons(dsn, url, options.concurrency):
                        record(f"FlowForge over {name}, tasks/s", throughput(dsn, options.tasks))
                        for _ in range(3):
                            record(f"FlowForge over {name}, ms a hop", hop(client))

    medians: dict[str, Any] = {name: statistics.median(values) for name, values in figures.items()}
    if options.json:
        sys.stdout.write(json.dumps({"medians": medians, "rounds": figures}) + "\n")
        return
    table = Table("figure", "median", "ratio to L1", "ratio to H1")
    for name, value in medians.items():
        rate = name.endswith("tasks/s")
        ratios = [f"{value / medians[limit]:.2f}" if rate else "" for limit in ("L1, tasks/s", "H1, tasks/s")]
        table.add_row(name, f"{value:,.1f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
