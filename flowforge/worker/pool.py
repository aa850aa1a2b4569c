"""The threads of asyncio.to_thread: whose they are, and whether they have ended with their handler."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from flowforge.worker.execution import Execution

current: ContextVar[Execution | None] = ContextVar("flowforge execution", default=None)
"""The execution whose handler's code runs, on event loops and in what they hand to threads."""


class HandlerPool(ThreadPoolExecutor):
    """The default executor of the handlers' event loops.

    A coroutine can be cancelled, and a thread that it waits for cannot: that goes on, whatever became of the
    handler. `on_idle` is told of an execution when the last such thread of it ends.
    """

    def __init__(self, threads: int, on_idle: Callable[[Execution], None]) -> None:
        super().__init__(threads, "flowforge-to-thread")
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._busy: Counter[Execution] = Counter()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As ThreadPoolExecutor.submit, for the current execution."""
        execution = current.get()
        if execution is None:
            return super().submit(fn, *args, **kwargs)

        def run() -> Any:
            with self._lock:
                self._busy[execution] += 1
            try:
                return fn(*args, **kwargs)
            finally:
                self._left(execution)

        return super().submit(run)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: an event loop does this to its default executor when it is closed, and others go on."""

    def end(self) -> None:
        """Begin nothing more. The threads that run go on until the process ends."""
        super().shutdown(wait=False, cancel_futures=True)

    def busy(self, execution: Execution) -> bool:
        """Whether a thread of it runs."""
        with self._lock:
            return execution in self._busy

    def _left(self, execution: Execution) -> None:
        with self._lock:
            self._busy[execution] -= 1
            idle = not self._busy[execution]
            if idle:
                del self._busy[execution]
        if idle:
            self._on_idle(execution)
