"""Keeping the leases of what this process really executes, on a connection and thread of its own.

A lease is renewed from the claim's answer until the finish is answered, by task run and token: a claim whose
answer was lost is renewed by nobody. The same thread reports progress and presence, which may wait, and must
not make a lease wait: no call takes longer than a third of the shortest lease that is held, and between two
tries while the database is away lies no more than a tenth.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from flowforge import log, threads
from flowforge.db import is_transient
from flowforge.errors import first_line
from flowforge.worker.execution import Execution, StopReason
from flowforge.worker.session import CALL_LIMIT, PASSING_REFUSALS, Session, Unanswered

_log = log.of("worker")

_RENEW = """
    select r.outcome, extract(epoch from r.lease_expires_at - clock_timestamp())::float8
    from flowforge.renew_leases(%s::bigint[], %s::bigint[], make_interval(secs => %s)) as r
    order by r."position"
"""
_PROGRESS = """
    select flowforge.report_progress(p.task_run_id, p.fencing_token, p.fraction, p.message)
    from unnest(%s::bigint[], %s::bigint[], %s::float8[], %s::text[])
        as p (task_run_id, fencing_token, fraction, message)
"""
_ANNOUNCE = "select flowforge.announce_worker(%s::text, %s::text[], %s::bigint)"

PROGRESS_INTERVAL = 1.0
"""Seconds between two reports of progress; of what comes in between, the last of each handler counts."""

ANNOUNCE_INTERVAL = 30.0
"""Seconds between two announcements of this worker's presence."""


class LeaseKeeper:
    """A thread that renews leases. `hold`, `forget` and `renew_soon` are for any thread.

    What handlers call, directly or by their context, takes no lock that this thread or another of the worker
    waits for: whatever a handler's thread does to itself, the leases of the others are kept.
    """

    def __init__(
        self,
        session: Session,
        worker: str,
        queues: Sequence[str],
        capacity: int,
        lease: float,
        counts: Counter[str],
        on_crash: Callable[[str], None],
    ) -> None:
        """`lease` in seconds, for what has none of its own; `on_crash` is told if the thread dies."""
        self._session, self._worker, self._queues, self._capacity = session, worker, list(queues), capacity
        self._lease, self._counts, self._on_crash = lease, counts, on_crash
        self._lock = threading.Lock()  # of these three
        self._held: set[Execution] = set()
        self._next_renewal = self._next_progress = float("inf")
        self._next_announcement = 0.0
        # Wakes the thread: an execution to renew at once, or None.
        self._calls: queue.SimpleQueue[Execution | None] = queue.SimpleQueue()
        self._refusals: Counter[Execution] = Counter()  # in a row, of what could not be renewed
        self._stuck: frozenset[Execution] = frozenset()  # of these, what is told of
        self.renewals: Counter[str] = Counter()
        """Answers to renewals."""
        self._closing = False
        self._thread = threading.Thread(target=self._main, name="flowforge-renew", daemon=True)

    def start(self) -> None:
        """Begin. Raises NoThread."""
        threads.start(self._thread)

    @property
    def held(self) -> int:
        """How many task runs are this worker's: their handlers run, or their reports are not answered yet."""
        return len(self._held)

    @property
    def refused(self) -> bool:
        """Whether some lease that is held is refused its renewals, whatever else is answered meanwhile."""
        return any(each in self._held for each in self._stuck)

    def hold(self, executions: Sequence[Execution]) -> None:
        """Renew the leases of `executions` from now on, each at a third of its length, and report their
        progress."""
        if not executions:
            return
        renewal = min(each.renewed_at + each.claim.lease / 3 for each in executions)
        progress = time.monotonic() + PROGRESS_INTERVAL
        with self._lock:
            self._held.update(executions)
            sooner = renewal < self._next_renewal or progress < self._next_progress
            self._next_renewal = min(self._next_renewal, renewal)
            self._next_progress = min(self._next_progress, progress)
        if sooner:
            self._calls.put(None)
        # The call that is under way was given its limit without knowing of these.
        self._session.hurry(min(each.claim.lease for each in executions) / 3)

    def forget(self, executions: Iterable[Execution]) -> None:
        """Renew these no longer."""
        with self._lock:
            self._held.difference_update(executions)

    def renew_soon(self, execution: Execution) -> None:
        """Renew this one at once: what its own transaction had added to the lease was rolled back with it."""
        self._calls.put(execution)

    def close(self, timeout: float) -> None:
        """Take the announcement back and end, within about `timeout` seconds."""
        self._closing = True
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout)
        if self._thread.is_alive():
            self._session.sever()
            self._thread.join(1)

    # -- in the thread

    def _main(self) -> None:
        try:
            while not self._closing:
                pause, ended, wait = self._turn(), time.monotonic(), 0.0
                while wait >= 0 and not self._closing:
                    self._wait(wait)
                    due = min(self._next_renewal, self._next_progress, self._next_announcement)
                    # Asked anew each time: what was claimed since may have a shorter lease.
                    retry_at = ended + min(pause, self._shortest() / 10)
                    wait = max(due, retry_at) - time.monotonic()
            if self._session.healthy:
                self._announce(0)
        except Unanswered:
            pass
        except Exception as exc:  # noqa: BLE001 -- a thread that dies must not go unnoticed
            _log.exception("renewing leases broke down")
            self._on_crash(f"renewing leases broke down: {exc}")
        finally:
            self._session.close()

    def _wait(self, seconds: float) -> None:
        """Until called or the time is over."""
        with suppress(queue.Empty):
            execution = self._calls.get(timeout=seconds)
            while True:
                if execution is not None:
                    with self._lock:
                        execution.renewed_at = self._next_renewal = float("-inf")
                execution = self._calls.get_nowait()

    def _turn(self) -> float:
        """Do what is due; after a failure the seconds to wait before the next try, as far as leases allow."""
        try:
            now = time.monotonic()
            if now >= self._next_renewal:
                self._renew(now)
            if now >= self._next_progress:
                self._report_progress()
            if now >= self._next_announcement:
                self._next_announcement = now + ANNOUNCE_INTERVAL
                self._announce(self._capacity)
        except Unanswered:
            return self._session.pause()
        return 0.0

    def _renew(self, now: float) -> None:
        with self._lock:
            # Also what will be due soon, so that many leases do not become many statements.
            due = [
                each
                for each in self._held
                if each.renewed_at + each.claim.lease / 6 <= now and not each.finished
            ]
        try:
            if due:
                self._apply(due, now, self._ask(due))
        except psycopg.Error as exc:
            _log.warning("renewal refused; repeating one by one", count=len(due), error=first_line(exc))
            for each in due:
                try:
                    self._apply([each], now, self._ask([each]))
                except psycopg.Error as each_exc:
                    each.renewed_at = now
                    self._refusals[each] += 1
                    if self._refusals[each] > (PASSING_REFUSALS if is_transient(each_exc) else 0):
                        self._stuck |= {each}
                    _log.error("renewal refused", task_run=each.claim.task_run_id, error=first_line(each_exc))
        with self._lock:
            gone = self._refusals.keys() - self._held
            self._next_renewal = min(
                (each.renewed_at + each.claim.lease / 3 for each in self._held if not each.finished),
                default=float("inf"),
            )
        for each in gone:
            del self._refusals[each]
        self._stuck &= self._refusals.keys()

    def _ask(self, due: Sequence[Execution]) -> list[tuple[Any, ...]]:
        ids = [each.claim.task_run_id for each in due]
        tokens = [each.claim.fencing_token for each in due]
        # An answer that takes longer than the next renewal is worth no more than a new connection.
        return self._session.call(_RENEW, [ids, tokens, self._lease], limit=self._limit())

    def _limit(self) -> float:
        """Seconds that a call may take, so that the next renewal comes in time."""
        return min(self._shortest() / 3, CALL_LIMIT)

    def _shortest(self) -> float:
        """Seconds of the shortest lease that is held."""
        with self._lock:
            return min((each.claim.lease for each in self._held), default=self._lease)

    def _tell(self, query: str, arguments: Sequence[Any]) -> None:
        """A call that may be refused for a lock that others hold, rather than take the connection with it."""
        limit = self._limit()
        self._session.call(query, arguments, limit=limit, lock_timeout=max(0.01, min(limit / 2, 5.0)))

    def _apply(self, due: Sequence[Execution], now: float, answers: Sequence[tuple[Any, ...]]) -> None:
        self.renewals.update(str(outcome) for outcome, _ in answers)
        for each, (outcome, lease_left) in zip(due, answers, strict=True):
            each.renewed_at = now
            self._refusals.pop(each, None)
            if lease_left is not None:
                each.prolong(now + lease_left)
            if outcome == "cancel":
                each.stop(StopReason.CANCEL)
            elif outcome == "busy":
                # Held, by whoever has the row locked, but not extended: look again a little earlier.
                each.renewed_at = now - each.claim.lease / 6
            elif outcome == "lost":
                if each.ended:
                    # Finished a moment ago, perhaps, and the answer is still to come: let that decide.
                    each.gone = True
                elif not (each.committing or each.finished):
                    self._lost(each)

    def _lost(self, execution: Execution) -> None:
        if execution.stop(StopReason.LOST):
            claim = execution.claim
            self._counts["lost"] += 1
            _log.warning(
                "lease lost; stopping the handler", run=claim.run_id, task_run=claim.task_run_id,
                attempt=claim.attempt, token=claim.fencing_token,
            )  # fmt: skip
        self.forget([execution])

    def _report_progress(self) -> None:
        with self._lock:
            held = sorted(self._held, key=lambda each: each.claim.task_run_id)
            self._next_progress = time.monotonic() + PROGRESS_INTERVAL if held else float("inf")
        moved = []
        for each in held:
            # Read once: the handler's thread puts another in its place at any moment.
            progress = each.progress
            if progress is not None and progress is not each.reported:
                moved.append((each, progress))
        if not moved:
            return
        reports = [(each.claim.task_run_id, each.claim.fencing_token, *progress) for each, progress in moved]
        try:
            self._tell(_PROGRESS, [list(column) for column in zip(*reports, strict=True)])
        except psycopg.Error as exc:
            _log.warning("progress not recorded", count=len(reports), error=first_line(exc))
        for each, progress in moved:
            each.reported = progress

    def _announce(self, capacity: int) -> None:
        try:
            self._tell(_ANNOUNCE, [self._worker, self._queues, capacity])
        except psycopg.Error as exc:
            # Presence only sizes the window; work goes on without it.
            _log.warning("presence not announced", error=first_line(exc))
