"""Handlers in slots: whatever they do, exactly one report comes of each, and the slot is free or known to be
lost."""

import asyncio
import functools
import os
import socket
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from flowforge.db import Connection
from flowforge.worker.execution import Execution, Finish, Release, StopReason
from flowforge.worker.failures import Failures
from tests.python.slots import LIMIT, OUT_OF_TIME, Slots, an_execution
from tests.python.workbench import Gate
from tests.services.process import wait_until


def test_sync_and_async_handlers_share_the_slots(slots: Callable[..., Slots]) -> None:
    gate = Gate()

    async def coroutine(_ctx: Any) -> None:
        await asyncio.to_thread(gate.wait)

    bench = slots(3, thread=lambda _: gate.wait(), coroutine=coroutine)
    started = [bench.start("thread"), bench.start("coroutine"), bench.start("coroutine")]
    gate.await_arrivals(3)
    assert bench.free() == 0
    gate.open()
    assert {bench.report(each) for each in started} == {Finish("succeeded")}
    wait_until(lambda: bench.free() == 3, "free slots")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_no_exception_of_a_handler_ends_its_thread_or_the_loop(
    slots: Callable[..., Slots], kind: type[BaseException]
) -> None:
    def thread(_ctx: Any) -> None:
        raise kind("out")

    async def coroutine(_ctx: Any) -> None:
        raise kind("out")

    async def fine(_ctx: Any) -> str:
        return "fine"

    bench = slots(1, thread=thread, coroutine=coroutine, good=lambda _: "good", fine=fine)
    for handler in ("thread", "coroutine"):
        report = bench.run(handler)
        assert isinstance(report, Finish)
        assert report.outcome == "failed"
        assert (report.error or "").startswith(kind.__name__)
    assert bench.run("good") == Finish("succeeded", output='"good"')
    assert bench.run("fine") == Finish("succeeded", output='"fine"')
    assert bench.broken == []


def test_a_task_of_an_async_handler_cannot_end_the_loop(slots: Callable[..., Slots]) -> None:
    async def leave() -> None:
        sys.exit(3)

    async def coroutine(_ctx: Any) -> str:
        try:
            await asyncio.create_task(leave())
        except SystemExit:
            return "still here"
        return "nothing happened"

    bench = slots(1, coroutine=coroutine)
    assert bench.run("coroutine") == Finish("succeeded", output='"still here"')
    assert bench.run("coroutine") == Finish("succeeded", output='"still here"')


def test_async_function_behind_a_plain_wrapper_is_awaited(slots: Callable[..., Slots]) -> None:
    async def inner(_ctx: Any) -> int:
        await asyncio.sleep(0)
        return 7

    @functools.wraps(inner)
    def wrapper(ctx: Any) -> Any:
        return inner(ctx)

    assert slots(1, h=wrapper).run("h") == Finish("succeeded", output="7")


def test_told_to_stop_before_it_began_is_given_back_unstarted(slots: Callable[..., Slots]) -> None:
    ran: list[int] = []
    gate = Gate()
    bench = slots(1, h=lambda _: ran.append(1), gate=lambda _: gate.wait())
    execution = an_execution("h")
    execution.stop(StopReason.SHUTDOWN)
    assert bench.executor.reserve(1, timeout=10) == 1
    bench.executor.start([execution])
    assert bench.report(execution) == Release("unstarted")
    assert ran == []


def test_a_forked_child_reports_nothing(slots: Callable[..., Slots]) -> None:
    """A handler that forks: the child leaves with its own exit code, and neither closes nor reports
    anything."""
    reader, writer = os.pipe()

    def fork(_ctx: Any) -> int:
        pid = os.fork()
        if pid == 0:
            os.write(writer, b"child")
            sys.exit(5)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def fork_and_return(_ctx: Any) -> int:
        pid = os.fork()
        if pid == 0:
            return 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    bench = slots(1, fork=fork, ret=fork_and_return)
    assert bench.run("fork") == Finish("succeeded", output="5")
    assert os.read(reader, 10) == b"child"
    assert bench.run("ret") == Finish("succeeded", output="0")
    assert len(bench.reports) == 2
    os.close(reader)
    os.close(writer)


# -- what is told of failures


def told_of_failures(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [
        record.keys  # type: ignore[attr-defined]
        for record in caplog.records
        if record.levelname == "WARNING" and record.getMessage().startswith("attempt ")
    ]


def test_failures_are_told_and_successes_are_not(
    slots: Callable[..., Slots], caplog: pytest.LogCaptureFixture
) -> None:
    """In one line that names the attempt, without the traceback or what comes after the first line."""

    def fail(_ctx: Any) -> None:
        raise ValueError("in the first line\nin the second")

    gate = Gate()

    def late(ctx: Any) -> None:
        gate.wait(until=ctx.check)

    bench = slots(1, fail=fail, late=late, good=lambda _: {"secret": 1})
    bench.run("fail")
    execution = bench.start("late", LIMIT)
    gate.await_arrivals()
    bench.run_out(execution)
    bench.report(execution)
    bench.run("good")
    wait_until(lambda: bench.free() == 1, "a free slot")
    common = {"daemon": "worker", "run": 1, "task_run": 1, "attempt": 1, "token": 1}
    common |= {"workflow": "w", "task": "t"}
    assert told_of_failures(caplog) == [
        {**common, "handler": "fail", "error": "ValueError: in the first line"},
        {**common, "handler": "late", "error": f"time limit of {LIMIT} s exceeded"},
    ]
    assert "secret" not in caplog.text


def test_a_flood_of_failures_is_told_in_a_bounded_number_of_lines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("flowforge.worker.failures.time", SimpleNamespace(monotonic=lambda: now[0]))
    failures, failed = Failures(), Finish("failed", error="x" * 10_000)

    def counts() -> list[int]:
        return [each.keys["count"] for each in caplog.records if "more" in each.getMessage()]  # type: ignore[attr-defined]

    for _ in range(1000):
        failures.tell(an_execution(), failed)
    assert len(told_of_failures(caplog)) == 20
    assert counts() == []
    now[0] += 1
    failures.tell(an_execution(), failed)
    assert (len(told_of_failures(caplog)), counts()) == (21, [980])
    for _ in range(30):
        failures.tell(an_execution(), failed)
    failures.flush()
    failures.flush()
    assert (len(told_of_failures(caplog)), counts()) == (40, [980, 11])
    assert len(caplog.text) < 30_000


# -- a handler's connection that is lost before it is cut


class Losing:
    """A handler's connection that libpq notices the loss of: from then on it has no socket to tell of."""

    def __init__(self) -> None:
        self.far, self._near = socket.socketpair()
        self._lost = False

    def fileno(self) -> int:
        if self._lost:
            raise psycopg.OperationalError("the connection is lost")
        return self._near.fileno()

    def attach(self, ctx: Any) -> None:
        self._execution = ctx.execution
        self._execution.attach(cast(Connection, self))
        self._lost = True

    def assert_cut(self) -> None:
        self.far.settimeout(60)
        assert self.far.recv(1) == b""
        self._execution.detach()
        self._near.close()
        self.far.close()


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_a_handler_that_ends_with_its_connection_lost_is_reported(
    slots: Callable[..., Slots], kind: str
) -> None:
    connection = Losing()

    async def coroutine(ctx: Any) -> str:
        connection.attach(ctx)
        return "done"

    def thread(ctx: Any) -> str:
        connection.attach(ctx)
        return "done"

    bench = slots(1, thread=thread, coroutine=coroutine)
    assert bench.run(kind) == Finish("succeeded", output='"done"')
    connection.assert_cut()
    wait_until(lambda: bench.free() == 1, "a free slot")
    assert bench.broken == []


@pytest.mark.parametrize("reason", [StopReason.TIME_LIMIT, StopReason.SHUTDOWN])
def test_a_handler_is_stopped_with_its_connection_lost(
    slots: Callable[..., Slots], reason: StopReason
) -> None:
    connection, gate = Losing(), Gate()

    def h(ctx: Any) -> None:
        connection.attach(ctx)
        gate.wait(until=ctx.check)

    bench = slots(1, h=h, good=lambda _: "good")
    execution = bench.start("h", LIMIT)
    gate.await_arrivals()
    if reason is StopReason.SHUTDOWN:
        assert bench.executor.stop_all(reason) == 1
    else:
        bench.run_out(execution)
    expected = {StopReason.TIME_LIMIT: OUT_OF_TIME, StopReason.SHUTDOWN: Release("shutdown")}
    assert bench.report(execution) == expected[reason]
    connection.assert_cut()
    assert bench.run("good", 100) == Finish("succeeded", output='"good"')
    assert bench.broken == []


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_an_end_that_cannot_be_reported_is_told_and_frees_the_slot(
    slots: Callable[..., Slots], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, not in a loop, and neither the thread nor the loop goes down with it."""
    calls: list[Execution] = []

    def end(self: Execution) -> bool:
        calls.append(self)
        raise RuntimeError("no end")

    async def coroutine(_ctx: Any) -> str:
        return "done"

    bench = slots(1, thread=lambda _: "done", coroutine=coroutine)
    with monkeypatch.context() as patched:
        patched.setattr(Execution, "end", end)
        execution = bench.start(kind)
        wait_until(lambda: bench.free() == 1, "a free slot")
    assert (bench.reports, calls) == ([], [execution])
    assert len(bench.broken) == 1
    assert bench.run(kind) == Finish("succeeded", output='"done"')


class Leaving(dict[str, Any]):
    def items(self) -> Any:
        raise SystemExit(3)


class Nameless(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


def test_no_value_and_no_exception_ends_the_thread_that_looks_at_it(slots: Callable[..., Slots]) -> None:
    def fail(_ctx: Any) -> None:
        raise Nameless

    bench = slots(1, value=lambda _: Leaving(a=1), fail=fail)
    for handler, error in (("value", "result not storable: SystemExit: 3"), ("fail", "Nameless: ")):
        report = bench.run(handler)
        assert isinstance(report, Finish)
        assert (report.error or "").startswith(error)
    assert bench.broken == []
