"""The threads of asyncio.to_thread: whose they are, and whether they have ended with their handler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

from flowforge.worker.execution import Execution, awaited

current: ContextVar[Execution | None] = ContextVar("flowforge execution", default=None)
"""The execution whose handler's code runs, on event loops and in what they hand to threads."""

_NAME = "flowforge-to-thread"

MOST_THREADS = 32
"""Of one execution, as asyncio has at most."""

_LEAST_THREADS = 8
_THREADS_OF_ALL = 256


def threads_each(slots: int) -> int:
    """How many threads each of so many executions may have. It is known from the beginning, and nothing that
    the others do changes it: calls of one handler may wait for each other. All together have 256 at most, or
    eight for each slot."""
    return max(_LEAST_THREADS, min(MOST_THREADS, _THREADS_OF_ALL // slots))


class _Share(ThreadPoolExecutor):
    """The threads of one execution."""

    calls = 0
    """That have not ended."""


class HandlerPool(ThreadPoolExecutor):
    """The default executor of the handlers' event loops, in which each execution has up to `threads` of its
    own. However many hang, others go on.

    A coroutine can be cancelled, and a thread that it waits for cannot: that goes on, whatever became of the
    handler. `on_idle` is told of an execution when the last call of it ends.
    """

    def __init__(self, threads: int, on_idle: Callable[[Execution], None]) -> None:
        super().__init__(threads, _NAME)  # for what is no execution's
        self._threads_each, self._on_idle = threads, on_idle
        self._lock = threading.Lock()
        self._shares: dict[Execution, _Share] = {}
        self._ended = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As ThreadPoolExecutor.submit, for the current execution."""
        execution = current.get()
        if execution is None:
            return super().submit(fn, *args, **kwargs)
        with self._lock:
            if self._ended:
                raise RuntimeError("the worker has stopped")
            share = self._shares.get(execution)
            if share is None:
                share = self._shares[execution] = _Share(self._threads_each, _NAME)
            future = share.submit(fn, *args, **kwargs)
            share.calls += 1
        future.add_done_callback(lambda _: self._done(execution, share))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing: an event loop does this to its default executor when it is closed, and others go on."""

    def end(self) -> None:
        """Begin nothing of what waits. The threads that run go on until the process ends."""
        super().shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._ended = True
            shares, self._shares = list(self._shares.values()), {}
        # Without the lock: a share tells of each call that it calls off while it holds one of its own, which
        # `submit` takes second.
        for share in shares:
            share.shutdown(wait=False, cancel_futures=True)

    def busy(self, execution: Execution) -> bool:
        """Whether a call of `execution`, whose handler has ended, has not."""
        with self._lock:
            idle = self._taken_if_idle(execution)
            busy = execution in self._shares
        if idle is not None:
            idle.shutdown(wait=False)
        return busy

    def _done(self, execution: Execution, share: _Share) -> None:
        with self._lock:
            share.calls -= 1
            idle = self._taken_if_idle(execution) if execution.ended else None
        if idle is not None:
            idle.shutdown(wait=False)
            self._on_idle(execution)

    def _taken_if_idle(self, execution: Execution) -> _Share | None:
        """Its threads, of which none is of use any more: they are for the caller to end, without the lock."""
        share = self._shares.get(execution)
        return self._shares.pop(execution) if share is not None and share.calls == 0 else None


class LeavingPool(ThreadPoolExecutor):
    """The default executor of one event loop, whose end waits for none of its threads."""

    def __init__(self) -> None:
        super().__init__(MOST_THREADS, _NAME)
        self._unfinished: set[Future[Any]] = set()

    @property
    def busy(self) -> bool:
        """Whether a call has not ended."""
        return bool(self._unfinished)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As ThreadPoolExecutor.submit."""
        future = super().submit(fn, *args, **kwargs)
        self._unfinished.add(future)
        future.add_done_callback(self._unfinished.discard)
        return future


def run_alone(execution: Execution, coroutine: Awaitable[object], pool: ThreadPoolExecutor) -> object:
    """What `coroutine` returns, on an event loop of its own. `pool` runs what it hands to threads, for which
    nobody waits: asyncio's own would be waited for."""

    async def main() -> object:
        current.set(execution)
        return await awaited(execution, coroutine)

    async def leave_executor(_timeout: float | None = None) -> None:
        # Closing the loop shuts the executor down. To wait for it asyncio would start a thread, and where
        # there can be none, as under a memory limit, that would take the place of what the handler returned.
        pass

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        loop.set_default_executor(pool)
        loop.shutdown_default_executor = leave_executor  # type: ignore[method-assign]
        return runner.run(main())
