"""What the clauses work with: a scheduler and a publisher, the worker under test behind proxies, and what
another client, worker and operator would do."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote, urlsplit, urlunsplit
from uuid import uuid4

import psycopg
from psycopg import conninfo

from flowforge import db, runner, threads
from flowforge.broker.desk import Desk
from flowforge.client import is_connection_string
from flowforge.config import Config
from flowforge.conformance.proxy import DatabaseProxy, Proxy
from flowforge.conformance.target import connect
from flowforge.errors import ConfigError, FlowForgeError, from_database
from flowforge.publisher import Publisher
from flowforge.scheduler import Scheduler
from flowforge.stopping import Stop, held_back

_LOOK = 0.1  # seconds between two looks at a condition
_QUIET = 1.0  # seconds without a tick, of ten a second, after which a handler counts as stopped


class Violated(Exception):
    """A clause does not hold; the text says what was seen."""


class Engine:
    """A context manager: daemons and worker run within the block. Every name in database and broker holds
    `name`, which nobody else uses."""

    def __init__(self, config: Config, worker_url: str, command: Sequence[str], patience: float) -> None:
        """`worker_url`: a connection string with the worker's own login, or empty. `patience`: seconds that
        the worker has for what is asked of it.

        Raises ConfigError, FlowForgeError when there is no database or broker."""
        self.name = f"conformance_{secrets.token_hex(4)}"
        self.config = config.replace(
            namespace=self.name if config.uses_broker else "",
            poll_interval=0.2,
            queues=(self.name,),
            health_file="",  # which scheduler and publisher would write in turn
        )
        self._command, self.patience = command, patience
        self._stop = Stop()
        self._threads: list[threading.Thread] = []
        self._runs: list[int] = []
        self._workflows = 0
        self._lock = threading.Lock()
        self.worker: subprocess.Popen[bytes] | None = None
        if config.amqp_urls and urlsplit(config.amqp_urls[0]).scheme != "amqp":
            raise ConfigError(
                "conformance stands between the worker and the broker, so that has to take amqp://"
            )
        self.desk = Desk(self.config) if config.uses_broker else None
        self._conn = connect(self.config, self._stop)
        try:
            info = self._conn.info
            self._dbname = info.dbname
            self._login = self._login_of(worker_url) if worker_url else (info.user, info.password)
            self.database = DatabaseProxy(
                f"{info.host}/.s.PGSQL.{info.port}" if info.host.startswith("/") else (info.host, info.port)
            )
            self.broker = Proxy(self.desk.place()) if self.desk else None
            self._files = tempfile.TemporaryDirectory(prefix="flowforge-conformance-")
        except BaseException:
            self._conn.close()
            raise

    def __enter__(self) -> Self:
        daemons: list[runner.Daemon] = [Scheduler(self.config)]
        if self.config.uses_broker:
            daemons.append(Publisher(self.config))
        for daemon in daemons:
            thread = threading.Thread(
                target=runner.run, args=(daemon, self.config), kwargs={"stop": self._stop}, daemon=True
            )
            self._threads.append(threads.start(thread))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        def clear() -> None:
            # What has ended the examination is what is to be told.
            with suppress(*[FlowForgeError, psycopg.Error] if kind is not None else []):
                self.clear()

        with ExitStack() as stack:  # from the last to the first, whichever of them fails
            stack.callback(self._files.cleanup)
            if self.desk is not None:
                stack.callback(self.desk.remove, self.name, self.other_queue)
            for proxy in (self.database, self.broker):
                if proxy is not None:
                    stack.callback(proxy.close)
            stack.callback(lambda: self._conn.close())
            stack.callback(self._end_daemons)
            stack.callback(clear)

    def _end_daemons(self) -> None:
        self._stop.request()
        for thread in self._threads:
            thread.join(10)

    # -- the worker under test

    def _login_of(self, worker_url: str) -> tuple[str, str]:
        """The user and password that libpq finds by a connection string, in files and environment too.

        Raises ConfigError, DatabaseError when that is no login of its own."""
        own = self._conn.info
        if not is_connection_string(worker_url):
            raise ConfigError("--worker-url is not a PostgreSQL connection string (URI or key=value)")
        place = conninfo.make_conninfo(worker_url, host=own.host, port=own.port, dbname=own.dbname)
        try:
            with db.connect(
                place,
                application_name="flowforge conformance",
                connect_timeout=self.config.connect_timeout,
                prepared_statements=False,
            ) as connection:
                login = connection.info.user, connection.info.password
        except psycopg.Error as error:
            raise ConfigError(f"--worker-url: {from_database(error)}") from error
        if login[0] == own.user:
            raise ConfigError(
                f"--worker-url names no other login than {own.user}, which this command has itself: "
                "whether the worker's own has the rights that it needs would not be known"
            )
        return login

    def environment(self) -> dict[str, str]:
        """What tells the worker its servers, which are the proxies, and its queue."""
        (user, password), dbname = self._login, self._dbname
        secret = f":{quote(password, safe='')}" if password else ""
        login = f"{quote(user, safe='')}{secret}@127.0.0.1:{self.database.port}"
        found = {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.database.port),
            "PGUSER": user,
            "PGPASSWORD": password,
            "PGDATABASE": dbname,
            "PGSSLMODE": "disable",
            "PGGSSENCMODE": "disable",
            "FLOWFORGE_DATABASE_URL": f"postgresql://{login}/{quote(dbname, safe='')}?sslmode=disable",
            "FLOWFORGE_AMQP_URL": "",
            "FLOWFORGE_NAMESPACE": self.config.namespace,
            "FLOWFORGE_QUEUES": self.name,
            "FLOWFORGE_GRACE": "0",
        }
        if self.broker is not None:
            parts = urlsplit(self.config.amqp_urls[0])
            login = parts.netloc.rpartition("@")[0]
            place = f"{login}{'@' if login else ''}127.0.0.1:{self.broker.port}"
            found["FLOWFORGE_AMQP_URL"] = urlunsplit(parts._replace(netloc=place))
        return found

    def start_worker(self) -> None:
        """Start it if it does not run; whatever it prints goes to standard error.

        Raises ConfigError when it cannot be started."""
        if self.worker is None or self.worker.poll() is not None:
            environment = os.environ | self.environment()
            try:
                with held_back():  # or nobody would know it, to end it
                    self.worker = subprocess.Popen(
                        self._command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=2,
                        start_new_session=True,
                    )
            except OSError as error:
                raise ConfigError(f"the worker cannot be started: {error}") from error

    def kill_worker(self) -> None:
        """Kill it with all its processes."""
        if self.worker is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.worker.pid, signal.SIGKILL)
            self.worker.wait()
            self.worker = None

    def clear(self) -> None:
        """Kill the worker, and end what runs. Raises FlowForgeError, psycopg.Error."""
        self.kill_worker()
        self.database.loses = None
        for proxy in (self.database, self.broker):
            if proxy is not None:
                proxy.up()
        if self._conn.closed:  # interrupted in the middle of a call
            self._conn = connect(self.config, Stop())
        for run in self._runs:
            self.value("select flowforge.cancel_run(%s, 'conformance')", run)
        for task_run, token in self.rows(
            "select task_run_id, fencing_token from flowforge.task_run"
            " where run_id = any (%s) and state = 'running'",
            self._runs,
        ):
            self.value("select flowforge.release_task_run(%s, %s, 'shutdown')", task_run, token)
        self._runs.clear()
        if self.desk is not None:
            self.desk.purge(self.name)

    def wait(self, condition: Callable[[], bool], otherwise: str, seconds: float | None = None) -> None:
        """Wait until the condition holds. Raises Violated with `otherwise` when it does not in time, or when
        the worker has ended meanwhile."""
        deadline = time.monotonic() + (seconds or self.patience)
        while not condition():
            if self.worker is not None and (code := self.worker.poll()) is not None:
                raise Violated(f"the worker ended by itself, with exit code {code}")
            if time.monotonic() > deadline:
                raise Violated(otherwise)
            time.sleep(_LOOK)

    # -- workflows and runs

    @property
    def other_queue(self) -> str:
        """A queue that the worker does not serve."""
        return f"{self.name}_other"

    def trigger(self, *tasks: dict[str, Any], value: Any = None) -> int:
        """A run of a workflow of these tasks, in the worker's queue unless they say otherwise."""
        self._workflows += 1
        name = f"{self.name}_{self._workflows}"
        spec = {"name": name, "tasks": [{"queue": self.name, "lease": 120, **task} for task in tasks]}
        self.rows("select flowforge.define_workflow(%s)", json.dumps(spec))
        run = int(self.value("select flowforge.trigger(%s, %s)", name, json.dumps(value)))
        self._runs.append(run)
        return run

    def begin(self, handler: str, value: Any = None, **options: Any) -> int:
        """A run of one task of one of the handlers."""
        return self.trigger({"name": "task", "handler": f"conformance.{handler}", **options}, value=value)

    def ticking(self, ticks: int, **options: Any) -> tuple[int, Path]:
        """A run whose only task ticks for so many tenths of a second, and the file that it ticks into."""
        file = Path(self._files.name, secrets.token_hex(4))
        file.touch()
        return self.begin("tick", {"file": str(file), "ticks": ticks}, **options), file

    def ticks(self, file: Path) -> None:
        """Wait until the handler ticks."""
        self.wait(lambda: b"." in file.read_bytes(), "the handler was not started")

    def stops(self, file: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until the handler ticks no more, though it is not at its end, calling `meanwhile` all the
        time."""
        seen, since = -1, time.monotonic()

        def quiet() -> bool:
            nonlocal seen, since
            meanwhile()
            if (size := file.stat().st_size) != seen:
                seen, since = size, time.monotonic()
            return time.monotonic() - since >= _QUIET

        self.wait(quiet, "the handler went on")
        if file.read_bytes().endswith(b"e"):
            raise Violated("the handler went on to its end")

    def task(self, run: int, name: str = "task") -> dict[str, Any]:
        """The row of a task run."""
        query = """
            select to_jsonb(tr) from flowforge.task_run tr join flowforge.task t using (task_id)
            where tr.run_id = %s and t.name = %s and tr.map_index is null
        """
        row: dict[str, Any] = self.value(query, run, name)
        return row

    def has_claimed(self) -> bool:
        """Whether the worker holds something, told or not."""
        query = """
            select exists (select from flowforge.task_run tr join flowforge.queue q using (queue_id)
                where q.name = %s and tr.state = 'running')
        """
        return bool(self.value(query, self.name))

    def attempts(self, run: int) -> list[tuple[str, bool, str]]:
        """Of the executions of a run that did not succeed: outcome, whether the worker reported it, error."""
        query = """
            select a.outcome::text, a.answered, coalesce(a.error, '') from flowforge.attempt a
            join flowforge.task_run tr using (task_run_id) where tr.run_id = %s order by a.fencing_token
        """
        return self.rows(query, run)

    def ends(self, run: int, state: str) -> None:
        """Wait until the run has ended so."""
        query = "select state::text from flowforge.run where run_id = %s"
        try:
            self.wait(lambda: self.value(query, run) != "running", "the run did not end")
        except Violated as violated:
            raise Violated(f"{violated}; {self._told(run)}") from None
        if (found := self.value(query, run)) != state:
            raise Violated(f"the run ended {found}, not {state}; {self._told(run)}")

    def ends_untroubled(self, run: int) -> None:
        """Wait until the run has succeeded, its task by the first execution."""
        self.ends(run, "succeeded")
        self.once(run)

    def once(self, run: int) -> None:
        """The task of the run was claimed once, never taken back, and no execution failed."""
        row = self.task(run)
        if (row["fencing_token"], row["reaps"]) != (1, 0) or self.attempts(run):
            raise Violated(f"it took more than one execution; {self._told(run)}")

    def is_well(self) -> None:
        """The worker still works."""
        self.ends_untroubled(self.begin("echo"))

    def _told(self, run: int) -> str:
        query = """
            select string_agg(format('%%s: %%s, token %%s, attempt %%s, reaped %%s%%s', t.name, tr.state,
                tr.fencing_token, tr.attempt, tr.reaps, ', ' || tr.error), '; ' order by tr.task_run_id)
            from flowforge.task_run tr join flowforge.task t using (task_id) where tr.run_id = %s
        """
        return str(self.value(query, run))

    # -- what others do

    def take_over(self, run: int) -> int:
        """Be another worker, who owns the task run from now on; the token."""
        row = self.task(run)
        with db.begin(self._conn) as conn:
            conn.execute(
                "select flowforge.release_task_run(%s, %s, 'shutdown')",
                [row["task_run_id"], row["fencing_token"]],
            )
            claimed = conn.execute(
                "select fencing_token from flowforge.claim_task_run(%s, %s, 'conformance', %s, '120 s')",
                [row["task_run_id"], row["dispatch_id"], uuid4()],
            ).fetchone()
        if claimed is None or claimed[0] is None:
            raise Violated(f"the handler was given up before; {self._told(run)}")
        return int(claimed[0])

    def renew(self, run: int, token: int) -> None:
        """Hold it as that worker."""
        query = "select flowforge.renew_leases(array[%s::bigint], array[%s::bigint], '120 s')"
        self.rows(query, self.task(run)["task_run_id"], token)

    def finish(self, run: int, name: str, token: int, output: Any) -> str:
        """Report a success as that worker; the answer."""
        return str(
            self.value(
                "select flowforge.finish_task_run(%s, %s, 'succeeded', %s)",
                self.task(run, name)["task_run_id"], token, json.dumps(output),
            )
        )  # fmt: skip

    def supply(self, run: int, name: str, output: Any) -> None:
        """Do a task of the other queue."""
        self.wait(lambda: self.task(run, name)["state"] == "ready", "the scheduler dispatches nothing")
        query = "select fencing_token from flowforge.claim_next(array[%s], 'conformance', %s, '120 s')"
        tokens: list[int] = []

        def taken() -> bool:  # claim_next passes over what a daemon holds at that moment
            tokens.extend(token for (token,) in self.rows(query, self.other_queue, uuid4()))
            return bool(tokens)

        self.wait(taken, "the task run stays locked")
        self.finish(run, name, tokens[0], output)

    def message(self, task_run: int, dispatch: str) -> None:
        """Send the worker a message that names them."""
        body = {"task_run_id": task_run, "dispatch_id": dispatch, "handler": "conformance.echo", "attempt": 1}
        self.raw_message(json.dumps(body).encode(), dispatch)

    def raw_message(self, body: bytes, message_id: str | None = None) -> None:
        """Send the worker these bytes."""
        assert self.desk is not None  # noqa: S101 -- clauses about messages are for where there is a broker
        self.desk.publish(self.name, body, message_id)

    def delete_queue(self) -> None:
        """Delete the worker's queue; the publisher declares it again for the next message."""
        assert self.desk is not None  # noqa: S101 -- as above
        self.desk.delete(self.name)

    def counts(self) -> tuple[int, int]:
        """Messages in the worker's queue that no consumer has, and the consumers."""
        assert self.desk is not None  # noqa: S101 -- as above
        return self.desk.counts(self.name)

    @contextmanager
    def without_broker(self) -> Generator[None]:
        """In the block the worker has no broker: what it had not settled is in the queue again."""
        assert self.broker is not None  # noqa: S101 -- as above
        self.broker.down()
        try:
            deadline = time.monotonic() + 10
            while self.counts()[1] and time.monotonic() < deadline:
                time.sleep(_LOOK)
            yield
        finally:
            self.broker.up()

    def settles_all(self) -> None:
        """Wait until no message is left, waiting or with the worker."""

        def settled() -> bool:
            self.wait(lambda: self.counts()[1] > 0, "it does not come back to its queue")
            deadline = time.monotonic() + _QUIET
            while self.counts()[0] and time.monotonic() < deadline:
                time.sleep(_LOOK)
            time.sleep(_QUIET)  # for what the worker has just been given, which a cut would bring back
            with self.without_broker():
                return self.counts()[0] == 0

        self.wait(settled, "it leaves a message without acknowledgement, or gives it back without end")

    # -- SQL

    def rows(self, query: str, *params: Any) -> list[Any]:
        with self._lock:  # proxies ask from threads of their own
            return db.call(self._conn, query, params)

    def value(self, query: str, *params: Any) -> Any:
        return self.rows(query, *params)[0][0]
