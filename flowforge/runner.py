"""The loop of scheduler and publisher, written once: connect, call `tick`, wait, reconnect, stop, say how one
is.

A daemon is one duty with a `tick` that makes one bounded call; `run` does the rest. The worker, whose threads
need a shape of their own, shares its parts: `connecting`, `health`, `stopping`.
"""

from __future__ import annotations

import contextlib
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

import psycopg

from flowforge import cutoff, db, exits, log, threads
from flowforge.config import Config
from flowforge.connecting import connect
from flowforge.errors import (
    BrokerBlocked,
    BrokerUnavailable,
    ConfigError,
    DatabaseError,
    DatabaseUnavailable,
    FlowForgeError,
    MissingPrivilege,
    SchemaError,
    from_database,
)
from flowforge.health import Health
from flowforge.listen import Listener
from flowforge.metrics import Metric, counted, of_daemon, serving
from flowforge.stopping import Stop, signals
from flowforge.waking import Waker


class Daemon(ABC):
    """One duty. `run` calls its methods from one thread."""

    name: ClassVar[str]
    role: ClassVar[str]  # the group role that its login needs
    functions: ClassVar[tuple[str, ...]]  # the database functions it calls, checked at the start
    channels: ClassVar[tuple[str, ...]] = ()  # notifications that wake it
    tick_limit: float = 60.0  # seconds after which a tick's connection is given up as dead
    stop_limit: float = 5.0  # the same from when it is asked to stop, the time-out of locks not counted
    stop: Stop | None = None  # of whoever runs it: a tick of several parts looks at it between two of them

    def on_connect(self) -> None:  # noqa: B027 -- not every daemon needs it
        """Called with each new connection, before its first tick."""

    @abstractmethod
    def tick(self, conn: db.Connection) -> int:
        """One bounded piece of work; how much was done. More than zero: called again at once.

        Raises psycopg.Error, BrokerUnavailable or BrokerBlocked for what passes, other FlowForgeErrors to
        end."""

    def pause(self, conn: db.Connection) -> float | None:  # noqa: ARG002 -- for those that override it
        """Called when a tick found nothing: the longest wait in seconds, or None for the poll interval."""
        return None

    def trouble(self) -> str:
        """What is wrong although ticks succeed, for the state of health; empty when nothing is."""
        return ""

    def metrics(self) -> list[Metric]:
        """What it counts, for whoever scrapes it. Called by other threads."""
        return []

    def close(self) -> None:  # noqa: B027 -- not every daemon needs it
        """Called once, when the loop has ended."""


def run(daemon: Daemon, config: Config, *, stop: Stop | None = None, health: Health | None = None) -> int:
    """Run `daemon` until asked to stop and return its exit code.

    Without `stop` the signals of the process ask for it (main thread only); with it this may be any thread.
    What passes by itself (the database or the broker away, blocked, failing over) is waited for with jittered
    back-off; what does not at the start (a wrong password, an old schema, a missing privilege) ends the
    daemon with one line that names the remedy."""
    if stop is None:
        with signals(Stop()) as own:
            return _run(daemon, config, own, health, alone=True)
    return _run(daemon, config, stop, health, alone=False)


def _run(daemon: Daemon, config: Config, stop: Stop, health: Health | None, *, alone: bool) -> int:
    """As `run`. `alone`: nothing else runs in the process, whose metrics are this daemon's then."""
    try:
        health = health or Health(daemon.name, config.health_file)
    except ConfigError as exc:
        log.of(daemon.name).error(str(exc))
        daemon.close()
        return exits.exit_code(exc)
    loop = _Loop(daemon, config, stop, health)
    try:
        with serving(config, loop.metrics) if alone else contextlib.nullcontext():
            loop.run()
    except FlowForgeError as exc:
        log.of(daemon.name).error(str(exc))
        health.report("failed", str(exc))
        return exits.exit_code(exc)
    except Exception as exc:  # noqa: BLE001 -- a mistake in the program must be told as well, in a thread too
        log.of(daemon.name).exception("unforeseen error")
        health.report("failed", f"{type(exc).__name__}: {exc}")
        return exits.EXIT_FAILED
    finally:
        loop.close()
    if stop.immediate:
        return exits.EXIT_INTERRUPTED
    health.report("stopping")
    log.of(daemon.name).info("stopped")
    return exits.EXIT_OK


class _Loop:
    def __init__(self, daemon: Daemon, config: Config, stop: Stop, health: Health) -> None:
        self.daemon, self.config, self.stop, self.health = daemon, config, stop, health
        daemon.stop = stop
        self.log = log.of(daemon.name)
        self.waker = Waker()
        # Apart: a database that is lost once the broker has been away for long is asked again at once.
        self.backoff, self.broker_backoff = db.Backoff(), db.Backoff()
        self.conn: db.Connection | None = None
        self.cutoff: cutoff.Cutoff | None = None
        self.listener: Listener | None = None
        self.shorten: Callable[[float], None] | None = None  # the time that the tick has
        self.started = False
        self.counts: Counter[str] = Counter()
        stop.on_request(self._asked)

    def metrics(self) -> list[Metric]:
        """Of the loop and of its daemon. For any thread."""
        counts = self.counts
        return [
            *of_daemon(self.daemon.name, self.health.state),
            counted(
                "ticks", "Turns of the daemon's loop, by whether there was something to do.", "work",
                {"found": counts["found"], "none": counts["none"]},
            ),
            counted(
                "errors", "Turns that failed and were tried again, by what was missing.", "missing",
                {"database": counts["database"], "broker": counts["broker"]},
            ),
            Metric(
                "counter", "database_connections", "Connections made to PostgreSQL, the first included.",
                {"": counts["connections"]},
            ),
            *self.daemon.metrics(),
        ]  # fmt: skip

    def _asked(self) -> None:
        self.waker.set()
        if self.stop.immediate and (cutoff := self.cutoff) is not None:
            cutoff.cut()
        elif (shorten := self.shorten) is not None:
            shorten(self.config.lock_timeout + self.daemon.stop_limit)

    def close(self) -> None:
        self.daemon.close()
        if self.listener is not None:
            self.listener.close()
        self._disconnect()

    def _disconnect(self) -> None:
        if self.cutoff is not None:
            self.cutoff.close()
            self.cutoff = None
        if self.conn is not None:
            self.conn.close()
            self.conn = None

    def _turn(self) -> None:
        conn = self._connection()
        with cutoff.guard(conn, self.daemon.tick_limit) as self.shorten:
            if self.stop.requested:  # before there was anything to shorten
                return
            moved = self.daemon.tick(conn)
            wait = None if moved or self.stop.requested else self.daemon.pause(conn)
        self._worked()
        self.counts["found" if moved else "none"] += 1
        if not moved:
            jitter = random.uniform(0.8, 1.0)  # noqa: S311 -- not a secret
            self._wait(self.config.poll_interval * jitter if wait is None else wait)

    def run(self) -> None:
        while not self.stop.requested:
            try:
                self._turn()
            except (BrokerUnavailable, BrokerBlocked) as exc:
                self.counts["broker"] += 1
                state = "blocked" if isinstance(exc, BrokerBlocked) else "no broker"
                if self.health.state != state:
                    self.log.warning("waiting for the broker", state=state, error=str(exc))
                self.health.report(state, str(exc))
                # Notifications of more work must not turn this into a hot loop.
                self._wait(min(self.broker_backoff.next(), self.config.poll_interval), wakeable=False)
            except psycopg.Error as exc:
                if self.stop.immediate:
                    return
                self._lost(from_database(exc), passing=db.is_transient(exc))
            except OSError as exc:
                # No descriptors left, or no threads, for a moment.
                self._lost(DatabaseUnavailable(str(exc)), passing=True)
            except (ConfigError, DatabaseError, SchemaError, MissingPrivilege) as exc:
                # From connecting and its checks. Once started, a daemon outlasts even these: a failover, a
                # restore, a rotated password, or a pooler that refuses a parameter, may look like them for a
                # while.
                passing = isinstance(exc, DatabaseUnavailable)
                if not passing and not self.started:
                    raise
                self._lost(exc, passing=passing)

    def _connection(self) -> db.Connection:
        """The working connection, made and checked when there is none."""
        if self.conn is None:
            self.conn = connect(
                self.config, self.daemon.name, self.stop, self.daemon.functions, self.daemon.role
            )
            self.cutoff = cutoff.Cutoff(self.conn)
            self.daemon.on_connect()
            if self.listener is None and self.daemon.channels:
                listener = Listener(
                    self.config.database_url,
                    self.daemon.channels,
                    self.waker.set,
                    name=self.daemon.name,
                    connect_timeout=self.config.connect_timeout,
                )
                threads.start(listener)
                self.listener = listener
            self.counts["connections"] += 1
            self.log.info("connected to PostgreSQL" if not self.started else "connected to PostgreSQL again")
            self.started = True
        return self.conn

    def _worked(self) -> None:
        if self.health.state in ("no broker", "blocked"):
            self.log.info("the broker is back")
        self.backoff.reset()
        self.broker_backoff.reset()
        self.health.ticked(self.daemon.trouble())

    def _lost(self, exc: FlowForgeError, *, passing: bool) -> None:
        """Give the connection up and wait a little before the next one."""
        self.counts["database"] += 1
        self._disconnect()
        if passing and self.stop.requested:
            self.log.warning("the last call failed; stopping", error=str(exc))
            return
        state, seconds = "no database" if passing else "error", self.backoff.next()
        if self.health.report(state, str(exc)):
            tell = self.log.warning if passing else self.log.error
            tell(f"{state}; trying again", error=str(exc), seconds=round(seconds, 3))
        self._wait(seconds, wakeable=False)

    def _wait(self, seconds: float, *, wakeable: bool = True) -> None:
        """Wait until woken, at most `seconds`, keeping the health report fresh."""
        deadline = time.monotonic() + seconds
        while not self.stop.requested and (left := deadline - time.monotonic()) > 0:
            if self.waker.wait(min(left, 5.0)) if wakeable else self.stop.wait(min(left, 5.0)):
                self.waker.clear()
                break
            self.health.beat()
