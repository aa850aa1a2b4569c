"""Every exception that FlowForge raises, in one tree.

Library errors (psycopg, pika, yoyo) become one of these at the edge, so that callers need only this module.
No message holds a password or a payload.

    FlowForgeError
        ConfigError             a setting is missing or has a value that is not allowed
        SchemaError             the schema is missing, too old, or not what the files say
        MissingPrivilege        the login may not do what its daemon needs
        DatabaseError           the database refused; `.sqlstate` tells why
            InvalidArgument, NotFound, InvalidDefinition, IdempotencyConflict, LimitExceeded, Fenced,
            StateConflict, IsolationError      WF001 to WF008, raised by FlowForge's own functions
            DatabaseUnavailable nothing wrong with the request: asking again later may succeed
        NotStorable             a value that is not JSON, or that PostgreSQL cannot keep
        NotReadable             an output that PostgreSQL keeps and Python cannot read
        WaitTimeout             a run had not ended when the time to wait for it was over
        EmbeddedPostgresError   the private PostgreSQL could not be started or kept
        BrokerError
            BrokerUnavailable, BrokerBlocked
            BrokerMisconfigured
                BrokerForbidden, BrokerMismatch
        PermanentError          raised by a handler: no further attempt
        Cancelled               inside a handler: its run is being cancelled, or its lease is lost
        TimeLimitExceeded       inside a handler: the task's time limit has passed
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import psycopg


class FlowForgeError(Exception):
    """The root of the tree."""


class ConfigError(FlowForgeError):
    """A setting is missing or has a value that is not allowed; the message names it and says what is."""


class SchemaError(FlowForgeError):
    """The schema is missing, too old for this program, or differs from the files it was made from."""


class MissingPrivilege(FlowForgeError):
    """The database login lacks a privilege; the message names what is missing and how to give it."""


class DatabaseError(FlowForgeError):
    """The database refused. `sqlstate` is its five-character code, or None when the connection itself
    failed."""

    default_sqlstate: ClassVar[str | None] = None
    position: int | None = None
    """Of several that were given in one call, the one that was refused, counted from 0."""

    def __init__(self, message: str, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate if sqlstate is not None else self.default_sqlstate


class InvalidArgument(DatabaseError):
    """WF001: an argument is null, out of bounds or of the wrong form."""

    default_sqlstate = "WF001"


class NotFound(DatabaseError):
    """WF002: no such workflow, version, run, task, task run or queue."""

    default_sqlstate = "WF002"


class InvalidDefinition(DatabaseError, ValueError):
    """WF003: a workflow definition breaks a rule (unknown key, cycle, duplicate task, ...). Python raises it
    for what is obvious there, the database for the rest."""

    default_sqlstate = "WF003"


class IdempotencyConflict(DatabaseError):
    """WF004: the idempotency key was used before, with another input."""

    default_sqlstate = "WF004"


class LimitExceeded(DatabaseError):
    """WF005: a named limit was exceeded (payload, number of tasks, length of a name, ...)."""

    default_sqlstate = "WF005"


class Fenced(DatabaseError):
    """WF006: the fencing token is no longer the current one; another owner may be at work."""

    default_sqlstate = "WF006"


class StateConflict(DatabaseError):
    """WF007: refused in the present state, such as a retry of a task that is running."""

    default_sqlstate = "WF007"


class IsolationError(DatabaseError):
    """WF008: the function only works at isolation level READ COMMITTED."""

    default_sqlstate = "WF008"


class DatabaseUnavailable(DatabaseError):
    """The connection was lost or refused, or the statement lost a race: the same request may succeed
    later."""


class NotStorable(FlowForgeError):
    """The value is not JSON (bytes, NaN, a lone surrogate, ...) or is JSON that PostgreSQL cannot keep
    (U+0000, depth). `path` is where in the value that is, such as ['a'][1], or empty for the whole; the
    message begins with it."""

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class NotReadable(FlowForgeError):
    """An output that Python's json does not read: a number of too many digits, or nested too deeply. The
    message names the task, and says how to have it as text."""


class WaitTimeout(FlowForgeError, TimeoutError):
    """The run had not ended when the time to wait for it was over. The run goes on."""


class EmbeddedPostgresError(FlowForgeError):
    """The private PostgreSQL could not be started or kept; the message says what to do."""


class BrokerError(FlowForgeError):
    """The root of what concerns RabbitMQ."""


class BrokerUnavailable(BrokerError):
    """No broker of the configured URLs could be reached, or the connection was lost."""


class BrokerBlocked(BrokerError):
    """The broker has stopped reading from publishers (memory or disk alarm) for longer than the blocked
    time-out."""


class BrokerMisconfigured(BrokerError):
    """The broker will go on refusing until someone changes it: a queue or exchange with other arguments, a
    wrong password, a missing virtual host or permission. The message names it."""


class BrokerForbidden(BrokerMisconfigured):
    """The user of the broker lacks a permission. It can be granted at any time, so it is waited for."""


class BrokerMismatch(BrokerMisconfigured):
    """A queue or exchange exists with other arguments. It can be deleted at any time, so it is waited for."""


class PermanentError(FlowForgeError):
    """Raised by a handler: the task failed, and no further attempt would help."""


class Cancelled(FlowForgeError):
    """Raised inside a handler whose run is being cancelled, or whose lease is lost."""


class TimeLimitExceeded(FlowForgeError):
    """Raised inside a handler when the task's time limit has passed."""


_BY_SQLSTATE: dict[str | None, type[DatabaseError]] = {
    kind.default_sqlstate: kind
    for kind in (
        InvalidArgument,
        NotFound,
        InvalidDefinition,
        IdempotencyConflict,
        LimitExceeded,
        Fenced,
        StateConflict,
        IsolationError,
    )
}

_TRANSIENT = frozenset(
    {"40001", "40P01", "55P03", "57P01", "57P02", "57P03", "57P05", "57014", "25006", "25P03", "25P04"}
)
_TRANSIENT_CLASSES = ("08", "53")

# A failed connection has no SQLSTATE in libpq's interface, so its text must tell. What matches none of these
# is taken for transient: a server whose messages are in another language is asked again instead of given up.
_REFUSED = (
    (
        re.compile(
            r"password authentication failed|no password supplied|authentication failed for user",
            re.IGNORECASE,
        ),
        "wrong login or password",
    ),
    (re.compile(r'role "[^"]*" does not exist', re.IGNORECASE), "the login does not exist"),
    (
        re.compile(r"no pg_hba\.conf entry|pg_hba\.conf rejects", re.IGNORECASE),
        "the server does not admit this login from this host",
    ),
    (re.compile(r'database "[^"]*" does not exist', re.IGNORECASE), "the database does not exist"),
    (
        re.compile(r"permission denied for database|is not permitted to log in", re.IGNORECASE),
        "the login may not connect to this database",
    ),
)


def is_transient(exc: BaseException) -> bool:
    """Whether the same request may succeed later, on a fresh connection: the connection was lost or refused,
    the server is starting, stopping, read-only or out of slots, or the statement lost a race (serialization,
    deadlock, lock time-out, statement time-out), or its notification queue was full."""
    import psycopg  # not before it is needed: whoever only defines workflows does without it

    if not isinstance(exc, psycopg.Error):
        return isinstance(exc, (ConnectionError, TimeoutError))
    if exc.sqlstate == "54000" and "NOTIFY" in (exc.diag.message_primary or ""):
        return True  # the server's notification queue is full, which a commit is told as if it were too large
    if exc.sqlstate is not None:
        return exc.sqlstate in _TRANSIENT or exc.sqlstate[:2] in _TRANSIENT_CLASSES
    return isinstance(exc, (psycopg.OperationalError, psycopg.InterfaceError)) and refusal(exc) is None


def refusal(exc: psycopg.Error) -> str | None:
    """Why a connection can never succeed as configured (wrong password, no such database, ...), or None."""
    if exc.sqlstate is not None:
        known = {"28P01": 0, "28000": 2, "3D000": 3}.get(exc.sqlstate)
        return None if known is None else _REFUSED[known][1]
    text = str(exc)
    return next((reason for pattern, reason in _REFUSED if pattern.search(text)), None)


def first_line(error: BaseException | str) -> str:
    """What an error says in short; its kind when it says nothing."""
    return str(error).strip().partition("\n")[0] or ("" if isinstance(error, str) else type(error).__name__)


# U+0000 in jsonb; text that is not JSON (lone surrogate, NaN); bytes that are not UTF-8; nesting beyond the
# server's stack.
_NOT_STORABLE = frozenset({"22P05", "22P02", "22021", "54001"})


_DOUBLED = re.compile(r"^connection (?:is bad|failed): (?=connection )")


def is_read_only(exc: psycopg.Error) -> bool:
    """Whether the database is there, and takes no writes."""
    return exc.sqlstate == "25006" or (exc.sqlstate is None and "session is read-only" in str(exc))


READ_ONLY = (
    "it is a standby, or default_transaction_read_only is on; `flowforge doctor` tells which, and what to do"
)


def from_database(exc: psycopg.Error) -> FlowForgeError:
    """The exception of this tree that says what `exc` says. Raise it `from exc`."""
    sqlstate = exc.sqlstate
    # What psycopg puts before libpq's own words only says the same.
    text = exc.diag.message_primary or _DOUBLED.sub("", first_line(exc))
    if exc.diag.message_hint and sqlstate is not None and sqlstate.startswith("WF"):
        text = f"{text} ({exc.diag.message_hint})"
    if sqlstate in _BY_SQLSTATE:
        return _BY_SQLSTATE[sqlstate](text)
    if is_read_only(exc):
        return DatabaseUnavailable(f"the database takes no writes: {text}: {READ_ONLY}", sqlstate)
    if is_transient(exc):
        return DatabaseUnavailable(text, sqlstate)
    if sqlstate == "42501":
        return MissingPrivilege(text)
    if sqlstate in ("42883", "3F000"):
        return SchemaError(
            f"{text}: the schema is missing or older than this program; run `flowforge migrate`"
        )
    if sqlstate in _NOT_STORABLE or (sqlstate is None and type(exc).__name__ == "DataError"):
        return NotStorable(f"not storable: {text}")
    return DatabaseError(text, sqlstate)
