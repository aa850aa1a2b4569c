"""What the polls cost while somebody holds an old snapshot, so that vacuum removes nothing.

    ./dev run python -m benchmarks.held_snapshot [--pg 18|15] [--rate N] [--minutes N] [--hurry] [--free]

Each second of load is so many runs of one task, from trigger to end, by the functions that the daemons call,
in the batches that they use, on one connection; with `--hurry` seconds follow one another as fast as they can
be done. Told are milliseconds (median and 95th percentile) of one call, and the pages of the buffer cache
that it touches when it finds nothing, in the first minute and in the last. `--free` holds no snapshot, for
comparison; `--json` prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.table import Table

from benchmarks.sql_pipeline import CLAIM, chunks, database, task

POLLS = {
    "settle": "settle_finished(1000)",
    "dispatch": "dispatch_ready(500)",
    "reap": "reap_expired_leases(500)",
    "redispatch": "redispatch_lost(500)",
    "undeliverable": "fail_undeliverable(500)",
    "leftovers": "cancel_leftovers(100)",
    "sweep": "sweep_outbox(2000)",
}
ADVANCE = "advance_frontiers()"
ADVANCE_EVERY = 5  # seconds, as the scheduler does


class Load:
    """One second of load after the other, and what each call took."""

    def __init__(self, dsn: str, rate: int, *, hurry: bool) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        self.rate = rate
        self.hurry = hurry
        self.seconds = 0
        self.milliseconds: dict[str, list[float]] = defaultdict(list)
        self.pages: dict[str, list[int]] = defaultdict(list)
        self.looking = False
        definition = {"name": "single", "tasks": [task("a")]}
        self.connection.execute("select flowforge.define_workflow(%s)", (Jsonb(definition),))
        self.connection.execute("select flowforge.configure_queue('bench', 1000000)")

    def call(self, what: str, call: str, *arguments: Any) -> list[tuple[Any, ...]]:
        query = f"select * from flowforge.{call}"  # noqa: S608 - the calls are written in this file
        started = time.perf_counter()
        rows = self.connection.execute(query, arguments).fetchall()
        self.milliseconds[what].append((time.perf_counter() - started) * 1000)
        return rows

    def look(self, what: str, call: str) -> None:
        """Pages that a call touches which finds nothing."""
        query = f"explain (analyze, buffers, format json) select * from flowforge.{call}"  # noqa: S608
        ((plan,),) = self.connection.execute(query).fetchall()
        top = plan[0]["Plan"]
        self.pages[what].append(top["Shared Hit Blocks"] + top["Shared Read Blocks"])

    def second(self) -> None:
        self.call("trigger", "trigger_many('single', %s)", [Jsonb({})] * self.rate)
        self.call("dispatch", POLLS["dispatch"])
        with self.connection.transaction():
            orders = self.call("fetch", "fetch_outbox(1000)")
            self.call("mark", "mark_published(%s)", [order[0] for order in orders])
        for some in chunks(orders, CLAIM):
            ids, dispatches = [each[1] for each in some], [each[2] for each in some]
            claim = "claim_task_runs(%s, %s, 'bench', %s, '5 s')"
            claimed = self.call("claim", claim, ids, dispatches, uuid.uuid4())
            held, tokens = [row[2] for row in claimed], [row[4] for row in claimed]
            self.call("renew", "renew_leases(%s, %s, '5 s')", held, tokens)
            outputs, nulls = [Jsonb({})] * len(held), [None] * len(held)
            finish = "finish_task_runs(%s, %s, %s, %s, %s, %s)"
            many = ["succeeded"] * len(held), outputs, nulls, [True] * len(held)
            self.call("finish", finish, held, tokens, *many)
        for what in ("settle", "reap", "redispatch", "undeliverable", "leftovers", "sweep"):
            self.call(what, POLLS[what])
        if self.seconds % ADVANCE_EVERY == 0:
            self.call("advance", ADVANCE)
        self.seconds += 1

    def minute(self, seconds: int = 60) -> dict[str, dict[str, float]]:
        """So many seconds of load; what the calls took and touched."""
        self.milliseconds.clear()
        self.pages.clear()
        for _ in range(seconds):
            started = time.monotonic()
            self.second()
            if not self.hurry:
                time.sleep(max(0.0, started + 1 - time.monotonic()))
        for what, call in (POLLS | {"fetch": "fetch_outbox(1000)"}).items():
            self.look(what, call)
        return {
            what: {
                "p50": statistics.median(each),
                "p95": statistics.quantiles(each, n=20)[-1],
                "pages": statistics.median(self.pages[what]) if what in self.pages else float("nan"),
            }
            for what, each in self.milliseconds.items()
        }


def report(first: dict[str, dict[str, float]], last: dict[str, dict[str, float]], minutes: int) -> None:
    table = Table(title="One call, in the first minute and in the last")
    headings = ("call", "p50 ms", f"in minute {minutes}", "p95 ms", f"in minute {minutes}", "pages idle")
    for heading in (*headings, f"in minute {minutes}"):
        table.add_column(heading, justify="left" if heading == "call" else "right")
    for what, before in first.items():
        after = last[what]
        pairs = [f"{figures[key]:.1f}" for key in ("p50", "p95", "pages") for figures in (before, after)]
        table.add_row(what, *pairs)
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.held_snapshot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--pg", default="18", help="18, 15 or a connection string (default: 18)")
    parser.add_argument("--rate", type=int, default=300, help="task runs of a second (default: 300)")
    parser.add_argument("--minutes", type=int, default=15, help="(default: 15)")
    parser.add_argument("--hurry", action="store_true", help="do not wait for the clock")
    parser.add_argument("--free", action="store_true", help="hold no snapshot")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    with database(options.pg) as (_, dsn), psycopg.connect(dsn) as holder:
        load = Load(dsn, options.rate, hurry=options.hurry)
        if not options.free:
            holder.execute("set transaction isolation level repeatable read")
            holder.execute("select count(*) from flowforge.workflow")
        first = load.minute()
        load.minute(60 * (options.minutes - 2))
        last = load.minute()
        load.connection.close()
    if options.json:
        sys.stdout.write(json.dumps({"first": first, "last": last}, indent=2) + "\n")
    else:
        report(first, last, options.minutes)


if __name__ == "__main__":
    main()
