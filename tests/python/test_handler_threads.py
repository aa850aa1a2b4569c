"""What handlers leave behind in threads and contexts is accounted for, and is nobody else's."""

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flowforge.worker.execution import Finish, StopReason
from tests.python.test_execution import Slots
from tests.python.workbench import Gate
from tests.services.process import wait_until

tenant: contextvars.ContextVar[str | None] = contextvars.ContextVar("tenant", default=None)


@pytest.fixture
def slots() -> Iterator[Callable[..., Slots]]:
    made: list[Slots] = []

    def make(count: int, **handlers: Callable[[Any], Any]) -> Slots:
        made.append(Slots(count, **handlers))
        return made[-1]

    yield make
    for each in made:
        each.executor.close()


def test_a_context_variable_is_not_for_the_next_handler(slots: Callable[..., Slots]) -> None:
    """A tenant or a trace of one run must not show in another's."""

    def thread(_ctx: Any) -> str | None:
        before = tenant.get()
        tenant.set("A")
        return before

    async def coroutine(ctx: Any) -> str | None:
        return thread(ctx)

    bench = slots(1, thread=thread, coroutine=coroutine)
    for handler in ("thread", "coroutine") * 2:
        assert bench.run(handler) == Finish("succeeded")
        wait_until(lambda: bench.free() == 1, "a free slot")


def test_every_slot_can_hand_its_work_to_a_thread(slots: Callable[..., Slots]) -> None:
    """Not only as many as asyncio would have threads on a machine with few processors."""
    gate = Gate()

    async def coroutine(_ctx: Any) -> None:
        await asyncio.gather(asyncio.to_thread(gate.wait), asyncio.to_thread(gate.wait))

    bench = slots(40, coroutine=coroutine)
    started = [bench.start("coroutine") for _ in range(40)]
    gate.await_arrivals(80)
    gate.open()
    assert {bench.report(each) for each in started} == {Finish("succeeded")}
    wait_until(lambda: bench.free() == 40, "free slots")


def test_a_thread_that_outlives_its_handler_keeps_its_slot(slots: Callable[..., Slots]) -> None:
    """The coroutine is cancelled at its time limit, its thread cannot be: it counts until it ends."""
    gate = Gate()

    async def coroutine(_ctx: Any) -> None:
        await asyncio.to_thread(gate.wait)

    bench = slots(2, coroutine=coroutine)
    execution = bench.start("coroutine", time_limit=1000)
    gate.await_arrivals()
    bench.run_out(execution)
    assert bench.report(execution) == Finish("failed", error="time limit of 1000 s exceeded")
    wait_until(lambda: bench.executor.lost == 1, "the loss of the slot")
    assert (bench.free(), bench.broken) == (1, [])
    gate.open()
    wait_until(lambda: (bench.executor.lost, bench.free()) == (0, 2), "the slot")


def test_when_such_threads_have_every_slot_the_worker_ends(slots: Callable[..., Slots]) -> None:
    gate = Gate()

    async def coroutine(_ctx: Any) -> None:
        await asyncio.to_thread(gate.wait)

    bench = slots(2, coroutine=coroutine)
    started = [bench.start("coroutine") for _ in range(2)]
    gate.await_arrivals(2)
    for execution in started:
        execution.stop(StopReason.SHUTDOWN)
        bench.report(execution)
    wait_until(lambda: bool(bench.broken), "the end")
    assert (bench.executor.exhausted, bench.broken[0]) == (
        True,
        "every slot is lost to a handler that does not stop",
    )
    gate.open()
    wait_until(lambda: bench.executor.lost == 0, "the threads' end")


def test_a_thread_that_is_about_to_end_costs_nothing(slots: Callable[..., Slots]) -> None:
    """An ordinary cancel, or a time-out of the handler's own, leaves one for a moment."""
    gate = Gate()

    async def coroutine(_ctx: Any) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(gate.wait), 0.01)
        return "went on"

    bench = slots(1, coroutine=coroutine)
    assert bench.run("coroutine") == Finish("succeeded", output='"went on"')
    assert (bench.free(), bench.executor.lost, bench.broken) == (0, 0, [])
    gate.open()
    wait_until(lambda: bench.free() == 1, "the slot")
    assert (bench.executor.lost, bench.broken) == (0, [])


def test_when_a_blocked_loop_ends_the_others_can_still_use_threads(slots: Callable[..., Slots]) -> None:
    """A loop that was set aside closes what it takes for its own."""
    gate = Gate()

    async def blocks(_ctx: Any) -> None:
        gate.arrive()
        while not gate.is_open():
            time.sleep(0.01)

    async def threaded(_ctx: Any) -> str:
        return await asyncio.to_thread(lambda: "done")

    bench = slots(2, blocks=blocks, threaded=threaded)
    blocked = bench.start("blocks")
    gate.await_arrivals()
    wait_until(lambda: bool(bench.executor.blocked), "the loop to be set aside")
    gate.open()
    assert bench.report(blocked) == Finish("succeeded")
    wait_until(lambda: len(bench.executor._loops) < 2, "the end of that loop")
    assert bench.run("threaded") == Finish("succeeded", output='"done"')
