"""One database and one session for the tests of single calls, each in a transaction that is rolled back."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from pytest_postgresql.executors import NoopExecutor

from tests.services.database import Clock, Database
from tests.services.postgres import PostgresServer
from tests.sql.helpers import Engine


class _Session:
    """A session that outlives the server's restarts, in a database where nothing is ever committed."""

    def __init__(self, server: PostgresServer, template: str) -> None:
        self.server = server
        self.database = Database(server, template)
        Clock(self.database).close()
        self._connection: psycopg.Connection[Any] | None = None

    def connection(self) -> psycopg.Connection[Any]:
        if not self.server.is_running():
            self.server.start()
        try:
            if self._connection is not None:
                self._connection.execute("select 1")
                return self._connection
        except psycopg.OperationalError:
            pass  # another test has restarted the server
        self._connection = self.database.connect(autocommit=False, row_factory=namedtuple_row)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        forbidden = self.database.forbidden_transitions()
        self.database.drop()
        assert not forbidden


@pytest.fixture(scope="session")
def _session(pg_server: PostgresServer, template: NoopExecutor) -> Iterator[_Session]:
    session = _Session(pg_server, template.template_dbname)
    yield session
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
