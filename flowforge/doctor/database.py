"""The checks of the database as such: what it is, who this login is there, and what is set."""

from __future__ import annotations

import re
import time

import psycopg
from psycopg import errors as pg

from flowforge import connecting, cutoff, db
from flowforge.config import called
from flowforge.doctor.setup import (
    MOMENT,
    Check,
    Setup,
    Verdict,
    length,
    ok,
    problem,
    skipped,
    some,
    warning,
)
from flowforge.errors import MissingPrivilege, SchemaError, first_line
from flowforge.listen import SELF_TEST_SECONDS, hears
from flowforge.migrate import ROLES, SCHEMA_VERSION, check_schema
from flowforge.publisher import Publisher
from flowforge.scheduler import Scheduler
from flowforge.worker import daemon as worker

GROUPS = tuple(role.removeprefix("flowforge_") for role in ROLES if role != "flowforge_owner")

_DAEMONS = {
    "scheduler": Scheduler.functions,
    "publisher": Publisher.functions,
    "worker": worker.FUNCTIONS,
}
_SUPPORTED = range(15, 19)  # major versions of PostgreSQL
_SKEW = 2.0  # seconds between two clocks that confuse nobody
_SHORT = 60_000  # milliseconds; a time-out below that ends work that is in order
_LONG_TRANSACTION = 600.0  # seconds


def _reachable(setup: Setup) -> Verdict:
    setup.lacking["connection"] = setup.lacking["database"] = "the database cannot be reached"
    correct = f"correct {setup.source}"
    try:
        setup.conn = setup.connect()
    except psycopg.Error as error:
        said, reason = first_line(error), db.refusal(error)
        if reason is None and re.search(r"too many (clients|connections)|connection slots", said):
            limits = "raise max_connections, or the limit of the login or database, or put a pooler between"
            return problem(f"no connection is left: {said}", limits)
        if reason is None:
            remedy = _tls(setup, str(error)) or f"start PostgreSQL at that address, or {correct}"
            return problem(f"no connection: {said}", remedy)
        remedies = {
            "the database does not exist": f"createdb it, then {setup.by('owner', 'migrate')}",
            "the login does not exist": "create it and grant it its group role",
            "the server does not admit this login from this host": _tls(setup, str(error))
            or "add a line for it to pg_hba.conf",
            "the login may not connect to this database": "alter role … login, grant connect on database …",
        }
        remedy = f"{remedies[reason]}, or {correct}" if reason in remedies else correct
        return problem(f"{reason} ({said})", remedy)
    info = setup.conn.info
    del setup.lacking["connection"]
    setup.lacking["database"] = "the server does not answer"
    return ok(f'"{info.dbname}" at {info.host}, port {info.port}')


# What libpq says of TLS, and what to set for it.
_TLS = {
    r"server does not support SSL": "let the server take TLS (ssl = on), or ask for none: sslmode=disable in "
    "{source}, which sends all in clear",
    r"root certificate file .* does not exist|could not read root certificate file": "name the file with the "
    "certificate of the server's authority by sslrootcert in {source}; sslrootcert=system: the system's",
    r"does not match host name": "name the server by host in {source} as its certificate does (hostaddr may "
    "give the address), or give it a certificate of that name",
    r"certificate verify failed": "name the certificate of the authority that the server's is from by "
    "sslrootcert in {source}",
    r"private key file|certificate file|certificate required": "name this client's own certificate and key, "
    "which only it may read, by sslcert and sslkey in {source}",
    r"^(?!.*, SSL encryption).*, no encryption": "set sslmode=verify-full in {source} if it admits TLS only, "
    "or else add a line for it to pg_hba.conf",
}


def _tls(setup: Setup, said: str) -> str:
    """What to set where TLS is what fails, or empty."""
    found = (remedy for pattern, remedy in _TLS.items() if re.search(pattern, said, re.DOTALL))
    return next(found, "").format(source=setup.source)


def _answers(setup: Setup) -> Verdict:
    try:
        with cutoff.guard(setup.conn, MOMENT):
            ((setup.login, setup.database),) = setup.rows(
                "select session_user::text, current_database()::text"
            )
    except psycopg.Error as error:
        if not db.connection_lost(setup.conn):
            raise
        return problem(
            f"a connection is taken, but no question answered within {MOMENT:g} s: {first_line(error)}",
            f"look at the log of PostgreSQL, or of the pooler, or correct {setup.source}",
        )
    del setup.lacking["database"]
    return ok("it does")


def _version(setup: Setup) -> Verdict:
    ((number, text, encoding),) = setup.rows(
        "select current_setting('server_version_num')::int / 10000, current_setting('server_version'), "
        "current_setting('server_encoding')"
    )
    if encoding != "UTF8":
        return problem(f"the encoding is {encoding}", "create the database anew with encoding 'UTF8'")
    if number in _SUPPORTED:
        return ok(f"PostgreSQL {text}")
    detail = f"PostgreSQL {text}; supported are {_SUPPORTED[0]} to {_SUPPORTED[-1]}"
    if number < _SUPPORTED[0]:
        return problem(detail, "upgrade the server")
    return warning(detail, "look for a newer release of FlowForge")


def _writable(setup: Setup) -> Verdict:
    ((standby, read_only),) = setup.rows(
        "select pg_is_in_recovery(), current_setting('default_transaction_read_only') = 'on'"
    )
    if not standby and not read_only:
        return ok("it takes writes")
    setup.lacking["writable"] = "the database takes no writes"
    if standby:
        return problem(
            "this is a standby, where nothing can be written",
            f"name the primary in {setup.source}, or all hosts: of several, daemons take the writable one",
        )
    return problem("default_transaction_read_only is on", setup.reset(["default_transaction_read_only"]))


def _login(setup: Setup) -> Verdict:
    ((superuser, creates, missing, groups),) = setup.rows(
        """
        select (select rolsuper from pg_roles where rolname = session_user),
            to_regnamespace('flowforge') is null and has_database_privilege(current_database(), 'create')
                and (select rolcreaterole from pg_roles where rolname = session_user),
            array(select r from unnest(%s::text[]) r where r not in (select rolname from pg_roles)),
            array(select rolname::text from pg_roles
                  where rolname = any(%s) and pg_has_role(session_user, oid, 'usage'))
        """,
        list(ROLES),
        list(ROLES),
    )
    setup.may_be = {group.removeprefix("flowforge_") for group in (ROLES if ROLES[0] in groups else groups)}
    if creates:
        setup.may_be.add("owner")
    if missing:
        return problem(f"group roles are missing: {some(missing)}", setup.by("owner", "migrate"))
    may_be = [group for group in GROUPS if f"flowforge_{group}" in groups]
    login = setup.quoted(setup.login)
    if setup.role and setup.role not in may_be:
        return problem(f'"{setup.login}" cannot be {setup.role}', f"grant flowforge_{setup.role} to {login}")
    if not may_be:
        return problem(
            f'"{setup.login}" is a member of no group role of FlowForge',
            f"grant that of its program to it, or to look and operate: grant flowforge_operator to {login}",
        )
    ((first,),) = setup.rows("select current_schema()::text")
    if first == "flowforge":
        return warning(
            f'tables that "{setup.login}" makes or names without a schema are looked for in flowforge first, '
            "as for a login of that name",
            f"alter role {login} set search_path = public",
        )
    superuser_too = " is a superuser, which no program needs to be: it" if superuser else ""
    return ok(f'"{setup.login}"{superuser_too} can be {", ".join(may_be)}')


def _schema(setup: Setup) -> Verdict:
    ((exists, usable, views, operator),) = setup.rows(
        """
        select n.oid is not null, coalesce(has_schema_privilege(n.oid, 'usage'), false),
            coalesce((select has_table_privilege(c.oid, 'select') from pg_class c
                      where c.relnamespace = n.oid and c.relname = 'health'), false),
            coalesce((select has_function_privilege(p.oid, 'execute') from pg_proc p
                      where p.pronamespace = n.oid and p.proname = 'violations'), false)
        from (values ('flowforge')) s (name) left join pg_namespace n on n.nspname = s.name
        """
    )
    if not usable:
        why = "there is no schema"
        if exists:
            why = f"this login may not use the schema: {setup.granting('operator')}"
        setup.lacking["schema"] = setup.lacking["views"] = setup.lacking["operator"] = why
        if not exists:
            detail = f'database "{setup.database}" has no schema flowforge'
            return problem(detail, setup.by("owner", "migrate"))
        return problem(
            "this login may not use the schema",
            f"{setup.granting('operator')}, or the group role of its program",
        )
    try:
        check_schema(setup.conn)
        if setup.role in _DAEMONS:
            connecting.check_start(setup.conn, _DAEMONS[setup.role], f"flowforge_{setup.role}")
    except SchemaError as error:
        too_old = "the schema is too old"
        setup.lacking["schema"] = setup.lacking["views"] = setup.lacking["operator"] = too_old
        return setup.said(error)
    except MissingPrivilege as error:
        return setup.said(error)
    finally:
        if not views:
            setup.lacking.setdefault("views", f"for members only: {setup.granting('reader')}")
        if not operator:
            setup.lacking.setdefault("operator", f"for members only: {setup.granting('operator')}")
    ((version,),) = setup.rows("select flowforge.schema_version()")
    newer = "" if version == SCHEMA_VERSION else f", newer than this program's {SCHEMA_VERSION}: that will do"
    return ok(f"version {version}{newer}")


def _notifications(setup: Setup) -> Verdict:
    with setup.another() as conn:
        setup.hears = hears(conn, setup.another)
    if setup.hears:
        return ok("a notification arrived")
    return warning(
        f"no notification arrived within {SELF_TEST_SECONDS:g} s, as behind a pooler in transaction mode: "
        f"daemons look for work every {setup.config.poll_interval:g} s only",
        f"name PostgreSQL itself in {setup.source}, or a pool in session mode",
    )


def _prepared(setup: Setup) -> Verdict:
    ((pid,),) = setup.rows("select pg_backend_pid()")
    if pid == setup.conn.info.backend_pid:
        return ok("there is no pooler between")
    if not setup.config.prepared_statements:
        return ok("there is a pooler between, and they are off")
    remedy = "set FLOWFORGE_PREPARED_STATEMENTS=off"
    if (place := called("prepared_statements")) != "FLOWFORGE_PREPARED_STATEMENTS":
        remedy = f"turn off {place}"
    try:
        with setup.another(prepared=True) as one, setup.another(prepared=True) as other:
            for each in (one, other, one, other):
                each.execute("select 1", prepare=True)
    except (pg.DuplicatePreparedStatement, pg.InvalidSqlStatementName) as error:
        return problem(f"the pooler between mixes them up: {first_line(error)}", remedy)
    if setup.hears:
        return ok("there is a pooler between, which keeps sessions")
    return warning(
        "there is a pooler between, and they are on", f"unless it knows how to keep them, {remedy}"
    )


def _clock(setup: Setup) -> Verdict:
    before = time.time()
    ((there,),) = setup.rows("select extract(epoch from clock_timestamp())::float8")
    after = time.time()
    skew = there - (before + after) / 2
    if abs(skew) <= _SKEW + (after - before) / 2:
        return ok("this machine and the database agree")
    return warning(
        f"the database's clock is {length(abs(skew))} {'ahead' if skew > 0 else 'behind'}: no decision "
        "depends on it, but times in logs and views do not fit",
        "synchronise both machines (NTP)",
    )


def _timeouts(setup: Setup) -> Verdict:
    found = setup.rows(
        """
        select name, current_setting(name) from pg_settings
        where name in ('statement_timeout', 'idle_in_transaction_session_timeout', 'idle_session_timeout',
                       'transaction_timeout') and setting::bigint between 1 and %s - 1
            or name = 'default_transaction_isolation' and setting <> 'read committed'
        order by name
        """,
        _SHORT,
        limited=False,
    )
    if not found:
        return ok("nothing that hurts is set for this login")
    shown = ", ".join(f"{name} = {value}" for name, value in found)
    return warning(f"{shown}: can end or fail what is in order", setup.reset(name for name, _ in found))


def _durability(setup: Setup) -> Verdict:
    found = setup.rows(
        "select name from pg_settings where setting = 'off' "
        "and name in ('synchronous_commit', 'fsync', 'full_page_writes') order by name"
    )
    if not found:
        return ok("what is committed survives a crash of the server")
    names = [name for (name,) in found]
    return warning(
        f"{', '.join(names)} off: a crash of the server can undo claims and results", setup.reset(names)
    )


def _connections(setup: Setup) -> Verdict:
    ((used, most),) = setup.rows(
        """
        select (select sum(numbackends) from pg_stat_database)::int,
            (select sum(case when name = 'max_connections' then setting::int else -setting::int end)
             from pg_settings
             where name in ('max_connections', 'superuser_reserved_connections', 'reserved_connections'))::int
        """
    )
    detail = f"{used} of {most} in use"
    if used < 0.9 * most:
        return ok(detail)
    return warning(detail, "raise max_connections, or put a pooler between")


def _autovacuum(setup: Setup) -> Verdict:
    if setup.rows("select 1 from pg_settings where name = 'autovacuum' and setting = 'off'"):
        return warning("off for the server: tables grow, and all slows down", setup.reset(["autovacuum"]))
    found = setup.rows(
        """
        select 'flowforge.' || quote_ident(c.relname)
        from pg_class c join pg_namespace n on n.oid = c.relnamespace and n.nspname = 'flowforge'
        cross join pg_options_to_table(c.reloptions) o
        where o.option_name = 'autovacuum_enabled' and not o.option_value::boolean
        order by 1
        """
    )
    if not found:
        return ok("on")
    names = [name for (name,) in found]
    remedy = "; ".join(f"alter table {name} reset (autovacuum_enabled)" for name in names)
    return warning(f"off for {some(names)}: tables grow, and all slows down", remedy)


def _long_transactions(setup: Setup) -> Verdict:
    found = setup.rows(
        """
        select 'process ' || pid || ' (' || application_name || ')',
            extract(epoch from clock_timestamp() - xact_start)::float8 as age,
            'select pg_terminate_backend(' || pid || ')'
        from pg_stat_activity
        where backend_type = 'client backend' and datname = current_database() and pid <> pg_backend_pid()
        union all
        select 'the prepared transaction ' || quote_literal(gid),
            extract(epoch from clock_timestamp() - prepared)::float8,
            'rollback prepared ' || quote_literal(gid)
        from pg_prepared_xacts where database = current_database()
        order by age desc nulls last limit 1
        """
    )
    if found and (found[0][1] or 0) > _LONG_TRANSACTION:
        who, age, end = found[0]
        return warning(f"{who} has held back vacuum for {length(age)}", f"end it there, or: {end}")
    ((sees_all,),) = setup.rows("select pg_has_role(session_user, 'pg_read_all_stats', 'usage')")
    if not sees_all:
        login = setup.quoted(setup.login)
        return skipped(f"this login sees its own sessions only: grant pg_read_all_stats to {login}")
    return ok(f"none is open for longer than {length(_LONG_TRANSACTION)}")


CHECKS: tuple[Check, ...] = (
    ("database", (), _reachable),
    ("server answers", ("connection",), _answers),
    ("version", ("database",), _version),
    ("writable", ("database",), _writable),
    ("login", ("database",), _login),
    ("schema", ("database",), _schema),
    ("notifications", ("database", "writable"), _notifications),
    ("prepared statements", ("database",), _prepared),
    ("clock", ("database",), _clock),
    ("time-outs", ("database",), _timeouts),
    ("durability", ("database",), _durability),
    ("connections", ("database",), _connections),
    ("autovacuum", ("database", "schema"), _autovacuum),
    ("long transactions", ("database",), _long_transactions),
)
