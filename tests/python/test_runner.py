"""The loop of every daemon: it wakes, and outlasts what passes."""

import errno
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from flowforge import connecting, cutoff, exits
from flowforge import db as database
from flowforge.config import Config
from flowforge.errors import (
    BrokerBlocked,
    BrokerUnavailable,
    ConfigError,
    DatabaseUnavailable,
    FlowForgeError,
)
from flowforge.health import Health, read_health
from flowforge.stopping import Stop
from tests.python.daemons import TIMEOUT, Running
from tests.python.probe import Probe, listening, notify, terminate
from tests.python.proxy import Proxy
from tests.services.database import Database
from tests.services.process import wait_until


def test_work_is_followed_by_the_next_tick_at_once_and_a_notification_wakes(config: Config) -> None:
    probe = Probe(*[lambda _: 1] * 5)
    with Running(probe, config) as running:
        wait_until(lambda: probe.ticks >= 6, "a tick after the last that found work")
        wait_until(lambda: listening(config), "LISTEN")
        before = probe.ticks
        notify(config)
        wait_until(lambda: probe.ticks > before, "the notification's tick")
    assert running.code == exits.EXIT_OK
    assert probe.closed
    assert probe.connections == 1


def test_without_notifications_the_poll_interval_finds_work(config: Config) -> None:
    probe = Probe()
    with Running(probe, config.replace(poll_interval=0.01)):
        wait_until(lambda: probe.ticks >= 10, "polling")


def test_a_daemon_says_itself_how_long_to_wait(config: Config) -> None:
    class Hurried(Probe):
        def pause(self, conn: database.Connection) -> float:
            conn.execute("select 1")
            return 0.01

    probe = Hurried()
    with Running(probe, config):
        wait_until(lambda: probe.ticks >= 10, "its own interval")


def test_a_lost_connection_is_replaced_with_one_line_each(
    config: Config, written: Callable[[], list[dict[str, object]]]
) -> None:
    probe = Probe()
    with Running(probe, config) as running:
        wait_until(lambda: listening(config), "LISTEN")
        terminate(config, "flowforge probe")
        notify(config)
        wait_until(lambda: probe.connections == 2, "the new connection")
        wait_until(lambda: running.health.state == "ok", "health")
    events = [line["event"] for line in written() if line["event"] != "listening again on a new connection"]
    assert events == [
        "connected to PostgreSQL",
        "no database; trying again",
        "connected to PostgreSQL again",
        "stopped",
    ]
    assert all(line["daemon"] == "probe" and line["time"] and line["level"] for line in written())


def test_a_read_only_database_is_left_until_it_is_writable(config: Config, db: Database) -> None:
    def write(conn: database.Connection) -> int:
        conn.execute("create temporary table if not exists t (x bigint)")
        probe.actions.append(write)
        return 0

    probe = Probe(write)
    with Running(probe, config.replace(poll_interval=0.05)) as running, db.connect() as conn:
        wait_until(lambda: running.health.state == "ok", "the start")
        conn.execute(f"alter database {db.name} set default_transaction_read_only = on")
        try:
            terminate(config, "flowforge probe")
            wait_until(lambda: running.health.state == "no database", "the read-only server to be left")
        finally:
            conn.execute("set default_transaction_read_only = off")
            conn.execute(f"alter database {db.name} reset default_transaction_read_only")
        wait_until(lambda: running.health.state == "ok", "the return")


def test_a_database_that_is_down_is_waited_for(config: Config, db: Database) -> None:
    db.server.stop()
    probe = Probe()
    with Running(probe, config) as running:
        wait_until(lambda: running.health.state == "no database", "the failed connection")
        assert probe.ticks == 0
        db.server.start()
        wait_until(lambda: running.health.state == "ok", "the database")
        db.server.restart()
        notify(config)
        wait_until(lambda: probe.connections >= 2, "the new connection")


def test_a_tick_on_a_dead_path_is_given_up(config: Config, db: Database) -> None:
    with Proxy(db.server.port) as proxy:
        dsn = db.server.dsn(db.name, tcp=True) + f" port={proxy.port} sslmode=disable connect_timeout=2"

        def die(conn: database.Connection) -> int:
            proxy.stalled = True
            conn.execute("select 1")
            return 0

        probe = Probe(die)
        probe.tick_limit = 0.5
        with Running(probe, config.replace(database_url=dsn)) as running:
            wait_until(lambda: running.health.state == "no database", "the dead path to be noticed")
            proxy.stalled = False
            wait_until(lambda: running.health.state == "ok", "a new path")


def test_an_unforeseen_error_of_the_database_is_outlasted_and_shown(config: Config) -> None:
    def fail(conn: database.Connection) -> int:
        conn.execute("select 1 / 0")
        return 0

    probe = Probe(lambda _: 1, fail)
    states: list[str] = []
    health = Health("probe")
    report = health.report

    def spy(state: str, detail: str = "") -> bool:
        states.append(f"{state} {detail}")
        return report(state, detail)

    health.report = spy  # type: ignore[method-assign]
    running = Running(probe, config)
    running.health = health
    with running:
        wait_until(lambda: probe.ticks >= 3, "the tick after the error")
    assert "error division by zero" in states
    assert running.code == exits.EXIT_OK


def test_a_moment_without_descriptors_is_outlasted_and_shown(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While connecting, on a new connection, and in the guard of every tick."""
    full = "[Errno 24] Too many open files"
    lacking = [(psycopg, "connect"), (cutoff, "Cutoff"), (cutoff, "guard")]

    def lacks(where: Any, name: str) -> None:
        real = getattr(where, name)

        def fail(*_: Any, **__: Any) -> Any:
            monkeypatch.setattr(where, name, real)
            raise OSError(errno.EMFILE, "Too many open files")

        monkeypatch.setattr(where, name, fail)

    running = Running(Probe(), config)
    seen: list[str] = []
    report = running.health.report

    def spy(state: str, detail: str = "") -> bool:
        seen.append(f"{state}: {detail}")
        if lacking and state == "no database":
            lacks(*lacking.pop(0))
        return report(state, detail)

    running.health.report = spy  # type: ignore[method-assign]
    lacks(*lacking.pop(0))
    with running:
        wait_until(lambda: seen[-1:] == ["ok: "], "a tick")
    assert (running.code, seen.count(f"no database: {full}")) == (exits.EXIT_OK, 3)


def test_a_moment_without_threads_is_outlasted(
    config: Config, db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While connecting, and for the listener, which is there afterwards."""
    refused: list[str] = []
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name in ("flowforge-connect", "flowforge-listen-probe") and thread.name not in refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    probe = Probe()
    with Running(probe, config) as running:
        wait_until(lambda: len(refused) == 2 and running.health.state == "ok", "a tick")

        enough = probe.ticks + 5

        def woken() -> bool:
            with psycopg.connect(db.dsn, autocommit=True) as conn:
                conn.execute("notify probe")
            return probe.ticks >= enough

        wait_until(woken, "what the listener hears")
    assert running.code == exits.EXIT_OK


@pytest.mark.parametrize(("where", "name"), [(psycopg, "connect"), (cutoff, "guard")])
def test_a_connection_for_which_there_is_no_descriptor_may_be_had_later(
    config: Config, monkeypatch: pytest.MonkeyPatch, where: Any, name: str
) -> None:
    """The worker's start asks again for what is unavailable, and ends for all else."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(where, name, fail)
    with pytest.raises(DatabaseUnavailable, match="Too many open files"):
        connecting.connect(config, "worker", Stop(), (), "flowforge_worker")


def test_what_ends_a_start_is_outlasted_by_a_daemon_under_way(config: Config, db: Database) -> None:
    dsn = db.create_login("flowforge_scheduler")
    name = psycopg.conninfo.conninfo_to_dict(dsn)["user"]
    probe = Probe()
    with Running(probe, config.replace(database_url=dsn)) as running, db.connect() as conn:
        wait_until(lambda: running.health.state == "ok", "the start")
        conn.execute(f"alter role {name} nologin")
        terminate(config, "flowforge probe")
        notify(config)
        wait_until(lambda: running.health.state == "error", "the refusal to show")
        conn.execute(f"alter role {name} login")
        wait_until(lambda: running.health.state == "ok", "the return")


def test_a_connection_string_that_is_refused_is_outlasted_by_a_daemon_under_way(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pooler says `unsupported startup parameter` of it, for one, after it was set up anew."""
    real = connecting._connect

    def refuse(*_: Any) -> Any:
        monkeypatch.setattr(connecting, "_connect", real)
        raise ConfigError("unsupported startup parameter: options")

    probe = Probe()
    running = Running(probe, config)
    states: list[str] = []
    report = running.health.report

    def spy(state: str, detail: str = "") -> bool:
        states.append(state)
        return report(state, detail)

    running.health.report = spy  # type: ignore[method-assign]
    with running:
        wait_until(lambda: running.health.state == "ok", "the start")
        monkeypatch.setattr(connecting, "_connect", refuse)
        terminate(config, "flowforge probe")
        notify(config)
        wait_until(lambda: probe.connections == 2, "the return")
    assert "error" in states
    assert running.code == exits.EXIT_OK


@pytest.mark.parametrize(
    ("error", "state"), [(BrokerBlocked("alarm"), "blocked"), (BrokerUnavailable("away"), "no broker")]
)
def test_a_broker_that_is_away_or_blocked_is_shown_and_asked_again_without_spinning(
    config: Config, error: FlowForgeError, state: str
) -> None:
    def fail(_: database.Connection) -> int:
        if not healed.is_set():
            probe.actions.append(fail)
            raise error
        return 0

    healed = threading.Event()
    probe = Probe(fail)
    with Running(probe, config.replace(poll_interval=0.2)) as running:
        wait_until(lambda: running.health.state == state, "the state to show")
        before, started = probe.ticks, time.monotonic()
        for _ in range(200):
            notify(config)
        # Each wait is at least half of the shortest back-off, however many notifications come.
        assert probe.ticks - before <= (time.monotonic() - started) / 0.05 + 1
        assert probe.connections == 1
        healed.set()
        wait_until(lambda: running.health.state == "ok", "the broker")


def test_a_database_lost_after_a_long_outage_of_the_broker_is_asked_again_at_once(
    config: Config, written: Callable[[], list[dict[str, object]]]
) -> None:
    """What was waited for the one does not count for the other."""

    def away(_: database.Connection) -> int:
        raise BrokerUnavailable("away")

    def lost(_: database.Connection) -> int:
        raise psycopg.OperationalError("lost")

    probe = Probe(*[away] * 12, lost)
    with Running(probe, config.replace(poll_interval=0.01)):
        wait_until(lambda: probe.connections == 2, "the next connection")
    [told] = [entry for entry in written() if entry["event"] == "no database; trying again"]
    assert float(str(told["seconds"])) <= 0.1, "the first delay"


def test_a_mistake_in_the_program_ends_the_daemon_with_its_traceback(
    config: Config, written: Callable[[], list[dict[str, object]]]
) -> None:
    def fail(_: database.Connection) -> int:
        raise KeyError("mistake")

    running = Running(Probe(fail), config)
    with running:
        running.join()
    assert running.code == exits.EXIT_FAILED
    assert running.health.state == "failed"
    assert [line for line in written() if "KeyError: 'mistake'" in str(line.get("traceback"))]


def test_the_health_file_says_how_the_daemon_is(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "health"
    assert read_health(path) == (False, f"no health report in {path}")
    probe = Probe()
    with Running(probe, config.replace(health_file=str(path))):
        wait_until(lambda: read_health(path)[0], "the report")
        assert re.match(r"probe: ok, last tick \d+ s ago", read_health(path)[1])
        probe.wrong = "one function fails"
        notify(config)
        wait_until(lambda: listening(config), "LISTEN")
        notify(config)
        wait_until(lambda: "probe: error (one function fails)" in read_health(path)[1], "the trouble")
        assert not read_health(path)[0]
    assert read_health(path) == (False, read_health(path)[1])
    assert read_health(path)[1].startswith("probe: stopping")
    assert list(tmp_path.iterdir()) == [path]


def test_a_silent_daemon_is_not_well(tmp_path: Path) -> None:
    path = tmp_path / "health"
    health = Health("probe", path)
    health.ticked()
    assert read_health(path)[0]
    assert not read_health(path, max_age=-1)[0]
    assert "silent" in read_health(path, max_age=-1)[1]
    path.write_text("not JSON")
    assert not read_health(path)[0]


def test_the_health_of_a_daemon_that_waits_long_stays_fresh(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "health"
    with Running(Probe(), config.replace(health_file=str(path))):
        wait_until(lambda: read_health(path)[0], "the report")
        first = json.loads(path.read_text())["written"]
        wait_until(lambda: bool(json.loads(path.read_text())["written"] > first), "a later report", TIMEOUT)
