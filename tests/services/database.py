"""One migrated database as a template, a copy of it for each test, and a clock that a test sets."""

import uuid
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from psycopg import connect, sql
from psycopg.conninfo import make_conninfo

from flowforge.migrate import migrate
from tests.services.postgres import Connection, PostgresServer

TRANSITIONS = Path(__file__).with_name("transitions.sql")
NOTES = Path(__file__).with_name("notes.sql")


class Database:
    """A database of one test. `dsn` logs in as the superuser; `create_login` makes lesser ones."""

    def __init__(self, server: PostgresServer, template: str) -> None:
        self.server = server
        self.template = template
        self.name = f"t_{uuid.uuid4().hex[:12]}"
        self._logins: list[str] = []
        # What was logged before is not this database's, and grows with every test.
        self._log_start = server.log_file.stat().st_size
        server.create_database(self.name, template)

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    def connect(self, **parameters: Any) -> Connection:
        """An autocommit connection; `parameters` are psycopg's."""
        return self.server.connect(self.name, **parameters)

    def create_login(self, *groups: str) -> str:
        """Create a login that is a member of the groups; return its connection string.

        Roles belong to the whole server, so the name is this test's own, and goes with its database.
        """
        name = f"login_{uuid.uuid4().hex[:12]}"
        self._logins.append(name)
        with self.connect() as connection:
            connection.execute(
                sql.SQL("create role {} login password {}").format(
                    sql.Identifier(name), sql.Literal(self.server.password)
                )
            )
            for group in groups:
                connection.execute(
                    sql.SQL("grant {} to {}").format(sql.Identifier(group), sql.Identifier(name))
                )
        return self.server.dsn(self.name, name)

    def log(self) -> list[str]:
        """The lines that the sessions in this database logged."""
        return self.server.log_of(self.name, self._log_start)

    def forbidden_transitions(self) -> list[str]:
        """What transitions.sql rejected here, as logged: a daemon may have swallowed the error."""
        return [line for line in self.log() if "forbidden transition" in line]

    def drop(self) -> None:
        """Drop database and logins, ending their sessions; start the server if the test left it down."""
        if not self.server.is_running():
            self.server.start()
        self.server.drop_database(self.name)
        if self._logins:
            with self.server.connect() as connection:
                for name in self._logins:
                    connection.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


class Clock:
    """FlowForge's clock in one database, standing still until the test moves it.

    Moving it commits at once, so every session sees it from its next reading on.
    """

    def __init__(self, database: Database) -> None:
        self._connection = database.connect()
        self._connection.execute(
            """
            create schema if not exists flowforge_test;
            create table flowforge_test.clock (reading timestamptz not null);
            insert into flowforge_test.clock values (clock_timestamp());
            grant usage on schema flowforge_test to public;
            grant select on flowforge_test.clock to public;
            -- Replacing keeps the owner and the grants.
            create or replace function flowforge._clock() returns timestamptz
            language sql volatile as 'select c.reading from flowforge_test.clock as c';
            """
        )

    def now(self) -> datetime:
        row = self._connection.execute("select c.reading from flowforge_test.clock as c").fetchone()
        assert row is not None
        reading: datetime = row[0]
        return reading

    def set(self, reading: datetime) -> None:
        self._connection.execute("update flowforge_test.clock set reading = %s", (reading,))

    def advance(self, interval: timedelta | str) -> None:
        """Move by an interval: a timedelta, or text as PostgreSQL writes it ('30 seconds')."""
        self._connection.execute(
            "update flowforge_test.clock set reading = reading + %s::interval", (interval,)
        )

    def close(self) -> None:
        self._connection.close()


def prepare_template(host: str, port: int, user: str, dbname: str, password: str, autocommit: bool) -> None:
    """Migrate the template and have it reject forbidden state transitions; called by pytest-postgresql."""
    dsn = make_conninfo("", host=host, port=port, user=user, dbname=dbname, password=password)
    migrate(dsn)
    with connect(dsn, autocommit=autocommit) as connection:
        connection.execute(TRANSITIONS.read_bytes())
