"""Claiming dispatches: what both deliveries share, and the delivery by PostgreSQL alone.

One claim is under way at a time, for as many task runs as there are free slots, so that a worker never has
two undecided deliveries of one dispatch. A call whose outcome is not known is repeated whole, with the same
claim id and arguments, until it is answered: its claims, if it made any, are nobody else's to give back. One
whose answer is too much is asked for in parts, under that claim id. A message is acknowledged when its claim
was decided, won or lost, and not before.
"""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import psycopg

from flowforge import db, log, threads
from flowforge.config import Config
from flowforge.crash import crash_point
from flowforge.errors import first_line
from flowforge.listen import hears
from flowforge.waking import Waker, readable
from flowforge.worker.claim import (
    BARE_CLAIM_NEXT,
    CLAIM_NEXT,
    CLAIM_TASK_RUNS,
    TRACEPARENTS,
    Answer,
    Claim,
    answers,
)
from flowforge.worker.execution import Execution, Release
from flowforge.worker.executor import Executor
from flowforge.worker.finishing import Finisher
from flowforge.worker.leases import LeaseKeeper
from flowforge.worker.session import CALL_LIMIT, Session, Unanswered, longer

_log = log.of("worker")

TRY_AGAIN_AFTER = 60.0
"""Seconds after which a worker that could not try whether notifications reach it does so."""


TRACEPARENTS_LIMIT = 5.0
"""Seconds that handlers wait for the traces that they belong to, at most."""


class Parts(NamedTuple):
    """What claiming works with."""

    config: Config
    worker: str
    executor: Executor
    keeper: LeaseKeeper
    finisher: Finisher
    counts: Counter[str]
    on_crash: Callable[[str], None]


_MOST_TOO_MUCH = 2
"""How often a claim is asked for whose answer seems to be too much."""

_SINGLY_FOR = 600.0  # seconds for which single ones are claimed then: what comes next may be as much


class TooMuch(Exception):
    """The answer to a claim does not arrive, in time or in memory. Whether the claim was made is
    not known; `first` as in Sent."""

    def __init__(self, message: str, first: float) -> None:
        super().__init__(message)
        self.first = first


class Sent(NamedTuple):
    """When a claiming call was sent, by time.monotonic(): for the first time that may have reached the
    database, and the time that was answered."""

    first: float
    last: float


class Claimer(ABC):
    """A thread with its own connection that claims. `start`, `stop` and `close` are for the thread that owns
    the worker."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.session = Session(parts.config, "claim", self._connected)
        self.waker = Waker()
        self.stopping = False
        self._given_up = threading.Event()
        self._most = parts.config.concurrency  # to claim at once, less after a refusal
        self._singly_until = 0.0
        self._thread = threading.Thread(target=self._main, name="flowforge-claim", daemon=True)
        # Held from claim to the answer of the finish; more than this and results come in faster than they go
        # out.
        self._most_held = 2 * parts.config.concurrency + 100

    def start(self) -> None:
        """Begin. Raises NoThread."""
        threads.start(self._thread)

    def stop(self) -> None:
        """Take nothing new. What the claim under way wins is given back."""
        self.stopping = True
        self.waker.set()
        self.parts.executor.wake()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, and with it every claim."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the thread now, even if the answer to a claim is still missing."""
        self._given_up.set()
        self.session.sever()
        self._thread.join(2)

    # -- in the thread

    @abstractmethod
    def _turn(self) -> None:
        """Wait for work and claim once."""

    def _connected(self, conn: db.Connection) -> None:  # noqa: B027 -- only one delivery needs it
        """Prepare a new connection."""

    def _step_aside(self) -> None:  # noqa: B027 -- only one delivery has anything to give back
        """Leave to others what was taken and not claimed: the database does not answer, or the thread
        ends."""

    def _main(self) -> None:
        try:
            while not self.stopping:
                self._turn()
        except Exception as exc:  # noqa: BLE001 -- a thread that dies must not go unnoticed
            _log.exception("claiming broke down")
            self.parts.on_crash(f"claiming broke down: {exc}")
        finally:
            self._step_aside()
            self.session.close()

    def _reserve(self, most: int, timeout: float) -> int:
        """Free slots, reserved; 0 when none came free in time."""
        slots = 0
        if self.parts.finisher.wait_below(self._most_held, timeout):
            slots = self.parts.executor.reserve(most, timeout)
        if slots == 0:
            # A connection lost since the last claim is not missed before the next, hours later perhaps.
            self.session.resting = True
        return slots

    def _claim(self, query: str, *arguments: Any, first: float | None = None) -> tuple[list[Answer], Sent]:
        """Ask until answered, each time for the very same; also when that was. `first`: some may have been
        claimed by a call from then on, whose answer was too much.

        Raises psycopg.Error for a definite refusal of all that was sent, so that nothing is claimed, TooMuch
        when it has to be asked for in parts, and Unanswered when told to end.
        """
        too_much, limit, bare = 0, CALL_LIMIT, first is not None
        while True:
            last = time.monotonic()
            try:
                found = answers(self.session.call(query, arguments, limit=limit))
                return found, Sent(first or last, last)
            except Unanswered as exc:
                reason = str(exc)
                if exc.sent and first is None:
                    first = last
                too_much += exc.too_much
                if exc.too_much and bare:
                    limit = longer(limit)
                elif too_much == _MOST_TOO_MUCH and first is not None:
                    raise TooMuch(str(exc), first) from exc
            except psycopg.Error as exc:
                if first is None:
                    raise
                # Only this repeat was refused. What it repeats may be under way in the database to this
                # moment, and its claims would be nobody's if they were not asked for again.
                reason = first_line(exc)
                self.session.stuck(exc)
                _log.warning(
                    "repeat of a claim refused, whose outcome is not known; trying again",
                    error=reason,
                )
            self._step_aside()
            if self._given_up.wait(self.session.pause()):
                raise Unanswered(reason, sent=first is not None)

    def _claim_in_parts(
        self,
        too_much: TooMuch,
        query: str,
        arguments: Sequence[Any],
        claim_id: UUID,
        slots: int,
        decided: Callable[[Sequence[Answer]], None] = lambda _: None,
    ) -> None:
        """Claim by `query`, a bare one, and ask for what handlers get of each alone. All the while the lease
        keeper has them. `decided` is told of what was won and lost; `slots` are reserved for it."""
        _log.warning("no answer to a claim; asking in parts", error=first_line(too_much), count=slots)
        self._most, self._singly_until = 1, time.monotonic() + _SINGLY_FOR
        try:
            found, sent = self._claim(query, *arguments, first=too_much.first)
        except Unanswered:
            # Told to end. Whether anything is claimed is not known; it is offered again.
            self.parts.executor.give_back(slots)
            return
        decided(found)
        held = [Execution(answer.claim, *sent) for answer in found if answer.claim is not None]
        self.parts.executor.give_back(slots - len(held))
        self.parts.keeper.hold(held)
        for each in held:
            self._complete(each, claim_id, sent)

    def _complete(self, held: Execution, claim_id: UUID, sent: Sent) -> None:
        """Ask for what the handler of a task run gets that is claimed under this id, and run it."""
        parts, claim, limit = self.parts, held.claim, CALL_LIMIT
        arguments = [claim.task_run_id], [claim.dispatch_id], parts.worker, claim_id, parts.config.lease
        found, last = list[Answer](), sent.last
        while not self.stopping:
            last = time.monotonic()
            try:
                found = answers(self.session.call(CLAIM_TASK_RUNS, arguments, limit=limit))
                break
            except Unanswered as exc:
                if exc.too_much:
                    limit = longer(limit)
            except psycopg.Error as exc:
                self.session.stuck(exc)
                if not db.is_transient(exc):
                    # It cannot be read, perhaps. Its lease runs out, which is counted.
                    _log.error("what a handler gets is refused; leaving it", task_run=claim.task_run_id,
                               error=first_line(exc))  # fmt: skip
                    break
            self._step_aside()
            if self._given_up.wait(self.session.pause()):
                return
        else:
            parts.executor.give_back(1)
            parts.finisher.put(held, Release("unstarted"))
            return
        if won := [answer.claim for answer in found if answer.claim is not None]:
            self._execute(won, Sent(sent.first, last))
        else:
            parts.executor.give_back(1)
        parts.keeper.forget([held])

    def _more_at_once(self) -> None:
        """A claim went well: the next one may be for more."""
        if time.monotonic() >= self._singly_until:
            self._most = min(2 * self._most, self.parts.config.concurrency)

    def _execute(self, claims: Sequence[Claim], sent: Sent) -> None:
        """Run what was won, each in a slot reserved for it."""
        executor, finisher = self.parts.executor, self.parts.finisher
        self.parts.counts["claimed"] += len(claims)
        executions = [Execution(claim, *sent) for claim in claims]
        self.parts.keeper.hold(executions)
        if self.parts.config.tracing:
            self._ask_for_traces(executions)
        known = []
        for execution in executions:
            if self.stopping:
                finisher.put(execution, Release("unstarted"))
            elif executor.knows(execution.claim.handler):
                known.append(execution)
            else:
                self.parts.counts["unknown_handler"] += 1
                _log.warning(
                    "no such handler in this worker's modules; giving the task run back for another worker "
                    "(a worker has its modules as they were when it started: restart it after an edit)",
                    handler=execution.claim.handler,
                    run=execution.claim.run_id, task_run=execution.claim.task_run_id,
                )  # fmt: skip
                finisher.put(execution, Release("unknown_handler"))
        if len(known) < len(claims):
            executor.give_back(len(claims) - len(known))
        if known:
            executor.start(known)

    def _ask_for_traces(self, executions: Sequence[Execution]) -> None:
        """Which traces they belong to. Without an answer each begins one of its own."""
        claims = [execution.claim for execution in executions]
        pairs = [claim.task_run_id for claim in claims], [claim.fencing_token for claim in claims]
        try:
            rows = self.session.call(TRACEPARENTS, pairs, limit=TRACEPARENTS_LIMIT)
        except (psycopg.Error, Unanswered) as exc:
            _log.warning("the traces that handlers belong to are not known", error=first_line(exc))
            self.session.resting = True  # it does without
            return
        for execution, (traceparent,) in zip(executions, rows, strict=True):
            execution.claim = execution.claim._replace(traceparent=traceparent)


class QueueClaimer(Claimer):
    """Takes dispatches from PostgreSQL by claim_next, woken by NOTIFY and looking by itself every poll
    interval."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._hears: bool | None = None  # not known
        self._try_again_at = float("inf")

    def _turn(self) -> None:
        config = self.parts.config
        slots = self._reserve(self._most, timeout=1.0)
        if slots == 0:
            return
        claim_id = uuid4()
        arguments = [list(config.queues), self.parts.worker, claim_id, config.lease, slots]
        try:
            found, sent = self._claim(CLAIM_NEXT, *arguments)
        except TooMuch as exc:
            self._claim_in_parts(exc, BARE_CLAIM_NEXT, arguments, claim_id, slots)
            return
        except (psycopg.Error, Unanswered) as exc:
            self.parts.executor.give_back(slots)
            if isinstance(exc, psycopg.Error):
                self._refused(exc, slots)
            return
        self._more_at_once()
        self.parts.executor.give_back(slots - len(found))
        if found:
            self._forget_notifications()
            crash_point("worker:after-claim-commit")
            self._execute([answer.claim for answer in found if answer.claim is not None], sent)
        else:
            self._wait(config.poll_interval * random.uniform(0.8, 1.0))  # noqa: S311 -- jitter, not a secret

    def _refused(self, exc: psycopg.Error, slots: int) -> None:
        """Try again: at once with a single one, when more may be the reason, else later."""
        if db.is_transient(exc):
            _log.warning("claim refused; trying again", error=first_line(exc))
            self.session.stuck(exc)
        elif slots > 1:
            _log.warning("claim refused; trying a single one", error=first_line(exc), count=slots)
            self._most = 1
            return
        else:
            _log.error("claim of a single one refused; trying again later", error=first_line(exc))
            self._most = 1
            self.session.stuck(exc)
        self.waker.wait(self.session.pause())

    def _connected(self, conn: db.Connection) -> None:
        # The connection that claims can listen too: it is in autocommit mode and in no transaction while it
        # waits, each claim is a short one of its own, and what arrives meanwhile is kept for `_wait`.
        if self._hears is None:
            try:
                self._hears = hears(conn, self.session.connect)
            except psycopg.Error as exc:
                if db.connection_useless(conn, exc):
                    raise
                # The server's queue of notifications may be full. That is no reason not to work.
                _log.warning("LISTEN cannot be tried; polling until it can", error=first_line(exc))
                self._try_again_at = time.monotonic() + TRY_AGAIN_AFTER
                return
            if not self._hears:
                _log.warning("LISTEN hears nothing (a pooler?); going on by polling only")
        if self._hears:
            conn.execute("listen flowforge_outbox")

    def _wait(self, seconds: float) -> None:
        """Until notified, told to stop, or the time is over."""
        conn = self.session.connection
        if conn is None or not self._hears:
            self.waker.wait(seconds)
            if self._hears is None and time.monotonic() >= self._try_again_at:
                self.session.close()  # the next one tries
            return
        # What arrived while the claim was under way is not to be seen on the socket any more.
        if self._forget_notifications():
            return
        try:
            readable(seconds, conn.fileno(), self.waker.fileno())
        except (psycopg.Error, OSError) as exc:
            self.session.give_up(exc)
        self._forget_notifications()

    def _forget_notifications(self) -> bool:
        """Take all that have arrived, since one claim answers them all; whether there were any. They would
        gather while there is much to do, and be taken for as many reasons to look again when there is not."""
        conn = self.session.connection
        if conn is None or not self._hears:
            return False
        try:
            with db.guard(conn, 5):
                return sum(1 for _ in conn.notifies(timeout=0)) > 0
        except (psycopg.Error, OSError) as exc:
            # The next claim makes another, and looks at everything.
            self.session.give_up(exc)
            return False
