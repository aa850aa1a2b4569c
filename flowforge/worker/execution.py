"""One execution: a claimed task run in this process, told to stop or not, and what comes of it.

An `Execution` is one claimed task run in this process, from the claim's answer to the end of its handler.
Exactly one `Report` comes out of it, whatever happens: the handler returns, raises, is told to stop, or is
abandoned because it does not stop. What a report may still change is for the database to decide, by the
fencing token.
"""

from __future__ import annotations

import asyncio
import enum
import os
import threading
import traceback
from collections.abc import Awaitable, Generator
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from flowforge import log
from flowforge.cutoff import Cutoff
from flowforge.db import Connection, json_text
from flowforge.errors import Cancelled, NotStorable, PermanentError, TimeLimitExceeded
from flowforge.worker.claim import Claim

_log = log.of("worker")


class StopReason(enum.Enum):
    """Why a handler is told to stop. CANCEL asks, and a success that still comes counts; the others end the
    ownership."""

    CANCEL = "the run is being cancelled"
    LOST = "the lease is lost; another worker may own this task run"
    TIME_LIMIT = "the time limit of the task has passed"
    SHUTDOWN = "the worker is shutting down"
    BLOCKED = "its event loop was blocked, and is given up with all that runs there"


class Finish(NamedTuple):
    """Tell the database how the handler ended. `output` is JSON text; None stores no output."""

    outcome: str
    output: str | None = None
    error: str | None = None
    retryable: bool = True


class Release(NamedTuple):
    """Give the task run back: unstarted, shutdown (it had begun), crashed or unknown_handler."""

    reason: str


Report = Finish | Release | None
"""None: nothing is to be sent, because the lease is lost or the handler's own transaction has finished the
task run."""


class HandlerProcess(Protocol):
    """A process of its own that a handler runs in."""

    def wake(self) -> None:
        """Let it look whether its handler was told to stop. Waits for nothing."""

    def kill(self) -> None:
        """End it at once. Waits for nothing."""


class Execution:
    """One claimed task run in this process. Safe to use from any thread.

    Telling a handler to stop is telling, and no more: no exception is ever raised in its thread from outside,
    because it could strike between the taking of a lock and the block that gives it back, and so hold up
    everyone else who needs that lock (ADR 9).
    """

    __slots__ = (
        "_abandoned", "_cutoff", "_ended", "_lock", "_process", "_stop", "_task", "alarm", "broken_off",
        "claim", "commit_unknown", "committing", "deadline", "finished", "gone", "lost_by", "out_of_memory",
        "overdue", "progress", "renewed_at", "reported",
    )  # fmt: skip

    def __init__(self, claim: Claim, claimed_at: float, answered_at: float) -> None:
        """By time.monotonic(), from before the claiming call was sent: `claimed_at` for the first time that
        may have reached the database, `answered_at` for the time that was answered."""
        self.claim = claim
        # Never later than the database's, which counts from the call that took effect. Whether that was the
        # first is not known, so it may be too early after an outage, but not before the lease ends.
        self.deadline = None if claim.time_limit is None else claimed_at + claim.time_limit
        self.prolong(answered_at + claim.lease_left)
        # Of the executor: when to look at the time limit next; whether it has passed.
        self.alarm, self.overdue = self.deadline, False
        # Of the lease keeper: when the lease was last extended; whether it was lost after the handler's end;
        # what progress it has reported.
        self.renewed_at = answered_at
        self.gone = False
        self.reported: tuple[float, str | None] | None = None
        # Of the handler, for the lease keeper to look at: the progress it made.
        self.progress: tuple[float, str | None] | None = None
        # Of the handler's own transaction: the exception that told of its loss before COMMIT; its COMMIT is
        # under way; was lost; has taken effect.
        self.lost_by: BaseException | None = None
        self.committing = False
        self.commit_unknown = False
        self.finished = False
        self._lock = threading.Lock()
        self._stop: StopReason | None = None
        self._ended = False
        self._abandoned = False
        self._cutoff: Cutoff | None = None
        self._task: asyncio.Task[None] | None = None
        # Of a handler in a process of its own: that process; why it is given back as crashed.
        self._process: HandlerProcess | None = None
        self.broken_off = ""
        # Whether it failed for want of memory.
        self.out_of_memory = False

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the handler was told to stop, or None."""
        return self._stop

    @property
    def ended(self) -> bool:
        """Whether the handler has ended or was abandoned: its report is made."""
        return self._ended

    def prolong(self, lease_end: float) -> None:
        """The lease lasts until `lease_end` at least, and so does the time limit, past which no lease is
        extended."""
        if self.deadline is not None:
            self.deadline = max(self.deadline, lease_end)

    def raise_if_stopped(self) -> None:
        """Raises Cancelled or TimeLimitExceeded when the handler was told to stop."""
        if self._stop is StopReason.TIME_LIMIT:
            raise TimeLimitExceeded(self.time_limit_text)
        if self._stop is not None:
            raise Cancelled(self._stop.value)

    def raise_if_not_owner(self) -> None:
        """As `raise_if_stopped`, but a run being cancelled does not matter: a success that still comes
        counts."""
        if self._stop is not StopReason.CANCEL:
            self.raise_if_stopped()

    @property
    def time_limit_text(self) -> str:
        return f"time limit of {self.claim.time_limit:g} s exceeded"

    def stop(self, reason: StopReason) -> bool:
        """Tell the handler to stop: its context says so, an async handler is cancelled as an asyncio task,
        and unless it is only asked to (CANCEL) the connection of its open transaction is cut. True when this
        call changed anything."""
        with self._lock:
            if self._ended or self._stop not in (None, StopReason.CANCEL) or self._stop is reason:
                return False
            self._stop = reason
            if reason is not StopReason.CANCEL:
                self._cut()
            if self._task is not None:
                with suppress(RuntimeError):  # its loop is closed: it has ended
                    self._task.get_loop().call_soon_threadsafe(self._task.cancel)
            if self._process is not None:
                self._process.wake()
            return True

    def begin(self) -> bool:
        """The handler starts now. False when it was told to stop before."""
        with self._lock:
            return self._stop is None and not self._abandoned

    def run_as(self, task: asyncio.Task[Any] | None) -> None:
        """The handler runs as `task`, the present one, which is cancelled when it is told to stop."""
        with self._lock:
            self._task = task
            if self._stop is not None and task is not None:
                task.cancel()

    def runs_in(self, process: HandlerProcess | None) -> None:
        """The handler is about to run in `process`, which is woken when it is told to stop; None: it has left
        it to others."""
        with self._lock:
            self._process = process

    def kill(self) -> bool:
        """Kill the process that the handler runs in; whoever waits for that reports. False when it runs in
        none of its own, or has ended."""
        with self._lock:
            if self._ended or self._process is None:
                return False
            self._process.kill()
            return True

    def end(self) -> bool:
        """The handler has ended: no transaction of it can commit any more. False when it had been
        abandoned."""
        with self._lock:
            self._ended, self._process = True, None
            self._cut()
            return not self._abandoned

    def abandon(self) -> bool:
        """Report without waiting for the handler any longer. False when it has ended."""
        with self._lock:
            if self._ended:
                return False
            self._ended = self._abandoned = True
            self._cut()
            return True

    def commits(self, committing: bool) -> None:
        """The COMMIT of the handler's transaction is about to be sent, or was refused."""
        self.committing = committing

    def attach(self, connection: Connection) -> None:
        """`connection` is about to hold the handler's transaction. Raises Cancelled or TimeLimitExceeded when
        the handler must not go on, RuntimeError when it has a transaction open, psycopg.Error when the
        connection is lost already."""
        with self._lock:
            self.raise_if_not_owner()
            if self._ended:
                raise Cancelled("the handler has ended; its context is of no use any more")
            if self._cutoff is not None:
                raise RuntimeError("a transaction of this task run is open already")
            self._cutoff = Cutoff(connection)

    def detach(self) -> None:
        """The transaction is over; its connection is about to be closed."""
        with self._lock:
            if self._cutoff is not None:
                self._cutoff.close()
                self._cutoff = None

    def _cut(self) -> None:
        if self._cutoff is not None:
            self._cutoff.cut()


async def awaited(execution: Execution, coroutine: Awaitable[object]) -> object:
    """What `coroutine` returns, in a task that is cancelled when the handler is told to stop."""
    execution.run_as(asyncio.current_task())
    return await coroutine


def tell_log(execution: Execution) -> None:
    """What is logged in the present context is about this task run."""
    claim = execution.claim
    log.about(run=claim.run_id, task_run=claim.task_run_id, task=claim.task)


# -- from the handler's end to a report


def unstarted(execution: Execution) -> Report:
    """The report of one whose handler has not begun."""
    return None if execution.stop_reason is StopReason.LOST else Release("unstarted")


def report_of(execution: Execution, returned: object, raised: BaseException | None) -> Report:
    """The report of one whose handler has ended, with a word on what is not kept. Raises MemoryError only."""
    try:
        _warn_of_loss(execution, returned, raised)
        return judge(execution, returned, raised)
    except MemoryError:
        raise
    except BaseException as exc:  # noqa: BLE001 -- of the error's own class, whose code may do anything
        return undescribed(raised or exc)


def undescribed(raised: BaseException) -> Finish:
    """The report of a failure that nothing can be said of but its class."""
    name = type.__dict__["__name__"].__get__(type(raised))  # whatever its metaclass makes of that
    return Finish("failed", error=storable(f"{name}: the error could not be described"))


def _warn_of_loss(execution: Execution, returned: object, raised: BaseException | None) -> None:
    claim = execution.claim
    if execution.finished and raised is not None:
        _log.warning(
            "the handler raised after its transaction had finished the task run, which stays succeeded",
            run=claim.run_id, task_run=claim.task_run_id, handler=claim.handler, error=type(raised).__name__,
        )  # fmt: skip
    elif execution.finished and returned is not None:
        _log.warning(
            "what the handler returned is not kept, since its transaction had finished the task run; "
            "give it to tx.finish(output)",
            run=claim.run_id, task_run=claim.task_run_id, handler=claim.handler,
        )  # fmt: skip


def leave_if_forked(pid: int, raised: BaseException | None) -> None:
    """End this process unless it is `pid`: a handler forked, and this is the child on its way out, which must
    touch nothing of its parent's."""
    if os.getpid() != pid:
        code = raised.code if isinstance(raised, SystemExit) else int(raised is not None)
        os._exit(code if isinstance(code, int) else int(code is not None))


def judge(execution: Execution, returned: object, raised: BaseException | None) -> Report:
    """What to tell the database, from how the handler ended and what it had been told."""
    stop = execution.stop_reason
    if execution.finished or stop is StopReason.LOST:
        return None
    if stop is StopReason.TIME_LIMIT:
        return Finish("failed", error=execution.time_limit_text)
    if stop is StopReason.BLOCKED:
        return Release("crashed")
    if execution.broken_off:
        return Release("shutdown" if stop is StopReason.SHUTDOWN else "crashed")
    if execution.commit_unknown:
        # Either the commit took effect, and this is answered `fenced`; or nothing did, and the whole is asked
        # for again. A finish alone could make a success without its side effects.
        return Release("crashed")
    if raised is None:
        try:
            return Finish("succeeded", output=None if returned is None else json_text(returned))
        except NotStorable as exc:
            return Finish("failed", error=_unstorable(exc), retryable=False)
        except MemoryError as exc:
            return judge(execution, None, exc)
        except BaseException as exc:  # noqa: BLE001 -- whatever the value's own methods raise
            return Finish("failed", error=f"result not storable: {describe(exc)}", retryable=False)
    if stop is StopReason.SHUTDOWN:
        return Release("shutdown")
    if stop is StopReason.CANCEL and isinstance(raised, Cancelled | asyncio.CancelledError):
        return Finish("cancelled", error=describe(raised, trace=False))
    if execution.lost_by is not None and any(each is execution.lost_by for each in causes(raised)):
        # It is certain that nothing happened, and not the handler's doing.
        return Release("crashed")
    if isinstance(raised, NotStorable):
        return Finish("failed", error=_unstorable(raised), retryable=False)
    execution.out_of_memory = is_of_memory(raised)
    return Finish("failed", error=describe(raised), retryable=not isinstance(raised, PermanentError))


def is_of_memory(exc: BaseException) -> bool:
    """Whether it comes of a want of memory."""
    try:
        return any(isinstance(each, MemoryError) for each in causes(exc))
    except Exception:  # noqa: BLE001 -- as in `report_of`
        return False


def causes(exc: BaseException) -> Generator[BaseException]:
    """`exc` and every exception that it was made of or raised for."""
    seen, left = set(), [exc]
    while left:
        each = left.pop(0)
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            parts = each.exceptions if isinstance(each, BaseExceptionGroup) else ()
            left += [more for more in (*parts, each.__cause__, each.__context__) if more is not None]


def _unstorable(error: NotStorable) -> str:
    """What is told of a result that cannot be stored, naming the part that cannot, where that is known."""
    return storable(f"result{'' if error.path else ' '}{error}")


def describe(exc: BaseException, *, trace: bool = True) -> str:
    """`Type: message` and the end of the traceback, bounded, and free of what PostgreSQL cannot keep in a
    text."""
    try:
        message = str(exc)
    except BaseException:  # noqa: BLE001 -- an exception that cannot even say what it is
        message = "(its message could not be made)"
    head = f"{type(exc).__name__}: {message}" if message else type(exc).__name__
    head = storable(head[:2000])
    if not trace or exc.__traceback__ is None:
        return head
    try:
        # Without the frame of this module that called the handler.
        frames = traceback.format_tb(exc.__traceback__.tb_next)
    except Exception:  # noqa: BLE001 -- of what loads the source, such as from an archive that was replaced
        frames = []
    return f"{head}\n\n{storable(''.join(frames)[-4000:])}" if frames else head


def storable(text: str) -> str:
    """`text` with U+0000 and lone surrogates replaced, which PostgreSQL refuses."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
