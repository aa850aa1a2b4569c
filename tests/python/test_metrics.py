"""Metrics: what real daemons tell a scraper, that it is what happened, and what they say when they cannot."""

import errno
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from flowforge import cutoff, metrics
from flowforge.config import Config
from flowforge.errors import ConfigError
from flowforge.exits import EXIT_CONFIG
from flowforge.scheduler import Scheduler
from tests.python.cluster import PROGRAM, Cluster
from tests.services.database import Database
from tests.services.process import free_port, wait_until
from tests.services.rabbitmq import RabbitServer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"
Samples = dict[tuple[str, str], float]

# What is left out while there is nothing to measure.
OPTIONAL = {
    "flowforge_oldest_eligible_seconds",
    "flowforge_oldest_unpublished_seconds",
    "flowforge_queue_oldest_eligible_seconds",
    "flowforge_queue_oldest_dispatched_seconds",
    "flowforge_queue_claims_per_second",
}


@pytest.fixture
def cluster(
    db: Database, rabbit_server: RabbitServer, amqp_namespace: str, tmp_path: Path
) -> Iterator[Cluster]:
    with Cluster(db, tmp_path, rabbit_server, amqp_namespace) as cluster:
        yield cluster


def scrape(port: int, host: str = "127.0.0.1") -> Samples:
    """What stands at /metrics: by name and value of the label. Nothing while nobody listens there yet."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_daemons_tell_what_happened(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("scheduler", "publisher", "worker")
    ports = {name: free_port() for name in names}
    for name in names:
        cluster.start(name, FLOWFORGE_METRICS_PORT=str(ports[name]), FLOWFORGE_LEASE="1")
    gate = tmp_path / "gate"
    held = cluster.trigger("one", {"work": {"until": str(gate)}})
    worker = "flowforge_worker"
    wait_until(
        lambda: scrape(ports["worker"]).get((f"{worker}_renewals_total", "held"), 0) >= 1, "a renewal", 60
    )
    busy = scrape(ports["worker"])
    assert [busy[f"{worker}_slots", state] for state in ("busy", "free", "lost")] == [1, 7, 0]
    figures = scrape(ports["scheduler"])
    assert figures["flowforge_database_readable", ""] == 1
    assert figures["flowforge_active_runs", ""] == figures["flowforge_running", ""] == 1
    gate.touch()
    runs = cluster.trigger_many("mixed", [{"broken": {"fail": True}}] * 3)
    cluster.wait_ended(held, *runs)

    def attempts() -> tuple[float, float]:
        found = scrape(ports["worker"])
        return found[f"{worker}_attempts_total", "succeeded"], found[f"{worker}_attempts_total", "failed"]

    # of mixed: a, flaky, rescue and end succeed, broken fails, and one is skipped
    wait_until(lambda: attempts() == (13, 3), "every attempt counted", 30)
    told = scrape(ports["worker"])
    assert told[f"{worker}_claims_total", "claimed"] == told[f"{worker}_finishes_total", "accepted"] == 16
    assert told[f"{worker}_finishes_total", "fenced"] == 0
    assert told[f"{worker}_slots", "free"] == 8
    wait_until(lambda: scrape(ports["worker"])["flowforge_healthy", "worker"] == 1, "the worker's health", 30)
    published = scrape(ports["publisher"])
    assert published["flowforge_publisher_messages_total", "confirmed"] == cluster.value(
        "select count(*) from public.marked"
    )
    assert published["flowforge_publisher_messages_total", "refused"] == 0
    assert published["flowforge_database_connections_total", ""] == 1
    scheduled = scrape(ports["scheduler"])
    assert scheduled["flowforge_scheduler_moved_total", "dispatch_ready"] == 16
    assert scheduled["flowforge_scheduler_failures_total", "dispatch_ready"] == 0
    assert scheduled["flowforge_ticks_total", "found"] > 0

    # A session that is ended shows as an error and a second connection.
    cluster.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where application_name = 'flowforge scheduler' and datname = current_database()"
    )
    wait_until(
        lambda: scrape(ports["scheduler"])["flowforge_database_connections_total", ""] == 2, "a reconnect", 30
    )
    assert scrape(ports["scheduler"])["flowforge_errors_total", "database"] >= 1

    found = {name for port in ports.values() for name, _ in scrape(port) if name.startswith("flowforge_")}
    listed = set(re.findall(r"^\| `(flowforge_\w+)` ", PAGE.read_text(), re.MULTILINE))
    assert found | OPTIONAL == listed


def test_without_the_right_to_read_the_figures_the_daemon_says_what_to_grant(
    db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    login = db.create_login("flowforge_scheduler")
    scheduler = Scheduler(Config(database_url=login))
    try:
        told = {each.name: each.values for each in scheduler.metrics()}
        assert told["database_readable"] == {"": False}
        assert "eligible" not in told
        assert told["scheduler_moved"]["dispatch_ready"] == 0
        (record,) = caplog.records
        assert "remedy: grant flowforge_reader to" in record.__dict__["keys"]["error"]
    finally:
        scheduler.close()


def test_figures_are_read_once_for_scrapes_in_a_row(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = metrics.Figures(Config(database_url=db.dsn))
    try:
        with db.connect() as conn:
            first = figures.metrics()
            conn.execute(
                "select flowforge.define_workflow(%s)",
                ['{"name": "w", "tasks": [{"name": "t", "queue": "new"}]}'],
            )
            assert figures.metrics() == first
            monkeypatch.setattr(metrics, "FRESH", -1.0)
            again = {each.name: each.values for each in figures.metrics()}
            assert again["queue_eligible"]["new"] == 0
    finally:
        figures.close()


def test_a_database_that_does_not_answer_holds_up_no_scrape(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a daemon counts itself is told, whatever becomes of the database."""
    monkeypatch.setattr(metrics, "PATIENCE", 0.2)
    figures = metrics.Figures(Config(database_url=db.dsn))
    with db.connect() as conn:
        conn.execute("begin; lock table flowforge.queue in access exclusive mode")
        assert figures.metrics() == []
        figures.close()
        conn.execute("rollback")


def test_figures_are_read_again_after_the_system_has_refused_something(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor, then a thread."""
    monkeypatch.setattr(metrics, "FRESH", -1.0)
    figures = metrics.Figures(Config(database_url=db.dsn))

    def readable() -> bool:
        told = {each.name: each.values for each in figures.metrics()}
        return bool(told["database_readable"][""])

    def refuse(error: Exception) -> Callable[..., NoReturn]:
        def refusing(*_: object, **__: object) -> NoReturn:
            raise error

        return refusing

    try:
        with monkeypatch.context() as lacking:
            lacking.setattr(threading.Thread, "start", refuse(RuntimeError("can't start new thread")))
            assert not readable()
        assert readable()
        with monkeypatch.context() as lacking:
            lacking.setattr(cutoff, "guard", refuse(OSError(errno.EMFILE, "Too many open files")))
            assert not readable()
        assert readable()
    finally:
        figures.close()


def test_a_port_that_is_taken_ends_the_daemon_with_a_word(db: Database, rabbit_server: RabbitServer) -> None:
    taken = str(rabbit_server.port)
    for command in (["scheduler"], ["worker", "tests.python.scenario_flows"]):
        done = subprocess.run(
            [PROGRAM, *command, "--database-url", db.dsn, "--metrics-port", taken],
            capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert done.returncode == EXIT_CONFIG
        assert f"cannot listen on 127.0.0.1 port {taken}: Address already in use" in done.stderr
    told = pytest.raises(ConfigError, match=r"cannot listen on a\.\.b port \d+: .*label")
    with told, serving(free_port(), "a..b"):
        pass


def serving(port: int, host: str = "127.0.0.1") -> AbstractContextManager[None]:
    config = Config(metrics_port=port, metrics_host=host)
    return metrics.serving(config, lambda: metrics.of_daemon("test", "ok"))


def is_well(port: int, host: str = "127.0.0.1") -> bool:
    return scrape(port, host).get(("flowforge_healthy", "test")) == 1


def test_idle_and_slow_clients_use_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(metrics, "CONNECTION_LIMIT", float("inf"))
    with ExitStack() as clients, serving(port):
        idle, drop = [
            [clients.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(count)]
            for count in (metrics.MOST_CONNECTIONS, 20)
        ]
        for each in drop:
            each.settimeout(30)
            assert not received(each)  # closed at once, while those before it are still served
        monkeypatch.setattr(metrics, "CONNECTION_LIMIT", 0.2)

        def dripping() -> bool:
            """Whether a client that always sends a little more is still served."""
            try:
                idle[0].sendall(b"x")
            except OSError:
                return False
            return True

        wait_until(lambda: not dripping(), "the slow client's end")
        for each in idle[1:]:
            each.settimeout(30)
            assert not received(each)
        monkeypatch.undo()
        assert is_well(port)


def received(client: socket.socket) -> bytes:
    """What comes next; nothing when the connection was closed, however."""
    try:
        return client.recv(1)
    except ConnectionResetError:
        return b""


def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_LIMIT", 0.2)
    port, large = free_port(), metrics.Metric("gauge", "large", "x" * 20_000_000, {"": 1})
    with metrics.serving(Config(metrics_port=port), lambda: [large]):
        before = threading.active_count()
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert received(client)
            wait_until(lambda: threading.active_count() <= before, "the end of the connection's thread")


def test_metrics_are_served_again_after_the_system_had_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """And meanwhile each try is followed by a pause."""
    port, happened, enough = free_port(), list[str](), threading.Event()

    def accept(_: socket.socket) -> NoReturn:
        happened.append("accept")
        if len(happened) > 10:
            enough.set()
        raise OSError(errno.EMFILE, "Too many open files")

    def sleep(seconds: float) -> None:
        happened.append("pause")
        real_sleep(min(seconds, 0.01))

    real_sleep = time.sleep
    with serving(port), socket.create_connection(("127.0.0.1", port)), monkeypatch.context() as lacking:
        lacking.setattr(time, "sleep", sleep)
        lacking.setattr(socket.socket, "accept", accept)
        with socket.create_connection(("127.0.0.1", port)):
            assert enough.wait(60)
        lacking.undo()
        assert happened[:10] == ["accept", "pause"] * 5
        assert is_well(port)


def test_metrics_are_served_at_ipv6_too() -> None:
    """Where the machine has it."""
    port = free_port()
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        with pytest.raises(ConfigError, match=f"cannot listen on ::1 port {port}"), serving(port, "::1"):
            pass
    else:
        with serving(port, "::1"):
            assert is_well(port, "[::1]")
