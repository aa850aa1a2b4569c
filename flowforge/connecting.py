"""How a daemon gets its connection: made, given up when it is told to stop, and checked to be of use."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress

import psycopg

from flowforge import cutoff, db, threads
from flowforge.config import Config
from flowforge.errors import (
    DatabaseError,
    DatabaseUnavailable,
    MissingPrivilege,
    SchemaError,
    first_line,
    from_database,
)
from flowforge.migrate import check_schema
from flowforge.stopping import Stop


def check_start(conn: db.Connection, functions: Iterable[str], role: str) -> None:
    """Check that the schema is there and new enough, and that this login may execute `functions` (names
    without the schema), as members of `role` may.

    Raises SchemaError or MissingPrivilege, naming all that is missing and the remedy.
    """
    wanted = list(functions)
    row = conn.execute(
        """
        select session_user::text, current_database()::text,
               n.oid is not null, coalesce(has_schema_privilege(n.oid, 'usage'), false),
               coalesce(array_agg(w.name order by w.name) filter (where p.oid is null), '{}'),
               coalesce(array_agg(w.name order by w.name)
                        filter (where not has_function_privilege(p.oid, 'execute')), '{}')
        from unnest(%s::text[]) w(name)
        left join pg_catalog.pg_namespace n on n.nspname = 'flowforge'
        left join pg_catalog.pg_proc p on p.pronamespace = n.oid and p.proname = w.name
        group by n.oid
        """,
        [wanted],
    ).fetchone()
    assert row is not None  # noqa: S101 -- an aggregate over a list that is never empty
    login, database, exists, usable, missing, forbidden = row
    if not exists:
        raise SchemaError(f'database "{database}" has no schema flowforge; run `flowforge migrate`')
    if missing:
        if usable:
            with suppress(MissingPrivilege):
                check_schema(conn)
        raise SchemaError(
            f"the schema is too old: it has no function {', '.join(missing)}; run `flowforge migrate`"
        )
    if not usable or forbidden:
        lacks = ([] if usable else ["USAGE on schema flowforge"]) + [
            f"EXECUTE on {name}" for name in forbidden
        ]
        raise MissingPrivilege(f'login "{login}" lacks {", ".join(lacks)}; remedy: grant {role} to "{login}"')
    check_schema(conn)


CHECK_LIMIT = 60.0
"""Seconds after which a check that got no answer is given up with its connection."""


def connect(config: Config, daemon: str, stop: Stop, functions: Iterable[str], role: str) -> db.Connection:
    """A connection of `daemon` as the configuration says, checked as by `check_start`. The attempt, which may
    take the connection time-out for each host, is given up when `stop` is requested.

    Raises DatabaseUnavailable when a later try may succeed, DatabaseError when this login is refused for
    good; SchemaError, MissingPrivilege or psycopg.Error from the check."""
    attempt: Future[db.Connection] = Future()

    def main() -> None:
        try:
            attempt.set_result(_checked(_connect(config, daemon), functions, role))
        except Exception as exc:  # noqa: BLE001 -- raised where it is waited for
            attempt.set_exception(exc)

    # In a thread of its own: there is no socket yet that could be cut.
    try:
        threads.start(threading.Thread(target=main, name="flowforge-connect", daemon=True))
    except threads.NoThread as exc:
        raise DatabaseUnavailable(str(exc)) from exc
    while not stop.requested:
        with suppress(TimeoutError):
            return attempt.result(0.1)
    attempt.add_done_callback(lambda done: None if done.exception() else done.result().close())
    raise DatabaseUnavailable("told to stop while connecting")


def _checked(conn: db.Connection, functions: Iterable[str], role: str) -> db.Connection:
    try:
        with cutoff.guard(conn, CHECK_LIMIT):
            check_start(conn, functions, role)
    except OSError as exc:  # no descriptor left for the guard
        conn.close()
        raise DatabaseUnavailable(str(exc)) from exc
    except BaseException:
        conn.close()
        raise
    return conn


def _connect(config: Config, daemon: str) -> db.Connection:
    try:
        return db.connect(
            config.database_url,
            application_name=f"flowforge {daemon}",
            connect_timeout=config.connect_timeout,
            prepared_statements=config.prepared_statements,
        )
    except psycopg.Error as exc:
        reason = db.refusal(exc)
        if reason is not None:
            raise DatabaseError(
                f"the database refuses the connection: {reason} ({first_line(exc)})", exc.sqlstate
            ) from exc
        raise from_database(exc) from exc
    except OSError as exc:  # no descriptors left
        raise DatabaseUnavailable(str(exc)) from exc
