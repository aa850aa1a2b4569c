"""A thread that wakes its daemon when the database notifies.

A notification is a hint and nothing more: whoever waits also looks by itself every so often.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from threading import Event, Thread

import psycopg
from psycopg import sql

from flowforge import cutoff, db, log
from flowforge.waking import Waker, readable

SELF_TEST_SECONDS = 2.0
# Tries to catch a pooler at sharing sessions. As a rule it gives to the next what it got back last.
_LOOKS = 10


def hears(conn: db.Connection, connect: Callable[[], AbstractContextManager[db.Connection]]) -> bool:
    """Whether notifications reach `conn`, told by sending one on a channel that nobody else uses. `connect`
    makes a second connection of the same kind."""
    channel = sql.Identifier(f"flowforge_test_{random.getrandbits(64):x}")
    listen, notify = sql.SQL("listen {}").format(channel), sql.SQL("notify {}").format(channel)
    if _session(conn) == conn.info.backend_pid:
        conn.execute(listen)
        conn.execute(notify)
    else:
        # A pooler is between. What one sends oneself may come back even through one that forwards nothing
        # else, so another connection sends it.
        with connect() as other:
            if _share_sessions(conn, other):
                return False
            conn.execute(listen)
            other.execute(notify)
    heard = any(True for _ in conn.notifies(timeout=SELF_TEST_SECONDS, stop_after=1))
    conn.execute(sql.SQL("unlisten {}").format(channel))
    return heard


def _share_sessions(conn: db.Connection, other: db.Connection) -> bool:
    """Whether a pooler gives both the same session of the server, or one of them several. Then LISTEN is of
    no use, and would stay behind in a session that is anybody's."""
    ours: set[int] = set()
    theirs: set[int] = set()
    for _ in range(_LOOKS):
        ours.add(_session(conn))
        theirs.add(_session(other))
        if len(ours) > 1 or len(theirs) > 1 or ours & theirs:
            return True
    return False


def _session(conn: db.Connection) -> int:
    """The process id of the server's session that answers."""
    row = conn.execute("select pg_backend_pid()").fetchone()
    return row[0] if row else 0


class Listener(Thread):
    """A thread with its own autocommit connection that LISTENs and calls `wake` for whatever arrives.

    `wake` is also called after each (re)connect, once LISTEN is in force, so that the caller looks at
    everything that was committed before. The connection is checked by a round trip every `check_every`
    seconds and replaced when that fails or takes `check_timeout` seconds, with jittered back-off and one log
    line each. At the start a random channel is notified; if nothing arrives within two seconds (a pooler in
    transaction mode), one warning is logged and the thread ends: `polling_only` is then true."""

    def __init__(
        self,
        dsn: str,
        channels: Iterable[str],
        wake: Callable[[], None],
        *,
        name: str,
        check_every: float = 10.0,
        check_timeout: float = 5.0,
        connect_timeout: int | None = None,
    ) -> None:
        super().__init__(name=f"flowforge-listen-{name}", daemon=True)
        self.polling_only = False
        self.listening = Event()
        self._dsn, self._channels, self._wake = dsn, tuple(channels), wake
        self._application = f"flowforge {name} listen"
        self._check_every, self._check_timeout = check_every, check_timeout
        self._connect_timeout = connect_timeout
        self._log = log.of(name)
        self._ending = Waker()

    def close(self) -> None:
        """End the thread. Returns when it has ended, or after a second: an attempt to connect takes its time,
        and does nothing more when it is over."""
        self._ending.set()
        if self.is_alive():
            self.join(1)

    def run(self) -> None:
        backoff, tested, lost = db.Backoff(), False, False
        while not self._ending.is_set():
            try:
                with self._connect() as conn:
                    if not tested and not self._tested(conn):
                        self.polling_only = True
                        self._log.warning("LISTEN hears nothing (a pooler?); going on by polling only")
                        return
                    tested = True
                    with cutoff.guard(conn, self._check_timeout):
                        for channel in self._channels:
                            conn.execute(sql.SQL("listen {}").format(sql.Identifier(channel)))
                    if lost:
                        self._log.info("listening again on a new connection")
                    lost = False
                    backoff.reset()
                    self.listening.set()
                    self._wake()
                    self._relay(conn)
            except (psycopg.Error, OSError) as exc:
                if not lost:
                    self._log.warning("listening connection lost; reconnecting", error=type(exc).__name__)
                lost = True
                self._ending.wait(backoff.next())
            except Exception:  # noqa: BLE001 -- without this thread nothing would wake its daemon any more
                self._log.exception("unforeseen error of the listener; starting anew")
                lost = True
                self._ending.wait(backoff.next())
            finally:
                self.listening.clear()

    def _connect(self) -> db.Connection:
        return db.connect(
            self._dsn,
            application_name=self._application,
            connect_timeout=self._connect_timeout,
            prepared_statements=False,
        )

    def _tested(self, conn: db.Connection) -> bool:
        with cutoff.guard(conn, SELF_TEST_SECONDS + self._check_timeout):
            return hears(conn, self._connect)

    def _relay(self, conn: db.Connection) -> None:
        """Call `wake` for what arrives, until asked to stop; a lost connection raises."""
        stop, notes = self._ending.fileno(), conn.fileno()
        while True:
            ready = readable(self._check_every, stop, notes)
            if stop in ready:
                return
            with cutoff.guard(conn, self._check_timeout):
                if not ready:
                    conn.execute("select 1")
                heard = sum(1 for _ in conn.notifies(timeout=0))
            if ready or heard:
                self._wake()
