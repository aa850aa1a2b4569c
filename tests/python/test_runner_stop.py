"""The stop of every daemon: what is under way is finished, up to a limit."""

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flowforge import db as database
from flowforge import exits
from flowforge.config import Config
from flowforge.health import read_health
from flowforge.stopping import Stop
from tests.python.daemons import TIMEOUT, Running, process
from tests.python.probe import Probe
from tests.python.proxy import Proxy
from tests.services.database import Database
from tests.services.process import wait_until


def test_a_request_lets_a_tick_finish(config: Config, written: Callable[[], list[dict[str, object]]]) -> None:
    begun, done = threading.Event(), threading.Event()

    def work(conn: database.Connection) -> int:
        begun.set()
        conn.execute("select pg_sleep(0.5)")
        done.set()
        return 0

    with Running(Probe(work), config) as running:
        assert begun.wait(TIMEOUT)
        running.stop.request()
        running.join()
    assert done.is_set()
    assert "the last call failed; stopping" not in [line["event"] for line in written()]


def test_a_request_gives_a_tick_on_a_dead_path_a_few_seconds_more(
    config: Config,
    db: Database,
    monkeypatch: pytest.MonkeyPatch,
    written: Callable[[], list[dict[str, object]]],
) -> None:
    """A supervisor waits for no more than that."""
    begun = threading.Event()

    def stall(conn: database.Connection) -> int:
        proxy.stalled = True
        begun.set()
        conn.execute("select 1")
        return 0

    monkeypatch.setattr(Probe, "tick_limit", 3600.0)
    monkeypatch.setattr(Probe, "stop_limit", 0.1)
    with Proxy(db.server.port) as proxy:
        dsn = db.server.dsn(db.name, tcp=True) + f" port={proxy.port} sslmode=disable"
        with Running(Probe(stall), config.replace(database_url=dsn, lock_timeout=0.1)) as running:
            assert begun.wait(TIMEOUT)
            running.stop.request()
            running.join()
    assert "the last call failed; stopping" in [line["event"] for line in written()]


def test_a_second_request_ends_a_tick_that_would_not_end(config: Config) -> None:
    def hang(conn: database.Connection) -> int:
        conn.execute("select pg_sleep(300)")
        return 0

    probe = Probe(hang)
    with Running(probe, config) as running:
        wait_until(lambda: probe.ticks == 1, "the tick")
        running.stop.request()
        assert (running.stop.requested, running.stop.immediate) == (True, False)
        # Leaving the block asks for the second time.
    assert running.code == exits.EXIT_INTERRUPTED


def test_a_second_request_cuts_its_own_connection_whatever_its_descriptor_is_now(
    config: Config, db: Database
) -> None:
    """The number of a closed one is the next connection's."""
    with db.connect() as other:

        def hang(conn: database.Connection) -> int:
            conn.fileno = other.fileno  # type: ignore[method-assign]
            probe.ticks += 1
            conn.execute("select pg_sleep(300)")
            return 0

        probe = Probe(hang)
        with Running(probe, config) as running:
            wait_until(lambda: probe.ticks == 2, "the tick")
            running.stop.request()
        assert running.code == exits.EXIT_INTERRUPTED
        assert other.execute("select 1").fetchone() == (1,)


def test_stop_tells_late_comers_at_once() -> None:
    stop, called = Stop(), threading.Semaphore(0)
    assert not stop.wait(0)
    stop.request()
    stop.on_request(called.release)
    assert called.acquire(timeout=0)
    assert stop.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_daemon(config: Config, tmp_path: Path, number: signal.Signals) -> None:
    config = config.replace(health_file=str(tmp_path / "health"))
    daemon = process("Scheduler", config)
    wait_until(lambda: read_health(config.health_file)[0], "the start")
    daemon.send_signal(number)
    _, errors = daemon.communicate(timeout=TIMEOUT)
    assert daemon.returncode == exits.EXIT_OK
    events = [json.loads(line)["event"] for line in errors.splitlines()]
    assert events == ["connected to PostgreSQL", "stopped"]


def test_a_crash_point_kills_without_warning(config: Config, db: Database) -> None:
    daemon = process(
        "Scheduler",
        config.replace(poll_interval=0.05),
        FLOWFORGE_CRASH_AT="scheduler:before-settle_finished@2",
    )
    daemon.communicate(timeout=TIMEOUT)
    assert daemon.returncode == -signal.SIGKILL


def test_one_stray_variable_kills_no_daemon(config: Config, tmp_path: Path) -> None:
    config = config.replace(health_file=str(tmp_path / "health"))
    daemon = process(
        "Scheduler",
        config,
        FLOWFORGE_CRASH_AT="scheduler:before-settle_finished",
        FLOWFORGE_TEST_CRASHES="",
    )
    wait_until(lambda: read_health(config.health_file)[0], "a tick")
    daemon.terminate()
    daemon.communicate(timeout=TIMEOUT)
    assert daemon.returncode == exits.EXIT_OK
