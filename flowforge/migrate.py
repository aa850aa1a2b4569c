"""Bringing a database to this release: roles, schema, tables (by yoyo), functions. The only module that
imports yoyo.

All of it happens on one connection that holds a session advisory lock, so that several runners take turns and
a killed one leaves nothing behind. Migrations under sql/migrations are applied once each, in the same
transaction as their record; a file that was edited afterwards is refused. Functions, views and privileges
under sql/functions are the one current text of each: all files are applied in the order of their names, every
time, in one transaction."""

from __future__ import annotations

import datetime
import functools
import hashlib
import logging
import random
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg import sql

from flowforge import cutoff, db, log
from flowforge.crash import crash_point
from flowforge.errors import MissingPrivilege, SchemaError, from_database

# Raised by the first change to sql/ after a release, with schema_version() in sql/functions/_common.sql.
SCHEMA_VERSION = 2

ROLES = tuple(
    f"flowforge_{name}"
    for name in ("owner", "client", "worker", "scheduler", "publisher", "operator", "reader")
)
_OWNER = ROLES[0]

# Any number does, as long as it never changes: it keeps runners of this database apart.
_LOCK = 0x466C6F77466F7267

# What it has to say is in the report.
logging.getLogger("yoyo").setLevel(logging.WARNING)

ANSWER_LIMIT = 60.0
"""Seconds that the server may take for its first answer. No step of a migration has a limit."""

LOCK_TIMEOUT = 0.2
"""Seconds that a step waits for a lock that somebody holds. As long, all who come after wait behind it."""

LOCK_PAUSE = 2.0
"""Seconds, about, between two tries of such a step."""

LOCK_PATIENCE = 600.0
"""Seconds for which it is tried again."""

# What passes when others are done: a lock not had in time, or one of two who wait for each other.
_IN_THE_WAY = (pg.LockNotAvailable, pg.DeadlockDetected)

_T = TypeVar("_T")

_log = log.of("migrate")


@dataclass(frozen=True)
class MigrationReport:
    """What a run did: names of the migrations it applied, roles it created, and how many functions there are
    now."""

    applied: tuple[str, ...]
    roles: tuple[str, ...]
    functions: int


def check_schema(conn: db.Connection) -> None:
    """Raise SchemaError unless the database has a schema at least as new as this program."""
    try:
        row = conn.execute("select flowforge.schema_version()").fetchone()
    except (pg.UndefinedFunction, pg.InvalidSchemaName):
        raise SchemaError("the database has no schema flowforge; run `flowforge migrate`") from None
    except psycopg.Error as exc:
        raise from_database(exc) from exc
    version = row[0] if row else None
    if version is None or version < SCHEMA_VERSION:
        raise SchemaError(
            f"the schema has version {version}, this program needs {SCHEMA_VERSION}; run `flowforge migrate`"
        )


def migrate(dsn: str, create_roles: bool = True, *, directory: Path | None = None) -> MigrationReport:
    """Bring the database of `dsn` to this release; safe to repeat and to run several times at once.

    The login needs CREATE on the database and, for `create_roles`, CREATEROLE; it need not be a superuser.
    Without `create_roles` the roles must exist, and the login be able to become flowforge_owner. `directory`
    holds the folders migrations and functions, by default this release's own.

    A lock that others hold is tried again for LOCK_PATIENCE seconds, so that the daemons go on meanwhile.

    Raises SchemaError (a server or file that won't do, a migration that fails, an edited file, an orphan
    function), MissingPrivilege, ConfigError, or DatabaseError."""
    directory = directory or _own_directory()
    try:
        with db.connect(dsn, application_name="flowforge migrate") as conn:
            with cutoff.answered_within(conn, ANSWER_LIMIT):
                _check_server(conn)
            # So that the locks of a killed runner go at once, and those of one that stands still soon.
            conn.execute("set client_connection_check_interval = '1s'")
            conn.execute("set idle_in_transaction_session_timeout = '1min'")
            _take_lock(conn)
            created = _roles(conn, create_roles)
            _become_member(conn)
            conn.execute("select set_config('lock_timeout', %s, false)", (f"{LOCK_TIMEOUT:g}s",))
            _patiently(conn, lambda: _make_schema(conn))
            conn.execute(sql.SQL("set role {}").format(sql.Identifier(_OWNER)))
            _patiently(conn, lambda: _make_table(conn))
            applied = _migrations(conn, directory / "migrations")
            functions = _patiently(conn, lambda: _functions(conn, directory))
    except psycopg.Error as exc:
        raise from_database(exc) from exc
    return MigrationReport(applied, created, functions)


def _own_directory() -> Path:
    """The folder sql: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent
    for directory in (package / "_sql", package.parent / "sql"):
        if (directory / "migrations").is_dir():
            return directory
    raise SchemaError("the files of the schema are missing from this installation")


def _value(conn: db.Connection, query: str, *params: Any) -> Any:
    row = conn.execute(query, params).fetchone()
    return row[0] if row else None


def _check_server(conn: db.Connection) -> None:
    if conn.info.server_version < 150_000:
        raise SchemaError(f"PostgreSQL 15 or newer is needed; this is {conn.info.server_version // 10_000}")
    encoding = conn.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise SchemaError(f"the database's encoding is {encoding}; create it with encoding 'UTF8'")


def _take_lock(conn: db.Connection) -> None:
    if not _value(conn, "select pg_try_advisory_lock(%s)", _LOCK):
        _log.info("another migration of this database is running; waiting for it")
        conn.execute("select pg_advisory_lock(%s)", (_LOCK,))


def _patiently(conn: db.Connection, step: Callable[[], _T]) -> _T:
    """Do a step, whole or not at all, whenever nobody else holds a lock that it needs: each try waits for a
    moment only, and the last one fails as it does."""
    deadline = time.monotonic() + LOCK_PATIENCE
    before: set[str] = set()
    told = ""
    while True:
        try:
            return step()
        except (psycopg.Error, SchemaError) as exc:
            if not (isinstance(exc, _IN_THE_WAY) or isinstance(exc.__cause__, _IN_THE_WAY)):
                raise
            now = _holders(conn)
            if time.monotonic() > deadline:
                holders = ", ".join(sorted(before & now or now)) or "many in turn"
                raise SchemaError(
                    f"a table is locked, for {LOCK_PATIENCE:g} s now, by {holders}; end that, and run "
                    "`flowforge migrate` again"
                ) from exc
        lasting = ", ".join(sorted(before & now))
        if lasting and lasting != told:
            _log.warning("a table is locked; trying again", at_most=f"{LOCK_PATIENCE:g} s", held_by=lasting)
            told = lasting
        before = now
        time.sleep(random.uniform(0.5, 1.5) * LOCK_PAUSE)  # noqa: S311 -- jitter, not a secret


def _holders(conn: db.Connection) -> set[str]:
    """The transactions of others that have locked anything of the schema, whoever may see what they do."""
    rows = conn.execute(
        """
        select format('pid %s (%s of %s, transaction %s)',
                      a.pid, coalesce(nullif(a.application_name, ''), '?'), a.usename, l.virtualtransaction)
        from pg_catalog.pg_locks l
        join pg_catalog.pg_class c on c.oid = l.relation
        join pg_catalog.pg_stat_activity a on a.pid = l.pid
        where l.granted and l.locktype = 'relation' and a.pid <> pg_backend_pid()
          and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
          and c.relnamespace = 'flowforge'::regnamespace
        """
    ).fetchall()
    return {row[0] for row in rows}


def _roles(conn: db.Connection, create: bool) -> tuple[str, ...]:
    """Create the group roles that are missing, or say which are."""
    found = {
        row[0] for row in conn.execute("select rolname from pg_roles where rolname = any(%s)", (list(ROLES),))
    }
    missing = [role for role in ROLES if role not in found]
    if not missing:
        return ()
    remedy = "; ".join(f"create role {role} nologin" for role in missing)
    if not create:
        raise SchemaError(f"roles are missing: {', '.join(missing)}; have them made: {remedy}")
    if not _value(conn, "select rolsuper or rolcreaterole from pg_roles where rolname = current_user"):
        raise MissingPrivilege(
            f'login "{conn.info.user}" may not create the roles that are missing; give it CREATEROLE, '
            f"or have them made: {remedy}"
        )
    created = []
    for role in missing:
        try:
            conn.execute(sql.SQL("create role {} nologin").format(sql.Identifier(role)))
            created.append(role)
        except (pg.DuplicateObject, pg.UniqueViolation):
            pass  # made at this moment by the migration of another database: roles belong to the whole server
    return tuple(created)


def _become_member(conn: db.Connection) -> None:
    """See to it that this login may act as flowforge_owner, to whom everything made belongs."""
    may = "set" if conn.info.server_version >= 160_000 else "member"
    user = conn.info.user
    if not _value(conn, "select pg_has_role(current_user, %s, %s)", _OWNER, may):
        grant = sql.SQL("grant {} to current_user").format(sql.Identifier(_OWNER))
        try:
            # Two migrations on one server may do this at once; the server then refuses one of them.
            for last in (False, False, True):
                try:
                    conn.execute(grant)
                    break
                except (pg.UniqueViolation, pg.InternalError_):
                    if last:
                        raise
        except pg.InsufficientPrivilege:
            raise MissingPrivilege(
                f'login "{user}" cannot act as {_OWNER}, which owns the schema; '
                f"remedy: run it as an administrator, or as a member of {_OWNER}"
            ) from None


def _make_schema(conn: db.Connection) -> None:
    """The schema, owned by flowforge_owner. Made before yoyo looks: else it believes that DDL is not
    transactional."""
    owner = _value(conn, "select nspowner::regrole::text from pg_namespace where nspname = 'flowforge'")
    if owner == _OWNER:
        return
    try:
        if owner is None:
            conn.execute(sql.SQL("create schema flowforge authorization {}").format(sql.Identifier(_OWNER)))
        else:
            conn.execute(sql.SQL("alter schema flowforge owner to {}").format(sql.Identifier(_OWNER)))
    except pg.InsufficientPrivilege:
        user, database = conn.info.user, conn.info.dbname
        if owner is not None:
            what, remedy = f"schema flowforge belongs to {owner}", f"alter schema flowforge owner to {_OWNER}"
        else:
            what = f'login "{user}" lacks CREATE on database "{database}"'
            remedy = f'grant create on database "{database}" to "{user}"'
        raise MissingPrivilege(f"{what}; remedy: {remedy}") from None


def _make_table(conn: db.Connection) -> None:
    """The table that remembers what the applied files contained."""
    conn.execute(
        """
        comment on schema flowforge is 'FlowForge: tables, functions and views of the workflow engine.';
        create table if not exists flowforge.migration_file (
            name text primary key,
            sha256 text not null,
            applied_at timestamptz not null default now()
        );
        comment on table flowforge.migration_file is
            'Content of every applied migration, so that one edited afterwards is noticed.';
        comment on column flowforge.migration_file.name is 'File name.';
        comment on column flowforge.migration_file.sha256 is 'SHA-256 of its bytes, in hexadecimal.';
        comment on column flowforge.migration_file.applied_at is 'When it was applied.';
        """
    )


def _migrations(conn: db.Connection, directory: Path) -> tuple[str, ...]:
    """Apply what is pending; the list is made under the lock."""
    import yoyo

    backend = _backend(conn)
    _patiently(conn, backend.init_database)
    # A row left by a killed runner: nobody else can be at it, since we hold the advisory lock.
    _patiently(conn, backend.break_lock)
    migrations = yoyo.read_migrations(str(directory))
    hashes = {Path(each.path).name: _sha256(Path(each.path)) for each in migrations}
    _patiently(conn, backend.ensure_internal_schema_updated)
    for name, sha256 in conn.execute("select name, sha256 from flowforge.migration_file").fetchall():
        if name not in hashes:
            raise SchemaError(f"the database was migrated by a newer release: {name} is unknown to this one")
        if hashes[name] != sha256:
            database, host = conn.info.dbname, conn.info.host
            raise SchemaError(
                f"database {database!r} on {host!r} was made by another build, whose {name} was another: use "
                "the build that made it, or another database"
            )
    applied = []
    for each in backend.to_apply(migrations):
        name = Path(each.path).name
        try:
            _patiently(conn, functools.partial(backend.apply_one, each))
        except psycopg.Error as exc:
            raise SchemaError(f"migration {name} failed and left nothing behind: {_where(exc)}") from exc
        applied.append(name)
    conn.execute("reset search_path")
    return tuple(applied)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _where(exc: psycopg.Error) -> str:
    text = exc.diag.message_primary or str(exc)
    return f"{text} [{exc.sqlstate}]"


def _backend(conn: db.Connection) -> Any:
    """yoyo on our connection, which holds the lock and has the owner's role."""
    from yoyo.backends.core.postgresql import PostgresqlPsycopgBackend
    from yoyo.connections import DatabaseURI

    class Backend(PostgresqlPsycopgBackend):  # type: ignore[misc]
        schema = "flowforge"

        def connect(self, _uri: Any) -> db.Connection:
            return conn

        def apply_one(self, migration: Any, force: bool = False) -> None:
            """Apply and record in one transaction, where yoyo takes two."""
            migration.load()
            if not migration.use_transactions:
                raise SchemaError(f"{migration.id}: migrations without a transaction are not supported")
            with self.transaction():
                migration.process_steps(self, "apply", force=force)
                self.log_migration(migration, "apply")
                self.mark_one(migration, log=False)
                path = Path(migration.path)
                conn.execute(
                    "insert into flowforge.migration_file (name, sha256) values (%s, %s)",
                    (path.name, _sha256(path)),
                )

        def get_log_data(self, migration: Any = None, operation: str = "apply") -> dict[str, Any]:
            """Without asking the system for the user's name, which a bare uid of a container does not
            have."""
            return {
                "id": str(uuid.uuid4()),
                "migration_id": migration.id if migration else None,
                "migration_hash": migration.hash if migration else None,
                "username": conn.info.user,
                "hostname": socket.gethostname(),
                "created_at_utc": datetime.datetime.now(datetime.UTC).replace(tzinfo=None),
                "operation": operation,
            }

    return Backend(
        DatabaseURI("postgresql+psycopg", None, None, None, None, conn.info.dbname, {}), "_yoyo_migration"
    )


# -- functions

_CREATE = re.compile(
    r"\bcreate\s+(?:or\s+replace\s+)?(?:function|procedure|aggregate)\s+flowforge\.(\w+)\s*\(", re.IGNORECASE
)


def _functions(conn: db.Connection, directory: Path) -> int:
    """Apply every file of functions, views and privileges; all or nothing."""
    files = sorted((directory / "functions").glob("*.sql"))
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    with conn.transaction():
        conn.execute("set local check_function_bodies = off; set local search_path = pg_catalog, pg_temp")
        for name, text in texts.items():
            try:
                conn.execute(text)
            except psycopg.Error as exc:
                position = exc.diag.statement_position
                line = f" line {text.count(chr(10), 0, int(position)) + 1}" if position else ""
                raise SchemaError(f"{name}{line} failed; nothing was changed: {_where(exc)}") from exc
        made = [path.read_text(encoding="utf-8") for path in sorted((directory / "migrations").glob("*.sql"))]
        orphans, count = _orphans(conn, [*texts.values(), *made])
        if orphans:
            raise SchemaError(
                f"functions that no file makes: {', '.join(orphans)}; "
                "put `drop function if exists` above the function that replaces each"
            )
        version = _value(conn, "select flowforge.schema_version()")
        if version != SCHEMA_VERSION:
            raise SchemaError(f"the functions have version {version}, this program {SCHEMA_VERSION}")
        crash_point("migrate:before-functions-commit")
    crash_point("migrate:after-functions-commit")
    return count


def _orphans(conn: db.Connection, texts: list[str]) -> tuple[list[str], int]:
    """Functions in the schema beyond those that the texts create, by signature, and how many there are in
    all.

    There are no overloads: a name with more signatures than statements that create it has an old one left.
    """
    made: dict[str, int] = {}
    for text in texts:
        for name in _CREATE.findall(text):
            made[name] = made.get(name, 0) + 1
    rows = conn.execute(
        """
        select p.proname, p.oid::regprocedure::text
        from pg_proc p
        where p.pronamespace = 'flowforge'::regnamespace
          and not exists (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')
        order by p.proname, p.oid
        """
    ).fetchall()
    signatures: dict[str, list[str]] = {}
    for name, signature in rows:
        signatures.setdefault(name, []).append(signature)
    return [each for name, all_ in signatures.items() if len(all_) > made.get(name, 0) for each in all_], len(
        rows
    )
