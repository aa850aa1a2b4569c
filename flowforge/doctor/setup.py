"""The set-up under examination: what its checks share, and how each of them answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import psycopg
from psycopg import errors as pg
from psycopg import sql

from flowforge import cutoff, db
from flowforge.broker.probe import Probe, QueueState
from flowforge.config import Config
from flowforge.errors import ConfigError, MissingPrivilege, SchemaError, first_line

_CHECK_SECONDS = 60.0  # after which a connection is given up as dead
_STATEMENT_SECONDS = 20  # that one question to the database may take
MOMENT = 10.0  # seconds that what takes a moment may take

# Whose login it is, for commands that this one cannot be used for.
_WHOSE = {
    "owner": "the login that migrates",
    "operator": "an operator's login",
    "scheduler": "the scheduler's login",
    "publisher": "the publisher's login",
    "worker": "a worker's login",
}

Status = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check: what was seen, or why nothing was, and what to do about it unless it is ok."""

    status: Status
    detail: str
    remedy: str = ""


def ok(detail: str) -> Verdict:
    return Verdict("ok", detail)


def warning(detail: str, remedy: str) -> Verdict:
    return Verdict("warning", detail, remedy)


def problem(detail: str, remedy: str) -> Verdict:
    return Verdict("problem", detail, remedy)


def skipped(why: str) -> Verdict:
    return Verdict("skipped", why)


class Setup:
    """What is known of it so far. `source` says where its database was given, `role` what its login is to be;
    `command` makes of a command one that works where the user is. `lacking` is what cannot be had, and why:
    the database, its being writable, the views, an operator's functions, the broker, the names of queues."""

    def __init__(self, config: Config, source: str, role: str | None, command: Callable[[str], str]) -> None:
        self.config, self.source, self.role, self.command = config, source, role, command
        self.lacking: dict[str, str] = {}
        self.may_be: set[str] = set()  # the group roles that the login has, without their prefix
        self.keeps_publishers = ""  # the check that tells what keeps every publisher from work
        self.login = self.database = ""
        self.hears = False  # whether notifications arrive, which they do only where sessions are kept
        self.probe: Probe | None = None
        self.queues: list[QueueState] = []
        self._conn: db.Connection | None = None
        self._figures: dict[str, float | None] | None = None

    def close(self) -> None:
        """Let go of the database and the broker."""
        if self._conn is not None:
            self._conn.close()
        if self.probe is not None:
            self.probe.close()

    @property
    def conn(self) -> db.Connection:
        """The connection, which every check that needs the database has."""
        assert self._conn is not None  # noqa: S101 -- as said
        return self._conn

    @conn.setter
    def conn(self, conn: db.Connection) -> None:
        self._conn = conn

    def connect(self, *, prepared: bool = False) -> db.Connection:
        """A connection as the daemons have, but to a server that may be read-only. Raises psycopg.Error."""
        return db.connect(
            self.config.database_url,
            application_name="flowforge doctor",
            connect_timeout=self.config.connect_timeout,
            prepared_statements=prepared,
            read_write=False,
        )

    @contextmanager
    def another(self, *, prepared: bool = False) -> Iterator[db.Connection]:
        """A further connection for a moment: a pool may have none left, and let it wait. Raises
        psycopg.Error."""
        began = time.monotonic()
        try:
            with self.connect(prepared=prepared) as conn, cutoff.guard(conn, MOMENT):
                yield conn
        except psycopg.OperationalError as error:
            if time.monotonic() - began < MOMENT:
                raise
            raise psycopg.OperationalError(f"no answer on a further connection in {MOMENT:g} s") from error

    def rows(self, query: str, *params: Any, limited: bool = True) -> list[tuple[Any, ...]]:
        """The answer of the database; `limited` in time, which shows in what the server says of its own
        time-out. Raises psycopg.Error."""
        if not limited:
            return self.conn.execute(query.encode(), params or None).fetchall()
        with self.conn.transaction():
            self.conn.execute(f"set local statement_timeout = '{_STATEMENT_SECONDS}s'".encode())
            return self.conn.execute(query.encode(), params or None).fetchall()

    def figure(self, name: str) -> float | None:
        """A figure of the view health. Raises psycopg.Error, SchemaError."""
        if self._figures is None:
            self._figures = dict(self.rows("select name, value from flowforge.health"))
        if name not in self._figures:
            raise SchemaError(f"the schema is too old: health does not tell {name}; run `flowforge migrate`")
        return self._figures[name]

    def count(self, name: str) -> int:
        """A figure that counts something. Raises psycopg.Error, SchemaError."""
        return int(self.figure(name) or 0)

    def quoted(self, name: str) -> str:
        """A name as SQL has it."""
        return sql.Identifier(name).as_string()

    def by(self, role: str, arguments: str) -> str:
        """A command for which a login has to be `role`: with the database of this one where it can be."""
        if role in self.may_be:
            return self.command(arguments)
        return f"flowforge {arguments}, with {_WHOSE[role]}"

    def granting(self, group: str) -> str:
        """How this login gets what it lacks."""
        return f"grant flowforge_{group} to {self.quoted(self.login)}"

    def reset(self, names: Iterable[str]) -> str:
        """How to undo settings of the server, each where it was set. Raises psycopg.Error."""
        login, database = self.quoted(self.login), self.quoted(self.database)
        remedies = []
        for name, source, default in self.rows(
            "select name, source, boot_val from pg_settings where name = any(%s) order by name",
            list(names),
            limited=False,
        ):
            places = {
                "user": f"alter role {login} reset {name}",
                "database": f"alter database {database} reset {name}",
                "database user": f"alter role {login} in database {database} reset {name}",
                "global": f"alter role all reset {name}",
                "configuration file": f"alter system set {name} = '{default}'; select pg_reload_conf()",
                "client": f"take {name} out of the connection string and of PGOPTIONS",
                "command line": f"take {name} out of the command line of the server",
            }
            remedies.append(places.get(source, f"set {name} to {default}"))
        return "; ".join(remedies)

    def said(self, error: Exception) -> Verdict:
        """The problem that an error tells which names its remedy at the end."""
        detail, _, remedy = str(error).rpartition("; ")
        remedy = remedy.removeprefix("remedy: ").removeprefix("run ").strip("`")
        if remedy == "flowforge migrate":
            remedy = self.by("owner", "migrate")
        return problem(detail, remedy) if detail else problem(str(error), "correct the settings")

    def made(self, needs: Sequence[str], check: Callable[[Setup], Verdict]) -> Verdict:
        """Make a check, unless it needs what is lacking. No error of a library passes."""
        for need in needs:
            if need in self.lacking:
                return skipped(self.lacking[need])
        try:
            if self._conn is None or db.connection_lost(self._conn):
                return check(self)  # which asks nothing of it
            with cutoff.guard(self._conn, _CHECK_SECONDS):
                return check(self)
        except pg.QueryCanceled:
            return skipped(f"the answer took longer than {_STATEMENT_SECONDS} s")
        except (pg.InsufficientPrivilege, MissingPrivilege) as error:
            return skipped(f"{first_line(error)}: {self.granting('operator')}")
        except (pg.UndefinedTable, pg.UndefinedFunction, pg.UndefinedColumn) as error:
            return problem(f"the schema is too old: {first_line(error)}", self.by("owner", "migrate"))
        except (SchemaError, ConfigError) as error:
            return self.said(error)
        except psycopg.Error as error:
            if self._conn is not None and db.connection_lost(self._conn):
                self.lacking["database"] = "the connection to the database was lost"
                self._conn = None
            return problem(first_line(error), "look at the log of PostgreSQL, or of the pooler")
        except ConnectionError as error:
            self.lacking["broker"] = "the connection to the broker was lost"
            return problem(str(error), "look at the log of RabbitMQ")


Check = tuple[str, tuple[str, ...], Callable[[Setup], Verdict]]  # its name, what it needs, and itself


def some(names: Iterable[object], most: int = 3) -> str:
    """Names, of many only the first ones."""
    shown = [str(name) for name in names]
    rest = f" and {len(shown) - most} more" if len(shown) > most else ""
    return ", ".join(shown[:most]) + rest


def length(seconds: float) -> str:
    """A length of time for people."""
    return str(timedelta(seconds=round(seconds))) if seconds >= 60 else f"{seconds:.0f} s"
