"""What `flowforge conformance` asks of a worker, for `flowforge worker flowforge.conformance.handlers`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from flowforge import Context, Workflow

conformance = Workflow("conformance")


@conformance.task
def echo(ctx: Context) -> Any:
    """Answer what the claim handed over."""
    return {"input": ctx.input, "upstream": dict(ctx.upstream), "item": ctx.item}


@conformance.task
def fail(ctx: Context) -> None:
    """Fail with the text that the input names."""
    raise RuntimeError(ctx.input["error"])


@conformance.task
def unstorable(_: Context) -> str:
    """Answer what PostgreSQL cannot keep."""
    return "\0"


@conformance.task
def nested(_: Context) -> list[Any]:
    """Answer what is nested deeper than PostgreSQL takes JSON."""
    value: list[Any] = []
    for _depth in range(100_000):
        value = [value]
    return value


@conformance.task
def tick(ctx: Context) -> None:
    """Append to a file: b at the beginning, a dot every tenth of a second, e at the end."""
    _append(ctx, b"b")
    for _ in range(ctx.input["ticks"]):
        time.sleep(0.1)
        ctx.check_cancelled()
        _append(ctx, b".")
    _append(ctx, b"e")


def _append(ctx: Context, what: bytes) -> None:
    with Path(ctx.input["file"]).open("ab") as file:
        file.write(what)
