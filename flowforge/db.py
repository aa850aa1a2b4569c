"""Connections to PostgreSQL as daemons and clients use them.

Everything works behind a pooler in transaction mode: what a call needs is set inside its own transaction
(`call`, `begin`). All that a session is given is how it writes times, where the server does that otherwise;
see `_read_times`. Errors of psycopg pass through unchanged; `errors.from_database` names them."""

from __future__ import annotations

import json
import logging
import math
import random
import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.rows import tuple_row
from psycopg.types.json import set_json_dumps

from flowforge import cutoff
from flowforge.config import is_secret
from flowforge.errors import ConfigError, NotStorable, first_line, is_transient, refusal

# What libpq, psycopg or the server say of values in the connection string.
_UNUSABLE = re.compile(
    r'invalid "?\w[\w ]*"? value\b|invalid (value for parameter|port number|SSL protocol version)|'
    r"weak sslmode|bad value for connect_timeout|require_auth method|could not parse network address|"
    r"unrecognized configuration parameter|unsupported startup parameter|"
    r"(?P<service>(definition of service|service file) .* not found|in service file)"
)

# Whatever it has to say arrives as an exception.
logging.getLogger("psycopg").setLevel(logging.CRITICAL)

__all__ = [
    "Backoff",
    "Connection",
    "begin",
    "call",
    "connect",
    "connection_lost",
    "connection_useless",
    "is_transient",
    "json_text",
    "refusal",
]

Connection = psycopg.Connection[tuple[Any, ...]]

_DEFAULTS: Mapping[str, str | int] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "client_encoding": "UTF8",
}


def connect(
    dsn: str,
    *,
    application_name: str,
    connect_timeout: int | None = None,
    prepared_statements: bool = True,
    read_write: bool = True,
    within: float | None = None,
) -> Connection:
    """A connection in autocommit mode whose explicit transactions are READ COMMITTED.

    `read_write` skips servers that are read-only at present (standbys, a server being failed over).
    `prepared_statements` off is for poolers in transaction mode. Parameters of `dsn` win over the keepalives
    and time-outs set here, but for `within`: no host is waited for longer than that, or two seconds, which is
    libpq's least. Values of psycopg's Json and Jsonb are written by `json_text`, and times and
    intervals can be read, however the server is set to write them.

    Raises ConfigError when `dsn` is empty, cannot be read without doubt, or holds a value that nothing can be
    done with; psycopg.Error when the connection fails. Neither shows a password.
    """
    given = _parsed(dsn)
    settings: dict[str, Any] = {**_DEFAULTS, "application_name": application_name, **given}
    if connect_timeout is not None and "connect_timeout" not in given:
        settings["connect_timeout"] = connect_timeout
    if read_write and "target_session_attrs" not in given:
        settings["target_session_attrs"] = "read-write"
    if within is not None:
        with suppress(ValueError):  # it is told of below
            most = max(2, math.ceil(within))
            asked = int(settings["connect_timeout"])  # none, or less, is for ever
            settings["connect_timeout"] = min(asked, most) if asked > 0 else most
    try:
        connection: Connection = psycopg.connect(
            **settings,
            autocommit=True,
            row_factory=tuple_row,
            prepare_threshold=5 if prepared_statements else None,
        )
    except UnicodeError as exc:  # of IDNA: an empty label, or one that is too long
        raise ConfigError(
            f"the database's connection string cannot be used: host {settings.get('host')!r}: {exc}"
        ) from None
    except psycopg.Error as exc:
        shown = _masked(str(exc), given)
        if exc.sqlstate is None and (unusable := _UNUSABLE.search(shown)):
            hint = "; services are looked for in ~/.pg_service.conf, or where PGSERVICEFILE says"
            raise ConfigError(
                "the database's connection string cannot be used: "
                f"{first_line(shown)}{hint if unusable['service'] else ''}"
            ) from None
        if shown != str(exc):
            raise type(exc)(shown) from None
        raise
    _read_times(connection)
    connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED
    set_json_dumps(json_text, connection)
    return connection


_STYLES_LIMIT = 10.0  # seconds


def _read_times(connection: Connection) -> None:
    """psycopg reads times and intervals in these styles only. Where the server, the database or the login has
    others, the session is given them: poolers know them as settings of their clients, and daemons, which read
    seconds, do without."""
    told = connection.info.parameter_status
    if (told("DateStyle") or "").startswith("ISO") and told("IntervalStyle") == "postgres":
        return
    try:
        with cutoff.guard(connection, _STYLES_LIMIT):
            connection.execute("set datestyle = iso; set intervalstyle = postgres", prepare=False)
    except BaseException:
        connection.close()
        raise


def _parsed(dsn: str) -> dict[str, Any]:
    """The parameters of `dsn`. Raises ConfigError, which quotes nothing: in a string that is read otherwise
    than it was meant, a part of the password may be anywhere."""
    if not dsn:
        raise ConfigError(
            "no database: FLOWFORGE_DATABASE_URL is not set, nor is a connection string given otherwise, "
            "such as postgresql://user@host/database"
        )
    with suppress(psycopg.Error, UnicodeEncodeError):
        given = conninfo.conninfo_to_dict(dsn)
        if _unmistakable(dsn, given):
            return given
    raise ConfigError(
        "the database's connection string is not one of PostgreSQL (URI or key=value), such as "
        "postgresql://user@host/database, or its host or port "
        "cannot be one; in a URI, write in a user's name or password %40 for @, %3A for :, %2F for /, "
        "%3F for ?, %23 for #, %25 for %"
    )


def _unmistakable(dsn: str, given: Mapping[str, Any]) -> bool:
    """Whether no part of a password can have become the host, port or database of `given`."""
    scheme, _, rest = dsn.partition("://")
    if scheme in ("postgresql", "postgres"):
        # As libpq does: the login ends at the first @, unless a / comes before it.
        login, _, place = rest.partition("@")
        if "@" in (rest if "/" in login else place).partition("?")[0]:
            return False
    hosts, ports = str(given.get("host", "")).split(","), str(given.get("port", ""))
    # A name or address, the folder of a socket, or an abstract socket.
    return all(re.fullmatch(r"[\w.:%-]*|[/@].*", host, re.DOTALL) for host in hosts) and bool(
        re.fullmatch(r"[\d\s,]*", ports)
    )


def _masked(text: str, given: Mapping[str, Any]) -> str:
    """`text` without the passwords of a connection string. Messages quote whatever they were given, and only
    there is looked, at what can be a password: one that is a part of another word would be given away by the
    hole in it."""
    secrets = {str(value) for key, value in given.items() if is_secret(key) and value}
    named = {str(value) for key, value in given.items() if not is_secret(key)}
    before = "(?<=password=)|(?<=secret=)|(?<=_key=)"
    anywhere = "|".join(map(re.escape, sorted(secrets, key=len, reverse=True)))

    def mask(quoted: re.Match[str]) -> str:
        mark, value = quoted[1], quoted[2]
        if value in secrets and value not in named:
            return f"{mark}***{mark}"
        return re.sub(rf"(?:{before}|(?<=:)(?=(?:{anywhere})@))(?:{anywhere})", "***", quoted[0])

    return re.sub(r"""(["'])(.*?)\1""", mask, text) if secrets else text


def call(
    conn: Connection, query: str, params: Sequence[Any] = (), *, lock_timeout: float = 5.0
) -> list[tuple[Any, ...]]:
    """Run one statement as its own READ COMMITTED transaction, in one round trip, and return its rows.

    `query` must be a single statement with %s placeholders, `lock_timeout` is in seconds. The values travel
    apart from the statement, so that no payload shows in the server's log or in pg_stat_activity.

    An error with an SQLSTATE, or of an argument, changed nothing; without one it is not known. Either way the
    connection is idle or closed afterwards."""
    cursor = conn.cursor()
    handled = sys.exc_info()[1]
    try:
        with conn.pipeline():
            conn.execute(_BEGIN)
            conn.execute(_lock_timeout(lock_timeout))
            cursor.execute(query.encode(), params or None)
            conn.execute("commit")
    except BaseException as exc:
        interruption = _interruption(exc, handled)
        if interruption is None:
            _roll_back(conn)
            raise
        conn.close()  # half way: what would be answered next is not known
        raise interruption from None
    return cursor.fetchall() if cursor.description else []


def _interruption(exc: BaseException | None, handled: BaseException | None) -> BaseException | None:
    """What interrupted a call, such as Ctrl-C, though leaving the pipeline then has raised an error of its
    own; not what was `handled` as it began."""
    while isinstance(exc, Exception) and exc is not handled:
        exc = exc.__context__
    return None if exc is handled else exc


def _roll_back(conn: Connection) -> None:
    """End the transaction that an error left open. An aborted pipeline has not got to its commit."""
    try:
        conn.rollback()
    except psycopg.Error:
        conn.close()


@contextmanager
def begin(conn: Connection, *, lock_timeout: float = 5.0) -> Generator[Connection]:
    """A READ COMMITTED transaction with a lock time-out in seconds; commits at the end of the block, or rolls
    back. It begins in one round trip."""
    # Several statements cannot be prepared.
    conn.execute(_BEGIN + b"; " + _lock_timeout(lock_timeout), prepare=False)
    try:
        yield conn
    except BaseException:
        with suppress(psycopg.Error):
            conn.execute("rollback")
        raise
    conn.execute("commit")


_BEGIN = b"begin isolation level read committed"


def _lock_timeout(seconds: float) -> bytes:
    return b"set local lock_timeout = %d" % round(seconds * 1000)


MOST_JSON = 67_108_864
"""Characters of the largest JSON text that any limit of the database admits. One of over a gigabyte would not
even be answered, but end its connection."""


def json_text(value: Any) -> str:
    """`value` as JSON text that PostgreSQL can keep; any Mapping is an object.

    Raises NotStorable saying which part of it can't be, and why."""
    try:
        return _json_text(value)
    except NotStorable as exc:
        path = ""
        with suppress(RecursionError):  # of a value that is nested deeply, or holds itself
            path = _place(value, "")
        raise NotStorable(f"{path} is {exc}" if path else str(exc), path) from None


def _json_text(value: Any) -> str:
    try:
        text = json.dumps(
            value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=_as_object
        )
        text.encode()
    except UnicodeEncodeError:
        raise NotStorable("not storable: text with a lone surrogate") from None
    except (TypeError, ValueError) as exc:
        raise NotStorable(f"not storable: {exc}") from None
    except RecursionError:
        raise NotStorable("not storable: nested too deeply") from None
    if len(text) > MOST_JSON:
        raise NotStorable(f"not storable: {len(text)} characters of JSON; at most {MOST_JSON} are allowed")
    # The expression takes long on a large text; what it looks for is hardly ever there.
    if "\\u0000" in text and re.search(r"(?<!\\)(?:\\\\)*\\u0000", text):
        raise NotStorable("not storable: text with the character U+0000")
    return text


def _as_object(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _place(value: object, path: str) -> str:
    """Where in `value`, which is at `path`, the first part is that cannot be stored even by itself."""
    parts: Iterable[tuple[object, object]] = ()
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    for key, part in parts:
        try:
            _json_text(part)
        except NotStorable:
            return _place(part, f"{path}[{key!r:.100}]")
    return path


# -- what is left of a connection after a failure


def connection_lost(conn: Connection) -> bool:
    """Whether `conn` can no longer be used."""
    return conn.closed or conn.broken


def connection_useless(conn: Connection, exc: BaseException) -> bool:
    """Whether after `exc` only a fresh connection helps: this one is lost, or its server is stopping or
    read-only."""
    if connection_lost(conn) or not isinstance(exc, psycopg.Error) or exc.sqlstate is None:
        return True
    return exc.sqlstate == "25006" or (exc.sqlstate[:2] in ("08", "57") and exc.sqlstate != "57014")


class Backoff:
    """Growing delays with jitter: each is between half and the whole of `first`, `first * 2`, ... up to `cap`
    seconds."""

    def __init__(self, first: float = 0.1, cap: float = 10.0) -> None:
        self._first, self._cap, self._tries = first, cap, 0

    def next(self) -> float:
        """The delay before the next try, in seconds."""
        whole = min(self._cap, self._first * 2.0 ** min(self._tries, 30))
        self._tries += 1
        return whole * random.uniform(0.5, 1.0)  # noqa: S311 -- jitter, not a secret

    def reset(self) -> None:
        """It worked: start anew."""
        self._tries = 0
