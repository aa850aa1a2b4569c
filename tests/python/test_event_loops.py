"""The event loops of async handlers: one that is blocked is set aside, and what is on it comes to its end."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from flowforge.worker.execution import Finish, Release, StopReason
from tests.python.slots import LIMIT, OUT_OF_TIME, Slots, an_execution, no_descriptors
from tests.python.workbench import Gate
from tests.services.process import wait_until


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
