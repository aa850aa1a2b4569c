"""Migrating: once each, all or nothing, several runners at once, and a plain word for what it cannot do."""

import hashlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from psycopg.errors import DeadlockDetected, LockNotAvailable

from flowforge.connecting import check_start
from flowforge.errors import ConfigError, DatabaseError, MissingPrivilege, SchemaError
from flowforge.migrate import ROLES, SCHEMA_VERSION, _patiently, check_schema, migrate
from tests.services import postgres
from tests.services.database import Database
from tests.services.postgres import Connection, PostgresServer
from tests.services.process import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]
MIGRATIONS = sorted(path.name for path in (CHECKOUT / "sql/migrations").glob("*.sql"))


@pytest.fixture
def empty(pg_server: PostgresServer) -> Iterator[str]:
    """The name of an empty database."""
    pg_server.create_database("empty")
    yield "empty"
    pg_server.drop_database("empty")


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server on which nobody has migrated yet, so that the roles are missing."""
    with PostgresServer(*postgres.binaries(request.config.getoption("--pg"))) as server:
        yield server


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A copy of the schema's files, for the test to change."""
    shutil.copytree(CHECKOUT / "sql", tmp_path / "sql")
    return tmp_path / "sql"


def value(conn: Connection, query: str, *params: object) -> object:
    row = conn.execute(query, params).fetchone()
    assert row is not None
    return row[0]


def owners(conn: Connection) -> set[object]:
    """Owners of the schema and of everything in it."""
    return {
        row[0]
        for row in conn.execute(
            """
            select nspowner::regrole::text from pg_namespace where nspname = 'flowforge'
            union select relowner::regrole::text from pg_class where relnamespace = 'flowforge'::regnamespace
            union select proowner::regrole::text from pg_proc where pronamespace = 'flowforge'::regnamespace
            union select typowner::regrole::text from pg_type where typnamespace = 'flowforge'::regnamespace
            """
        )
    }


def test_a_fresh_database_is_brought_up_and_a_second_run_changes_no_table(
    pg_server: PostgresServer, empty: str
) -> None:
    first = migrate(pg_server.dsn(empty))
    assert list(first.applied) == MIGRATIONS
    with pg_server.connect(empty) as conn:
        assert owners(conn) == {"flowforge_owner"}
        assert value(conn, "select count(*) from pg_roles where rolname = any(%s)", list(ROLES)) == len(ROLES)
        assert (
            value(conn, "select bool_or(rolcanlogin) from pg_roles where rolname = any(%s)", list(ROLES))
            is False
        )
        check_schema(conn)
    second = migrate(pg_server.dsn(empty))
    assert (second.applied, second.roles, second.functions) == ((), (), first.functions)


def test_runners_that_start_together_apply_each_migration_once(pg_server: PostgresServer, empty: str) -> None:
    with ThreadPoolExecutor(5) as pool:
        reports = list(pool.map(migrate, [pg_server.dsn(empty)] * 5))
    assert sorted(name for report in reports for name in report.applied) == MIGRATIONS
    with pg_server.connect(empty) as conn:
        assert value(conn, "select count(*) from flowforge._yoyo_migration") == len(MIGRATIONS)


def test_databases_of_one_server_may_be_migrated_at_the_same_time(own_server: PostgresServer) -> None:
    names = [f"db{number}" for number in range(4)]
    for name in names:
        own_server.create_database(name)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(migrate, [own_server.dsn(name) for name in names]))
    created = [role for report in reports for role in report.roles]
    assert sorted(created) == sorted(ROLES)
    assert [report.applied for report in reports] == [tuple(MIGRATIONS)] * 4


def test_functions_behind_a_long_transaction_are_told_who_holds_them_up(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowforge.migrate.LOCK_PAUSE", 0.1)
    with db.connect(autocommit=False) as reader, ThreadPoolExecutor() as pool:
        reader.execute("select from flowforge.health")
        upgrade = pool.submit(migrate, db.dsn)
        # From one try to the next; between them nobody waits behind it.
        with db.connect() as other:
            other.execute("set lock_timeout = '20s'")
            for _ in range(3):
                other.execute("select from flowforge.queue_status, flowforge.health")
        assert not upgrade.done()
        reader.rollback()
        upgrade.result(60)
        reader.execute("select from flowforge.health")
        monkeypatch.setattr("flowforge.migrate.LOCK_PATIENCE", 0.5)
        with pytest.raises(SchemaError, match=f"a table is locked.* by pid {reader.info.backend_pid} "):
            migrate(db.dsn)


def test_a_step_that_ends_a_deadlock_is_tried_again(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads two views in one transaction may meet it the other way round."""
    monkeypatch.setattr("flowforge.migrate.LOCK_PAUSE", 0.0)
    made: list[str] = []

    def step() -> str:
        made.append("")
        if len(made) == 1:
            raise SchemaError("views.sql failed") from DeadlockDetected()
        return "done"

    with db.connect() as conn:
        assert _patiently(conn, step) == "done"


def test_who_only_passes_by_is_not_blamed_for_a_lock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only who holds it from one try to the next, in the warning as in the error at the end."""
    seen = list[set[str]]()

    def holders(_: object) -> set[str]:
        seen.append(tries.pop(0))
        return seen[-1]

    def step() -> None:
        if tries:
            raise LockNotAvailable

    monkeypatch.setattr("flowforge.migrate.LOCK_PAUSE", 0.0)
    monkeypatch.setattr("flowforge.migrate._holders", holders)
    conn: Any = None
    tries = [{"a", "b"}, {"b", "c"}, {"b", "d"}, {"d"}, {"e"}]
    _patiently(conn, step)
    assert [each.__dict__["keys"]["held_by"] for each in caplog.records] == ["b", "d"]
    seen.clear()
    monkeypatch.setattr("flowforge.migrate.LOCK_PATIENCE", 1.5)
    monkeypatch.setattr(time, "monotonic", lambda: float(len(seen)))
    tries = [{"a", "b"}, {"b", "c"}, {"d"}]
    with pytest.raises(SchemaError, match="now, by b; end that"):
        _patiently(conn, step)


def test_a_lock_row_of_a_killed_runner_blocks_nobody(
    pg_server: PostgresServer, db: Database, empty: str
) -> None:
    with db.connect() as conn:
        assert value(conn, "select count(*) from flowforge.yoyo_lock") == 0
    with pg_server.connect(empty) as conn:
        # As of a runner that died while yoyo was making its own tables.
        conn.execute(
            """
            create schema flowforge authorization flowforge_owner;
            set role flowforge_owner;
            create table flowforge.yoyo_lock (locked int primary key default 1, ctime timestamp, pid int);
            insert into flowforge.yoyo_lock (pid) values (1);
            """
        )
    assert list(migrate(pg_server.dsn(empty)).applied) == MIGRATIONS


def test_a_runner_killed_in_a_migration_leaves_the_next_one_free(db: Database, files: Path) -> None:
    slow = files / "migrations/9998.slow.sql"
    slow.write_text("create table flowforge.half (x bigint);\nselect pg_sleep(300);\n")
    command = (
        "import sys, pathlib; from flowforge.migrate import migrate; "
        "migrate(sys.argv[1], directory=pathlib.Path(sys.argv[2]))"
    )
    runner = subprocess.Popen([sys.executable, "-c", command, db.dsn, str(files)], cwd=CHECKOUT)
    with db.connect() as conn:
        sleeping = (
            "select count(*) from pg_stat_activity where query = 'select pg_sleep(300);' and state = 'active'"
        )
        wait_until(lambda: value(conn, sleeping) == 1, "the migration to be under way")
        runner.send_signal(signal.SIGKILL)
        runner.wait()
        assert value(conn, sleeping) == 1
        slow.write_text("create table flowforge.half (x bigint);\n")
        assert migrate(db.dsn, directory=files).applied == (slow.name,)
        assert value(conn, "select to_regclass('flowforge.half') is not null")


def test_a_migration_that_fails_leaves_nothing_and_is_named(db: Database, files: Path) -> None:
    bad = files / "migrations/9999.bad.sql"
    bad.write_text("create table flowforge.half (x bigint);\nselect 1 / 0;\n")
    with pytest.raises(SchemaError, match=r"9999\.bad\.sql failed .*division by zero"):
        migrate(db.dsn, directory=files)
    with db.connect() as conn:
        assert value(conn, "select to_regclass('flowforge.half')") is None
    bad.write_text("create table flowforge.half (x bigint);\n")
    assert migrate(db.dsn, directory=files).applied == (bad.name,)


def test_a_migration_and_its_record_are_one(db: Database, files: Path) -> None:
    new = files / "migrations/9999.new.sql"
    new.write_text("create table flowforge.half (x bigint);\n")
    with db.connect() as conn:
        # Recorded already, so that recording it fails.
        sha256 = hashlib.sha256(new.read_bytes()).hexdigest()
        conn.execute(
            "insert into flowforge.migration_file (name, sha256) values (%s, %s)", [new.name, sha256]
        )
        with pytest.raises(SchemaError, match=r"9999\.new\.sql failed and left nothing behind"):
            migrate(db.dsn, directory=files)
        assert value(conn, "select to_regclass('flowforge.half')") is None


def test_an_applied_file_that_was_edited_is_refused(db: Database, files: Path) -> None:
    edited = files / "migrations" / MIGRATIONS[0]
    edited.write_text(edited.read_text() + "\n-- a harmless remark\n")
    with pytest.raises(SchemaError, match=f"was made by another build, whose {MIGRATIONS[0]} was another"):
        migrate(db.dsn, directory=files)


def test_a_database_of_a_newer_release_is_refused(db: Database, files: Path) -> None:
    newer = files / "migrations/9999.newer.sql"
    newer.write_text("create table flowforge.newer (x bigint);\n")
    migrate(db.dsn, directory=files)
    with pytest.raises(SchemaError, match=r"newer release: 9999\.newer\.sql"):
        migrate(db.dsn)


@pytest.mark.parametrize("orphan", ["flowforge.left_over()", "flowforge.schema_version(integer)"])
def test_a_function_that_no_file_makes_is_refused_and_nothing_changes(
    db: Database, files: Path, orphan: str
) -> None:
    name = orphan.removeprefix("flowforge.")
    with db.connect() as conn:
        conn.execute(f"create function {orphan} returns bigint language sql return 1")
    (files / "functions/a_new_one.sql").write_text(
        "create function flowforge.a_new_one() returns bigint language sql return 1;"
    )
    with pytest.raises(SchemaError, match="functions that no file makes") as caught:
        migrate(db.dsn, directory=files)
    assert name in str(caught.value)
    with db.connect() as conn:
        assert value(conn, "select to_regproc('flowforge.a_new_one')") is None


def test_a_function_file_that_fails_leaves_the_old_functions_and_names_the_line(
    db: Database, files: Path
) -> None:
    text = "create function flowforge.a_new_one() returns bigint language sql return 1;"
    (files / "functions/_0_new.sql").write_text(text)
    (files / "functions/zzz_bad.sql").write_text("select 1;\n\nselect nothing from nowhere;\n")
    with pytest.raises(SchemaError, match=r"zzz_bad\.sql line 3 failed.*nowhere"):
        migrate(db.dsn, directory=files)
    with db.connect() as conn:
        assert value(conn, "select to_regproc('flowforge.a_new_one')") is None
        check_schema(conn)


def login(server: PostgresServer, dbname: str, name: str, attributes: str = "") -> str:
    with server.connect() as conn:
        conn.execute(f"create role {name} login {attributes}")
        conn.execute(f"grant create on database {dbname} to {name}")
    return server.dsn(dbname, name)


def test_an_owner_without_superuser_makes_roles_and_gives_all_to_the_owner_role(
    own_server: PostgresServer,
) -> None:
    own_server.create_database("one")
    own_server.create_database("two")
    dsn = login(own_server, "one", "deployer", "createrole")
    assert sorted(migrate(dsn).roles) == sorted(ROLES)
    with own_server.connect("one") as conn:
        assert owners(conn) == {"flowforge_owner"}
    assert migrate(dsn).applied == ()
    # Another login, in another database, finds the roles made by somebody else.
    other = login(own_server, "two", "stranger", "createrole")
    if own_server.version >= 16:
        with pytest.raises(MissingPrivilege, match="as a member of flowforge_owner"):
            migrate(other)
        with own_server.connect() as conn:
            conn.execute("grant flowforge_owner to stranger")
    assert migrate(other).applied == tuple(MIGRATIONS)
    with own_server.connect("two") as conn:
        assert owners(conn) == {"flowforge_owner"}


def test_without_role_creation_the_missing_roles_are_named_and_existing_ones_do(
    own_server: PostgresServer,
) -> None:
    own_server.create_database("one")
    dsn = login(own_server, "one", "deployer")
    with own_server.connect() as conn:
        for role in ROLES[:-1]:
            conn.execute(f"create role {role}")
    with pytest.raises(SchemaError, match=f"roles are missing: {ROLES[-1]};"):
        migrate(dsn, create_roles=False)
    with pytest.raises(MissingPrivilege, match=f"create role {ROLES[-1]} nologin"):
        migrate(dsn)
    with own_server.connect() as conn:
        conn.execute(f"create role {ROLES[-1]}")
        conn.execute("grant flowforge_owner to deployer")
    assert migrate(dsn, create_roles=False).applied == tuple(MIGRATIONS)


def test_a_login_that_may_not_create_in_the_database_is_told_so(db: Database) -> None:
    dsn = db.create_login("flowforge_owner")
    with db.connect() as conn:
        conn.execute("drop schema flowforge cascade")
    with pytest.raises(MissingPrivilege, match=f'lacks CREATE on database "{db.name}"; remedy: grant create'):
        migrate(dsn)


def test_a_login_of_an_application_is_not_made_the_owner(db: Database) -> None:
    with pytest.raises(MissingPrivilege, match="remedy: run it as an administrator, or as a member"):
        migrate(db.create_login("flowforge_client"))


def test_a_schema_that_belongs_to_another_is_taken_over_or_refused(db: Database) -> None:
    with db.connect() as conn:
        conn.execute("alter schema flowforge owner to postgres")
        with pytest.raises(MissingPrivilege, match="schema flowforge belongs to postgres"):
            migrate(db.create_login("flowforge_owner"))
        migrate(db.dsn)
        assert owners(conn) == {"flowforge_owner"}


def test_only_utf8_databases_are_served(pg_server: PostgresServer) -> None:
    with pg_server.connect() as conn:
        conn.execute("create database latin encoding 'LATIN1' template template0")
    try:
        with pytest.raises(SchemaError, match="encoding is LATIN1"):
            migrate(pg_server.dsn("latin"))
    finally:
        pg_server.drop_database("latin")


def test_an_old_or_missing_schema_is_told_apart(pg_server: PostgresServer, empty: str, db: Database) -> None:
    with pg_server.connect(empty) as conn, pytest.raises(SchemaError, match="has no schema flowforge"):
        check_schema(conn)
    with db.connect() as conn:
        conn.execute(
            "create or replace function flowforge.schema_version() returns bigint language sql return 0"
        )
        with pytest.raises(SchemaError, match=f"has version 0, this program needs {SCHEMA_VERSION}"):
            check_schema(conn)
        # The same words where a function is missing too, as of a daemon's.
        with pytest.raises(SchemaError, match=f"has version 0, this program needs {SCHEMA_VERSION}"):
            check_start(conn, ["schema_version", "not_yet_there"], "flowforge_worker")


def test_errors_of_the_connection_are_this_projects_own(pg_server: PostgresServer) -> None:
    with pytest.raises(DatabaseError):
        migrate(pg_server.dsn("no_such_database"))
    with pytest.raises(ConfigError) as caught:
        migrate("user:s3cret@host")
    assert "s3cret" not in str(caught.value)


def test_the_files_are_found_inside_an_installed_package(
    tmp_path: Path, pg_server: PostgresServer, empty: str
) -> None:
    shutil.copytree(CHECKOUT / "flowforge", tmp_path / "flowforge")
    shutil.copytree(CHECKOUT / "sql", tmp_path / "flowforge/_sql")
    command = (
        "import sys; from flowforge.migrate import migrate; print(*migrate(sys.argv[1]).applied, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", command, pg_server.dsn(empty)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == MIGRATIONS


def test_yoyo_is_loaded_only_to_migrate() -> None:
    command = "import sys, flowforge.runner; sys.exit('yoyo' in sys.modules)"
    subprocess.run([sys.executable, "-c", command], cwd=CHECKOUT, check=True)
