"""A test's own engine: scheduler and publisher in threads, workers in threads, and a proxy that loses
answers."""

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from flowforge import runner
from flowforge.config import Config
from flowforge.definition import Workflow
from flowforge.publisher import Publisher
from flowforge.scheduler import Scheduler
from flowforge.stopping import Stop
from flowforge.worker.context import Context
from flowforge.worker.daemon import Worker, handlers_of
from tests.services.database import Database
from tests.services.process import wait_until


class Bench:
    """One database with its daemons. `amqp_url` and `namespace` make it deliver by RabbitMQ."""

    def __init__(self, db: Database, amqp_url: str = "", namespace: str = "") -> None:
        self.db = db
        self.config = Config(
            database_url=db.dsn,
            amqp_urls=(amqp_url,) if amqp_url else (),
            namespace=namespace,
            concurrency=4,
            lease=30,
            grace=10,
            poll_interval=0.2,
            lock_timeout=5,
        )
        self._stop = Stop()
        self._threads: list[threading.Thread] = []
        self._connection = db.connect()

    def one(self, query: str, *params: Any) -> Any:
        """The only value of the only row."""
        row = self._connection.execute(query, params).fetchone()
        assert row is not None
        return row[0]

    def all(self, query: str, *params: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(query, params).fetchall()

    def execute(self, query: str, *params: Any) -> None:
        self._connection.execute(query, params)

    # -- daemons

    def start(self, *, schedule: bool = True) -> None:
        """Start the scheduler, unless told not to, and the publisher, where there is a broker."""
        daemons: list[runner.Daemon] = [Scheduler(self.config)] if schedule else []
        if self.config.uses_broker:
            daemons.append(Publisher(self.config))
        for daemon in daemons:
            thread = threading.Thread(
                target=runner.run, args=(daemon, self.config), kwargs={"stop": self._stop}
            )
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        self._stop.request()
        for thread in self._threads:
            thread.join()
        self._connection.close()

    @contextlib.contextmanager
    def worker(
        self, *workflows: Workflow, sources: Sequence[str] = (), **settings: Any
    ) -> Iterator["RunningWorker"]:
        """A worker in a thread for the time of the block."""
        running = RunningWorker(workflows, self.config.replace(**settings), sources)
        try:
            yield running
        finally:
            running.stop()

    # -- workflows and runs

    def define(self, workflow: Workflow) -> None:
        self.execute("select flowforge.define_workflow(%s)", json.dumps(workflow.spec()))

    def never_redispatch(self) -> None:
        """A message lost between broker and worker stays lost, so that a test finds out."""
        self.execute("select flowforge.configure_queue('default', redispatch_delay => '10 hours')")

    def trigger(self, workflow: Workflow, value: Any = None) -> int:
        run: int = self.one("select flowforge.trigger(%s, %s::jsonb)", workflow.name, json.dumps(value))
        return run

    def trigger_many(self, workflow: Workflow, count: int) -> list[int]:
        inputs = [json.dumps(number) for number in range(count)]
        return [
            run for (run,) in self.all(
                "select unnest(flowforge.trigger_many(%s, %s::text[]::jsonb[]))", workflow.name, inputs
            )
        ]  # fmt: skip

    def tasks(self, run: int) -> dict[str, Any]:
        """The task runs of `run` that are no elements of maps, as rows with names."""
        found = self.all(
            """
            select t.name, to_jsonb(tr) from flowforge.task_run tr join flowforge.task t using (task_id)
            where tr.run_id = %s and tr.map_index is null
            """,
            run,
        )
        return dict(found)

    def task(self, run: int, name: str) -> dict[str, Any]:
        task: dict[str, Any] = self.tasks(run)[name]
        return task

    def run_state(self, run: int) -> str:
        state: str = self.one("select state from flowforge.run where run_id = %s", run)
        return state

    def wait_state(self, run: int, task: str, state: str) -> dict[str, Any]:
        wait_until(lambda: self.task(run, task)["state"] == state, f"{task} {state}")
        return self.task(run, task)

    def wait_run(self, *runs: int) -> list[str]:
        """Wait until the runs have ended; their states."""
        wait_until(
            lambda: self.one(
                "select count(*) from flowforge.run where run_id = any (%s) and state = 'running'", list(runs)
            ) == 0,
            "the end of the runs",
        )  # fmt: skip
        return [self.run_state(run) for run in runs]

    def violations(self) -> list[tuple[Any, ...]]:
        return self.all("select * from flowforge.violations()")


class RunningWorker:
    """A worker in a thread of this process."""

    def __init__(self, workflows: tuple[Workflow, ...], config: Config, sources: Sequence[str] = ()) -> None:
        self.asked = Stop()
        self.worker = Worker(handlers_of(workflows), config, self.asked, sources=sources)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def counts(self) -> dict[str, int]:
        return self.worker.counts

    def _run(self) -> None:
        self.code = self.worker.run()

    def wait_ended(self, seconds: float = 60) -> int | None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the worker does not end"
        return self.code

    def stop(self) -> int | None:
        self.asked.request()
        return self.wait_ended()


class LossyProxy:
    """A TCP proxy before a PostgreSQL server that can lose what it should carry.

    `lose(pattern, sent=True)`: the next client message that matches reaches the server, whose answer gets
    lost with the connection; `sent=False`: it does not even reach the server. `down` refuses and cuts every
    connection.
    """

    def __init__(self, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._server = f"{given['host']}/.s.PGSQL.{given['port']}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.dsn = make_conninfo(dsn, host="127.0.0.1", port=port)
        self.lost = 0
        self._pattern: re.Pattern[bytes] | None = None
        self._sent = True
        self._times = 0
        self._down = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, pattern: str, *, sent: bool = True, times: int = 1) -> None:
        self._sent, self._times, self._pattern = sent, times, re.compile(pattern.encode())

    @contextlib.contextmanager
    def down(self) -> Iterator[None]:
        self._down = True
        self._cut(*self._sockets)
        try:
            yield
        finally:
            self._down = False

    def close(self) -> None:
        self._down = True
        self._listener.close()
        self._cut(*self._sockets)

    def _cut(self, *sockets: socket.socket) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                if self._down:
                    client.close()
                    server.close()
                    continue
                server.connect(self._server)
                self._sockets |= {client, server}
                swallow = threading.Event()
                for source, target, look in ((client, server, True), (server, client, False)):
                    threading.Thread(
                        target=self._carry, args=(source, target, look, swallow), daemon=True
                    ).start()

    def _carry(
        self, source: socket.socket, target: socket.socket, look: bool, swallow: threading.Event
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not look and swallow.is_set():
                    break
                if look and self._matches(data):
                    if not self._sent:
                        break
                    swallow.set()
                target.sendall(data)
        self._cut(source, target)
        with self._lock:
            self._sockets -= {source}
        source.close()

    def _matches(self, data: bytes) -> bool:
        with self._lock:
            if self._times == 0 or self._pattern is None or not self._pattern.search(data):
                return False
            self._times -= 1
            self.lost += 1
            return True


class Gate:
    """A point where handlers wait for the test, and the test for them."""

    def __init__(self) -> None:
        self.arrivals = 0
        self._lock = threading.Lock()
        self._open = threading.Event()

    def wait(self, until: Callable[[], None] = lambda: None) -> None:
        """In a handler: arrive, then wait until the gate is opened. `until` is called about a hundred times a
        second and may raise."""
        self.arrive()
        while not self._open.wait(0.01):
            until()

    def arrive(self) -> None:
        """In a handler: arrive, and go on."""
        with self._lock:
            self.arrivals += 1

    def await_arrivals(self, count: int = 1) -> None:
        wait_until(lambda: self.arrivals >= count, f"{count} handlers at the gate")

    def open(self) -> None:
        self._open.set()

    def is_open(self) -> bool:
        return self._open.is_set()


class Witness:
    """A workflow of one task that records its executions."""

    def __init__(self, name: str = "w", **options: Any) -> None:
        self.workflow = Workflow(name)
        self.executions: list[tuple[int, int]] = []
        self.gate = Gate()
        self.gate.open()
        self.result: Callable[[Context], Any] = lambda _: None
        self.workflow.task(name="task", **options)(self._handle)

    def _handle(self, ctx: Context) -> Any:
        self.executions.append((ctx.task_run_id, ctx.fencing_token))
        self.gate.wait()
        return self.result(ctx)

    def closed(self) -> "Witness":
        self.gate = Gate()
        return self
