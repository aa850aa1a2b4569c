"""Claiming dispatches: what both deliveries share.

One claim is under way at a time, for as many task runs as there are free slots, so that a worker never has
two undecided deliveries of one dispatch. A call whose outcome is not known is repeated whole, with the same
claim id and arguments, until it is answered: its claims, if it made any, are nobody else's to give back. One
whose answer is too much is asked for in parts, under that claim id. A message is acknowledged when its claim
was decided, won or lost, and not before.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from flowforge import db, log, threads
from flowforge.config import Config
from flowforge.errors import first_line
from flowforge.waking import Waker
from flowforge.worker.claim import (
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

_LONGEST_PART = 4 * CALL_LIMIT
"""Seconds that what one handler gets may take to arrive, at its last try."""

_UNKNOWN_TOLD_EVERY = 60.0  # seconds
_UNKNOWN_KEPT = 1000
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
        self._unknown: dict[str, tuple[float, int]] = {}  # handlers: when last told, and how many since
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
                if bare:
                    limit = longer(limit) if exc.too_much else limit
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
        self._complete(held, claim_id, sent)

    def _complete(self, held: Sequence[Execution], claim_id: UUID, sent: Sent) -> None:
        """Ask for what the handler of each task run gets that is claimed under this id, and run it. One whose
        answer is too much waits for the others and is given more time; after some tries it is given back, and
        that counts."""
        parts, waiting = self.parts, deque((each, CALL_LIMIT) for each in held)
        while waiting and not self._given_up.is_set():
            each, limit = waiting.popleft()
            if self.stopping:
                self._leave(each, Release("unstarted"))
                continue
            claim = each.claim
            arguments = [claim.task_run_id], [claim.dispatch_id], parts.worker, claim_id, parts.config.lease
            last = time.monotonic()
            try:
                [answer] = answers(self.session.call(CLAIM_TASK_RUNS, arguments, limit=limit))
            except Unanswered as exc:
                if not exc.too_much:
                    waiting.appendleft((each, limit))
                elif limit < _LONGEST_PART:
                    waiting.append((each, longer(limit)))
                else:
                    each.broken_off = f"what its handler gets does not arrive: {exc}"
                    self._leave(each, Release("crashed"))
            except psycopg.Error as exc:
                self.session.stuck(exc)
                if db.is_transient(exc):
                    waiting.appendleft((each, limit))
                else:
                    each.broken_off = f"what its handler gets cannot be read: {first_line(exc)}"
                    self._leave(each, Release("crashed"))
            else:
                if answer.claim is not None:
                    self._execute([answer.claim], Sent(sent.first, last), instead_of=[each])
                else:
                    parts.keeper.forget([each])
                    parts.executor.give_back(1)
                continue
            self._step_aside()
            self._given_up.wait(self.session.pause())

    def _leave(self, execution: Execution, release: Release) -> None:
        """Give back a task run that is held and has a slot, and will not be run."""
        if release.reason == "crashed":
            claim = execution.claim
            _log.error("giving a task run back", run=claim.run_id, task_run=claim.task_run_id,
                       error=execution.broken_off)  # fmt: skip
        self.parts.executor.give_back(1)
        self.parts.finisher.put(execution, release)

    def _more_at_once(self) -> None:
        """A claim went well: the next one may be for more."""
        if time.monotonic() >= self._singly_until:
            self._most = min(2 * self._most, self.parts.config.concurrency)

    def _execute(self, claims: Sequence[Claim], sent: Sent, *, instead_of: Sequence[Execution] = ()) -> None:
        """Run what was won, each in a slot reserved for it; `instead_of` what was held for these."""
        executor, finisher = self.parts.executor, self.parts.finisher
        self.parts.counts["claimed"] += len(claims)
        executions = [Execution(claim, *sent) for claim in claims]
        self.parts.keeper.hold(executions)
        self.parts.keeper.forget(instead_of)
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
                self._tell_unknown(execution.claim)
                finisher.put(execution, Release("unknown_handler"))
        if len(known) < len(claims):
            executor.give_back(len(claims) - len(known))
        if known:
            executor.start(known)

    def _tell_unknown(self, claim: Claim) -> None:
        """Of each handler once a minute: it may be a whole map's, and each element comes back again. What
        comes after the last time is never told, nor what was counted before the names were too many."""
        now = time.monotonic()
        told, more = self._unknown.get(claim.handler, (-math.inf, 0))
        if now < told + _UNKNOWN_TOLD_EVERY:
            self._unknown[claim.handler] = told, more + 1
            return
        if len(self._unknown) >= _UNKNOWN_KEPT:
            self._unknown.clear()
        self._unknown[claim.handler] = now, 0
        _log.warning(
            "no such handler in this worker's modules; giving the task run back for another worker "
            "(a worker has its modules as they were when it started: restart it after an edit, and with each "
            "module of which there is work)",
            handler=claim.handler, run=claim.run_id, task_run=claim.task_run_id,
            **({"more_since_last_told": more} if more else {}),
        )  # fmt: skip

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
