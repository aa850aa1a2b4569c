"""Workflows of the scenarios. Each handler tells a witness, a file outside the engine, what it executes, then
does what the run's input asks of its task: {"sleep": s, "exit": code, "fail": true, "attempts": n, "until":
file, "progress": message, "transaction": file, "spin": file, "hold": s, "fork": true, "die": file, "output":
…}. Output and error name the token, so that whatever is accepted tells whose it is.
"""

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from flowforge import Context, Retry, Workflow


def _tell(ctx: Context, event: str) -> None:
    line = json.dumps(
        {
            "event": event,
            "run": ctx.run_id,
            "task_run": ctx.task_run_id,
            "task": ctx.task,
            "attempt": ctx.attempt,
            "token": ctx.fencing_token,
            "dispatch": str(ctx.dispatch_id),
            "pid": os.getpid(),
            "at": time.time(),
        }
    )
    # One write of less than a page to a file opened for appending: lines of several processes do not mix.
    with open(os.environ["FLOWFORGE_TEST_WITNESS"], "ab", buffering=0) as witness:  # noqa: PTH123
        witness.write(line.encode() + b"\n")


def act(ctx: Context) -> Any:
    """What every handler does."""
    _tell(ctx, "start")
    asked = (ctx.input or {}).get(ctx.task, {})
    deadline = time.monotonic() + asked.get("sleep", 0)
    while time.monotonic() < deadline or ("until" in asked and not Path(asked["until"]).exists()):
        ctx.check_cancelled()
        if "progress" in asked:
            ctx.progress(0.5, asked["progress"])
        time.sleep(0.02)
    _hog(asked, ctx)
    if "exit" in asked:
        os._exit(asked["exit"])
    if asked.get("fail") is True or ("fail" in asked and Path(str(asked["fail"])).exists()):
        raise RuntimeError(f"asked to fail, token {ctx.fencing_token}")
    if ctx.attempt < asked.get("attempts", 1):
        raise RuntimeError(f"asked for another attempt, token {ctx.fencing_token}")
    if "transaction" in asked:
        _write(ctx, Path(asked["transaction"]))
    _tell(ctx, "end")
    return unstorable(asked["output"]) if "output" in asked else {"token": ctx.fencing_token}


def _write(ctx: Context, until: Path) -> None:
    """Write to a table of the test's in one transaction with the task's end, and keep it open and idle until
    a file is there."""
    with ctx.transaction() as tx:
        tx.execute("insert into public.effect values (%s)", [ctx.task_run_id])
        while not until.exists():
            time.sleep(0.02)
        tx.finish({"token": ctx.fencing_token})


def _hog(asked: dict[str, Any], ctx: Context) -> None:
    """Be no good neighbour to the worker's other threads: compute until a file is there, hold the
    interpreter's lock in C (the first owner only), fork, kill the process unless a file tells that this was
    done."""
    if "spin" in asked:
        # As long at a time as starves others most: shorter than the interpreter's switch interval of 5 ms, so
        # that nobody asks for it, and long enough to take it back at once.
        begun = time.perf_counter()
        sum(range(1_000_000))
        some = int(1_000_000 * 0.003 / (time.perf_counter() - begun))
        while not Path(asked["spin"]).exists():
            sum(range(some))
    if "hold" in asked and ctx.fencing_token == 1:
        ctypes.PyDLL(None).sleep(asked["hold"])
    if "fork" in asked:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    if "die" in asked and not Path(asked["die"]).exists():
        Path(asked["die"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def unstorable(kind: Any) -> Any:
    """Values that JSON or PostgreSQL cannot keep, by name; anything else as it is."""
    if not isinstance(kind, str):
        return kind
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    return {
        "nul": "a\0b",
        "surrogate": "\ud800",
        "nan": float("nan"),
        "bytes": b"x",
        "deep": deep,
        "big": 2**70,
    }.get(kind, kind)


def _define(name: str, **tasks: list[str]) -> Workflow:
    workflow = Workflow(name)
    for task, after in tasks.items():
        workflow.task(name=task, after=after)(act)
    return workflow


one = _define("one", work=[])
chain = _define("chain", a=[], b=["a"], c=["b"])
diamond = _define("diamond", a=[], b=["a"], c=["a"], d=["b", "c"])
wide = _define("wide", a=[], **{f"b{n}": ["a"] for n in range(20)}, d=[f"b{n}" for n in range(20)])
forty = _define("forty", **{f"t{n}": [] for n in range(40)})
clearable = _define("clearable", a=[], b=["a"], c=["a"], d=["b", "c"], e=["d"])

mixed = Workflow("mixed")
mixed.task(name="a")(act)
mixed.task(name="flaky", after=["a"], retry=Retry(max_attempts=3, delay=0.05))(act)
mixed.task(name="broken", after=["a"])(act)
mixed.task(name="rescue", after=["broken"], when="any_failed")(act)
mixed.task(name="skipped", after=["broken"])(act)
mixed.task(name="end", after=["flaky", "rescue", "skipped"], when="all_done")(act)

mapped = Workflow("mapped")
mapped.task(name="items")(act)
mapped.task(name="each", map="items")(act)
mapped.task(name="last", after=["each"])(act)
