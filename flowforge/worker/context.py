"""What a handler is given: what it works on, how to report, how to learn that it should stop, and its
transaction.

Side effects exactly once, where the database can give it: `Context.transaction` asserts the lease, runs the
handler's own statements and finishes the task run in one commit. Either all of it took effect or nothing did.
An unknown outcome of that commit (the connection went away) is never settled by a finish alone, which could
record a success without its side effects: the task run is given back, and if the commit did take effect that
changes nothing. It is given back, too, when the connection was lost before the commit and the handler ends
for that: nothing happened, and no attempt is used up.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from types import MappingProxyType
from typing import Any, NoReturn, Protocol
from uuid import UUID

import psycopg

from flowforge import db
from flowforge.config import Config
from flowforge.errors import Cancelled, ConfigError, DatabaseUnavailable, NotStorable, PermanentError
from flowforge.worker.execution import Execution, StopReason, causes, storable

IDLE_LIMIT = 300.0
"""Seconds that a transaction may stand idle between two statements, for a task without a time limit."""

CONNECT_LIMIT = 30.0
"""Seconds for which a transaction's connection is asked for again while the database is away."""

_MOST_MESSAGE = 1000

# The server must notice by itself that the worker's host is gone: until then the row of the task run stays
# locked.
_SETTINGS = """
    select set_config('idle_in_transaction_session_timeout', %s, true),
           set_config('statement_timeout', coalesce(%s, current_setting('statement_timeout')), true),
           set_config('tcp_user_timeout', '20s', true), set_config('tcp_keepalives_idle', '10', true),
           set_config('tcp_keepalives_interval', '5', true), set_config('tcp_keepalives_count', '3', true),
           set_config('client_connection_check_interval', '1s', true)
"""


class Renewer(Protocol):
    """Who renews leases."""

    def renew_soon(self, execution: Execution) -> None:
        """Renew this one at once."""


class _Upstream(dict[str, Any]):
    """What is known of the upstreams, by task. Says which there are when asked for another one."""

    def __missing__(self, task: str) -> NoReturn:
        raise KeyError(f"{task!r} is not among these upstream tasks: {', '.join(self) or 'none'}")


class Context:
    """The task run that a handler executes. Made by the worker, one for each execution; usable from any
    thread.

    run_id, task_run_id, workflow, task, attempt, fencing_token, dispatch_id: which it is. map_index: the
    position in the mapped array, from 0; None when the task is not mapped.
    """

    __slots__ = ("_cache", "_config", "_execution", "_keeper")

    def __init__(self, execution: Execution, keeper: Renewer, config: Config) -> None:
        self._execution, self._keeper, self._config = execution, keeper, config
        self._cache: dict[str, Any] = {}

    def __repr__(self) -> str:
        claim = self._execution.claim
        return f"<Context {claim.workflow}.{claim.task} run={claim.run_id} attempt={claim.attempt}>"

    # -- which task run

    @property
    def run_id(self) -> int:
        """The run."""
        return self._execution.claim.run_id

    @property
    def task_run_id(self) -> int:
        """The task run."""
        return self._execution.claim.task_run_id

    @property
    def workflow(self) -> str:
        """The workflow's name."""
        return self._execution.claim.workflow

    @property
    def task(self) -> str:
        """The task's name."""
        return self._execution.claim.task

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 1. The same attempt may be executed again after its worker was
        lost."""
        return self._execution.claim.attempt

    @property
    def fencing_token(self) -> int:
        """Larger for every later execution of this task run: give it to other systems to refuse what is
        stale."""
        return self._execution.claim.fencing_token

    @property
    def dispatch_id(self) -> UUID:
        """The same for every execution of this attempt: an idempotency key for calls to other systems."""
        return self._execution.claim.dispatch_id

    @property
    def map_index(self) -> int | None:
        """The position in the mapped array, from 0; None when the task is not mapped."""
        return self._execution.claim.map_index

    # -- what it works on

    @property
    def input(self) -> Any:
        """The input of the run, decoded from JSON. Each of these raises ValueError for JSON that Python
        cannot hold."""
        return self._decoded("input", self._execution.claim.input)

    @property
    def upstream(self) -> Mapping[str, Any]:
        """The outputs of the upstream tasks that succeeded, by task name, but for a mapped array."""
        outputs = self._decoded("upstream", self._execution.claim.upstream_outputs)
        return MappingProxyType(_Upstream(outputs or {}))

    @property
    def upstream_states(self) -> Mapping[str, str]:
        """The states of the upstream tasks, by task name."""
        states = self._decoded("states", self._execution.claim.upstream_states)
        return MappingProxyType(_Upstream(states or {}))

    @property
    def item(self) -> Any:
        """The element of the mapped array that this execution is for; None when the task is not mapped."""
        return self._decoded("item", self._execution.claim.item)

    def _decoded(self, name: str, text: str | None) -> Any:
        if name not in self._cache:
            try:
                self._cache[name] = None if text is None else json.loads(text)
            except RecursionError:
                raise ValueError(f"{name} is nested too deeply for Python") from None
        return self._cache[name]

    # -- reporting

    def progress(self, fraction: float, message: str | None = None) -> None:
        """Say how far the work is, from 0 to 1, for people to see. Cheap, and never waits: reports are sent
        about once a second, and only the last one counts. Of `message` 1,000 characters are kept.

        Raises ValueError when `fraction` is not between 0 and 1; TimeLimitExceeded when the time is over, and
        Cancelled when the lease is lost or the worker ends. A run being cancelled does not matter here.
        """
        self._execution.raise_if_not_owner()
        try:
            allowed = 0 <= fraction <= 1
        except TypeError:
            allowed = False
        if not allowed:
            raise ValueError(f"fraction must be a number between 0 and 1, not {fraction!r}")
        self._execution.progress = (
            float(fraction),
            None if message is None else storable(message[:_MOST_MESSAGE]),
        )

    # -- stopping
    #
    # No thread is ever interrupted, so a sync handler that may take long has to look now and then. One that
    # does not end within two seconds of its time limit is given up, and its slot with it until it does.

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: its run is being cancelled, its lease or its time is over, or the
        worker ends."""
        return self._execution.stop_reason is not None

    def check_cancelled(self) -> None:
        """Raises Cancelled when the handler should stop, TimeLimitExceeded when that is because its time is
        over.

        A handler that lets Cancelled through in a run being cancelled ends as cancelled.
        """
        self._execution.raise_if_stopped()

    @property
    def deadline(self) -> float | None:
        """When the time limit passes, on the clock of `time.monotonic`; None without a limit."""
        return self._execution.deadline

    def time_left(self) -> float | None:
        """Seconds until the time limit passes, negative once it has; None without a limit."""
        deadline = self._execution.deadline
        return None if deadline is None else deadline - time.monotonic()

    # -- the handler's own transaction

    @contextmanager
    def transaction(self) -> Generator[Transaction]:
        """A transaction on the database of FlowForge, in which side effects and the end of this task run
        commit together.

        `with ctx.transaction() as tx: tx.execute(...); tx.finish(output)`. It begins by asserting the lease,
        which locks the task run, and ends by finishing it as succeeded, with the output given to `tx.finish`,
        which every block has to call. After that the task run is over, and what the handler returns or raises
        no longer counts: a handler has one successful transaction at most. When the block raises, everything
        is rolled back and the exception goes on.

        The transaction is READ COMMITTED, with the login of the worker, on a connection of its own; keep it
        short. It may take until the time limit, and without one stand idle for 300 s between statements. When
        the handler is told to stop for good, the connection is cut and nothing of it commits.

        Raises Cancelled when the lease is lost, TimeLimitExceeded; DatabaseUnavailable when the connection
        was lost while committing: whether it took effect is not known to the handler, and the worker finds
        out. NotStorable for an output that is too large; psycopg.Error for what the database says, also when
        the connection is lost: a handler that lets it through is executed again in the same attempt.
        RuntimeError for a block that ends without `tx.finish` (then nothing is kept, and no further attempt
        made), on the thread of the event loop (an async handler runs the block by asyncio.to_thread), or for
        a second transaction.
        """
        _refuse_event_loop()
        execution = self._execution
        with self._connected() as connection:
            try:
                with connection.transaction():
                    tx = Transaction(connection, self._begin(connection))
                    yield tx
                    tx._finish(execution)
                    execution.commits(True)
                execution.finished = True
            except BaseException as exc:
                refused = (
                    isinstance(exc, psycopg.Error)
                    and exc.sqlstate
                    and not db.connection_useless(connection, exc)
                )
                if execution.committing and not refused:
                    execution.commit_unknown = True
                else:
                    execution.commits(False)
                    execution.lost_by = _loss(connection, exc)
                    self._keeper.renew_soon(execution)
                if isinstance(exc, psycopg.Error) and not refused:
                    execution.raise_if_not_owner()
                    if execution.commit_unknown:
                        raise DatabaseUnavailable(
                            "the connection was lost while the transaction of task run "
                            f"{self.task_run_id} was committed; whether it took effect is not known"
                        ) from exc
                raise

    @contextmanager
    def _connected(self) -> Generator[db.Connection]:
        """A connection that is cut when the handler is told to stop for good."""
        with closing(self._connect()) as connection:
            self._execution.attach(connection)
            try:
                yield connection
            finally:
                self._execution.detach()

    def _connect(self) -> db.Connection:
        execution, give_up, backoff = self._execution, time.monotonic() + CONNECT_LIMIT, db.Backoff(cap=2.0)
        if execution.finished or execution.commit_unknown:
            raise RuntimeError("the transaction of this task run was committed already; it can have only one")
        while True:
            execution.raise_if_not_owner()
            try:
                return db.connect(
                    self._config.database_url,
                    application_name="flowforge worker transaction",
                    connect_timeout=self._config.connect_timeout,
                    prepared_statements=self._config.prepared_statements,
                )
            except (psycopg.Error, ConfigError, OSError) as exc:  # OSError: there are no descriptors left
                if isinstance(exc, psycopg.Error) and not db.is_transient(exc):
                    raise
                if time.monotonic() > give_up:
                    execution.lost_by = exc
                    raise
                time.sleep(backoff.next())

    def _begin(self, connection: db.Connection) -> str:
        """The first statements of the transaction; its id."""
        left = self.time_left()
        idle = IDLE_LIMIT if left is None else left
        connection.execute(_SETTINGS, [_milliseconds(idle), None if left is None else _milliseconds(left)])
        try:
            [transaction_id, _] = connection.execute(
                "select pg_current_xact_id()::text, flowforge.assert_lease(%s, %s)",
                [self.task_run_id, self.fencing_token],
            ).fetchone() or ("", None)
        except psycopg.Error as exc:
            if exc.sqlstate != "WF006":
                raise
            self._execution.stop(StopReason.LOST)
            self._execution.raise_if_not_owner()
            raise Cancelled(StopReason.LOST.value) from exc
        return str(transaction_id)


class UnfinishedTransaction(PermanentError, RuntimeError):
    """The block of a transaction ended without `finish`, or ended the transaction itself: the handler has a
    mistake that no further attempt mends."""


class Transaction:
    """The open transaction of a handler. What it does takes effect together with the end of the task run, or
    not at all."""

    def __init__(self, connection: db.Connection, transaction_id: str) -> None:
        self._transaction_id = transaction_id
        self.connection = connection
        """psycopg's connection, for all that `execute` does not do; committing and rolling back are
        refused."""
        self._output: str | None = None
        self._has_output = False

    def execute(self, query: Any, params: Any = None) -> psycopg.Cursor[tuple[Any, ...]]:
        """As psycopg's Connection.execute."""
        return self.connection.execute(query, params)

    def finish(self, output: object = None) -> None:
        """Let the transaction end the task run as succeeded, with this output, by its last statement. Every
        block has to call it.

        Raises NotStorable for what is not JSON; RuntimeError when called twice.
        """
        if self._has_output:
            raise RuntimeError("finish was called before in this transaction")
        self._output, self._has_output = None if output is None else db.json_text(output), True

    def _finish(self, execution: Execution) -> None:
        claim = execution.claim
        if not self._has_output:
            raise UnfinishedTransaction(
                "the block of ctx.transaction() ended without tx.finish(output); call it as the block's last "
                "step, with what the task is to return"
            )
        try:
            answer = self.connection.execute(
                """
                select flowforge.finish_task_run(%s, %s, 'succeeded', %s::jsonb)
                where pg_current_xact_id()::text = %s
                """,
                [claim.task_run_id, claim.fencing_token, self._output, self._transaction_id],
            ).fetchone()
        except psycopg.Error as exc:
            if exc.sqlstate is not None and (
                exc.sqlstate.startswith(("22", "54")) or exc.sqlstate == "WF005"
            ):
                raise NotStorable(f"not storable: {exc.diag.message_primary}") from exc
            raise
        if answer != ("accepted",):
            # In another transaction it would make a success of side effects that may not be there.
            # Nor would another attempt mend it, only do them again.
            raise UnfinishedTransaction(
                "the handler has ended the transaction of ctx.transaction() inside its block"
            )


def _loss(connection: db.Connection, exc: BaseException) -> BaseException | None:
    """What told of the loss of `connection`, when `exc` came of that."""
    if not db.connection_lost(connection):
        return None
    # Other codes are the server's verdict on the handler, such as a transaction that stood idle for too long.
    return next(
        (
            each
            for each in causes(exc)
            if isinstance(each, psycopg.OperationalError | psycopg.InterfaceError)
            and (each.sqlstate is None or each.sqlstate[:2] in ("08", "57"))
        ),
        None,
    )


def _refuse_event_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(
        "ctx.transaction() would block the event loop and every other async handler; "
        "put the block into a function and await asyncio.to_thread(function, ctx)"
    )


def _milliseconds(seconds: float) -> str:
    return str(max(1, min(round(seconds * 1000), 2_147_483_647)))
