"""Handlers for processes of their own, each in a workflow of its own with one task, `task`.

The run's input says how: `witness` is a file that each execution adds the id of its process to, and `go` one
that some wait for.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowforge import Context, Retry, Workflow


def flow(name: str, **options: Any) -> Callable[[Callable[[Context], Any]], Workflow]:
    """A workflow of the decorated handler."""

    def made(function: Callable[[Context], Any]) -> Workflow:
        workflow = Workflow(name)
        workflow.task(name="task", **options)(function)
        return workflow

    return made


def tell(ctx: Context) -> int:
    """Add this process to the witness; how many executions there are with this one."""
    path = Path(ctx.input["witness"])
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(path.read_text().splitlines())


def wait_for_go(ctx: Context) -> None:
    while not Path(ctx.input["go"]).exists():
        ctx.check_cancelled()
        time.sleep(0.01)


def hang_in_c() -> None:
    """Without giving the interpreter lock back."""
    ctypes.PyDLL(None).sleep(3600)


def hang_in_python() -> None:
    while True:
        pass


def crash(how: str) -> None:
    if how == "segmentation fault":
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        ctypes.string_at(0)
    {"exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "abort": os.abort}[
        how
    ]()


# -- what works as in threads

graph = Workflow("graph")


@graph.task
def first(ctx: Context) -> list[Any]:
    ctx.progress(0.5, "half")
    wait_for_go(ctx)
    left = ctx.time_left()
    return [os.getpid(), ctx.input["value"], left, threading.current_thread() is threading.main_thread()]


@graph.task(map=first, time_limit=3600)
async def each(ctx: Context) -> list[Any]:
    await asyncio.sleep(0)
    return [ctx.map_index, ctx.item, 0 < (ctx.time_left() or 0) < 3600]


@graph.task(after=[each])
def book(ctx: Context) -> None:
    with ctx.transaction() as tx:
        tx.execute("insert into public.booked values (%s)", [os.getpid()])
        tx.finish(ctx.upstream["each"])


@graph.task(after=[each], isolation="threads")
def near(ctx: Context) -> int:
    return os.getpid()


logs = Workflow("logs")


@logs.task
def isolated(ctx: Context) -> None:
    logging.getLogger(__name__).info("isolated %s", "at work")
    logging.getLogger(__name__).debug("isolated in detail")
    logging.getLogger("a_library").debug("noise")


@logs.task(isolation="threads")
def threaded(ctx: Context) -> None:
    try:
        raise ValueError("no luck")
    except ValueError:
        logging.getLogger("shop").exception("threaded\nat work")
    logging.getLogger("a_library").debug("noise")


@logs.task(isolation="threads")
async def awaiting(ctx: Context) -> None:
    await asyncio.to_thread(logging.getLogger("shop").warning, "awaiting at work")


@flow("pid")
def pid(ctx: Context) -> int:
    return os.getpid()


@flow("quick", time_limit=0.5, retry=Retry(max_attempts=100, delay=0))
def quick(ctx: Context) -> int:
    return os.getpid()


@flow("listens")
def listens(ctx: Context) -> None:
    tell(ctx)
    while True:
        ctx.check_cancelled()
        time.sleep(0.01)


@flow("awaits")
async def awaits(ctx: Context) -> None:
    tell(ctx)
    await asyncio.Event().wait()


@flow("waits")
def waits(ctx: Context) -> int:
    tell(ctx)
    while not Path(ctx.input["go"]).exists():
        time.sleep(0.01)
    return os.getpid()


@flow("locked", time_limit=1)
def locked(ctx: Context) -> None:
    with ctx.transaction() as tx:
        tx.execute("insert into public.booked values (1)")
        tx.execute("select pg_sleep(3600)")
        tx.finish()


@flow("goes_on")
def goes_on(ctx: Context) -> str:
    """After its transaction, too."""
    with ctx.transaction() as tx:
        tx.execute("insert into public.booked values (1)")
        tx.finish("kept")
    tell(ctx)
    wait_for_go(ctx)
    if "crash" in ctx.input:
        crash(ctx.input["crash"])
    return "not kept"


# -- what does not stop


@flow("hangs", time_limit=1)
def hangs(ctx: Context) -> None:
    tell(ctx)
    {"in C": hang_in_c, "in Python": hang_in_python}[ctx.input["how"]]()


@flow("hangs_once")
def hangs_once(ctx: Context) -> int:
    if (count := tell(ctx)) == 1:
        hang_in_c()
    return count


# -- what starts others


@flow("starts_another", time_limit=1, max_reaps=0)
def starts_another(ctx: Context) -> None:
    """Which has nothing to do with the handler's end."""
    other = subprocess.Popen(["sleep", "600"])
    with Path(ctx.input["witness"]).open("a") as file:
        file.write(f"{other.pid}\n")
    how: dict[str, Callable[[], object]] = {
        "hangs": other.wait,
        "crashes": lambda: crash("exit"),
        "returns": lambda: None,
    }
    how[ctx.input["how"]]()


# -- memory


@flow("eats")
def eats(ctx: Context) -> Any:
    how, much = ctx.input.get("eats"), 400 * 1024 * 1024
    if how == "a block":
        return len(bytearray(much))
    if how == "small objects":
        kept: list[Any] = []
        while True:
            kept.append([len(kept)])
    if how == "its result":
        return [["x" * 1024] * 1024] * 400
    if how == "in a group":
        return asyncio.run(_eats_in_a_group(much))
    return os.getpid()


async def _eats_in_a_group(much: int) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.to_thread(bytearray, much))


# -- what dies


@flow("dies_once")
def dies_once(ctx: Context) -> int:
    if (count := tell(ctx)) == 1:
        crash(ctx.input["how"])
    return count


@flow("dies", max_reaps=1)
def dies(ctx: Context) -> None:
    tell(ctx)
    crash("exit")


# -- what is no business of a handler


@flow("odd", max_reaps=0)
def odd(ctx: Context) -> Any:
    return ODD[ctx.input["do"]](ctx)


def _forks(_ctx: Context) -> Any:
    """And both return."""
    child = os.fork()
    return {"exit code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])} if child else "twice"


def _closes_and_hangs(_ctx: Context) -> None:
    os.closerange(3, 1000)
    time.sleep(3600)


def _leaves_a_daemon(ctx: Context) -> None:
    """That holds the socket, and dies."""
    for descriptor in range(3, 100):
        if Path(f"/proc/self/fd/{descriptor}").exists():
            os.set_inheritable(descriptor, True)
    daemon = subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)
    Path(ctx.input["witness"]).write_text(str(daemon.pid))
    crash("exit")


def _tells_what_it_has(_ctx: Context) -> Any:
    files = []
    # Which it writes by descriptors of its own, too.
    streams = {str(Path(f"/proc/self/fd/{each}").readlink()) for each in range(3)}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            if str(path.readlink()) not in streams:
                files.append(str(path.readlink()))
    return {
        "sockets": len([name for name in files if name.startswith("socket:")]),
        "others": [name for name in files if not name.startswith(("socket:", "/proc/"))],
        "arguments": Path("/proc/self/cmdline").read_text().split("\0"),
        "settings": [name for name in sorted(os.environ) if name.startswith("FLOWFORGE")],
    }


def _ends_another(_ctx: Context) -> int:
    """By SIGTERM, which a handler's process does not heed itself."""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    other = subprocess.Popen(["sleep", "600"])
    other.terminate()
    return other.wait()


ODD: dict[str, Callable[[Context], Any]] = {
    "forks": _forks,
    "closes everything": lambda _: os.closerange(3, 1000),
    "closes everything and hangs": _closes_and_hangs,
    "prints bytes": lambda _: sys.stdout.buffer.write(b"\x80\x04\0\xff\n"),
    "leaves a daemon": _leaves_a_daemon,
    "leaves": lambda _: sys.exit(5),
    "tells what it has": _tells_what_it_has,
    "ends another": _ends_another,
    "large": lambda ctx: ctx.input["value"],
}
