"""A worker in a process of its own, for tests that kill or signal it: `python -m
tests.python.worker_process`.

Its handlers write what they do into the table public.trace of the test's database.
"""

import asyncio
import logging.config
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psycopg

from flowforge import log, stopping
from flowforge.config import Config
from flowforge.definition import Workflow
from flowforge.worker import daemon
from flowforge.worker.context import Context

workflow = Workflow("process")


def trace(ctx: Context, what: str) -> None:
    with psycopg.connect(os.environ["FLOWFORGE_DATABASE_URL"], autocommit=True) as conn:
        conn.execute(
            "insert into public.trace values (%s, %s, %s, %s)",
            [ctx.task_run_id, ctx.fencing_token, what, os.getpid()],
        )


def released(ctx: Context) -> bool:
    """Whether the test has written `go` for this task run, or for all."""
    with psycopg.connect(os.environ["FLOWFORGE_DATABASE_URL"], autocommit=True) as conn:
        found = conn.execute(
            "select 1 from public.trace where what = 'go' and task_run_id in (%s, 0)", [ctx.task_run_id]
        ).fetchone()
    return found is not None


@workflow.task
def quick(ctx: Context) -> int:
    trace(ctx, "ran")
    return ctx.fencing_token


@workflow.task
def patient(ctx: Context) -> str:
    """Ends when the test says so, whatever else it is told."""
    trace(ctx, "begun")
    while not released(ctx):
        time.sleep(0.05)
    trace(ctx, "ended")
    return "ended"


@workflow.task
async def gentle(ctx: Context) -> None:
    """Ends when it is cancelled."""
    trace(ctx, "begun")
    await asyncio.Event().wait()


@workflow.task
async def leaves_a_thread(ctx: Context) -> None:
    """Ends when it is cancelled, and leaves two threads that do not."""
    threading.Thread(target=time.sleep, args=(3600,), daemon=False).start()
    trace(ctx, "begun")
    await asyncio.to_thread(time.sleep, 3600)


@workflow.task
async def leaves_work(ctx: Context) -> None:
    """Ends well, and leaves what the interpreter waits for at its end: work in two pools of threads, of the
    event loop and of its own."""
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
    ThreadPoolExecutor(1).submit(time.sleep, 3600)


@workflow.task
def closes_everything(ctx: Context) -> None:
    trace(ctx, "begun")
    os.closerange(3, 500)


@workflow.task(time_limit=0.5)
def stuck(ctx: Context) -> None:
    """Blocked in C for longer than any test."""
    trace(ctx, "begun")
    time.sleep(3600)


def main() -> int:
    config = Config.from_environment()
    log.configure("json", config.log_level)
    # As a program's own configuration does unless told otherwise: what it does not know is turned off.
    logging.config.dictConfig({"version": 1})
    code = daemon.run(daemon.handlers_of([workflow]), config)
    stopping.end_soon(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
