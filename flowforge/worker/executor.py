"""Running handlers: slots, threads for sync handlers, an event loop for async ones, and time limits."""

from __future__ import annotations

import contextvars
import inspect
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from flowforge import log, threads, tracing
from flowforge.errors import Cancelled
from flowforge.worker.children import Children, NotStarted
from flowforge.worker.execution import (
    Execution,
    Report,
    StopReason,
    awaited,
    judge,
    leave_if_forked,
    report_of,
    tell_log,
    undescribed,
    unstarted,
)
from flowforge.worker.failures import Failures
from flowforge.worker.loops import HandlerLoop
from flowforge.worker.pool import current, run_alone
from flowforge.worker.slots import STOP_MOMENT, Slots

_log = log.of("worker")

LOST_MOMENT = 10.0
"""As STOP_MOMENT, for one that has lost its lease. It is longer since an outage of the database strikes all
handlers at once, and without slots a worker ends."""

_EXHAUSTED = "every slot is lost to a handler that does not stop"

KILL_MOMENT = 5.0
"""Seconds that the ends of killed processes are waited for."""

BLOCKED_AFTER = 5
"""Seconds that an event loop may not run before it is set aside."""


class Handler(Protocol):
    """A function of one context, sync or async."""

    def __call__(self, ctx: Any, /) -> Any: ...


class Executor:
    """Runs handlers in a bounded number of slots.

    A slot is reserved before its task run is claimed, and free again when the handler has ended. A handler
    that does not stop at its time limit, or when its lease is lost, takes its slot with it, until it ends
    after all: a thread can be told to stop, and not be made to. `on_broken` is told when no slot is left, or
    when one of the threads dies. One that runs in a process of its own (`children`) is killed instead, and
    keeps its slot.

    An event loop that a handler blocks is set aside: what has not begun there begins on a fresh one. When
    something on it has to stop meanwhile, which takes a running loop, it is given up with all that has begun
    there.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        slots: int,
        context: Callable[[Execution], Any],
        report: Callable[[Execution, Report], None],
        on_broken: Callable[[str], None],
        children: Children | None = None,
        spans: tracing.Spans = tracing.no_span,
    ) -> None:
        """`children` run the handlers whose names they know. `spans` surround the others."""
        isolated = children.handlers if children is not None else frozenset[str]()
        functions = {name: getattr(handler, "function", handler) for name, handler in handlers.items()}
        self._handlers = {
            name: (function, name not in isolated and inspect.iscoroutinefunction(function))
            for name, function in functions.items()
        }
        self._children, self._spans = children, spans
        self._slots = Slots(slots, lambda: on_broken(_EXHAUSTED))
        self._context, self._report, self._on_broken = context, report, on_broken
        self._failures = Failures()
        self._changed = threading.Condition()
        self._running: set[Execution] = set()
        self._queue: queue.SimpleQueue[tuple[Execution, Handler] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._in_threads = 0
        self._is_async = any(is_async for _, is_async in self._handlers.values())
        self._loop: HandlerLoop | None = None  # for what comes next
        self._no_loop = ""  # why there can be none
        self._wanted = 0  # threads that there were not when they were asked for
        self._no_thread = ""  # why
        self._loops: dict[HandlerLoop, threading.Thread] = {}  # with those set aside that have not ended
        self._blocked: dict[HandlerLoop, str] = {}  # of these, with what runs there
        self._watch: threading.Thread | None = None
        self._look = threading.Event()
        self._looks_at = float("inf")
        self._closed = False
        self._pid = os.getpid()

    def knows(self, handler: str) -> bool:
        """Whether there is a handler of that name."""
        return handler in self._handlers

    def reserve(self, most: int, timeout: float) -> int:
        """Reserve up to `most` free slots; waits up to `timeout` seconds for the first. Returns how many,
        possibly 0; also when there can be no thread or event loop for handlers."""
        with self._changed:
            usable = self._usable(most)
        if usable < min(most, 1):
            time.sleep(timeout)
            return 0
        return self._slots.reserve(usable, timeout)

    def _usable(self, most: int) -> int:
        """How many of `most` handlers could be run at present, as far as is known; the caller holds the
        lock."""
        if self._is_async and self._loop is None and not self._renew_loop():
            return 0
        try:
            if self._watch is None:
                self._watch = self._thread(self._keep_time, "flowforge-time-limits")
            self._add_threads(self._wanted)
        except threads.NoThread as exc:
            self._lacks_threads(exc)
            return min(most, len(self._threads) - self._in_threads) if self._watch is not None else 0
        self._no_thread = ""
        return most

    def give_back(self, slots: int) -> None:
        """Free reserved slots that nothing was claimed for."""
        self._slots.give_back(slots)

    def wake(self) -> None:
        """Let `reserve` wait for no slot any more, from now on: it answers with what is free."""
        self._slots.wake()

    @property
    def running(self) -> list[Execution]:
        """What runs or is about to, but for what was abandoned."""
        with self._changed:
            return list(self._running)

    @property
    def exhausted(self) -> bool:
        """Whether every slot is lost to a handler that does not stop."""
        return self._slots.exhausted

    @property
    def slots(self) -> dict[str, int]:
        """How many slots are busy (reserved, with a handler, or kept by what it has left), free and lost."""
        return self._slots.states

    @property
    def lost(self) -> int:
        """How many slots are lost to handlers that do not stop, or whose threads do not."""
        return self._slots.lost

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
            try:
                self._add_threads(self._in_threads)
            except threads.NoThread as exc:
                self._wanted = self._in_threads
                self._lacks_threads(exc)
            begun = len(threaded) - max(0, self._in_threads - len(self._threads))
            threaded, without = threaded[:begun], threaded[begun:]
            if coroutines:
                assert self._loop is not None  # noqa: S101 -- since slots were reserved
                self._loop.submit(coroutines)
        for each in threaded:
            self._queue.put(each)
        for execution, _ in without:
            self._unstarted(execution, in_thread=True)
        alarms = (execution.alarm for execution, _ in (*coroutines, *threaded))
        if any(alarm is not None and alarm < self._looks_at for alarm in alarms):
            self._look.set()

    def _add_threads(self, count: int) -> None:
        """For handlers, up to `count`; the caller holds the lock. Raises NoThread."""
        while len(self._threads) < count:
            self._threads.append(self._thread(self._work, f"flowforge-handler-{len(self._threads)}"))

    def _lacks_threads(self, exc: threads.NoThread) -> None:
        if not self._no_thread:
            _log.warning("no thread for handlers; trying again", error=str(exc))
        self._no_thread = str(exc)

    def wait_idle(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until no handler runs. True when none does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout)

    def stop_all(self, reason: StopReason) -> int:
        """Tell every handler to stop; returns how many were told."""
        return sum(execution.stop(reason) for execution in self.running)

    def abandon_all(self) -> None:
        """Make the report of every handler that still runs, without waiting for it; those in processes of
        their own are killed, and waited for."""
        for execution in self.running:
            self._abandon(execution)
        self.wait_idle(KILL_MOMENT)

    def close(self) -> None:
        """End the threads that are idle. Those of abandoned handlers go on until the process ends."""
        with self._changed:
            self._closed = True
            loops = dict(self._loops)
        self._slots.wake()
        self._look.set()
        if self._children is not None:
            self._children.close()  # before the threads: a child dies with the one that started it
        for _ in self._threads:
            self._queue.put(None)
        for loop in loops:
            loop.close()
        for thread in (*self._threads, *loops.values(), self._watch):
            if thread is not None:
                thread.join(0 if self.lost else 5)
        self._slots.pool.end()
        self._failures.flush()

    # -- in the threads

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            self._run(*item)
            del item

    def _run(self, execution: Execution, handler: Handler) -> None:
        if (children := self._children) is not None and execution.claim.handler in children.handlers:
            self._run_isolated(execution, children)
            return
        begun, returned, raised = False, None, None
        try:
            begun = execution.begin()
            if begun:
                with self._spans(execution):
                    # In a context of its own: what a handler sets there is not for the next one on this
                    # thread.
                    context = contextvars.copy_context()
                    context.run(tell_log, execution)
                    returned = context.run(handler, self._context(execution))
                    if inspect.iscoroutine(returned):
                        # A function that is async without looking like it, such as a wrapped one.
                        returned = context.run(run_alone, execution, returned, self._slots.pool)
        except BaseException as exc:  # noqa: BLE001 -- SystemExit of a handler must not end the worker
            raised = exc
        leave_if_forked(self._pid, raised)
        self._ended(execution, lambda: _judged(execution, begun, returned, raised), in_thread=True)
        # Its traceback holds this frame: together they would keep all that the handler had.
        returned = raised = None

    def _run_isolated(self, execution: Execution, children: Children) -> None:
        try:
            report = children.run(execution) if execution.begin() else unstarted(execution)
        except NotStarted as exc:
            report = unstarted(execution)
            self._on_broken(str(exc))
        self._ended(execution, lambda: report, in_thread=True)

    def _renew_loop(self) -> bool:
        """Make an event loop for what comes next; the caller holds the lock. False when there can be none at
        present, for want of descriptors or of a thread: then all stays as it is."""
        loop = None
        try:
            loop = HandlerLoop(self._run_coroutine, self._unstarted, self._slots.pool)
            thread = self._thread(partial(self._run_loop, loop), "flowforge-handlers")
        except OSError as exc:
            if loop is not None:
                loop.discard()
            if not self._no_loop:
                _log.warning("no event loop can be made; trying again", error=str(exc))
            self._no_loop = f"no event loop can be made: {exc}"
            return False
        self._loop, self._no_loop = loop, ""
        self._loops[loop] = thread
        return True

    def _run_loop(self, loop: HandlerLoop) -> None:
        try:
            loop.run()
        finally:
            with self._changed:
                self._loops.pop(loop, None)
                self._blocked.pop(loop, None)

    async def _run_coroutine(self, loop: HandlerLoop, execution: Execution, handler: Handler) -> None:
        if not loop.begin(execution):
            return
        begun, returned, raised = False, None, None
        try:
            begun = execution.begin()
            current.set(execution)
            tell_log(execution)
            if begun:
                with self._spans(execution):
                    returned = await awaited(execution, handler(self._context(execution)))
        except BaseException as exc:  # noqa: BLE001 -- neither cancellation nor SystemExit may reach the loop
            raised = exc
        leave_if_forked(self._pid, raised)
        self._ended(execution, lambda: _judged(execution, begun, returned, raised), in_thread=False)
        returned = raised = None  # as in a thread
        loop.left(execution)

    def _unstarted(self, execution: Execution, *, in_thread: bool = False) -> None:
        """It was taken back before it began, or there is no thread for it."""
        self._ended(execution, lambda: unstarted(execution), in_thread=in_thread)

    def _ended(self, execution: Execution, made: Callable[[], Report], *, in_thread: bool) -> None:
        """One report, and the slot free again. Raises nothing: neither a thread nor the loop could go on."""
        in_time = True
        try:
            in_time = execution.end()
            if in_time:
                report = made()
                self._report(execution, report)
                self._failures.tell(execution, report)
        except BaseException as exc:  # noqa: BLE001 -- a task run that is not reported must not go unnoticed
            _log.exception("a handler's end could not be reported", task_run=execution.claim.task_run_id)
            self._on_broken(f"a handler's end could not be reported: {exc!r}")
        finally:
            execution.lost_by = None  # it holds the handler's frames, and they hold the execution
            with self._changed:
                self._running.discard(execution)
                self._in_threads -= in_thread
                self._changed.notify_all()
            self._slots.ended(execution, lost=not in_time)

    # -- time limits, and what does not stop

    def _keep_time(self) -> None:
        beat_at = 0.0
        while not self._closed:
            self._look.clear()
            # What is started from here on has to wake this thread.
            self._looks_at = float("inf")
            running, now = self.running, time.monotonic()
            if now >= beat_at:
                beat_at = now + 1
                self._look_at_loops()
                self._slots.look()
                self._failures.flush()
            for execution in running:
                if execution.stop_reason is StopReason.LOST and not execution.overdue:
                    self._expect_end(execution, LOST_MOMENT)
                elif execution.alarm is not None and execution.alarm <= now:
                    self._out_of_time(execution)
            alarms = [execution.alarm for execution in running if execution.alarm is not None]
            self._looks_at = min([beat_at, *alarms])
            self._look.wait(max(0.0, self._looks_at - time.monotonic()))

    def _out_of_time(self, execution: Execution) -> None:
        """First alarm: tell the handler to stop. Second: go on without it."""
        if not execution.overdue and execution.deadline is not None:
            if execution.deadline > time.monotonic():
                execution.alarm = execution.deadline  # it was prolonged
                return
            execution.stop(StopReason.TIME_LIMIT)
            self._expect_end(execution, STOP_MOMENT)
        else:
            execution.alarm = None
            loop = self._loop_of(execution)
            if loop is not None and loop.silent >= STOP_MOMENT and execution in loop.begun:
                self._give_up(loop)
            self._abandon(execution)

    def _expect_end(self, execution: Execution, seconds: float) -> None:
        """It was told to stop, and has so many seconds for it."""
        execution.overdue = True
        if (loop := self._loop_of(execution)) is not None:
            loop.ask()
        execution.alarm = time.monotonic() + seconds

    def _abandon(self, execution: Execution) -> None:
        """Go on without the handler: unstarted when it has not begun, else with its slot lost."""
        loop = self._loop_of(execution)
        if loop is not None and loop.withdraw(execution):
            self._unstarted(execution)
        elif execution.kill():
            _log.warning(
                "handler does not stop; its process is killed", **execution.claim.named(),
                reason=execution.stop_reason.value if execution.stop_reason else "",
            )  # fmt: skip
        elif execution.abandon():
            _log.warning(
                "handler does not stop; going on without it and its slot", **execution.claim.named(),
                reason=execution.stop_reason.value if execution.stop_reason else "",
            )  # fmt: skip
            self._abandoned(execution)

    def _abandoned(self, execution: Execution) -> None:
        with self._changed:
            self._running.discard(execution)
            self._changed.notify_all()
        report = judge(execution, None, Cancelled())
        self._report(execution, report)
        self._failures.tell(execution, report)
        self._slots.lose()

    # -- event loops that do not run

    @property
    def blocked(self) -> str:
        """The handlers on event loops that do not run, those whose threads keep every slot, and why no event
        loop can be made, or thread or process be started, or nothing."""
        children = self._children.problem if self._children is not None else ""
        with self._changed:
            lacks = (self._no_loop, self._no_thread)
            reasons = [*self._blocked.values(), self._slots.taken, *lacks, children]
        return "; ".join(filter(None, reasons))

    def _loop_of(self, execution: Execution) -> HandlerLoop | None:
        with self._changed:
            loops = list(self._loops)
        return next((loop for loop in loops if loop.has(execution)), None)

    def _look_at_loops(self) -> None:
        with self._changed:
            loops = list(self._loops)
        for loop in loops:
            missed = loop.look()
            if missed == 0:
                with self._changed:
                    self._blocked.pop(loop, None)
            elif missed == BLOCKED_AFTER and not _all_ended(loop.begun):
                names = _names(loop)
                with self._changed:
                    self._blocked[loop] = f"the event loop is blocked by {names}"
                _log.warning(
                    "an event loop is blocked; other async handlers begin on a fresh one",
                    handler=names, seconds=round(loop.silent),
                )  # fmt: skip
            if missed >= BLOCKED_AFTER:
                self._set_aside(loop)

    def _set_aside(self, loop: HandlerLoop) -> None:
        """What has not begun there begins on a fresh loop, and so does what comes next."""
        with self._changed:
            if self._loop is loop and self._renew_loop():
                self._loop.submit(loop.retire())

    def _give_up(self, loop: HandlerLoop) -> None:
        """Nothing on it can be stopped: go on without all that has begun there. What nobody had told to stop
        is given back as after a crash."""
        names = _names(loop)
        self._set_aside(loop)
        abandoned = []
        for execution in loop.begun:
            if execution.stop_reason is None:
                execution.stop(StopReason.BLOCKED)
            if execution.abandon():
                abandoned.append(execution)
        with self._changed:
            self._blocked.pop(loop, None)
        if abandoned:
            _log.warning(
                "an event loop is blocked; going on without all handlers on it, and their slots",
                handler=names, count=len(abandoned), seconds=round(loop.silent),
            )  # fmt: skip
        for execution in abandoned:
            self._abandoned(execution)

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                target()
            except BaseException as exc:  # noqa: BLE001 -- a thread that dies must not go unnoticed
                _log.exception("running handlers broke down")
                self._on_broken(f"running handlers broke down: {exc!r}")

        return threads.start(threading.Thread(target=guarded, name=name, daemon=True))


def _judged(execution: Execution, begun: bool, returned: object, raised: BaseException | None) -> Report:
    try:
        return report_of(execution, returned, raised) if begun else unstarted(execution)
    except MemoryError as exc:
        return undescribed(raised or exc)


def _all_ended(executions: Collection[Execution]) -> bool:
    return bool(executions) and all(execution.ended for execution in executions)


def _names(loop: HandlerLoop) -> str:
    """The handler that blocks `loop`, or all that may."""
    current = loop.current
    found = {
        f"{each.claim.handler} (run {each.claim.run_id})" for each in (current and [current]) or loop.begun
    }
    return ", ".join(sorted(found)) or "what a handler left behind"
