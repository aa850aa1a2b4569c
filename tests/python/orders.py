"""A workflow for the tests of commands, and what they do to its runs."""

import os
import pty
import re
import subprocess
import sys

from flowforge import Client, Context, PermanentError, Workflow
from flowforge.db import Connection
from tests.python.shell import Shell
from tests.services.database import Database

flow = Workflow("orders")


@flow.task
def fetch(ctx: Context) -> list[int]:
    return list(range(ctx.input.get("count", 3)))


@flow.task(map=fetch)
def price(ctx: Context) -> int:
    if ctx.item == ctx.input.get("bad"):
        raise PermanentError(f"item {ctx.item} has no price")
    return int(ctx.item) * 10


@flow.task(after=price)
def total(ctx: Context) -> int:
    return sum(ctx.upstream["price"])


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def glad(ctx: Context) -> None: ...


def sad(ctx: Context) -> None:
    raise PermanentError("no")


def ten(ctx: Context) -> list[int]:
    return list(range(10))


def broken(ctx: Context) -> None:
    raise ValueError("no luck")


def fails_at_first(db: Database, *, delay: float, elements: int = 0) -> None:
    """Registers "shaky", whose task "solo" is retried, and with `elements` a map over what it gives."""
    retry = {"max_attempts": 9, "delay": delay, "backoff": 1, "jitter": 0}
    tasks: list[dict[str, object]] = [{"name": "solo", "retry": retry}]
    if elements:
        tasks.append({"name": "each", "map": "solo", "retry": retry})
    with Client(db.dsn) as client:
        client.define({"name": "shaky", "tasks": tasks})


def work(
    connection: Connection, outcome: str, what: str | None = None, how_many: int = 1, owner: str = "w"
) -> None:
    """Executes what is due, as scheduler and worker would: with that output or error, or not to its end."""
    connection.execute("select flowforge.dispatch_ready()")
    claimed = connection.execute(
        "select task_run_id, fencing_token "
        "from flowforge.claim_next('{default}', %s, gen_random_uuid(), '1 min', %s)",
        [owner, how_many],
    ).fetchall()
    assert len(claimed) == how_many
    for task_run, token in claimed:
        if outcome == "crashed":
            connection.execute("select flowforge.release_task_run(%s, %s, 'crashed')", [task_run, token])
        else:
            output, error = (what, None) if outcome == "succeeded" else (None, what)
            connection.execute(
                "select flowforge.finish_task_run(%s, %s, %s, %s::jsonb, %s)",
                [task_run, token, outcome, output, error],
            )


def on_terminal(shell: Shell, *arguments: str, **environment: str) -> str:
    """What the command writes to a terminal, escape sequences and all."""
    leader, follower = pty.openpty()
    settings = os.environ | shell.environment | {"TERM": "xterm-256color"} | environment
    process = subprocess.Popen(
        [sys.executable, "-m", "flowforge", *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=settings,
        close_fds=True,
    )
    os.close(follower)
    written = b""
    try:
        while chunk := os.read(leader, 65536):
            written += chunk
    except OSError:  # how Linux says that the last writer has closed it
        pass
    finally:
        os.close(leader)
        process.wait()
    return written.decode()
