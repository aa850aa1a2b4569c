"""The cluster: servers, daemons as processes of their own, each behind proxies of its own, and a supervisor
that starts again what has ended."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil
from psycopg.conninfo import make_conninfo

from tests.chaos.flows import WORKFLOWS
from tests.chaos.loop import Loop
from tests.chaos.servers import DATABASE, LOGIN, Pair
from tests.python.amqp_proxy import AmqpProxy
from tests.python.proxy import Proxy
from tests.services import debian
from tests.services.process import accepts_connections, start_child, wait_until
from tests.services.rabbitmq import RabbitServer

CHECKOUT = Path(__file__).resolve().parents[2]
LEASE = 10.0
GRACE = 3.0
RESTART_AFTER = 0.5
"""Seconds until the supervisor starts again what has ended."""

SETTINGS = {
    "FLOWFORGE_LEASE": str(LEASE),
    "FLOWFORGE_GRACE": str(GRACE),
    "FLOWFORGE_LOG_FORMAT": "json",
    "FLOWFORGE_POLL_INTERVAL": "0.5",
    "FLOWFORGE_REAP_INTERVAL": "0.25",
    "FLOWFORGE_RECOVER_INTERVAL": "0.5",
    "FLOWFORGE_CONCURRENCY": "6",
    "FLOWFORGE_CONNECT_TIMEOUT": "3",
    "FLOWFORGE_CONFIRM_TIMEOUT": "5",
    "FLOWFORGE_BLOCKED_TIMEOUT": "2",
    "FLOWFORGE_AMQP_HEARTBEAT": "10",
}


@dataclass(frozen=True)
class Role:
    """What a daemon of the cluster is."""

    name: str
    kind: str  # scheduler, publisher, worker
    broker: bool = True
    isolation: str = "threads"
    queues: str = ""
    """Those that a worker serves; all unless named."""
    clock: bool = False
    """Whether its clock can be shifted."""


ROLES = (
    Role("scheduler-1", "scheduler"),
    Role("scheduler-2", "scheduler", clock=True),
    Role("publisher-1", "publisher"),
    Role("publisher-2", "publisher"),
    Role("worker-1", "worker"),
    Role("worker-2", "worker", clock=True),
    Role("worker-3", "worker", isolation="processes"),
    # Whoever claims by PostgreSQL finds what was dispatched, whatever has become of its message. So one queue
    # is left to messages alone, or their loss would not show.
    Role("worker-4", "worker", broker=False, queues="default"),
)


@dataclass
class Death:
    """When a process of a daemon was found ended, and how."""

    pid: int
    at: float
    code: int


@dataclass
class Daemon:
    """One daemon under the supervisor, and its links."""

    role: Role
    environment: dict[str, str]
    database: Proxy
    broker: Proxy | None
    log: Path
    step: Path
    clock: Path
    process: subprocess.Popen[bytes] | None = None
    deaths: list[Death] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    _start_at: float = 0.0

    @property
    def pid(self) -> int:
        """Of the process there is, or was last."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look(self) -> None:
        """Restart always, after a moment."""
        now = time.monotonic()
        if self.process is not None and (code := self.process.poll()) is not None:
            self.deaths.append(Death(self.process.pid, now, code))
            self.process, self._start_at = None, now + RESTART_AFTER
        if self.process is None and now >= self._start_at:
            self.start()

    def start(self) -> None:
        arguments = ["tests.chaos.flows"] if self.role.kind == "worker" else []
        self.process = start_child(
            [sys.executable, "-m", "tests.chaos.steps", self.role.kind, *arguments],
            log=self.log, env=self.environment, death_signal=signal.SIGKILL,
        )  # fmt: skip
        self.pids.append(self.process.pid)

    def send(self, number: signal.Signals) -> None:
        """A signal to the process, if there is one."""
        if self.process is not None:
            self.process.send_signal(number)

    def children(self) -> list[psutil.Process]:
        """The processes below it."""
        with suppress(psutil.Error):
            return psutil.Process(self.pid).children()
        return []

    def end(self) -> int | None:
        """Its exit code, once it has been told to stop; by force after a minute."""
        if self.process is None:
            return None
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Cluster:
    """Everything that runs. Leaving the block ends all of it."""

    def __init__(self, directory: Path, version: str, deaf: frozenset[str]) -> None:
        """`deaf` daemons hear no NOTIFY, and live on looking."""
        self.directory, self.deaf = directory, deaf
        self.loop = Loop()
        self.witness = directory / "witness"
        self.witness.touch()
        self.daemons: dict[str, Daemon] = {}
        self.broker_may_be_down = False
        self._proxies: list[Proxy] = []
        self._stack = ExitStack()
        self._version = version

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.callback(self.loop.close)
            self.pair = Pair(self._version, self.loop, self._moved)
            stack.callback(self.pair.remove)
            self.broker = RabbitServer()
            stack.callback(self.broker.remove)
            self.broker.launch()
            self.pair.start()
            self.wire = AmqpProxy(self.broker.url)  # what publishers are told, and a witness of it
            stack.enter_context(self.wire)
            self.client_link = stack.enter_context(self._proxy())
            wait_until(self.broker_answers, "RabbitMQ's start")
            stack.callback(self._kill_daemons)
            for role in ROLES:
                self.daemons[role.name] = self._daemon(role, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """The definitions, the standby, the daemons."""
        with self.pair.connect() as connection:
            for workflow in WORKFLOWS:
                connection.execute(
                    "select version from flowforge.define_workflow(%s)", [json.dumps(workflow.spec())]
                )
            for queue in ("default", "wide"):
                connection.execute("select flowforge.configure_queue(%s, null, '5 s')", [queue])
        self.loop.start(self.pair.follow(), _raise)
        for daemon in self.daemons.values():
            daemon.start()

    def broker_answers(self) -> bool:
        return accepts_connections(self.broker.port)

    def _proxy(self, *, deaf: bool = False) -> Proxy:
        proxy = Proxy(self.pair.primary.port, pooled=deaf)
        self._proxies.append(proxy)
        return proxy

    def _moved(self, port: int) -> None:
        for proxy in self._proxies:
            proxy.target_port = port
            proxy.cut()

    def dsn(self, proxy: Proxy) -> str:
        """For a daemon or the client, through its proxy."""
        return make_conninfo(
            "", host="127.0.0.1", port=proxy.port, dbname=DATABASE, user=LOGIN,
            password=self.pair.primary.password, sslmode="disable", gssencmode="disable",
        )  # fmt: skip

    def _daemon(self, role: Role, stack: ExitStack) -> Daemon:
        database = stack.enter_context(self._proxy(deaf=role.name in self.deaf))
        url, broker = "", None
        if role.broker and role.kind != "scheduler":
            place = self.wire.url if role.kind == "publisher" else self.broker.url
            login, _, address = place.rpartition("@")
            broker = stack.enter_context(Proxy(int(address.partition("/")[0].rpartition(":")[2])))
            url = f"{login}@127.0.0.1:{broker.port}/%2F"
        step, clock = self.directory / f"step-{role.name}", self.directory / f"clock-{role.name}"
        clock.write_text("+0\n")
        environment = {
            **{
                name: value for name, value in os.environ.items() if not name.startswith(("PG", "FLOWFORGE_"))
            },
            **SETTINGS,
            "FLOWFORGE_DATABASE_URL": self.dsn(database),
            "FLOWFORGE_AMQP_URL": url,
            "FLOWFORGE_ISOLATION": role.isolation,
            "FLOWFORGE_QUEUES": role.queues,
            "FLOWFORGE_HEALTH_FILE": str(self.directory / f"health-{role.name}"),
            "PYTHONPATH": str(CHECKOUT),
            "CHAOS_DAEMON": role.name,
            "CHAOS_WITNESS": str(self.witness),
            "CHAOS_STEP": str(step),
        }
        if role.clock:
            environment |= {
                "LD_PRELOAD": str(debian.found("faketime", "usr/lib/*/faketime/libfaketimeMT.so.1")),
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_TIMESTAMP_FILE": str(clock),
                "FAKETIME_CACHE_DURATION": "1",
                "PYTHONPATH": f"{CHECKOUT / 'tests/python/shifted'}:{CHECKOUT}",
            }
        return Daemon(role, environment, database, broker, self.directory / f"log-{role.name}", step, clock)

    def look(self) -> None:
        """What the supervisor does all the time."""
        self.loop.tick()
        for daemon in self.daemons.values():
            daemon.look()
        self.pair.look()
        if not self.broker_may_be_down and not self.broker.is_running():
            self.broker.launch()

    def heal(self) -> None:
        """Whatever is still cut, stalled or stopped goes on."""
        for daemon in self.daemons.values():
            daemon.step.unlink(missing_ok=True)
            daemon.clock.write_text("+0\n")
            daemon.send(signal.SIGCONT)
            for proxy in (daemon.database, daemon.broker):
                if proxy is not None:
                    proxy.stalled = proxy.refusing = False
                    proxy.delay = 0.0
        self.client_link.stalled = self.client_link.refusing = False

    def stop_daemons(self) -> dict[str, int | None]:
        """Their exit codes."""
        for daemon in self.daemons.values():
            daemon.send(signal.SIGCONT)
            daemon.send(signal.SIGTERM)
        return {name: daemon.end() for name, daemon in self.daemons.items()}

    def _kill_daemons(self) -> None:
        for daemon in self.daemons.values():
            if daemon.running:
                daemon.send(signal.SIGKILL)
                assert daemon.process is not None
                daemon.process.wait()


def _raise(error: Exception) -> None:
    raise error


@contextmanager
def cluster(directory: Path, version: str, deaf: frozenset[str]) -> Iterator[Cluster]:
    with Cluster(directory, version, deaf) as made:
        made.begin()
        yield made
