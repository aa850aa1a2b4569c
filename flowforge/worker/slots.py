"""The slots of a worker: which are free, and which are not, though no handler runs in them any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from flowforge import log
from flowforge.worker.execution import Execution, StopReason
from flowforge.worker.pool import HandlerPool, threads_each

_log = log.of("worker")

STOP_MOMENT = 2.0
"""Seconds that a handler past its time limit gets to stop before it is abandoned."""

LEFT_MOMENT = 10.0
"""Seconds after which it is told that a thread has not ended which a handler has left."""

_TOLD = float("inf")


@dataclass
class _Left:
    """Threads that a handler has left: when to look whether they have ended, and whether its slot is lost."""

    look_at: float
    lost: bool


class Slots:
    """A bounded number of slots. For any thread.

    A slot is free again when its handler has ended, and all threads of the pool that it has left. It is lost
    when the handler does not stop, or, past its time limit, its threads do not end. Of others' threads it is
    not known that they should have ended: they keep the slot, and that is told.
    """

    def __init__(self, count: int, on_exhausted: Callable[[], None]) -> None:
        """`on_exhausted` is told when the last slot is lost, unless it is woken before."""
        self.pool = HandlerPool(threads_each(count), self._threads_ended)
        """For what handlers hand to threads."""
        self._count, self._on_exhausted = count, on_exhausted
        self._changed = threading.Condition()
        self._free, self._lost = count, 0
        self._left: dict[Execution, _Left] = {}
        self._woken = False

    def reserve(self, most: int, timeout: float) -> int:
        """Reserve up to `most` free slots; waits up to `timeout` seconds for the first. Returns how many,
        possibly 0."""
        with self._changed:
            if self._free == 0 and timeout > 0:
                self._changed.wait_for(lambda: self._free > 0 or self._woken, timeout)
            taken = max(0, min(most, self._free))
            self._free -= taken
            return taken

    def give_back(self, count: int) -> None:
        """Free reserved slots that nothing was claimed for."""
        with self._changed:
            self._free += count
            self._changed.notify_all()

    def wake(self) -> None:
        """The worker is about to end: wait no more, and tell no more that the last slot is lost."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    @property
    def lost(self) -> int:
        """How many slots are lost to handlers that do not stop, or whose threads do not."""
        return self._lost

    @property
    def states(self) -> dict[str, int]:
        """How many slots are busy (reserved, with a handler, or kept by what it has left), free and lost."""
        with self._changed:
            return {"busy": self._count - self._free - self._lost, "free": self._free, "lost": self._lost}

    @property
    def exhausted(self) -> bool:
        """Whether every slot is."""
        return self._lost == self._count

    @property
    def taken(self) -> str:
        """Who has left the threads that keep every slot, or nothing."""
        with self._changed:
            told = (each for each, left in self._left.items() if left.look_at == _TOLD and not left.lost)
            keepers = [each.claim.handler for each in told]
        if not keepers or len(keepers) + self._lost < self._count:
            return ""
        return f"every slot is kept by threads that handlers have left: {', '.join(sorted(set(keepers)))}"

    def ended(self, execution: Execution, *, lost: bool) -> None:
        """Its handler has ended; the slot had been lost to it if `lost`."""
        with self._changed:
            if self.pool.busy(execution):
                moment = STOP_MOMENT if execution.stop_reason is StopReason.TIME_LIMIT else LEFT_MOMENT
                self._left[execution] = _Left(_TOLD if lost else time.monotonic() + moment, lost)
            else:
                self._freed(lost)

    def lose(self) -> None:
        """A handler does not stop: its slot is lost until it has ended."""
        with self._changed:
            self._lost += 1
        self._tell()

    def look(self) -> None:
        """Find out which threads have had their moment. To be called about once a second."""
        now, lost = time.monotonic(), False
        with self._changed:
            late = [each for each, left in self._left.items() if left.look_at <= now]
            for execution in late:
                left = self._left[execution]
                left.look_at = _TOLD
                if execution.stop_reason is StopReason.TIME_LIMIT:
                    left.lost = lost = True
                    self._lost += 1
        for each in late:
            _log.warning(
                "a thread that the handler left does not end; going on without its slot",
                task_run=each.claim.task_run_id, handler=each.claim.handler,
            )  # fmt: skip
        if lost:
            self._tell()

    def _threads_ended(self, execution: Execution) -> None:
        with self._changed:
            if execution in self._left and not self.pool.busy(execution):
                self._freed(self._left.pop(execution).lost)

    def _freed(self, lost: bool) -> None:
        self._lost -= lost
        self._free += 1
        self._changed.notify_all()

    def _tell(self) -> None:
        if self.exhausted and not self._woken:
            self._on_exhausted()
