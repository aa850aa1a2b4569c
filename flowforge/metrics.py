"""Prometheus metrics of one daemon, served over HTTP for a scraper. The only module that imports
prometheus_client, which comes with the extra `metrics`.

Daemons count by themselves and are asked for what they have when somebody scrapes, so that nothing of this is
loaded where nobody does."""

from __future__ import annotations

import socket
import socketserver
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import psycopg

from flowforge import __version__, cutoff, db, log, threads
from flowforge.config import Config, called
from flowforge.errors import ConfigError, first_line
from flowforge.extras import installing

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

FRESH = 5.0
"""Seconds for which figures from the database are not read again, however often they are asked for."""

PATIENCE = 2.0
"""Seconds that a scrape waits for them. What takes longer is in the next one."""

CONNECTION_LIMIT = 10.0
"""Seconds that a connection may last, whatever its client does or does not."""

MOST_CONNECTIONS = 16
"""Connections at once; further ones are closed."""

STATEMENT_TIMEOUT = 10_000
"""Milliseconds that one look at the database may take there."""


@dataclass(frozen=True)
class Metric:
    """One metric: its name without `flowforge_` (and, of a counter, without `_total`), what it means, and its
    values by those of its label, or under "" when it has none."""

    kind: Literal["counter", "gauge"]
    name: str
    meaning: str
    values: Mapping[str, float]
    label: str = ""


def counted(name: str, meaning: str, label: str, counts: Mapping[str, float]) -> Metric:
    """A counter with a label, from whatever counts by it."""
    return Metric("counter", name, meaning, dict(counts), label)


@contextmanager
def serving(config: Config, collect: Callable[[], Iterable[Metric]]) -> Generator[None]:
    """Within the block what `collect` gives is served at /metrics, if the configuration names a port.
    `collect` is called in a thread of the server, for each scrape.

    Raises ConfigError when the extra is not installed, or the port cannot be listened on, and NoThread."""
    if not config.metrics_port:
        yield
        return
    try:
        import prometheus_client
        from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily
    except ImportError:
        raise ConfigError(
            f"{called('metrics_port')} is set, and what serves metrics is not installed: "
            f"{installing('metrics')}"
        ) from None

    def families() -> Iterator[Family]:
        for each in collect():
            kind = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
            family = kind(f"flowforge_{each.name}", each.meaning, labels=[each.label] if each.label else [])
            for label, value in each.values.items():
                family.add_metric([label] if each.label else [], value)
            yield family

    class Collector:
        def collect(self) -> Iterator[Family]:
            return families()

        def describe(self) -> list[Family]:
            return []  # so that registering asks for nothing yet

    registry = CollectorRegistry()
    registry.register(Collector())
    prometheus_client.ProcessCollector(registry=registry)
    try:
        server = _Server(
            config.metrics_host, config.metrics_port, prometheus_client.MetricsHandler.factory(registry)
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{called('metrics_port')}: cannot listen on {config.metrics_host} port {config.metrics_port}: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from None
    with server:
        threads.start(
            threading.Thread(target=server.serve_forever, name="flowforge-metrics-server", daemon=True)
        )
        try:
            yield
        finally:
            server.shutdown()


class _Server(socketserver.ThreadingTCPServer):
    """Serves each connection in a thread of its own, few at once and none for long: idle and slow clients
    must not use up what the daemon needs for its work."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[socketserver.BaseRequestHandler]) -> None:
        """Raises OSError when it cannot listen there."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, (name, *_) = found[0]
        self._lock = threading.Lock()
        self._open: dict[Any, float] = {}  # connection: when it was accepted
        super().__init__((str(name), port), handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            # Such as for want of a descriptor: the client still waits, and would be found again at once.
            time.sleep(0.5)
            raise

    def verify_request(self, *_: Any) -> bool:
        return len(self._open) < MOST_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:  # so that nobody cuts what another connection has the descriptor of by then
            self._open.pop(request, None)
            super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called twice a second: ends what lasts too long, whether it is read from or written to."""
        with self._lock:
            for request, since in self._open.items():
                if time.monotonic() - since > CONNECTION_LIMIT:
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: Any) -> None:
        """A client went away, or there was no thread to be had: its connection is closed, and no more."""


def of_daemon(name: str, state: str) -> list[Metric]:
    """What every daemon tells."""
    return [
        Metric("gauge", "build_info", "1, under the program's version.", {__version__: 1}, "version"),
        Metric("gauge", "healthy", "Whether the state of health is ok.", {name: state == "ok"}, "daemon"),
    ]


_QUEUES = {
    "window_size": ("window", "Most task runs dispatched and due at once."),
    "dispatched": ("dispatched", "Task runs waiting for a worker."),
    "eligible": ("eligible", "Task runs in line for the window."),
    "reoffered": ("reoffered", "Task runs offered again after a delay."),
    "oldest_eligible_age": ("oldest_eligible_seconds", "How long the oldest could have been dispatched."),
    "oldest_dispatched_age": ("oldest_dispatched_seconds", "How long ago the oldest was dispatched."),
    "drain_rate": ("claims_per_second", "Recent pace of claims while the queue was busy."),
    "capacity": ("capacity", "Task runs that announced workers execute at once."),
}


@dataclass
class Figures:
    """The views health and queue_status as metrics, read in a thread of their own, on a connection of their
    own, when a scrape asks and they are not fresh. Neither a scrape nor the daemon ever waits long for
    them."""

    config: Config
    _asked: threading.Event = field(default_factory=threading.Event)
    _read: threading.Condition = field(default_factory=threading.Condition)
    _reads: int = 0
    _read_at: float = float("-inf")
    _found: list[Metric] = field(default_factory=list)
    _thread: threading.Thread | None = None
    _closed: bool = False
    _told: str = ""

    def metrics(self) -> list[Metric]:
        """For any thread."""
        with self._read:
            if not self._closed and time.monotonic() - self._read_at > FRESH:
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="flowforge-metrics", daemon=True)
                    try:
                        threads.start(thread)
                    except threads.NoThread:
                        return [_readable(False)]  # there is none to be had; the next scrape tries again
                    self._thread = thread
                before = self._reads
                self._asked.set()
                self._read.wait_for(lambda: self._reads > before, PATIENCE)
            return list(self._found)

    def close(self) -> None:
        self._closed = True
        self._asked.set()

    def _run(self) -> None:
        while self._asked.wait() and not self._closed:
            self._asked.clear()
            found, error = self._look()
            if error and error != self._told:
                log.of("metrics").warning("figures of the database cannot be read", error=error)
            self._told = error
            with self._read:
                self._found = [*found, _readable(not error)]
                self._reads, self._read_at = self._reads + 1, time.monotonic()
                self._read.notify_all()

    def _look(self) -> tuple[list[Metric], str]:
        config = self.config
        try:
            with (
                db.connect(
                    config.database_url,
                    application_name="flowforge metrics",
                    connect_timeout=config.connect_timeout,
                    prepared_statements=False,
                ) as conn,
                cutoff.guard(conn, STATEMENT_TIMEOUT / 1000 + 5),
                conn.transaction(),
            ):
                conn.execute(f"set local statement_timeout = {STATEMENT_TIMEOUT}".encode())
                health = conn.execute("select name, value, meaning from flowforge.health").fetchall()
                queues = conn.execute(
                    """
                    select queue, paused_at is not null, window_size, dispatched, eligible, reoffered,
                        extract(epoch from oldest_eligible_age)::float8,
                        extract(epoch from oldest_dispatched_age)::float8, drain_rate, capacity
                    from flowforge.queue_status
                    """
                ).fetchall()
            return _figures(health, queues), ""
        except psycopg.errors.InsufficientPrivilege as exc:
            return [], f"{first_line(exc)}; remedy: grant flowforge_reader to the scheduler's login"
        except Exception as exc:  # noqa: BLE001 -- told; without this thread the last would stand for ever
            return [], first_line(exc)


def _readable(was: bool) -> Metric:
    meaning = "Whether the figures of the database could be read."
    return Metric("gauge", "database_readable", meaning, {"": was})


def _figures(health: list[tuple[Any, ...]], queues: list[tuple[Any, ...]]) -> list[Metric]:
    found = [
        Metric("gauge", name, f"{meaning[:1].upper()}{meaning[1:]}.", {"": value})
        for name, value, meaning in health
        if value is not None
    ]
    found.append(
        Metric(
            "gauge",
            "queue_paused",
            "Whether the queue is paused.",
            {row[0]: row[1] for row in queues},
            "queue",
        )
    )
    for number, (name, meaning) in enumerate(_QUEUES.values(), 2):
        values = {row[0]: float(row[number]) for row in queues if row[number] is not None}
        found.append(Metric("gauge", f"queue_{name}", meaning, values, "queue"))
    return found
