"""Handlers that are told to stop: by a cancel, a lost lease, a time limit, or the end of the worker."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from flowforge.errors import TimeLimitExceeded
from flowforge.worker.execution import Finish, Release, StopReason
from tests.python.slots import LIMIT, OUT_OF_TIME, Slots, an_execution
from tests.python.workbench import Gate
from tests.services.process import wait_until


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
