"""A daemon of nothing, for the tests of the loop that all share."""

from collections.abc import Callable
from typing import ClassVar

import psycopg

from flowforge import db as database
from flowforge.config import Config
from flowforge.runner import Daemon


class Probe(Daemon):
    """A daemon that does what its test says and counts."""

    name = "probe"
    role = "flowforge_scheduler"
    functions: ClassVar[tuple[str, ...]] = ("dispatch_ready",)
    channels: ClassVar[tuple[str, ...]] = ("probe",)

    def __init__(self, *actions: Callable[[database.Connection], int]) -> None:
        self.actions = list(actions)
        self.ticks = self.connections = 0
        self.closed = False
        self.wrong = ""

    def on_connect(self) -> None:
        self.connections += 1

    def tick(self, conn: database.Connection) -> int:
        conn.execute("select 1")
        self.ticks += 1
        return self.actions.pop(0)(conn) if self.actions else 0

    def trouble(self) -> str:
        return self.wrong

    def close(self) -> None:
        self.closed = True


def listening(config: Config) -> bool:
    with psycopg.connect(config.database_url) as conn:
        query = """select query from pg_stat_activity
            where application_name = 'flowforge probe listen' and datname = current_database()"""
        return any(row[0].lower().startswith("listen") for row in conn.execute(query))


def notify(config: Config) -> None:
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        conn.execute("notify probe")


def terminate(config: Config, application: str) -> None:
    with psycopg.connect(config.database_url, autocommit=True) as conn:
        # Of this database: that of a test before may still be on its way out.
        query = """select pg_terminate_backend(pid) from pg_stat_activity
            where application_name = %s and datname = current_database()"""
        assert conn.execute(query, [application]).fetchall() == [(True,)]
