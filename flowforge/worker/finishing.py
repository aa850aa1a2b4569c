"""Telling the database how executions ended: finishes in natural batches, and releases.

What ended while the last statement was under way goes into the next one. A finish is repeated until it is
answered; that is safe because the token recognises it (`repeated`). One that the database refuses is told
apart from its batch by repeating them one by one, and then recorded as a failure, so that no result can leave
its task run running. A release is repeated too: the token fences what is doubled, and without it the reaper
would count what a shutdown gives back uncounted.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import psycopg

from flowforge import log, threads
from flowforge.crash import crash_point
from flowforge.db import is_transient
from flowforge.errors import first_line
from flowforge.worker.execution import Execution, Finish, Release, Report, StopReason, storable
from flowforge.worker.failures import reason_of
from flowforge.worker.leases import LeaseKeeper
from flowforge.worker.session import CALL_LIMIT, Session, Unanswered, longer

_log = log.of("worker")

# Texts in binary form (%b): an array in text form would be escaped character by character in Python, which
# for a large result takes seconds in which no other thread runs, that of the leases included.
_FINISH = """
    select f.answer
    from flowforge.finish_task_runs(
        %s::bigint[], %s::bigint[], %s::text[], %b::text[]::jsonb[], %b::text[], %s::boolean[]) as f
    order by f."position"
"""
_RELEASE = "select flowforge.release_task_run(%s::bigint, %s::bigint, %s::text)"

_MOST_ROWS = 500
_MOST_CHARACTERS = 8_000_000  # of one statement; a larger result goes alone
_ALONE_LOCK_TIMEOUT = 0.2  # seconds; others wait behind
_MOST_LATER = 5  # that are sent again before others get their turn
# What PostgreSQL says of a value that it cannot keep: data exceptions, violated constraints, complexity of
# nesting, FlowForge's own limits.
_CLASSES_OF_VALUES = ("22", "23", "54", "WF")
_UNRECORDABLE = Finish("failed", error="the outcome of the handler could not be stored", retryable=False)


class _Ended(NamedTuple):
    execution: Execution
    report: Report
    alone: bool = False  # it was refused before, or too much with others, so it goes without them
    limit: float = CALL_LIMIT  # seconds that its statement may take
    instead_of: Report = None  # what the database refused, for what seemed to be the value's fault


class Finisher:
    """A thread with its own connection that sends reports. `put` and `wait_below` are for any thread."""

    def __init__(
        self, session: Session, keeper: LeaseKeeper, counts: Counter[str], on_crash: Callable[[str], None]
    ) -> None:
        """`keeper` forgets an execution once its report is answered; `on_crash` is told if the thread
        dies."""
        self._session, self._keeper, self._counts, self._on_crash = session, keeper, counts, on_crash
        self._queue: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._held_over: _Ended | None = None
        self._later: list[tuple[float, _Ended]] = []  # to be sent again, and when
        self._closing = False
        self._given_up = threading.Event()
        self._answered = threading.Condition()
        self._thread = threading.Thread(target=self._main, name="flowforge-finish", daemon=True)

    def start(self) -> None:
        """Begin. Raises NoThread."""
        threads.start(self._thread)

    def put(self, execution: Execution, report: Report) -> None:
        """The handler has ended: send `report`, if there is one, sooner or later."""
        self._queue.put(_Ended(execution, report))

    def wait_below(self, held: int, timeout: float) -> bool:
        """Wait up to `timeout` seconds until fewer than `held` task runs are this worker's, whose handlers
        run or whose reports are unanswered. Whether there are."""
        if self._keeper.held < held:
            return True
        with self._answered:
            return self._answered.wait_for(lambda: self._keeper.held < held, timeout)

    def close(self) -> None:
        """No more is put: end when all is answered."""
        self._closing = True
        self._queue.put(None)

    def wait_ended(self, seconds: float) -> bool:
        """Wait up to `seconds` until all is answered, after `close`. Whether it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """End without the answers that are missing."""
        self._given_up.set()
        self._queue.put(None)
        self._session.sever()
        self._thread.join(1)

    # -- in the thread

    def _main(self) -> None:
        try:
            while batch := self._next():
                self._send([each for each in batch if isinstance(each.report, Finish) and not each.alone])
                for each in batch:
                    if each.report is None:
                        self._counts[
                            "finished_in_transaction" if each.execution.finished else "not_sent"
                        ] += 1
                        self._forget([each])
                    elif isinstance(each.report, Release):
                        self._release(each, each.report.reason)
                    elif each.alone:
                        self._send([each])
        except Exception as exc:  # noqa: BLE001 -- a thread that dies must not go unnoticed
            _log.exception("reporting results broke down")
            self._on_crash(f"reporting results broke down: {exc}")
        finally:
            self._session.close()

    def _next(self) -> list[_Ended]:
        """Wait for a report, or for the moment of one that was put off; then take all that have come, within
        bounds. Empty at the end."""
        batch: list[_Ended] = []
        while not batch and not self._given_up.is_set() and not (self._closing and self._is_empty()):
            # What was refused and forgotten is no trouble any more.
            self._session.resting = self._is_empty()
            batch = self._take_arrived()
            batch += self._take_due(alone=not batch)
        return batch

    def _take_due(self, *, alone: bool) -> list[_Ended]:
        """Those put off whose moment has come: some, and one at most that may take long. At the end that one
        waits for all others, which have little time left; `alone`: none of them is about to be sent."""
        now = time.monotonic()
        due = [item for item in self._later if item[0] <= now]
        short = [item for item in due if not _is_long(item[1])][:_MOST_LATER]
        long = [item for item in due if _is_long(item[1])][:1]
        others = not alone or not self._queue.empty() or any(not _is_long(each) for _, each in self._later)
        taken = short if self._closing and others else [*short, *long]
        self._later = [item for item in self._later if item not in taken]
        return [each for _, each in taken]

    def _is_empty(self) -> bool:
        return self._queue.empty() and self._held_over is None and not self._later

    def _take_arrived(self) -> list[_Ended]:
        batch: list[_Ended] = []
        size = 0
        with suppress(queue.Empty):
            while len(batch) < _MOST_ROWS:
                if self._held_over is not None:
                    each, self._held_over = self._held_over, None
                elif (got := self._queue.get(timeout=self._patience(batch))) is not None:
                    each = got
                else:
                    break  # to end, or to look what has changed
                size += len(each.report.output or "") if isinstance(each.report, Finish) else 0
                if batch and size > _MOST_CHARACTERS:
                    self._held_over = each
                    break
                batch.append(each)
        return batch

    def _patience(self, batch: Sequence[_Ended]) -> float | None:
        """Seconds to wait for another report; None: until there is one."""
        if self._later and not batch:
            # Whatever its moment is, at the end the long one waits for the short.
            short = [at for at, each in self._later if self._closing and not _is_long(each)]
            return max(0.0, min(short or (at for at, _ in self._later)) - time.monotonic())
        return 0.0 if batch or self._closing else None

    def _send(self, batch: Sequence[_Ended]) -> None:
        """Finish `batch` together, repeated until answered or the leases are known to be lost."""
        while batch:
            timeout, limit = _ALONE_LOCK_TIMEOUT if batch[0].alone else None, batch[0].limit
            try:
                crash_point("worker:before-finish-commit")
                answers = self._session.call(_FINISH, _arguments(batch), limit=limit, lock_timeout=timeout)
                crash_point("worker:after-finish-commit")
            except Unanswered as exc:
                if self._given_up.wait(self._session.pause()):
                    return
                self._forget([each for each in batch if each.execution.gone])
                batch = [each for each in batch if not each.execution.gone]
                if exc.too_much:
                    limit = longer(limit) if len(batch) == 1 else limit
                    self._put_off(each._replace(alone=True, limit=limit) for each in batch)
                    return
            except psycopg.Error as exc:
                if len(batch) > 1:
                    self._put_off(each._replace(alone=True) for each in batch)
                else:
                    self._refused(batch[0], exc)
                return
            else:
                self._settle(batch, [answer for (answer,) in answers])
                return

    def _refused(self, each: _Ended, exc: psycopg.Error) -> None:
        """What the database refused alone: sent as a failure if the value is to blame, else again later."""
        about_values = exc.sqlstate is None or exc.sqlstate[:2] in _CLASSES_OF_VALUES
        if each.execution.gone:
            self._forget([each])
        elif about_values and not is_transient(exc) and each.instead_of is None:
            reason = storable(str(exc.diag.message_primary or exc).strip())
            failure = Finish("failed", error=f"result not storable: {reason}", retryable=False)
            succeeded = isinstance(each.report, Finish) and each.report.outcome == "succeeded"
            instead = failure if succeeded else _UNRECORDABLE
            self._send([each._replace(report=instead, instead_of=each.report)])
        else:
            # A lock held for long, a missing privilege, an error inside the function. If it refuses even that
            # which has no value in it, the value was not to blame: the report is what the handler said.
            self._again(each._replace(report=each.instead_of or each.report, instead_of=None), exc)

    def _again(self, each: _Ended, exc: psycopg.Error) -> None:
        """Send it later, alone. The lease is renewed meanwhile."""
        self._session.stuck(exc)
        _log.warning("report refused; trying again", error=first_line(exc), **each.execution.claim.named())
        self._put_off([each._replace(alone=True)], min(self._session.pause(), 1.0))

    def _put_off(self, batch: Iterable[_Ended], seconds: float = 0.0) -> None:
        """What has come since goes first, and whatever comes for so long."""
        at = time.monotonic() + seconds
        self._later += [(at, each) for each in batch]

    def _release(self, each: _Ended, reason: str) -> None:
        claim = each.execution.claim
        how = storable(reason_of(each.execution)) if reason == "crashed" else ""
        told = f"{reason}: {how}" if how else reason
        timeout = _ALONE_LOCK_TIMEOUT if each.alone else None
        while True:
            try:
                [(answer,)] = self._session.call(
                    _RELEASE, [claim.task_run_id, claim.fencing_token, told], lock_timeout=timeout
                )
            except Unanswered:
                if self._given_up.wait(self._session.pause()):
                    return
            except psycopg.Error as exc:
                if is_transient(exc) and not each.execution.gone:
                    self._again(each, exc)
                    return
                # The lease runs out by itself and the reaper does the rest.
                self._session.stuck(exc)
                _log.error("release refused", error=first_line(exc), **each.execution.claim.named())
                break
            else:
                self._counts[f"{answer}_{reason}"] += 1
                break
        self._forget([each])

    def _settle(self, batch: Sequence[_Ended], answers: Sequence[str]) -> None:
        for each, answer in zip(batch, answers, strict=True):
            if answer == "accepted" and isinstance(each.report, Finish):
                self._counts[f"finished_{each.report.outcome}"] += 1
            elif answer == "fenced" and each.execution.stop_reason is StopReason.TIME_LIMIT:
                # Both knew of it, and the reaper was the first to say so.
                self._counts["timed_out_before"] += 1
            else:
                self._counts[answer] += 1
                if answer == "fenced":
                    _log.warning("result refused: the lease was lost before", **each.execution.claim.named())
        self._forget(batch)

    def _forget(self, batch: Sequence[_Ended]) -> None:
        self._keeper.forget([each.execution for each in batch])
        with self._answered:
            self._answered.notify_all()


def _is_long(each: _Ended) -> bool:
    """Whether its statement may hold up all others for minutes."""
    return each.limit > CALL_LIMIT


def _arguments(batch: Sequence[_Ended]) -> list[list[object]]:
    reports = [each.report for each in batch if isinstance(each.report, Finish)]
    return [
        [each.execution.claim.task_run_id for each in batch],
        [each.execution.claim.fencing_token for each in batch],
        [report.outcome for report in reports],
        [report.output for report in reports],
        [report.error for report in reports],
        [report.retryable for report in reports],
    ]
