"""Event loops for async handlers.

One handler that blocks its event loop holds up all others on it, and asyncio can do nothing about that. So a
loop is asked now and then whether it still runs, and one that does not is set aside: what has not begun there
begins on another.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from flowforge import log
from flowforge.worker.execution import Execution

_log = log.of("worker")

Start = Callable[["HandlerLoop", Execution, Any], Coroutine[Any, Any, None]]


class HandlerLoop:
    """An event loop, to be `run` by a thread of its own. Everything but `run` is for any thread."""

    def __init__(
        self, start: Start, unstarted: Callable[[Execution], None], pool: ThreadPoolExecutor
    ) -> None:
        """`start(loop, execution, handler)` makes the coroutine of one execution, which calls `begin` first
        and `left` last; `unstarted` is told of one whose coroutine was cancelled before; `pool` runs what
        handlers hand to threads."""
        self.missed = 0
        """How many times in a row it was asked in vain."""
        self._start, self._unstarted = start, unstarted
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(pool)
        self._lock = threading.Lock()  # of these two
        self._waiting: dict[Execution, Any] = {}
        self._begun: set[Execution] = set()
        self._tasks: dict[asyncio.Task[None], Execution] = {}
        self._asked_at: float | None = None
        self._retired = self._ending = False

    # -- executions

    def submit(self, items: Iterable[tuple[Execution, Any]]) -> None:
        """Run these executions with their handlers."""
        given = list(items)
        with self._lock:
            self._waiting.update(given)
        self._call(lambda: self._create_tasks(given))

    def begin(self, execution: Execution) -> bool:
        """The execution begins here. False when it was withdrawn: it is none of this loop's business."""
        with self._lock:
            if self._waiting.pop(execution, None) is None:
                return False
            self._begun.add(execution)
            return True

    def left(self, execution: Execution) -> None:
        """The execution has ended here."""
        with self._lock:
            self._begun.discard(execution)
            if self._retired and not self._begun:
                self._end()

    def withdraw(self, execution: Execution) -> bool:
        """Take the execution back. False when it has begun, or is not here."""
        with self._lock:
            return self._waiting.pop(execution, None) is not None

    def has(self, execution: Execution) -> bool:
        """Whether the execution waits or has begun here."""
        with self._lock:
            return execution in self._waiting or execution in self._begun

    @property
    def begun(self) -> list[Execution]:
        """The executions that have begun here and not ended."""
        with self._lock:
            return list(self._begun)

    @property
    def current(self) -> Execution | None:
        """The execution whose own code runs at this moment, if that is known: the one that blocks a blocked
        loop."""
        task = asyncio.current_task(self._loop)
        return None if task is None else self._tasks.get(task)

    # -- whether it runs

    def ask(self) -> None:
        """Ask whether it runs, unless it has yet to answer."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._call(self._answer)

    def look(self) -> int:
        """To be called regularly: count whether it has answered since the last time, and ask again. The
        count, `missed`, is of calls and not of seconds, in which the whole process may have stood still."""
        self.missed = 0 if self._asked_at is None else self.missed + 1
        with self._lock:
            busy = self._waiting or self._begun
        if busy:
            self.ask()
        return self.missed

    @property
    def silent(self) -> float:
        """Seconds since it was asked whether it runs, without an answer; 0 when it has answered."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def _answer(self) -> None:
        self._asked_at = None

    # -- its end

    def retire(self) -> list[tuple[Execution, Any]]:
        """Take nothing more, and end when what has begun here has ended. What has not begun, to be submitted
        elsewhere."""
        with self._lock:
            moved = list(self._waiting.items())
            self._waiting.clear()
            self._retired = True
            if not self._begun:
                self._end()
            return moved

    def close(self) -> None:
        """End now; what runs is cancelled."""
        with self._lock:
            self._end()

    def discard(self) -> None:
        """Let go of what it holds: it is not going to be run."""
        self._loop.close()

    def run(self) -> None:
        """In its thread, until it is retired and empty, or closed."""
        asyncio.set_event_loop(self._loop)
        while not self._ending:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: BLE001 -- SystemExit of a task that a handler has made
                _log.exception("a task of an async handler tried to end the worker")
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        if pending:
            self._loop.run_until_complete(asyncio.wait(pending, timeout=1))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _end(self) -> None:
        self._ending = True
        self._call(self._loop.stop)

    def _call(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # it is closed
            self._loop.call_soon_threadsafe(callback)

    def _create_tasks(self, items: Iterable[tuple[Execution, Any]]) -> None:
        for execution, handler in items:
            # The loop itself keeps only weak references to tasks.
            task = self._loop.create_task(self._start(self, execution, handler))
            self._tasks[task] = execution
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        execution = self._tasks.pop(task)
        # Another handler may cancel whatever the loop has, and a task cancelled before its first step takes
        # none.
        if self.withdraw(execution):
            self._unstarted(execution)
