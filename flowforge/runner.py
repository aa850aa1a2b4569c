"""The loop of every daemon, written once: connect, check, call `tick`, wait, reconnect, stop, say how one is.

A daemon is one duty with a `tick` that makes one bounded call; `run` does the rest. Parts of it (Stop,
Health, check_start, crash_point, exit codes) serve the worker too, whose threads need a shape of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import psycopg

from flowforge import db, exits, log
from flowforge.config import Config
from flowforge.errors import (
    BrokerBlocked,
    BrokerUnavailable,
    ConfigError,
    DatabaseError,
    DatabaseUnavailable,
    FlowForgeError,
    MissingPrivilege,
    SchemaError,
    first_line,
    from_database,
)
from flowforge.listen import Listener, Waker
from flowforge.metrics import Metric, counted, of_daemon, serving
from flowforge.migrate import check_schema
from flowforge.stopping import SIGNALS, Remembered

# With what daemons end.
EXIT_OK = exits.EXIT_OK
EXIT_ERROR = exits.EXIT_FAILED
EXIT_CONFIG = exits.EXIT_CONFIG
EXIT_DATABASE = exits.EXIT_DATABASE
EXIT_SCHEMA = exits.EXIT_SCHEMA
EXIT_PRIVILEGE = exits.EXIT_PRIVILEGE
EXIT_BROKER = exits.EXIT_BROKER
EXIT_NO_SLOTS = exits.EXIT_NO_SLOTS
EXIT_FORCED = exits.EXIT_INTERRUPTED
exit_code = exits.exit_code


# -- stopping


class Stop:
    """A request to stop, shared by the threads of a process: asked once, take nothing new; asked twice, stop
    now."""

    def __init__(self) -> None:
        # One entry for each request. To count is to read and then write, and a second request may come in
        # between, from another thread or from a signal handler, which no lock may keep waiting.
        self._requests: list[None] = []
        self._flag = Waker()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """Whether to take nothing new."""
        return len(self._requests) > 0

    @property
    def immediate(self) -> bool:
        """Whether to stop now, finished or not."""
        return len(self._requests) > 1

    def request(self) -> None:
        """Ask to stop. Safe from any thread and from signal handlers."""
        self._requests.append(None)
        self._flag.set()
        for callback in self._callbacks:
            callback()

    def on_request(self, callback: Callable[[], None]) -> None:
        """Call `callback` at every request, in the thread or signal handler that asks: it must take no lock.
        Called at once when a request was made already."""
        self._callbacks.append(callback)
        if self.requested:
            callback()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a request, at most `seconds`; whether there was one."""
        return self._flag.wait(seconds)


@contextmanager
def signals(stop: Stop) -> Generator[Stop]:
    """Within the block SIGTERM and SIGINT ask `stop`, for those too that `stopping` remembers. Main thread
    only."""

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop.request()

    before = {number: signal.signal(number, ask) for number in SIGNALS}
    for handler in before.values():
        if isinstance(handler, Remembered):
            handler.take(stop.request)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- saying how one is


class Health:
    """The state of one daemon, kept in memory and, when a path is given, in a file that a health check can
    read. Raises ConfigError when that file cannot be written.

    States: starting, ok, no database, no broker, blocked, error, stopping, failed. Thread-safe.
    """

    def __init__(self, daemon: str, path: str | os.PathLike[str] | None = None) -> None:
        self._lock = threading.Lock()
        self._path = Path(path).absolute() if path else None  # a handler may change the directory
        self._written_at = float("-inf")  # by time.monotonic(): nobody sets that clock
        self._state: dict[str, Any] = {
            "daemon": daemon,
            "pid": os.getpid(),
            "state": "starting",
            "detail": "",
            "last_tick": None,
        }
        try:
            self._write()
        except OSError as exc:
            raise ConfigError(f"FLOWFORGE_HEALTH_FILE: cannot write {path}: {exc.strerror}") from None

    @property
    def state(self) -> str:
        """The present state's name."""
        return str(self._state["state"])

    def report(self, state: str, detail: str = "") -> bool:
        """Set the state; whether it changed."""
        changed = (state, detail) != (self._state["state"], self._state["detail"])
        self._state |= {"state": state, "detail": detail}
        self.beat(force=changed)
        return changed

    def ticked(self, trouble: str = "") -> None:
        """A tick was made: the state is ok, or error where there is `trouble`."""
        self._state["last_tick"] = time.time()
        self.report("error" if trouble else "ok", trouble)

    def beat(self, *, force: bool = False) -> None:
        """Write the file if it is older than a second. Call it every few seconds while alive."""
        if time.monotonic() - self._written_at >= 1 or force:
            # A full disk is no reason to stop working; whoever reads the file sees that it has grown old.
            with suppress(OSError):
                self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        with self._lock:
            self._written_at = time.monotonic()
            draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
            draft.write_text(json.dumps(self._state | {"written": time.time()}))
            draft.replace(self._path)


_CLOCK_SLEW = 2.0  # seconds that a clock may be set back by as a matter of course


def read_health(path: str | os.PathLike[str], max_age: float = 30.0) -> tuple[bool, str]:
    """Whether the daemon that writes `path` is well, and one line saying how it is. It is well when it
    reported within `max_age` seconds that its state is ok.

    A report from the future was made before the clock was set back: it says nothing of how old it is, and a
    daemon that is alive replaces it within seconds."""
    try:
        found = json.loads(Path(path).read_text())
        age = time.time() - found["written"]
        line = f"{found['daemon']}: {found['state']}" + (f" ({found['detail']})" if found["detail"] else "")
        if found["last_tick"] is not None:
            line += f", last tick {time.time() - found['last_tick']:.0f} s ago"
    except (OSError, ValueError, KeyError, TypeError):
        return False, f"no health report in {path}"
    if age < -_CLOCK_SLEW:
        return False, f"{line}; the clock was set back by {-age:.0f} s since"
    if age > max_age:
        return False, f"{line}; silent for {age:.0f} s"
    return found["state"] == "ok", line


_passes: dict[str, int] = {}


def crash_point(name: str) -> None:
    """For tests: kill this process as by kill -9 when FLOWFORGE_CRASH_AT names this point, as in
    `publisher:after-confirm`, or `publisher:after-confirm@3` for the third time it is passed. Not without
    FLOWFORGE_TEST_CRASHES=1: one stray variable shall never kill a daemon."""
    wanted, _, turn = os.environ.get("FLOWFORGE_CRASH_AT", "").partition("@")
    if wanted == name and os.environ.get("FLOWFORGE_TEST_CRASHES") == "1":
        _passes[name] = _passes.get(name, 0) + 1
        if _passes[name] >= int(turn or 1):
            os.kill(os.getpid(), signal.SIGKILL)


# -- starting


def check_start(conn: db.Connection, functions: Iterable[str], role: str) -> None:
    """Check that the schema is there and new enough, and that this login may execute `functions` (names
    without the schema), as members of `role` may.

    Raises SchemaError or MissingPrivilege, naming all that is missing and the remedy.
    """
    wanted = list(functions)
    row = conn.execute(
        """
        select session_user::text, current_database()::text,
               n.oid is not null, coalesce(has_schema_privilege(n.oid, 'usage'), false),
               coalesce(array_agg(w.name order by w.name) filter (where p.oid is null), '{}'),
               coalesce(array_agg(w.name order by w.name)
                        filter (where not has_function_privilege(p.oid, 'execute')), '{}')
        from unnest(%s::text[]) w(name)
        left join pg_catalog.pg_namespace n on n.nspname = 'flowforge'
        left join pg_catalog.pg_proc p on p.pronamespace = n.oid and p.proname = w.name
        group by n.oid
        """,
        [wanted],
    ).fetchone()
    assert row is not None  # noqa: S101 -- an aggregate over a list that is never empty
    login, database, exists, usable, missing, forbidden = row
    if not exists:
        raise SchemaError(f'database "{database}" has no schema flowforge; run `flowforge migrate`')
    if missing:
        raise SchemaError(
            f"the schema is too old: it has no function {', '.join(missing)}; run `flowforge migrate`"
        )
    if not usable or forbidden:
        lacks = ([] if usable else ["USAGE on schema flowforge"]) + [
            f"EXECUTE on {name}" for name in forbidden
        ]
        raise MissingPrivilege(f'login "{login}" lacks {", ".join(lacks)}; remedy: grant {role} to "{login}"')
    check_schema(conn)


CHECK_LIMIT = 60.0
"""Seconds after which a check that got no answer is given up with its connection."""


def connect(config: Config, daemon: str, stop: Stop, functions: Iterable[str], role: str) -> db.Connection:
    """A connection of `daemon` as the configuration says, checked as by `check_start`. The attempt, which may
    take the connection time-out for each host, is given up when `stop` is requested.

    Raises DatabaseUnavailable when a later try may succeed, DatabaseError when this login is refused for
    good; SchemaError, MissingPrivilege or psycopg.Error from the check."""
    attempt: Future[db.Connection] = Future()

    def main() -> None:
        try:
            attempt.set_result(_checked(_connect(config, daemon), functions, role))
        except Exception as exc:  # noqa: BLE001 -- raised where it is waited for
            attempt.set_exception(exc)

    # In a thread of its own: there is no socket yet that could be cut.
    threading.Thread(target=main, name="flowforge-connect", daemon=True).start()
    while not stop.requested:
        with suppress(TimeoutError):
            return attempt.result(0.1)
    attempt.add_done_callback(lambda done: None if done.exception() else done.result().close())
    raise DatabaseUnavailable("told to stop while connecting")


def _checked(conn: db.Connection, functions: Iterable[str], role: str) -> db.Connection:
    try:
        with db.guard(conn, CHECK_LIMIT):
            check_start(conn, functions, role)
    except OSError as exc:  # no descriptor left for the guard
        conn.close()
        raise DatabaseUnavailable(str(exc)) from exc
    except BaseException:
        conn.close()
        raise
    return conn


def _connect(config: Config, daemon: str) -> db.Connection:
    try:
        return db.connect(
            config.database_url,
            application_name=f"flowforge {daemon}",
            connect_timeout=config.connect_timeout,
            prepared_statements=config.prepared_statements,
        )
    except psycopg.Error as exc:
        reason = db.refusal(exc)
        if reason is not None:
            raise DatabaseError(
                f"the database refuses the connection: {reason} ({first_line(exc)})", exc.sqlstate
            ) from exc
        raise from_database(exc) from exc
    except OSError as exc:  # no descriptors left
        raise DatabaseUnavailable(str(exc)) from exc


# -- the loop


class Daemon(ABC):
    """One duty. `run` calls its methods from one thread."""

    name: ClassVar[str]
    role: ClassVar[str]  # the group role that its login needs
    functions: ClassVar[tuple[str, ...]]  # the database functions it calls, checked at the start
    channels: ClassVar[tuple[str, ...]] = ()  # notifications that wake it
    tick_limit: float = 60.0  # seconds after which a tick's connection is given up as dead

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
    back-off; what does not at the start (a wrong password, an old schema, a missing privilege, queues with
    other arguments) ends the daemon with one line that names the remedy."""
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
        return exit_code(exc)
    loop = _Loop(daemon, config, stop, health)
    try:
        with serving(config, loop.metrics) if alone else contextlib.nullcontext():
            loop.run()
    except FlowForgeError as exc:
        log.of(daemon.name).error(str(exc))
        health.report("failed", str(exc))
        return exit_code(exc)
    except Exception as exc:  # noqa: BLE001 -- a mistake in the program must be told as well, in a thread too
        log.of(daemon.name).exception("unforeseen error")
        health.report("failed", f"{type(exc).__name__}: {exc}")
        return EXIT_ERROR
    finally:
        loop.close()
    if stop.immediate:
        return EXIT_FORCED
    health.report("stopping")
    log.of(daemon.name).info("stopped")
    return EXIT_OK


class _Loop:
    def __init__(self, daemon: Daemon, config: Config, stop: Stop, health: Health) -> None:
        self.daemon, self.config, self.stop, self.health = daemon, config, stop, health
        self.log = log.of(daemon.name)
        self.waker = Waker()
        self.backoff = db.Backoff()
        self.conn: db.Connection | None = None
        self.cutoff: db.Cutoff | None = None
        self.listener: Listener | None = None
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

    def run(self) -> None:
        while not self.stop.requested:
            try:
                conn = self._connection()
                with db.guard(conn, self.daemon.tick_limit):
                    moved = self.daemon.tick(conn)
                    wait = None if moved else self.daemon.pause(conn)
                self._worked()
                self.counts["found" if moved else "none"] += 1
                if not moved:
                    jitter = random.uniform(0.8, 1.0)  # noqa: S311 -- not a secret
                    self._wait(self.config.poll_interval * jitter if wait is None else wait)
            except (BrokerUnavailable, BrokerBlocked) as exc:
                self.counts["broker"] += 1
                state = "blocked" if isinstance(exc, BrokerBlocked) else "no broker"
                if self.health.state != state:
                    self.log.warning("waiting for the broker", state=state, error=str(exc))
                self.health.report(state, str(exc))
                # Notifications of more work must not turn this into a hot loop.
                self._wait(min(self.backoff.next(), self.config.poll_interval), wakeable=False)
            except psycopg.Error as exc:
                if self.stop.immediate:
                    return
                self._lost(from_database(exc), passing=db.is_transient(exc))
            except OSError as exc:
                # No descriptors left, for a moment.
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
            self.cutoff = db.Cutoff(self.conn)
            self.daemon.on_connect()
            if self.listener is None and self.daemon.channels:
                self.listener = Listener(
                    self.config.database_url,
                    self.daemon.channels,
                    self.waker.set,
                    name=self.daemon.name,
                    connect_timeout=self.config.connect_timeout,
                )
                self.listener.start()
            self.counts["connections"] += 1
            self.log.info("connected to PostgreSQL" if not self.started else "connected to PostgreSQL again")
            self.started = True
        return self.conn

    def _worked(self) -> None:
        if self.health.state in ("no broker", "blocked"):
            self.log.info("the broker is back")
        self.backoff.reset()
        self.health.ticked(self.daemon.trouble())

    def _lost(self, exc: FlowForgeError, *, passing: bool) -> None:
        """Give the connection up and wait a little before the next one."""
        self.counts["database"] += 1
        self._disconnect()
        if passing and self.stop.requested:
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
