"""What handlers leave behind in threads and contexts is accounted for, and is nobody else's."""

import asyncio
import contextlib
import contextvars
import gc
import multiprocessing
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from flowforge.config import Config
from flowforge.worker import child
from flowforge.worker.execution import Execution, Finish, StopReason
from flowforge.worker.pool import MOST_THREADS, HandlerPool, current, threads_each
from tests.python.slots import Slots, an_execution
from tests.python.workbench import Gate
from tests.services.process import wait_until

tenant: contextvars.ContextVar[str | None] = contextvars.ContextVar("tenant", default=None)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Opened at the end: the interpreter waits for threads of pools, also those of a test that failed."""
    gate = Gate()
    yield gate
    gate.open()


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


class Large:
    """What a handler holds, of which it is known whether it is still there."""

    def __init__(self, held: list[weakref.ref[Any]]) -> None:
        held.append(weakref.ref(self))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Cycles are not collected, as between the oldest ones of a large process."""
    gc.disable()
    yield
    gc.enable()


def fails(held: list[weakref.ref[Any]]) -> Any:
    large = Large(held)
    raise ValueError(f"failed with {large}")


def returns(held: list[weakref.ref[Any]]) -> Any:
    return {"not JSON": Large(held)}


def runs_out(held: list[weakref.ref[Any]]) -> Any:
    class Greedy(dict[str, Any]):
        def items(self) -> Any:
            raise MemoryError

    return Greedy(large=Large(held))


ENDS = [fails, returns, runs_out]


@pytest.mark.parametrize("end", ENDS)
def test_what_a_failed_handler_held_is_gone(
    slots: Callable[..., Slots], end: Callable[..., Any], no_collector: None
) -> None:
    """Of a hundred megabytes each, a few failures would be more than there is."""
    held: list[weakref.ref[Any]] = []

    async def coroutine(_ctx: Any) -> Any:
        return end(held)

    bench = slots(1, thread=lambda _: end(held), coroutine=coroutine)
    for handler in ("thread", "coroutine"):
        report = bench.run(handler)
        assert isinstance(report, Finish)
        assert report.outcome == "failed"
    wait_until(lambda: [each() for each in held] == [None, None], "what they held to be gone", 10)


@pytest.mark.parametrize("end", ENDS)
def test_what_a_failed_handler_held_is_gone_in_a_process(end: Callable[..., Any], no_collector: None) -> None:
    """The next one has the same memory limit."""
    held: list[weakref.ref[Any]] = []
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        one = child.Child(theirs)
        execution = child._Execution(child.Task(an_execution().claim, None), one._tell)
        one._execute(execution, lambda _: end(held), Config())
        assert ours.recv().report.outcome == "failed"
        assert [each() for each in held] == [None]


def test_every_slot_can_hand_its_work_to_a_thread(slots: Callable[..., Slots], gate: Gate) -> None:
    """Not only as many as asyncio would have threads on a machine with few processors."""

    async def coroutine(_ctx: Any) -> None:
        await asyncio.gather(asyncio.to_thread(gate.wait), asyncio.to_thread(gate.wait))

    bench = slots(40, coroutine=coroutine)
    started = [bench.start("coroutine") for _ in range(40)]
    gate.await_arrivals(80)
    gate.open()
    assert {bench.report(each) for each in started} == {Finish("succeeded")}
    wait_until(lambda: bench.free() == 40, "free slots")


def test_a_thread_that_outlives_its_handler_keeps_its_slot(slots: Callable[..., Slots], gate: Gate) -> None:
    """The coroutine is cancelled at its time limit, its thread cannot be: it counts until it ends."""

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


def test_in_a_process_an_async_handler_is_reported_before_the_threads_that_it_left(gate: Gate) -> None:
    """As where it has no event loop of its own."""

    async def coroutine(_ctx: Any) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(gate.wait), 0.01)
        return "went on"

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        one = child.Child(theirs)
        execution = child._Execution(child.Task(an_execution().claim, None), one._tell)
        thread = threading.Thread(target=one._execute, args=(execution, coroutine, Config()))
        thread.start()
        in_time = ours.poll(20)
        gate.open()
        thread.join()
        assert in_time
        assert ours.recv().report == Finish("succeeded", output='"went on"')


@pytest.mark.parametrize("reason", [None, StopReason.TIME_LIMIT, StopReason.LOST, StopReason.CANCEL])
def test_a_process_is_not_used_again_with_threads_of_a_handler_that_was_told_to_stop(
    gate: Gate, reason: StopReason | None
) -> None:
    """Else they would go on beside the next attempt, past a time limit that is to be hard. What a handler
    leaves of its own accord is its own matter."""

    async def coroutine(_ctx: Any) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(gate.wait), 1000 if reason else 0.01)

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        one = child.Child(theirs)
        execution = child._Execution(child.Task(an_execution(time_limit=1000).claim, None), one._tell)
        thread = threading.Thread(target=one._execute, args=(execution, coroutine, Config()))
        thread.start()
        gate.await_arrivals()
        if reason is not None:
            execution.stop(reason)
        assert ours.poll(20)
        assert ours.recv().spent is (reason is not None)
        gate.open()
        thread.join()


def test_when_such_threads_have_every_slot_the_worker_ends(slots: Callable[..., Slots], gate: Gate) -> None:
    async def coroutine(_ctx: Any) -> None:
        await asyncio.to_thread(gate.wait)

    bench = slots(2, coroutine=coroutine)
    started = [bench.start("coroutine", time_limit=1000) for _ in range(2)]
    gate.await_arrivals(2)
    for execution in started:
        bench.run_out(execution)
        bench.report(execution)
    wait_until(lambda: bool(bench.broken), "the end")
    assert (bench.executor.exhausted, bench.broken[0]) == (
        True,
        "every slot is lost to a handler that does not stop",
    )
    gate.open()
    wait_until(lambda: bench.executor.lost == 0, "the threads' end")


def test_a_process_is_used_again_when_threads_of_such_a_handler_have_ended(gate: Gate) -> None:
    """Another one would take its time to start."""

    async def coroutine(_ctx: Any) -> None:
        await asyncio.to_thread(int)
        gate.arrive()
        await asyncio.sleep(1000)

    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        one = child.Child(theirs)
        execution = child._Execution(child.Task(an_execution().claim, None), one._tell)
        thread = threading.Thread(target=one._execute, args=(execution, coroutine, Config()))
        thread.start()
        gate.await_arrivals()
        execution.stop(StopReason.CANCEL)
        assert ours.poll(20)
        assert ours.recv().spent is False
        thread.join()


@pytest.mark.parametrize("reason", [None, StopReason.CANCEL, StopReason.LOST])
def test_threads_that_need_not_have_ended_keep_their_slots_and_end_no_worker(
    slots: Callable[..., Slots], monkeypatch: pytest.MonkeyPatch, reason: StopReason | None, gate: Gate
) -> None:
    """As of name look-ups during an outage of DNS, or of an HTTP call that nobody waits for any more. Health
    says so when nothing is left."""
    monkeypatch.setattr("flowforge.worker.slots.LEFT_MOMENT", 0)

    async def coroutine(_ctx: Any) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(gate.wait), 1000 if reason else 0.01)

    bench = slots(2, coroutine=coroutine)
    for count in (1, 2):
        assert not bench.executor.blocked
        execution = bench.start("coroutine")
        gate.await_arrivals(count)
        if reason is not None:
            execution.stop(reason)
        bench.report(execution)
    told = "every slot is kept by threads that handlers have left: coroutine"
    wait_until(lambda: bench.executor.blocked == told, "health")
    assert (bench.free(), bench.executor.lost, bench.broken) == (0, 0, [])
    gate.open()
    wait_until(lambda: bench.free() == 2, "the slots")
    assert bench.executor.blocked == ""


def test_threads_of_one_handler_are_not_for_want_of_another(slots: Callable[..., Slots], gate: Gate) -> None:
    """However many of them hang, also when the time limit of the handler has passed."""

    async def many(_ctx: Any) -> None:
        await asyncio.gather(*(asyncio.to_thread(gate.wait) for _ in range(100)))

    async def one(_ctx: Any) -> str:
        return await asyncio.to_thread(lambda: "done")

    bench = slots(3, many=many, one=one)
    hanging = [bench.start("many", time_limit=1000) for _ in range(2)]
    most = 2 * MOST_THREADS
    gate.await_arrivals(most)
    assert bench.run("one") == Finish("succeeded", output='"done"')
    for execution in hanging:
        bench.run_out(execution)
        bench.report(execution)
    assert bench.run("one") == Finish("succeeded", output='"done"')
    gate.open()
    wait_until(lambda: bench.free() == 3, "the slots")
    assert gate.arrivals == most, "what waited was called off with its handler"


def test_calls_of_one_handler_can_wait_for_each_other(slots: Callable[..., Slots], gate: Gate) -> None:
    """Whatever the threads of others do, or have done. A name look-up beside a blocking call is such a one,
    too, to which the event loop gives a thread of the same."""
    reached = threading.Event()

    async def many(_ctx: Any) -> None:
        await asyncio.gather(*(asyncio.to_thread(gate.wait) for _ in range(100)))

    async def pair(_ctx: Any) -> int:
        handed: queue.Queue[int] = queue.Queue(maxsize=1)

        def produce() -> None:
            reached.set()
            for number in range(10):
                handed.put(number)

        def consume() -> int:
            return sum(handed.get() for _ in range(10))

        _, found = await asyncio.gather(asyncio.to_thread(produce), asyncio.to_thread(consume))
        return found

    bench = slots(3, many=many, pair=pair)
    hogs = [bench.start("many") for _ in range(2)]
    gate.await_arrivals(2 * MOST_THREADS)
    waiting = bench.start("pair")
    assert reached.wait(60)
    gate.open()
    for each in hogs:
        assert bench.report(each) == Finish("succeeded")
    assert bench.report(waiting) == Finish("succeeded", output="45")


def test_all_threads_of_handlers_together_are_bounded() -> None:
    """A machine allows so many, and the worker needs its own. Eight are each handler's in any case."""
    assert [threads_each(slots) for slots in (1, 8, 16, 1000)] == [32, 32, 16, 8]


def test_what_is_not_waited_for_still_runs_and_keeps_the_slot(
    slots: Callable[..., Slots], gate: Gate
) -> None:
    """Also what has not begun when the handler ends."""

    async def coroutine(_ctx: Any) -> None:
        for _ in range(40):
            asyncio.get_running_loop().run_in_executor(None, gate.wait)

    bench = slots(1, coroutine=coroutine)
    assert bench.run("coroutine") == Finish("succeeded")
    gate.await_arrivals(MOST_THREADS)
    assert bench.free() == 0
    gate.open()
    gate.await_arrivals(40)
    wait_until(lambda: bench.free() == 1, "the slot")


def test_what_a_stop_abandons_is_no_reason_to_end(slots: Callable[..., Slots], gate: Gate) -> None:
    """The worker ends as it was asked to, and not for want of slots."""
    bench = slots(1, thread=lambda _: gate.wait())
    execution = bench.start("thread")
    gate.await_arrivals()
    bench.executor.wake()
    execution.stop(StopReason.SHUTDOWN)
    bench.executor.abandon_all()
    assert (bench.executor.lost, bench.broken) == (1, [])
    gate.open()
    wait_until(lambda: bench.free() == 1, "its end")


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_thread_that_is_about_to_end_costs_nothing(
    slots: Callable[..., Slots], gate: Gate, wrapped: bool
) -> None:
    """An ordinary cancel, or a time-out of the handler's own, leaves one for a moment. A function that is
    async without looking like it has an event loop of its own."""

    async def coroutine(_ctx: Any) -> str:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(gate.wait), 0.01)
        return "went on"

    bench = slots(1, coroutine=(lambda ctx: coroutine(ctx)) if wrapped else coroutine)
    assert bench.run("coroutine") == Finish("succeeded", output='"went on"')
    assert (bench.free(), bench.executor.lost, bench.broken) == (0, 0, [])
    gate.open()
    wait_until(lambda: bench.free() == 1, "the slot")
    assert (bench.executor.lost, bench.broken) == (0, [])


def test_the_end_calls_off_what_waits_while_the_last_thread_ends(gate: Gate) -> None:
    """Both tell of it at the same moment, which once hung the worker's stop."""
    idle: list[Execution] = []
    pool, execution = HandlerPool(MOST_THREADS, idle.append), an_execution()

    def calls() -> list[Future[Any]]:
        current.set(execution)
        return [pool.submit(gate.wait) for _ in range(MOST_THREADS + 1)]

    *running, waiting = contextvars.copy_context().run(calls)
    gate.await_arrivals(MOST_THREADS)
    execution.end()

    def end_the_others() -> None:
        """All but the one that waits end before it is told of."""
        gate.open()
        for each in running:
            each.result(20)
        wait_until(lambda: share.calls == 1, "what is told of their ends")

    share = pool._shares[execution]
    callbacks: Any = waiting
    callbacks._done_callbacks.insert(0, lambda _: end_the_others())
    thread = threading.Thread(target=pool.end, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    assert waiting.cancelled()
    with pytest.raises(RuntimeError, match="the worker has stopped"):
        contextvars.copy_context().run(calls)


def test_when_a_blocked_loop_ends_the_others_can_still_use_threads(
    slots: Callable[..., Slots], gate: Gate
) -> None:
    """A loop that was set aside closes what it takes for its own."""

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
