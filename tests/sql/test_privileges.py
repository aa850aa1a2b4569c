"""HD-37: every login can do what its role is for, and nothing else."""

import shutil
from pathlib import Path
from typing import Any

import psycopg
import pytest

from flowforge.migrate import migrate
from tests.services.database import Database
from tests.services.postgres import Connection
from tests.sql.helpers import Engine, task
from tests.sql.privileges import DOCUMENT, ROLES, document, granted

SQL = Path(__file__).resolve().parents[2] / "sql"
DENIED = "42501"


def test_the_matrix_is_the_documented_one(db: Database) -> None:
    with db.connect() as connection:
        assert document(connection) == DOCUMENT.read_text(encoding="utf-8")


def test_tables_and_sequences_are_granted_to_nobody(db: Database) -> None:
    with db.connect() as connection:
        assert granted(connection)["tables"] == {}


def sqlstate(connection: Connection, statement: str) -> str | None:
    """The error of a statement, which is rolled back."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement.encode())
    except psycopg.Error as error:
        return error.sqlstate
    return None


@pytest.mark.parametrize("role", [*ROLES, None])
def test_a_login_of_each_role_may_do_what_the_matrix_says(db: Database, role: str | None) -> None:
    """Every function called, every view and table touched, as that login."""
    with db.connect() as owner:
        matrix = granted(owner)
        functions = owner.execute(
            """
            select p.oid::regprocedure::text, p.proisstrict, p.proargtypes::regtype[]::text[]
            from pg_proc p where p.pronamespace = 'flowforge'::regnamespace
            """
        ).fetchall()
        relations = owner.execute(
            """
            select c.oid::regclass::text, c.relkind, quote_ident((
                -- An identity column is refused before anybody's rights are looked at.
                select min(a.attname::text) from pg_attribute a
                where a.attrelid = c.oid and a.attnum > 0 and a.attidentity = ''))
            from pg_class c where c.relnamespace = 'flowforge'::regnamespace and c.relkind in ('r', 'v', 'S')
            """
        ).fetchall()
    allowed: set[str] = set()
    with psycopg.connect(
        db.create_login(*[f"flowforge_{role}"] * (role is not None)), autocommit=True
    ) as login:
        for signature, strict, types in functions:
            # A strict function is not called at all with a null.
            values = [("'{}'" if each.endswith("[]") else "'1'") if strict else "null" for each in types]
            arguments = ", ".join(f"{value}::{each}" for value, each in zip(values, types, strict=True))
            if sqlstate(login, f"select * from {signature.split('(')[0]}({arguments})") != DENIED:
                allowed.add(signature.removeprefix("flowforge."))
        for relation, kind, column in relations:
            if kind == "S":
                assert sqlstate(login, f"select nextval('{relation}')") == DENIED
                continue
            if sqlstate(login, f"select * from {relation}") != DENIED:
                allowed.add(relation.removeprefix("flowforge."))
            for statement in (
                f"insert into {relation} default values",
                f"update {relation} set {column} = {column}",
                f"delete from {relation}",
                f"truncate {relation}",
                f"lock table {relation}",
            ):
                # Of a view that nobody can write to, PostgreSQL says so first.
                unwritable = ("55000", "42809", "0A000") if kind == "v" else ()
                assert sqlstate(login, statement) in (DENIED, *unwritable), statement
        for statement in (
            "create table flowforge.x ()",
            "create function flowforge.x() returns int return 1",
        ):
            assert sqlstate(login, statement) == DENIED
    granted_to = {name for kind in matrix.values() for name, roles in kind.items() if role in roles}
    assert allowed == granted_to


def test_roles_work_with_no_more_than_their_own_rights(db: Database) -> None:
    """One run, from its definition to its end, each step as the login whose duty it is."""

    def engine(*roles: str) -> Engine:
        from psycopg.rows import namedtuple_row

        login = db.create_login(*(f"flowforge_{role}" for role in roles))
        return Engine(psycopg.connect(login, autocommit=True, row_factory=namedtuple_row))

    client, scheduler, publisher, worker = (
        engine(role) for role in ("client", "scheduler", "publisher", "worker")
    )
    operator, reader = engine("operator"), engine("reader")
    client.define(task("a"), task("b", "a"))
    run_id = client.trigger()
    for name in "ab":
        scheduler.schedule()
        (order,) = publisher.table("fetch_outbox", 10)
        publisher.call("mark_published", [order.outbox_id])
        claim = worker.claim(order)
        assert claim.task == name
        assert worker.finish(claim) == "accepted"
    scheduler.schedule()
    assert client.row("select * from flowforge.run_result(%s)", run_id).state == "succeeded"
    assert reader.value("select state from flowforge.run_status") == "succeeded"
    assert operator.call("retry_run", run_id, "b") == 1
    assert operator.call("cancel_run", run_id) is True
    for each in (client, scheduler, publisher, worker, operator, reader):
        each.connection.close()


def test_a_function_made_without_a_grant_is_its_owners_alone(db: Database, tmp_path: Path) -> None:
    """Migrating takes away what PostgreSQL grants to everybody by default."""
    shutil.copytree(SQL, tmp_path / "sql")
    (tmp_path / "sql" / "functions" / "fresh.sql").write_text(
        "create or replace function flowforge.fresh() returns bigint language sql immutable return 1;\n"
    )
    migrate(db.dsn, directory=tmp_path / "sql")
    may = "select has_function_privilege(%s, 'flowforge.fresh()', 'execute')"
    with db.connect() as connection:
        answers = {
            role: connection.execute(may, (role,)).fetchone()
            for role in ("public", "flowforge_owner", *(f"flowforge_{each}" for each in ROLES))
        }
    assert {role for role, answer in answers.items() if answer == (True,)} == {"flowforge_owner"}


def test_a_worker_reaches_no_other_task_runs_input(db: Database) -> None:
    """Its claim brings the input of what it claims; nothing else shows it an input, an output or a run."""
    with db.connect() as connection:
        functions: dict[str, Any] = granted(connection)["functions"]
    mine = {name.split("(")[0] for name, roles in functions.items() if "worker" in roles}
    assert mine == {
        *("announce_worker", "claim_task_run", "claim_task_runs", "claim_next", "renew_leases"),
        *("finish_task_run", "finish_task_runs", "release_task_run", "report_progress", "assert_lease"),
        *("traceparents", "schema_version"),
    }
