"""The client: define and trigger workflows, wait for runs, cancel and retry them.

One connection, taken in turn by the threads that share the client. A call whose connection turned out dead is
repeated once on a new one when repeating it changes nothing: otherwise nobody could tell whether it took
effect, and the error says so.
"""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import psycopg
from psycopg import conninfo

from flowforge import arguments, cutoff, db, tracing
from flowforge.config import Config
from flowforge.definition import Duration, Workflow
from flowforge.errors import (
    ConfigError,
    DatabaseError,
    DatabaseUnavailable,
    InvalidArgument,
    NotReadable,
    WaitTimeout,
    first_line,
    from_database,
)

A_CONNECTION_STRING = (
    "a PostgreSQL connection string (URI or key=value), such as postgresql://user@host/database"
)

_FIRST_POLL, _POLL_GROWTH, _LONGEST_POLL = 0.01, 1.5, 0.25
_LONGEST_PAUSE = 5.0  # while the database is away
_IDLE_BEFORE_CHECK = 1.0
_CHECK_LIMIT = 5.0
_LAST_LOOK = 2.0  # seconds that a look may take beyond the end of a wait
_DEFINE = b"select workflow, version, created from flowforge.define_workflow(spec => %s::jsonb)"


_T = TypeVar("_T")


class _Unset(enum.Enum):
    UNSET = enum.auto()


_UNSET = _Unset.UNSET


@dataclass(frozen=True)
class Defined:
    """What became of a definition: its workflow, its version, and whether that version is new.

    `created` is False too when this very call made the version, but its answer was lost with the connection,
    so that it was repeated: then the content was known.
    """

    workflow: str
    version: int
    created: bool


@dataclass(frozen=True)
class RunResult:
    """A run as it stood when asked.

    state: running, succeeded, failed or cancelled. Once the run has ended, `outputs` holds the outputs of the
    succeeded tasks that nothing depends on, and `errors` the errors of the failed ones, by task. With
    `too_large` the outputs were left out, since they are more than `max_claim_bytes` together: ask for each
    by `Client.result(run_id, task)`.
    """

    run_id: int
    workflow: str
    version: int
    state: Literal["running", "succeeded", "failed", "cancelled"]
    created_at: datetime
    finished_at: datetime | None
    outputs: Mapping[str, Any] = field(default_factory=dict)
    errors: Mapping[str, Any] = field(default_factory=dict)
    too_large: bool = False

    @property
    def ended(self) -> bool:
        """Whether the run has ended, however."""
        return self.state != "running"

    @property
    def succeeded(self) -> bool:
        """Whether the run has ended well."""
        return self.state == "succeeded"


class Client:
    """A connection to FlowForge's database for programs that trigger workflows.

    Thread-safe; a context manager; connects at the first call. Every method may raise a
    `flowforge.errors.DatabaseError`, in particular NotFound for an unknown workflow, run or task,
    InvalidArgument, LimitExceeded and DatabaseUnavailable. NotStorable is raised before anything is sent,
    when a value is not JSON that PostgreSQL can keep.
    """

    def __init__(self, dsn: str | None = None, *, call_timeout: Duration = 300) -> None:
        """`dsn` is a PostgreSQL connection string; FLOWFORGE_DATABASE_URL when left out.

        call_timeout: the longest wait for an answer, in seconds, before the connection counts as lost and
            DatabaseUnavailable is raised. `trigger_many` of a great many runs may need more.

        Raises ConfigError when there is neither, or it is none.
        """
        if isinstance(dsn, str) and not (dsn := dsn.strip()):
            raise ConfigError("dsn is empty; leave it out for the one of FLOWFORGE_DATABASE_URL")
        if dsn is not None and not is_connection_string(dsn):
            raise ConfigError(f"dsn is not {A_CONNECTION_STRING}")
        self._dsn = dsn or Config.from_environment().database_url
        if not self._dsn:
            raise ConfigError(
                "no database: give Client a connection string, or set FLOWFORGE_DATABASE_URL; "
                'that of a running `flowforge up` is the line "database" of what it prints'
            )
        self._limit = arguments.seconds(call_timeout, "call_timeout")
        self._lock = threading.Lock()
        self._connection: db.Connection | None = None
        self._used_at = 0.0
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection. Later calls are refused."""
        with self._lock:
            self._closed = True
            self._drop()

    def define(self, workflow: Workflow | Mapping[str, Any]) -> Defined:
        """Registers a workflow, or a definition as the database takes it.

        New content becomes the current version; known content changes nothing. Raises InvalidDefinition.
        """
        [defined] = self.define_all([workflow])
        return defined

    def define_all(self, workflows: Iterable[Workflow | Mapping[str, Any]]) -> list[Defined]:
        """Registers several as `define` does, in one transaction: all of them, or none.

        Raises InvalidDefinition, LimitExceeded and the like with the `position` of the one that was refused.
        """
        given = [each.spec() if isinstance(each, Workflow) else each for each in workflows]
        specs = [arguments.json_text(each, "definition") for each in given]
        # Whatever is no definition at all, the database refuses.
        names = [str(dict(each).get("name")) if hasattr(each, "keys") else "" for each in given]
        for spec in specs:
            arguments.check_text(spec)

        def register(connection: db.Connection) -> dict[int, Defined]:
            found: dict[int, Defined] = {}
            with db.begin(connection):
                # In one order, whatever the caller's: two at once would wait for each other.
                for position in sorted(range(len(specs)), key=names.__getitem__):
                    try:
                        [row] = connection.execute(_DEFINE, [specs[position]]).fetchall()
                    except psycopg.Error as error:
                        refused = from_database(error)
                        if isinstance(refused, DatabaseError) and (error.sqlstate or "").startswith("WF"):
                            refused.position = position
                            raise refused from error
                        raise
                    found[position] = Defined(*row)
            return found

        found, _ = self._repeated(register, repeatable=True)
        return [found[position] for position in range(len(specs))]

    def trigger(
        self,
        workflow: Workflow | str,
        input: object = _UNSET,  # noqa: A002 - the database's own word
        *,
        idempotency_key: str | None = None,
        version: int | None = None,
        priority: int = 0,
        delay: Duration = 0,
        labels: Mapping[str, Any] | None = None,
    ) -> int:
        """Creates a run and returns its id.

        input: any JSON value; an empty object when left out.
        idempotency_key: triggering again with the same key and input gives the same run.
        version: the version to run; the current one when left out.
        priority: the larger goes first. delay: the time before anything of the run is dispatched.
        labels: free JSON, kept with the run. Where a span of OpenTelemetry is current, the label traceparent
            is that span, unless it is given.

        Raises IdempotencyConflict for a key used before with another input.
        """
        [(run_id,)] = self._call(
            "select flowforge.trigger(workflow => %s, input => %s::jsonb, idempotency_key => %s, "
            "version => %s::bigint, priority => %s::bigint, delay => %s::interval, labels => %s::jsonb)",
            [
                arguments.workflow_name(workflow),
                arguments.json_text({} if input is _UNSET else input, "input"),
                arguments.text(idempotency_key, "idempotency_key"),
                None if version is None else arguments.whole(version, "version"),
                arguments.whole(priority, "priority"),
                arguments.interval(delay),
                arguments.json_text(tracing.joined(arguments.labels(labels)), "labels"),
            ],
            repeatable=idempotency_key is not None,
        )
        return int(run_id)

    def trigger_many(
        self,
        workflow: Workflow | str,
        inputs: Sequence[object],
        *,
        idempotency_keys: Sequence[str] | None = None,
    ) -> list[int]:
        """Creates one run for each input, in one transaction; returns their ids in the order of the inputs.

        idempotency_keys: one for each input. Raises as `trigger` does; then no run is created.
        """
        if not arguments.is_sequence(inputs):
            raise InvalidArgument(
                f"inputs must be a list of inputs, one for each run, not {arguments.shown(inputs)}"
            )
        if idempotency_keys is not None and not arguments.is_sequence(idempotency_keys):
            raise InvalidArgument(
                "idempotency_keys must be a list of texts, one for each input, "
                f"not {arguments.shown(idempotency_keys)}"
            )
        rows = self._call(
            "select flowforge.trigger_many(workflow => %s, inputs => %s::jsonb[], "
            "idempotency_keys => %s::text[])",
            [
                arguments.workflow_name(workflow),
                [arguments.json_text(value, f"inputs[{position}]") for position, value in enumerate(inputs)],
                None
                if idempotency_keys is None
                else [arguments.text(each, "each of idempotency_keys") for each in idempotency_keys],
            ],
            repeatable=idempotency_keys is not None,
        )
        return list(rows[0][0])

    def wait(self, run_id: int, *, timeout: Duration | None = None) -> RunResult:
        """Waits until the run has ended, however it ends; for ever when `timeout` is left out. Once the
        database has answered this client, it is waited for too when it is away.

        Raises WaitTimeout when the run goes on after `timeout`, as far as the database could be asked.
        """
        return self._wait(run_id, timeout, time.sleep)

    def _wait(self, run_id: int, timeout: Duration | None, sleep: Callable[[float], object]) -> RunResult:
        """As `wait`, which may sleep in another way."""
        limit = None if timeout is None else arguments.seconds(timeout, "timeout")
        deadline = float("inf") if limit is None else time.monotonic() + limit
        pause, backoff = _FIRST_POLL, db.Backoff(cap=_LONGEST_PAUSE)
        workflow = ""
        while True:
            away: DatabaseUnavailable | None = None
            try:
                result = self._look(run_id, deadline)
            except DatabaseUnavailable as error:
                if not self._used_at and time.monotonic() < deadline:
                    raise
                away, pause = error, backoff.next()
            else:
                if result.ended:
                    return result
                backoff.reset()
                pause = min(pause * _POLL_GROWTH, _LONGEST_POLL)
                workflow = f" of workflow {result.workflow!r}"
            left = deadline - time.monotonic()
            if left <= 0:
                unknown = "" if away is None else f", as far as is known: {away}"
                raise WaitTimeout(f"run {run_id}{workflow} has not ended after {limit} s{unknown}") from away
            sleep(min(pause, left))

    @overload
    def result(self, run_id: int) -> RunResult: ...

    @overload
    def result(self, run_id: int, task: str) -> Any: ...

    def result(self, run_id: int, task: str | None = None) -> Any:
        """The run as it stands, without waiting; or one task's output, None while it has not succeeded.

        Raises NotReadable for an output that is beyond Python.
        """
        if task is not None:
            [(output,)] = self._call(
                "select flowforge.task_output(run_id => %s::bigint, task => %s)::text",
                [arguments.run_id(run_id), arguments.text(task, "task")],
                repeatable=True,
            )
            return None if output is None else _read(output, run_id, task)
        return self._look(run_id)

    def _look(self, run_id: int, until: float = float("inf")) -> RunResult:
        rows = self._call(
            "select workflow, version, state, created_at, finished_at, coalesce(outputs, '{}')::text, "
            "coalesce(errors, '{}'), finished_at is not null and outputs is null "
            "from flowforge.run_result(run_id => %s::bigint)",
            [arguments.run_id(run_id)],
            repeatable=True,
            until=until,
        )
        run = list(rows[0])
        run[5] = self._outputs(run_id, run[5], until)
        return RunResult(run_id, *run)

    def _outputs(self, run_id: int, text: str, until: float) -> dict[str, Any]:
        try:
            return dict(json.loads(text))
        except (ValueError, RecursionError):  # of one task: the error shall name it
            each = self._call(
                "select o.key, o.value::text "
                "from flowforge.run_result(run_id => %s::bigint) r, jsonb_each(r.outputs) o",
                [run_id],
                repeatable=True,
                until=until,
            )
            return {task: _read(output, run_id, task) for task, output in each}

    def cancel(self, run_id: int, *, reason: str | None = None) -> bool:
        """Asks for the run to be cancelled. False when that was asked for before, or the run has ended.

        When the answer was lost with the connection, so that the call was repeated, nobody can tell who asked
        first: then True says that the run is being cancelled, or was.
        """
        [(changed,)], repeated = self._asked(
            "select flowforge.cancel_run(run_id => %s::bigint, reason => %s)",
            [arguments.run_id(run_id), arguments.text(reason, "reason")],
            repeatable=True,
        )
        if changed or not repeated:
            return bool(changed)
        return self.result(run_id).state in ("running", "cancelled")

    def retry(self, run_id: int, *, from_task: str | None = None, request_id: str | None = None) -> int:
        """Runs again what failed or was cancelled, and what was skipped because of it; returns how many task
        runs were reset. Needs the operator's role.

        from_task: that task and everything below it, whatever became of them.
        request_id: asking again with the same one resets nothing further.
        Raises StateConflict while something to reset is under way.
        """
        [(count,)] = self._call(
            "select flowforge.retry_run(run_id => %s::bigint, from_task => %s, request_id => %s)",
            [
                arguments.run_id(run_id),
                arguments.text(from_task, "from_task"),
                arguments.text(request_id, "request_id"),
            ],
            repeatable=request_id is not None,
        )
        return int(count)

    def _call(
        self, query: str, params: list[Any], *, repeatable: bool, until: float = float("inf")
    ) -> list[tuple[Any, ...]]:
        return self._asked(query, params, repeatable=repeatable, until=until)[0]

    def _asked(
        self, query: str, params: list[Any], *, repeatable: bool, until: float = float("inf")
    ) -> tuple[list[tuple[Any, ...]], bool]:
        """The rows, and whether they answer a repeat, of which the first try may have taken effect."""
        for value in params:
            arguments.check_text(value)
        return self._repeated(
            lambda connection: db.call(connection, query, params), repeatable=repeatable, until=until
        )

    @contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        """The connection for this thread, once those before it have had it."""
        if not self._lock.acquire(timeout=-1 if until == float("inf") else self._left(until)):
            raise DatabaseUnavailable("the connection was in use by another thread until the end of the wait")
        try:
            yield
        finally:
            self._lock.release()

    def _left(self, until: float) -> float:
        """Seconds for an answer."""
        return min(self._limit, max(0.0, until - time.monotonic()) + _LAST_LOOK)

    def _repeated(
        self, work: Callable[[db.Connection], _T], *, repeatable: bool, until: float = float("inf")
    ) -> tuple[_T, bool]:
        """What `work` answers, and whether that is of a repeat."""
        with self._turn(until):
            if self._closed:
                raise InvalidArgument("the client is closed: make a new one, or call it before close()")
            for last in (False, True):
                ends = time.monotonic() + self._left(until)
                is_new = self._connection is None
                connection = self._connected(ends, check=not repeatable)
                try:
                    with cutoff.answered_within(connection, max(0.0, ends - time.monotonic())):
                        answer = work(connection)
                except DatabaseError:  # of a transaction that was undone
                    self._used_at = time.monotonic()
                    raise
                except psycopg.Error as error:
                    dead = db.connection_useless(connection, error)
                    if dead:
                        self._drop()
                    in_vain = is_new and time.monotonic() >= ends  # no other connection would be answered
                    if dead and repeatable and not last and not in_vain:
                        continue
                    raise from_database(error) from error
                except BaseException:  # interrupted half way: what the server would answer next is unknown
                    self._drop()
                    raise
                self._used_at = time.monotonic()
                return answer, last
            raise AssertionError("unreachable")

    def _connected(self, ends: float, *, check: bool) -> db.Connection:
        """The connection, made if there is none until the moment `ends`. With `check` one that stood idle is
        tried, and replaced if dead.
        """
        if self._connection is not None and check and time.monotonic() - self._used_at > _IDLE_BEFORE_CHECK:
            try:
                with cutoff.answered_within(self._connection, min(_CHECK_LIMIT, ends - time.monotonic())):
                    self._connection.execute("select")
            except psycopg.Error:
                self._drop()
        if self._connection is None:
            try:
                # Not prepared: it must work behind any pooler, without a setting.
                self._connection = db.connect(
                    self._dsn,
                    application_name="flowforge client",
                    prepared_statements=False,
                    within=ends - time.monotonic(),
                )
            except psycopg.Error as error:
                raise from_database(error) from error
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


def is_connection_string(dsn: object) -> bool:
    """Whether libpq can read it. Its own message is kept from view: it may quote a part of the password."""
    if not isinstance(dsn, str):
        return False
    try:
        conninfo.conninfo_to_dict(dsn)
    except (psycopg.Error, UnicodeEncodeError):
        return False
    return True


def _read(text: str, run_id: int, task: str) -> Any:
    """An output from its JSON text: PostgreSQL keeps longer numbers and deeper nesting than Python reads."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise NotReadable(
            f"the output of task {task!r} of run {run_id} cannot be read by Python: {why}; "
            "as text it is given by `flowforge show RUN --output TASK` and task_output in SQL"
        ) from None
