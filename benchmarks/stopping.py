"""How daemons end when they are told to, and what limits do: exit codes, seconds, what became of the tasks.

    ./dev run python -m benchmarks.stopping [--pg 18] [--json]

Each daemon as installed, a process of its own, on real servers. SIGTERM: idle, idle and asked twice, during
a task that ends in its grace time and one that does not, in the middle of a call behind a table that another
session has locked, and while the database acknowledges what is sent to it and answers nothing. Limits: a task
that asks for more memory than its worker's limit among 1,000 others, and one that hangs in a library written
in C beyond its time limit.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from flowforge import Client, Context, Workflow
from flowforge.errors import first_line
from flowforge.migrate import migrate
from tests.python.proxy import Proxy
from tests.services import postgres
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer

PROGRAM = str(Path(sys.executable).with_name("flowforge"))
MEMORY = 200  # MiB
LIMIT = 2.0  # seconds
OTHERS = 1_000

short = Workflow("short")
long = Workflow("long")
others = Workflow("others")
limits = Workflow("limits")


@short.task(name="task")
def _short(_ctx: Context) -> None:
    time.sleep(2)


@long.task(name="task")
def _long(_ctx: Context) -> None:
    time.sleep(600)


@others.task(isolation="processes")
def other(_ctx: Context) -> None:
    """Nothing."""


@limits.task(isolation="processes")
def greedy(_ctx: Context) -> int:
    return len(bytearray(MEMORY * 2 * 1024 * 1024))


@limits.task(isolation="processes", time_limit=LIMIT)
def deaf(_ctx: Context) -> bool:
    return re.match("(a+)+$", "a" * 64 + "b") is not None


class Bench:
    """The servers, and a client of its own."""

    def __init__(self, server: postgres.PostgresServer, amqp_url: str) -> None:
        self._server, self._amqp_url = server, amqp_url
        self.dsn = server.dsn("postgres")
        self.figures: list[dict[str, Any]] = []
        self.db = psycopg.connect(self.dsn, autocommit=True)

    @contextmanager
    def daemon(self, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
        """One that has started; killed at the end, if it still runs."""
        environment = {
            **os.environ,
            "FLOWFORGE_DATABASE_URL": self.dsn,
            "FLOWFORGE_AMQP_URL": self._amqp_url,
            "FLOWFORGE_LOG_LEVEL": "error",
            "FLOWFORGE_REAP_INTERVAL": "0.1",
            **environment,
        }
        program = f"flowforge {command[0]}"
        with subprocess.Popen([PROGRAM, *command], env=environment) as process:
            try:
                wait_until(lambda: self.sessions(f"{program}%") > 0, f"{program} to start")
                time.sleep(1)  # for what follows its first connection
                yield process
            finally:
                process.kill()
        wait_until(lambda: self.sessions(f"{program}%") == 0, f"the end of the sessions of {program}")

    def sessions(self, name: str, waits_for: str = "%") -> int:
        query = """
            select count(*) from pg_stat_activity
            where application_name like %s and coalesce(wait_event_type, '') like %s
        """
        return int(self.value(query.encode(), name, waits_for))

    def stuck(self, name: str) -> bool:
        """Whether a call of that daemon waits for a lock."""
        return self.sessions(f"flowforge {name}", "Lock") > 0

    def value(self, query: bytes, *parameters: Any) -> Any:
        row = self.db.execute(query, parameters).fetchone()
        return row and row[0]

    def runs_any(self) -> bool:
        return bool(self.value(b"select count(*) from flowforge.task_run where state = 'running'"))

    def stop(self, what: str, process: subprocess.Popen[bytes], *, times: int = 1) -> None:
        began = time.monotonic()
        for again in range(times):
            if again:
                time.sleep(0.2)  # sooner it is the same request
            process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        self.tell(what, code, time.monotonic() - began)

    def tell(self, what: str, code: int | None, seconds: float, then: str = "") -> None:
        sys.stderr.write(f"{what}: {'' if code is None else f'{code} in '}{seconds:.2f} s\n")
        self.figures.append({"what": what, "exit_code": code, "seconds": round(seconds, 2), "then": then})

    def then(self, text: str) -> None:
        sys.stderr.write(f"    {text}\n")
        self.figures[-1]["then"] = text

    def states(self, run_id: int) -> str:
        """Of a run's task runs, with their attempts and errors."""
        rows = self.db.execute(
            "select task, state, attempt, reaps, error from flowforge.task_run_status"
            " where run_id = %s order by task",
            [run_id],
        )
        return "; ".join(
            f"{task} {state}, attempt {attempt}, lost {reaps} times{f': {error}' if error else ''}"
            for task, state, attempt, reaps, error in rows
        )


def idle(bench: Bench) -> None:
    for command in (["scheduler"], ["publisher"], ["worker", "benchmarks.stopping"]):
        for times in (1, 2):
            with bench.daemon(*command) as process:
                bench.stop(f"{command[0]}, idle{', asked twice' if times > 1 else ''}", process, times=times)


def during_tasks(bench: Bench, client: Client) -> None:
    worker = ["worker", "benchmarks.stopping", "--grace", "6"]
    for workflow, times in ((short, 1), (long, 1), (long, 2)):
        with bench.daemon("scheduler"), bench.daemon("publisher"), bench.daemon(*worker) as process:
            run_id = client.trigger(workflow)
            wait_until(bench.runs_any, "the task")
            time.sleep(0.5)  # until its handler has begun, too: before, it would be given back at once
            what = f"worker, during a {workflow.name} task{', asked twice' if times > 1 else ''}"
            bench.stop(what, process, times=times)
            bench.then(bench.states(run_id))
        client.cancel(run_id)


def behind_a_lock(bench: Bench) -> None:
    for name, table in (("scheduler", "queue"), ("publisher", "outbox")):
        with bench.daemon(name) as process, psycopg.connect(bench.dsn) as other_session:
            other_session.execute(f"lock table flowforge.{table} in access exclusive mode".encode())
            wait_until(functools.partial(bench.stuck, name), "its call to wait")
            bench.stop(f"{name}, behind a locked table", process)


def without_an_answer(bench: Bench, server: postgres.PostgresServer) -> None:
    for name in ("scheduler", "publisher"):
        with Proxy(server.port) as proxy:
            through = psycopg.conninfo.make_conninfo(
                bench.dsn, host="127.0.0.1", port=proxy.port, password=server.password
            )
            with bench.daemon(name, FLOWFORGE_DATABASE_URL=through) as process:
                proxy.stalled = True
                time.sleep(7)  # a call is sent in that time
                bench.stop(f"{name}, while its database answers nothing", process)
                proxy.stalled = False


def at_limits(bench: Bench, client: Client) -> None:
    worker = ["worker", "benchmarks.stopping", "--memory-limit", str(MEMORY), "-c", "4"]
    ends = "select extract(epoch from finished_at - started_at)::float from flowforge.task_run_status"
    with bench.daemon("scheduler"), bench.daemon("publisher"), bench.daemon(*worker):
        began = time.monotonic()
        runs = client.trigger_many("others", [{}] * OTHERS)
        run_id = client.trigger(limits)
        result = client.wait(run_id, timeout=300)
        wait_until(
            lambda: not bench.value(b"select 1 from flowforge.run where finished_at is null"), "the end"
        )
        took = time.monotonic() - began
        for task in ("greedy", "deaf"):
            seconds = bench.value(f"{ends} where run_id = %s and task = %s".encode(), run_id, task)
            bench.tell(f"{task}, from its claim", None, seconds, first_line(result.errors[task]))
        good = bench.value(
            b"select count(*) from flowforge.run where run_id = any(%s) and state = 'succeeded'", runs
        )
        bench.tell("all of it", None, took, f"{good} of {OTHERS} others succeeded")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pg", default="18", help="18, 15 or a directory of binaries")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    programs, library_path = postgres.binaries(options.pg)
    with postgres.PostgresServer(programs, library_path) as server, RabbitServer() as rabbit:
        migrate(server.dsn("postgres"))
        bench = Bench(server, rabbit.url)
        with bench.db, Client(bench.dsn) as client:
            for workflow in (short, long, others, limits):
                client.define(workflow)
            idle(bench)
            during_tasks(bench, client)
            behind_a_lock(bench)
            without_an_answer(bench, server)
            at_limits(bench, client)
    if options.json:
        sys.stdout.write(json.dumps(bench.figures) + "\n")
        return
    table = Table("what", "exit code", "seconds", "then")
    for each in bench.figures:
        code = "" if each["exit_code"] is None else str(each["exit_code"])
        table.add_row(each["what"], code, f"{each['seconds']:.2f}", each["then"])
    Console().print(table)


if __name__ == "__main__":
    main()
