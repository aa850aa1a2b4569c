"""One thread's connection to PostgreSQL, replaced when it is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from flowforge import cutoff, db, log
from flowforge.config import Config
from flowforge.errors import ConfigError, first_line

_log = log.of("worker")

CALL_LIMIT = 60.0
"""Seconds after which a call that got no answer is given up as lost with its connection."""

_LONGEST_CALL = 3600.0
PASSING_REFUSALS = 2
"""In a row, by what passes by itself, until it is told of."""


class Unanswered(Exception):
    """No answer: the connection was lost or could not be made. Whether the statement took effect is not
    known, unless it was not even `sent`. `too_much`: the answer may be the reason, since it took all the time
    there is, or more memory."""

    def __init__(self, message: str, *, sent: bool, too_much: bool = False) -> None:
        super().__init__(message)
        self.sent, self.too_much = sent, too_much


def longer(limit: float) -> float:
    """The limit for another try of a call that was too much for `limit` and cannot be parted."""
    return min(2 * limit, _LONGEST_CALL)


class Session:
    """Calls of one thread on one connection. Everything but `hurry`, `sever` and `healthy` belongs to that
    thread."""

    def __init__(
        self, config: Config, purpose: str, on_connect: Callable[[db.Connection], None] | None = None
    ) -> None:
        """`purpose` ends the application_name; `on_connect` is called with each new connection."""
        self.purpose = purpose
        self._config, self._on_connect = config, on_connect
        self._conn: db.Connection | None = None
        self._cutoff: cutoff.Cutoff | None = None
        self._shorten: Callable[[float], None] | None = None
        self._backoff = db.Backoff()
        self.lost_since_answer = 0
        self.resting = False
        """Whether its owner has nothing to ask, so that what it heard last says nothing of the present; the
        next call unsets it."""
        self._refused = False
        self._refusals = 0

    @property
    def connection(self) -> db.Connection | None:
        """The present connection, if there is one."""
        return self._conn

    @property
    def refused(self) -> bool:
        """Whether nothing goes on for refusals, until a call succeeds or there is nothing to ask."""
        return self._refused and not self.resting

    @property
    def healthy(self) -> bool:
        """Whether the last call was answered, and not refused in a way that nothing goes on; or there is
        nothing to ask."""
        return self.resting or (self.lost_since_answer == 0 and not self._refused)

    def call(
        self,
        query: str,
        params: Sequence[Any],
        *,
        limit: float = CALL_LIMIT,
        lock_timeout: float | None = None,
    ) -> list[tuple[Any, ...]]:
        """Run one statement as its own transaction; its rows. `limit`: seconds after which the connection
        counts as lost, and that a new one may take; `lock_timeout`: seconds, the configured one unless given.

        Raises Unanswered, also while the connection string is refused, or psycopg.Error for a definite
        refusal, which changed nothing.
        """
        self.resting = False
        begun = time.monotonic()
        try:
            conn = self._connected(limit)
            begun = time.monotonic()
            with cutoff.guard(conn, limit) as self._shorten:
                rows = db.call(conn, query, params, lock_timeout=lock_timeout or self._config.lock_timeout)
        except (psycopg.Error, ConfigError, OSError, MemoryError) as exc:
            if not self._is_lost(exc):
                self._answered()
                raise
            sent = self._conn is not None
            no_memory = isinstance(exc, MemoryError) or "out of memory" in str(exc)
            too_much = sent and (no_memory or time.monotonic() - begun >= limit)
            self.give_up(exc)
            # Of a connection string that was good: a pooler was set up anew, perhaps, and will be again.
            self._refused = self._refused or isinstance(exc, ConfigError)
            raise Unanswered(first_line(exc), sent=sent, too_much=too_much) from exc
        self._answered()
        self._backoff.reset()
        self._refusals, self._refused = 0, False
        return rows

    def stuck(self, exc: psycopg.Error) -> None:
        """Whoever calls has got nowhere, for this refusal: one that passes by itself may come a few times in
        a row until it is told."""
        self._refusals += 1
        self._refused = self._refusals > (PASSING_REFUSALS if db.is_transient(exc) else 0)

    def give_up(self, exc: Exception) -> None:
        """Close the connection, which `exc` says is lost, and tell of it once, until a call is answered."""
        self.close()
        if self.lost_since_answer == 0:
            _log.warning(
                "database connection lost; trying again", connection=self.purpose, error=first_line(exc)
            )
        self.lost_since_answer += 1

    def _answered(self) -> None:
        if self.lost_since_answer:
            _log.info("database answers again", connection=self.purpose)
            self.lost_since_answer = 0

    def connect(self, limit: float = CALL_LIMIT) -> db.Connection:
        """Another connection of the same kind, the caller's to close, made within `limit` seconds or the
        configured time-out (at least the two seconds that libpq gives)."""
        return db.connect(
            self._config.database_url,
            application_name=f"flowforge worker {self.purpose}",
            connect_timeout=min(self._config.connect_timeout, max(2, int(limit))),
            prepared_statements=self._config.prepared_statements,
        )

    def pause(self) -> float:
        """Seconds to wait before the next try after a failure: growing, with jitter, until a call is
        answered."""
        return self._backoff.next()

    def hurry(self, seconds: float) -> None:
        """A call that is under way counts as lost unless it is answered within `seconds`. From any thread."""
        if (shorten := self._shorten) is not None:
            shorten(seconds)

    def sever(self) -> None:
        """Make a call that is under way fail. From any thread."""
        if (cutoff := self._cutoff) is not None:
            cutoff.cut()

    def close(self) -> None:
        """Close the connection; the next call makes another."""
        if self._cutoff is not None:
            self._cutoff.close()
            self._cutoff = None
        if self._conn is not None:
            self._conn.close()
            self._conn = None

    def _connected(self, limit: float) -> db.Connection:
        if self._conn is None:
            self._conn = conn = self.connect(limit)
            try:
                self._cutoff = cutoff.Cutoff(conn)
                if self._on_connect is not None:
                    with cutoff.guard(conn, CALL_LIMIT):
                        self._on_connect(conn)
            except BaseException:
                # Kept half prepared, it would stay so: it would never LISTEN.
                self.close()
                raise
        return self._conn

    def _is_lost(self, exc: Exception) -> bool:
        """Whether the outcome is unknown, or only a fresh connection can do better. To ask again for the same
        is safe in both cases."""
        if self._conn is None:
            return True
        if isinstance(exc, psycopg.DataError) and exc.sqlstate is None:
            # psycopg itself refused an argument; nothing was sent.
            return self._conn.broken
        return db.connection_useless(self._conn, exc)
