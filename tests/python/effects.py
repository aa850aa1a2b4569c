"""Side effects of handlers, in a table of the database, and the loss of a transaction's connection."""

from typing import Any

from flowforge.worker.context import Context
from tests.python.workbench import Bench


def effects(bench: Bench) -> list[str]:
    return [what for (what,) in bench.all("select what from public.effect order by what")]


def write(tx: Any, ctx: Context, what: str) -> None:
    tx.execute("insert into public.effect values (%s, %s)", [ctx.task_run_id, what])


def lose(tx: Any) -> None:
    tx.execute("select pg_terminate_backend(pg_backend_pid())")
