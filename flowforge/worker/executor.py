"""Running handlers: slots, threads for sync handlers, one event loop for async ones, and time limits."""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from flowforge import log
from flowforge.errors import Cancelled
from flowforge.worker.execution import Execution, Release, Report, StopReason, judge

_log = log.of("worker")

STOP_MOMENT = 2.0
"""Seconds that a handler past its time limit gets to stop before it is abandoned."""


class Handler(Protocol):
    """A function of one context, sync or async."""

    def __call__(self, ctx: Any, /) -> Any: ...


class Executor:
    """Runs handlers in a bounded number of slots.

    A slot is reserved before its task run is claimed, and free again when the handler has ended. A handler
    that does not stop at its time limit takes its slot with it, until it ends after all: a thread can be told
    to stop, and not be made to. `on_broken` is told when no slot is left, or when one of the threads dies.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        slots: int,
        context: Callable[[Execution], Any],
        report: Callable[[Execution, Report], None],
        on_broken: Callable[[str], None],
    ) -> None:
        functions = {name: getattr(handler, "function", handler) for name, handler in handlers.items()}
        self._handlers = {
            name: (function, inspect.iscoroutinefunction(function)) for name, function in functions.items()
        }
        self._slots, self._context, self._report, self._on_broken = slots, context, report, on_broken
        self._changed = threading.Condition()
        self._free = slots
        self._lost = 0
        self._running: set[Execution] = set()
        self._queue: queue.SimpleQueue[tuple[Execution, Handler] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._in_threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        self._pid = os.getpid()

    def knows(self, handler: str) -> bool:
        """Whether there is a handler of that name."""
        return handler in self._handlers

    def reserve(self, most: int, timeout: float) -> int:
        """Reserve up to `most` free slots; waits up to `timeout` seconds for the first. Returns how many,
        possibly 0."""
        with self._changed:
            if self._free == 0 and timeout > 0:
                self._changed.wait_for(lambda: self._free > 0 or self._stopping, timeout)
            taken = max(0, min(most, self._free))
            self._free -= taken
            return taken

    def give_back(self, slots: int) -> None:
        """Free reserved slots that nothing was claimed for."""
        with self._changed:
            self._free += slots
            self._changed.notify_all()

    def wake(self) -> None:
        """Let a waiting `reserve` return at once, with nothing if nothing is free, and wait no more from now
        on."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    @property
    def exhausted(self) -> bool:
        """Whether every slot is lost to a handler that does not stop."""
        return self._lost == self._slots

    @property
    def lost(self) -> int:
        """How many slots are lost to handlers that do not stop."""
        return self._lost

    def start(self, executions: Iterable[Execution]) -> None:
        """Run the handlers of `executions`, each in a slot reserved for it."""
        coroutines: list[tuple[Execution, Handler]] = []
        threaded: list[tuple[Execution, Handler]] = []
        for execution in executions:
            handler, is_async = self._handlers[execution.claim.handler]
            (coroutines if is_async else threaded).append((execution, handler))
        with self._changed:
            self._running.update(execution for execution, _ in (*coroutines, *threaded))
            self._in_threads += len(threaded)
            while len(self._threads) < self._in_threads:
                self._threads.append(self._thread(self._work, f"flowforge-handler-{len(self._threads)}"))
            if coroutines and self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._loop_thread = self._thread(lambda: self._run_loop(loop), "flowforge-handlers")
            if any(execution.alarm is not None for execution, _ in (*coroutines, *threaded)):
                if self._watch is None:
                    self._watch = self._thread(self._keep_time, "flowforge-time-limits")
                self._changed.notify_all()
        for each in threaded:
            self._queue.put(each)
        if coroutines and self._loop is not None:
            self._loop.call_soon_threadsafe(self._start_coroutines, self._loop, coroutines)

    def wait_idle(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until no handler runs. True when none does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout)

    def stop_all(self, reason: StopReason) -> int:
        """Tell every handler to stop; returns how many were told."""
        with self._changed:
            running = list(self._running)
        return sum(execution.stop(reason) for execution in running)

    def abandon_all(self) -> None:
        """Make the report of every handler that still runs, without waiting for it."""
        with self._changed:
            running = list(self._running)
        for execution in running:
            self._abandon(execution)

    def close(self) -> None:
        """End the threads that are idle. Those of abandoned handlers go on until the process ends."""
        with self._changed:
            self._stopping = self._closed = True
            self._changed.notify_all()
        for _ in self._threads:
            self._queue.put(None)
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)
        for thread in (*self._threads, self._loop_thread, self._watch):
            if thread is not None:
                thread.join(0 if self._lost else 5)

    # -- in the threads

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run(*item)
            del item

    def _run(self, execution: Execution, handler: Handler) -> None:
        begun, returned, raised = False, None, None
        try:
            begun = execution.begin()
            if begun:
                returned = handler(self._context(execution))
                if inspect.iscoroutine(returned):
                    # A function that is async without looking like it, such as a wrapped one.
                    returned = asyncio.run(_awaited(execution, returned))
        except BaseException as exc:  # noqa: BLE001 -- SystemExit of a handler must not end the worker
            raised = exc
        self._leave_if_forked(raised)
        self._ended(execution, begun, returned, raised, in_thread=True)

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while not self._closed:
            try:
                loop.run_forever()
            except BaseException:  # noqa: BLE001 -- SystemExit of a task that a handler has made
                _log.exception("a task of an async handler tried to end the worker")
        pending = asyncio.all_tasks(loop)
        for task in pending:
            task.cancel()
        if pending:
            loop.run_until_complete(asyncio.wait(pending, timeout=1))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _start_coroutines(
        self, loop: asyncio.AbstractEventLoop, items: list[tuple[Execution, Handler]]
    ) -> None:
        for execution, handler in items:
            # The loop itself keeps only weak references to tasks.
            task = loop.create_task(self._run_coroutine(execution, handler))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_coroutine(self, execution: Execution, handler: Handler) -> None:
        begun, returned, raised = False, None, None
        try:
            begun = execution.begin()
            if begun:
                returned = await _awaited(execution, handler(self._context(execution)))
        except BaseException as exc:  # noqa: BLE001 -- neither cancellation nor SystemExit may reach the loop
            raised = exc
        self._leave_if_forked(raised)
        self._ended(execution, begun, returned, raised, in_thread=False)

    def _leave_if_forked(self, raised: BaseException | None) -> None:
        """A handler forked, and this is the child on its way out: it must touch nothing of the parent's."""
        if os.getpid() != self._pid:
            code = raised.code if isinstance(raised, SystemExit) else int(raised is not None)
            os._exit(code if isinstance(code, int) else int(code is not None))

    def _ended(
        self,
        execution: Execution,
        begun: bool,
        returned: object,
        raised: BaseException | None,
        *,
        in_thread: bool,
    ) -> None:
        """One report, and the slot free again. Raises nothing: neither a thread nor the loop could go on."""
        in_time = True
        try:
            in_time = execution.end()
            if in_time:
                self._report(execution, _report_of(execution, begun, returned, raised))
        except BaseException as exc:  # noqa: BLE001 -- a task run that is not reported must not go unnoticed
            _log.exception("a handler's end could not be reported", task_run=execution.claim.task_run_id)
            self._on_broken(f"a handler's end could not be reported: {exc!r}")
        finally:
            with self._changed:
                self._running.discard(execution)
                self._in_threads -= in_thread
                self._lost -= not in_time
                self._free += 1
                self._changed.notify_all()

    # -- time limits

    def _keep_time(self) -> None:
        with self._changed:
            while not self._closed:
                alarms = [execution.alarm for execution in self._running if execution.alarm is not None]
                now = time.monotonic()
                if not alarms:
                    self._changed.wait()
                elif min(alarms) > now:
                    self._changed.wait(min(alarms) - now)
                else:
                    due = [each for each in self._running if each.alarm is not None and each.alarm <= now]
                    self._changed.release()
                    try:
                        for execution in due:
                            self._out_of_time(execution)
                    finally:
                        self._changed.acquire()

    def _out_of_time(self, execution: Execution) -> None:
        """First alarm: tell the handler to stop. Second: go on without it."""
        if not execution.overdue and execution.deadline is not None:
            if execution.deadline > time.monotonic():
                execution.alarm = execution.deadline  # it was prolonged
                return
            execution.overdue = True
            execution.alarm = time.monotonic() + STOP_MOMENT
            execution.stop(StopReason.TIME_LIMIT)
        else:
            execution.alarm = None
            self._abandon(execution)

    def _abandon(self, execution: Execution) -> None:
        if not execution.abandon():
            return
        _log.warning(
            "handler does not stop; going on without it and its slot",
            task_run=execution.claim.task_run_id, handler=execution.claim.handler,
            reason=execution.stop_reason.value if execution.stop_reason else "",
        )  # fmt: skip
        with self._changed:
            self._running.discard(execution)
            self._lost += 1
            self._changed.notify_all()
        self._report(execution, judge(execution, None, Cancelled()))
        if self.exhausted:
            self._on_broken("every slot is lost to a handler that does not stop")

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as exc:  # noqa: BLE001 -- a thread that dies must not go unnoticed
                _log.exception("running handlers broke down")
                self._on_broken(f"running handlers broke down: {exc!r}")

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        thread.start()
        return thread


def _report_of(execution: Execution, begun: bool, returned: object, raised: BaseException | None) -> Report:
    if not begun:
        return None if execution.stop_reason is StopReason.LOST else Release("unstarted")
    if execution.finished and (raised is not None or returned is not None):
        _log.warning(
            "what the handler did after its transaction had finished the task run does not count",
            task_run=execution.claim.task_run_id, error=type(raised).__name__ if raised else None,
        )  # fmt: skip
    return judge(execution, returned, raised)


async def _awaited(execution: Execution, coroutine: Awaitable[object]) -> object:
    """What `coroutine` returns, in a task that is cancelled when the handler is told to stop."""
    execution.run_as(asyncio.current_task())
    return await coroutine
