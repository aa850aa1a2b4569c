"""Claiming where PostgreSQL alone delivers: woken by NOTIFY, and looking by itself every poll interval."""

from __future__ import annotations

import random
import time
from uuid import uuid4

import psycopg

from flowforge import cutoff, db, log
from flowforge.crash import crash_point
from flowforge.errors import first_line
from flowforge.listen import hears
from flowforge.waking import readable
from flowforge.worker.claim import BARE_CLAIM_NEXT, CLAIM_NEXT
from flowforge.worker.claiming import Claimer, Parts, TooMuch
from flowforge.worker.session import Unanswered

_log = log.of("worker")

TRY_AGAIN_AFTER = 60.0
"""Seconds after which a worker that could not try whether notifications reach it does so."""


class QueueClaimer(Claimer):
    """Takes dispatches from PostgreSQL by claim_next."""

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
            with cutoff.guard(conn, 5):
                return sum(1 for _ in conn.notifies(timeout=0)) > 0
        except (psycopg.Error, OSError) as exc:
            # The next claim makes another, and looks at everything.
            self.session.give_up(exc)
            return False
