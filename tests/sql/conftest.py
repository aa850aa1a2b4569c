"""One database and one session for the tests of single calls, each in a transaction that is rolled back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from pytest_postgresql.executors import NoopExecutor

from tests.services.database import Clock, Database
from tests.services.postgres import PostgresServer
from tests.sql.helpers import Engine


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """plpgsql_check comes with Debian's PostgreSQL only."""
    return (
        True if collection_path.name == "test_plpgsql_check.py" and config.getoption("--pg") != "15" else None
    )


COVERAGE = pytest.StashKey[str]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    # Of a selection it says nothing.
    if (coverage := config.stash.get(COVERAGE, None)) and not config.option.keyword:
        terminalreporter.section("statements of SQL functions")
        terminalreporter.write_line(coverage)


class _Session:
    """A session that outlives the server's restarts, in a database where nothing is ever committed."""

    def __init__(self, server: PostgresServer, template: str) -> None:
        self.server = server
        self.database = Database(server, template)
        Clock(self.database).close()
        self._connection: psycopg.Connection[Any] | None = None
        available = "select from pg_available_extensions where name = 'plpgsql_check'"
        with self.database.connect() as connection:
            self._profiled = connection.execute(available).rowcount > 0
            if self._profiled:
                connection.execute("create extension plpgsql_check")

    def connection(self) -> psycopg.Connection[Any]:
        if not self.server.is_running():
            self.server.start()
        if self._connection is not None:
            if _lives(self._connection):
                return self._connection
            # A test that ran out of time has left it in the middle of something: what it has locked must not
            # hold up every test after it.
            self._connection.close()
        self._connection = self.database.connect(autocommit=False, row_factory=namedtuple_row)
        if self._profiled:
            self._connection.execute("load 'plpgsql_check'; set plpgsql_check.profiler = on")
            self._connection.commit()
        return self._connection

    def coverage(self) -> str:
        """How much of the plpgsql functions this session has executed; "" where nobody counts."""
        if not self._profiled or self._connection is None:
            return ""
        if not _lives(self._connection):
            return "not counted: a test has restarted the server since"
        rows = self._connection.execute(
            """
            select p.proname as name, s.lineno, s.exec_stmts > 0 as executed
            from pg_proc p join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'
            cross join lateral plpgsql_profiler_function_statements_tb(p.oid) s
            where p.pronamespace = 'flowforge'::regnamespace and s.stmtname <> 'statement block'
            order by 1, 2
            """
        ).fetchall()
        missed = [f"{row.name}:{row.lineno}" for row in rows if not row.executed]
        share = f"{len(rows) - len(missed)} of {len(rows)} executed by the tests of single calls"
        return f"{share}; not: {', '.join(missed)}" if missed else share

    def close(self) -> None:
        if not self.server.is_running():
            self.server.start()
        if self._connection is not None:
            self._connection.close()
        forbidden = self.database.forbidden_transitions()
        self.database.drop()
        assert not forbidden


def _lives(connection: psycopg.Connection[Any]) -> bool:
    """Whether the connection can be used: another test may have restarted the server."""
    try:
        connection.execute("select 1")
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture(scope="session")
def _session(
    pg_server: PostgresServer, template: NoopExecutor, request: pytest.FixtureRequest
) -> Iterator[_Session]:
    session = _Session(pg_server, template.template_dbname)
    yield session
    request.config.stash[COVERAGE] = session.coverage()
    session.close()


@pytest.fixture
def engine(_session: _Session) -> Iterator[Engine]:
    """The functions over one connection, with a clock that the test moves; nothing is committed.

    Every test ends with a look at `violations()`, unless it broke something on purpose and said so.
    """
    connection = _session.connection()
    engine = Engine(connection)
    yield engine
    try:
        assert not engine.sound or not engine.rows("select * from flowforge.violations()")
    finally:
        connection.rollback()


@pytest.fixture
def committing(db: Database, clock: Clock) -> Iterator[Engine]:
    """The same over a database of the test's own, where every call commits."""
    with db.connect(row_factory=namedtuple_row) as connection:
        engine = Engine(connection)
        yield engine
        assert not engine.sound or not engine.rows("select * from flowforge.violations()")
