"""Handlers in slots: whatever they do, exactly one report comes of each, and the slot is free or known to be
lost."""

import asyncio
import errno
import functools
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest

from flowforge.db import Connection
from flowforge.errors import TimeLimitExceeded
from flowforge.worker.claim import Claim
from flowforge.worker.execution import Execution, Finish, Release, Report, StopReason
from flowforge.worker.executor import Executor
from flowforge.worker.failures import Failures
from tests.python.workbench import Gate
from tests.services.process import wait_until

LIMIT = 1000
OUT_OF_TIME = Finish("failed", error=f"time limit of {LIMIT} s exceeded")


def an_execution(handler: str = "h", time_limit: float | None = None) -> Execution:
    claim = Claim(
        1, uuid.uuid4(), 1, 1, 1, "w", "t", handler, "null", "{}", "{}", None, None, 30.0, time_limit, 0.0
    )
    return Execution(claim, time.monotonic(), time.monotonic())


def no_descriptors() -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


class Slots:
    """An executor with what it reported."""

    def __init__(self, slots: int = 2, **handlers: Callable[[Any], Any]) -> None:
        self.reports: list[tuple[Execution, Report]] = []
        self.broken: list[str] = []
        self.executor = Executor(
            handlers, slots, self._context, lambda *each: self.reports.append(each), self.broken.append
        )

    def _context(self, execution: Execution) -> SimpleNamespace:
        return SimpleNamespace(execution=execution, check=execution.raise_if_stopped)

    def start(self, handler: str, time_limit: float | None = None) -> Execution:
        assert self.executor.reserve(1, timeout=10) == 1
        execution = an_execution(handler, time_limit)
        self.executor.start([execution])
        return execution

    def report(self, execution: Execution) -> Report:
        def mine() -> list[Report]:
            return [report for of, report in self.reports if of is execution]

        wait_until(lambda: bool(mine()), "a report")
        [report] = mine()
        return report

    def run(self, handler: str, time_limit: float | None = None) -> Report:
        return self.report(self.start(handler, time_limit))

    def run_out(self, execution: Execution) -> None:
        """The time limit passes now, rather than so many seconds after the start of a thread that may take
        longer."""
        execution.deadline = execution.alarm = time.monotonic()
        self.executor._look.set()

    def free(self) -> int:
        count = self.executor.reserve(1000, timeout=0)
        self.executor.give_back(count)
        return count


@pytest.fixture
def slots(request: pytest.FixtureRequest) -> Iterator[Callable[..., Slots]]:
    made: list[Slots] = []

    def make(count: int = 2, **handlers: Callable[[Any], Any]) -> Slots:
        made.append(Slots(count, **handlers))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()


# -- slots


def test_while_there_can_be_no_event_loop_nothing_is_claimed(
    slots: Callable[..., Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment without descriptors. Health says so."""

    async def coroutine(_ctx: Any) -> str:
        return "done"

    bench = slots(coroutine=coroutine)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", no_descriptors)
        assert bench.executor.reserve(1, timeout=0) == 0
        assert bench.executor.blocked == "no event loop can be made: [Errno 24] Too many open files"
    assert bench.run("coroutine") == Finish("succeeded", output='"done"')
    assert (bench.executor.blocked, bench.broken) == ("", [])


def test_a_blocked_loop_is_set_aside_once_there_can_be_another(
    slots: Callable[..., Slots], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    async def blocks(_ctx: Any) -> None:
        gate.arrive()
        while not gate.is_open():
            time.sleep(0.01)

    async def fine(_ctx: Any) -> str:
        return "done"

    bench = slots(blocks=blocks, fine=fine)
    blocked = bench.start("blocks")
    gate.await_arrivals()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "new_event_loop", no_descriptors)
        wait_until(lambda: "no event loop" in bench.executor.blocked, "the lack of another loop")
        waiting = bench.start("fine")
    assert bench.report(waiting) == Finish("succeeded", output='"done"')
    gate.open()
    bench.report(blocked)
    assert bench.broken == []


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


# -- stopping


def test_cancel_reaches_both_kinds(slots: Callable[..., Slots]) -> None:
    gate = Gate()

    def thread(ctx: Any) -> None:
        gate.wait(until=ctx.check)

    async def coroutine(_ctx: Any) -> None:
        gate.arrive()
        await asyncio.Event().wait()

    bench = slots(2, thread=thread, coroutine=coroutine)
    started = [bench.start("thread"), bench.start("coroutine")]
    gate.await_arrivals(2)
    for execution in started:
        assert execution.stop(StopReason.CANCEL)
        report = bench.report(execution)
        assert isinstance(report, Finish)
        assert report.outcome == "cancelled"


def test_ownership_lost_outweighs_a_cancel_and_not_the_other_way_round() -> None:
    execution = an_execution()
    assert execution.stop(StopReason.CANCEL)
    assert not execution.stop(StopReason.CANCEL)
    assert execution.stop(StopReason.LOST)
    assert not execution.stop(StopReason.CANCEL)
    assert execution.stop_reason is StopReason.LOST


def test_time_limit_is_told_to_a_thread_that_looks(slots: Callable[..., Slots]) -> None:
    caught: list[BaseException] = []
    gate = Gate()

    def looking(ctx: Any) -> None:
        try:
            gate.wait(until=ctx.check)
        except BaseException as exc:
            caught.append(exc)
            raise

    bench = slots(1, looking=looking, good=lambda _: "good")
    execution = bench.start("looking", LIMIT)
    gate.await_arrivals()
    bench.run_out(execution)
    assert bench.report(execution) == OUT_OF_TIME
    assert [type(exc) for exc in caught] == [TimeLimitExceeded]
    assert bench.run("good") == Finish("succeeded", output='"good"')
    assert bench.executor.lost == 0


def test_a_time_limit_that_was_prolonged_meanwhile_is_waited_for_anew(slots: Callable[..., Slots]) -> None:
    gate = Gate()
    bench = slots(1, h=lambda ctx: gate.wait(until=ctx.check))
    assert bench.executor.reserve(1, timeout=10) == 1
    execution = an_execution("h", 0.1)
    first = execution.deadline
    execution.prolong(time.monotonic() + 1000)
    bench.executor.start([execution])
    wait_until(lambda: execution.alarm != first, "the first alarm")
    assert execution.alarm == execution.deadline
    execution.prolong(time.monotonic())
    assert execution.alarm == execution.deadline, "never shortened"
    gate.open()
    assert bench.report(execution) == Finish("succeeded")


def test_nothing_is_raised_in_a_thread_that_does_not_look(slots: Callable[..., Slots]) -> None:
    """Not at the time limit and not later, until it ends by itself: an exception from outside could strike
    while it takes a lock that others need."""
    caught: list[BaseException] = []
    steps: list[int] = []
    done = threading.Event()

    def busy(_ctx: Any) -> None:
        try:
            while not done.is_set():
                steps[:] = [sum(steps) + 1]
        except BaseException as exc:
            caught.append(exc)
            raise

    bench = slots(2, busy=busy, good=lambda _: "good")
    execution = bench.start("busy", LIMIT)
    wait_until(lambda: bool(steps), "the first step")
    bench.run_out(execution)
    assert bench.report(execution) == OUT_OF_TIME
    wait_until(lambda: bench.executor.lost == 1, "a lost slot")
    reached = steps[0]
    wait_until(lambda: steps[0] > reached + 1000, "more steps of the abandoned handler")
    done.set()
    wait_until(lambda: bench.free() == 2, "the slot, back")
    assert bench.run("good") == Finish("succeeded", output='"good"')
    assert (caught, bench.broken, len(bench.reports)) == ([], [], 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_time_limit_cancels_a_coroutine(slots: Callable[..., Slots], wrapped: bool) -> None:
    """Also one that runs in a thread of its own, because its function does not look async."""

    gate = Gate()

    async def forever(_ctx: Any) -> None:
        gate.arrive()
        await asyncio.Event().wait()

    bench = slots(1, h=(lambda ctx: forever(ctx)) if wrapped else forever)
    execution = bench.start("h", LIMIT)
    gate.await_arrivals()
    bench.run_out(execution)
    assert bench.report(execution) == OUT_OF_TIME
    wait_until(lambda: bench.free() == 1, "a free slot")
    assert bench.executor.lost == 0


def test_a_stop_between_the_beginning_and_the_task_is_not_missed(slots: Callable[..., Slots]) -> None:
    async def forever(ctx: Any) -> None:
        await asyncio.Event().wait()

    def wrapper(ctx: Any) -> Any:
        ctx.execution.stop(StopReason.SHUTDOWN)
        return forever(ctx)

    assert slots(1, h=wrapper).run("h") == Release("shutdown")


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
def test_what_does_not_stop_is_abandoned_with_its_slot(slots: Callable[..., Slots], kind: str) -> None:
    """Blocked, and not looking: reported at once, its slot lost until it ends after all, and the last slot
    lost is told."""
    gate = Gate()

    def thread(_ctx: Any) -> None:
        gate.wait()

    async def coroutine(ctx: Any) -> None:
        thread(ctx)

    bench = slots(2, thread=thread, coroutine=coroutine, good=lambda _: "good")
    first = bench.start(kind, LIMIT)
    gate.await_arrivals()
    bench.run_out(first)
    assert bench.report(first) == OUT_OF_TIME
    wait_until(lambda: bench.executor.lost == 1, "a lost slot")
    assert bench.run("good") == Finish("succeeded", output='"good"')
    assert bench.broken == []
    second = bench.start("thread", LIMIT)
    gate.await_arrivals(2)
    bench.run_out(second)
    assert bench.report(second) == OUT_OF_TIME
    wait_until(lambda: bool(bench.broken), "the news that no slot is left")
    assert bench.executor.exhausted
    gate.open()
    wait_until(lambda: bench.free() == 2, "the slots, back")
    assert bench.executor.lost == 0
    assert len(bench.reports) == 3


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
    common = {"daemon": "worker", "run": 1, "task_run": 1, "task": "w.t", "attempt": 1, "token": 1}
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


# -- event loops that a handler blocks


class Blocking:
    """An async handler that blocks its event loop until it is let go."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.ended: list[BaseException | None] = []

    async def handle(self, _ctx: Any) -> None:
        self.gate.wait()
        try:
            await asyncio.sleep(0)
            self.ended.append(None)
        except BaseException as exc:
            self.ended.append(exc)
            raise


async def _fine(_ctx: Any) -> str:
    return "fine"


def test_a_loop_that_does_not_run_when_a_time_limit_passes_is_given_up(
    slots: Callable[..., Slots], caplog: pytest.LogCaptureFixture
) -> None:
    """What has begun on it is abandoned, what has not begins elsewhere, and so does what comes later. When it
    runs again, what it holds is cancelled and the slots come back."""
    blocking, idle, cancelled = Blocking(), Gate(), []

    async def waiting(_ctx: Any) -> None:
        idle.arrive()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as exc:
            cancelled.append(exc)
            raise

    bench = slots(5, blocking=blocking.handle, waiting=waiting, fine=_fine, thread=lambda _: "thread")
    neighbour = bench.start("waiting")
    idle.await_arrivals()
    blocker = bench.start("blocking", LIMIT)
    blocking.gate.await_arrivals()
    behind = bench.start("fine")
    bench.run_out(blocker)
    assert bench.report(blocker) == OUT_OF_TIME
    assert bench.report(neighbour) == Release("crashed")
    assert bench.report(behind) == Finish("succeeded", output='"fine"')
    assert bench.run("fine", 100) == Finish("succeeded", output='"fine"')
    assert bench.run("thread") == Finish("succeeded", output='"thread"')
    wait_until(lambda: bench.free() == 3, "the slots of what has ended")
    assert (bench.executor.lost, bench.executor.blocked) == (2, "")
    told = [record for record in caplog.records if "loop is blocked" in record.getMessage()]
    assert [record.keys["handler"] for record in told] == ["blocking (run 1)"]  # type: ignore[attr-defined]
    blocking.gate.open()
    wait_until(lambda: bench.free() == 5, "the slots, back")
    assert [type(exc) for exc in (*blocking.ended, *cancelled)] == [asyncio.CancelledError] * 2
    assert (bench.executor.lost, len(bench.reports), bench.broken) == (0, 5, [])
    wait_until(lambda: len(bench.executor._loops) == 1, "the end of the loop that was given up")


def test_a_handler_that_ignores_its_cancellation_costs_the_others_nothing(
    slots: Callable[..., Slots],
) -> None:
    """Its loop runs: only its own slot is lost."""
    begun, done = Gate(), Gate()

    async def deaf(_ctx: Any) -> None:
        begun.arrive()
        while True:
            try:
                return await asyncio.to_thread(done.wait)
            except asyncio.CancelledError:
                pass

    async def waiting(_ctx: Any) -> str:
        await asyncio.to_thread(done.wait)
        return "done"

    bench = slots(2, deaf=deaf, waiting=waiting)
    neighbour, execution = bench.start("waiting"), bench.start("deaf", LIMIT)
    begun.await_arrivals()
    bench.run_out(execution)
    assert bench.report(execution) == OUT_OF_TIME
    wait_until(lambda: bench.executor.lost == 1, "a lost slot")
    done.open()
    assert bench.report(neighbour) == Finish("succeeded", output='"done"')
    wait_until(lambda: bench.free() == 2, "the slots, back")


def test_a_loop_that_is_blocked_without_a_time_limit_is_told_and_set_aside(
    slots: Callable[..., Slots], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that has begun there is taken from it, and it ends when that has ended."""
    monkeypatch.setattr("flowforge.worker.executor.BLOCKED_AFTER", 2)
    blocking = Blocking()
    bench = slots(4, blocking=blocking.handle, fine=_fine)
    blocker = bench.start("blocking")
    blocking.gate.await_arrivals()
    behind, cancelled = an_execution("fine"), an_execution("fine")
    cancelled.stop(StopReason.CANCEL)
    assert bench.executor.reserve(2, timeout=10) == 2
    bench.executor.start([behind, cancelled])
    assert bench.report(behind) == Finish("succeeded", output='"fine"')
    assert bench.report(cancelled) == Release("unstarted")
    assert bench.executor.blocked == "the event loop is blocked by blocking (run 1)"
    assert bench.run("fine") == Finish("succeeded", output='"fine"')
    wait_until(lambda: bench.free() == 3, "the slots of what has ended")
    assert bench.executor.lost == 0
    blocking.gate.open()
    assert bench.report(blocker) == Finish("succeeded")
    wait_until(lambda: (bench.executor.blocked, len(bench.executor._loops)) == ("", 1), "the loop's end")
    assert caplog.text.count("an event loop is blocked") == 1


def test_a_time_limit_of_what_has_not_begun_leaves_the_blocked_loop_alone(
    slots: Callable[..., Slots],
) -> None:
    blocking = Blocking()
    bench = slots(2, blocking=blocking.handle, fine=_fine)
    blocker = bench.start("blocking")
    blocking.gate.await_arrivals()
    behind = bench.start("fine", LIMIT)
    bench.run_out(behind)
    assert bench.report(behind) == Release("unstarted")
    assert (blocker.ended, bench.executor.lost) == (False, 0)
    blocking.gate.open()
    assert bench.report(blocker) == Finish("succeeded")


@pytest.mark.parametrize("kind", ["thread", "coroutine"])
@pytest.mark.parametrize("time_limit", [None, 1000])
def test_what_lost_its_lease_and_does_not_stop_is_abandoned_with_its_slot(
    slots: Callable[..., Slots], kind: str, time_limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a time limit it would take the slot for ever, and nobody would know; the last one is told."""
    monkeypatch.setattr("flowforge.worker.executor.LOST_MOMENT", 2.0)
    gate = Gate()

    async def coroutine(_ctx: Any) -> None:
        gate.wait()

    bench = slots(1, thread=lambda _: gate.wait(), coroutine=coroutine)
    execution = bench.start(kind, time_limit)
    gate.await_arrivals()
    assert execution.stop(StopReason.LOST)
    assert bench.report(execution) is None
    wait_until(lambda: bool(bench.broken), "the news that no slot is left")
    assert bench.executor.exhausted
    gate.open()
    wait_until(lambda: bench.free() == 1, "the slot, back")
    assert (bench.executor.lost, len(bench.reports)) == (0, 1)


@pytest.mark.parametrize("reason", [StopReason.SHUTDOWN, StopReason.LOST])
def test_what_has_not_begun_on_a_blocked_loop_can_be_given_back(
    slots: Callable[..., Slots], reason: StopReason
) -> None:
    blocking = Blocking()
    bench = slots(2, blocking=blocking.handle, fine=_fine)
    blocker = bench.start("blocking")
    blocking.gate.await_arrivals()
    behind = bench.start("fine")
    assert bench.executor.stop_all(reason) == 2
    bench.executor.abandon_all()
    lost = reason is StopReason.LOST
    assert bench.report(behind) == (None if lost else Release("unstarted"))
    assert bench.report(blocker) == (None if lost else Release("shutdown"))
    assert (bench.executor.lost, bench.free()) == (1, 1)
    blocking.gate.open()
    wait_until(lambda: bench.free() == 2, "the slots, back")


def test_what_another_handler_cancels_before_its_first_step_is_given_back(
    slots: Callable[..., Slots],
) -> None:
    """A task that is cancelled then takes no step at all, so that nothing in it could report."""

    async def greedy(_ctx: Any) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    bench = slots(3, greedy=greedy)
    assert bench.executor.reserve(3, timeout=10) == 3
    first, *others = [an_execution("greedy") for _ in range(3)]
    bench.executor.start([first, *others])
    assert bench.report(first) == Finish("succeeded")
    assert [bench.report(each) for each in others] == [Release("unstarted")] * 2
    wait_until(lambda: bench.free() == 3, "free slots")
    assert bench.executor.running == []


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
