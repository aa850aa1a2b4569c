"""PostgreSQL with a standby, and who brings it back: a stand-in for what makes PostgreSQL highly available.

A commit is answered when the standby has it too (`synchronous_commit = on` with
`synchronous_standby_names = '*'`): only so can "nothing is lost" hold across a failover, since what an
asynchronous standby has not got yet is gone with the primary although it was answered. `remote_apply` would
add nothing: nobody reads from the standby. While there is no standby that follows (it is being made anew
after a failover, or has died), the primary goes on alone, as it would under any such manager; there is no
failover then.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from flowforge.migrate import migrate
from tests.chaos.loop import Loop, Task, after
from tests.services.database import NOTES
from tests.services.postgres import Connection, PostgresServer, binaries

DATABASE = "chaos"
LOGIN = "chaos"
SLOTS = 70
SETTINGS = {
    "max_connections": str(SLOTS),
    "wal_retrieve_retry_interval": "200ms",
    "wal_receiver_status_interval": "1s",
    "wal_keep_size": "64MB",
    "synchronous_commit": "on",
    "synchronous_standby_names": "",
    "restart_after_crash": "on",
    "log_line_prefix": "%m [%p] %u@%d/%a ",
    "log_min_messages": "warning",
}
_GROUPS = ("client", "worker", "scheduler", "publisher", "operator", "reader")


class Primary(PostgresServer):
    """Small segments of the log, so that a limit to the size of files can strike tables alone."""

    initdb = ("--wal-segsize=1",)


class Standby(Primary):
    """A copy of a server that follows it."""

    def __init__(self, programs: Path, library_path: str, of: PostgresServer) -> None:
        self._of = of
        super().__init__(programs, library_path, SETTINGS)
        self.password = of.password

    def _initdb(self) -> None:
        if self.account:
            os.chown(self.directory, self.account.pw_uid, self.account.pw_gid)
        self._run(
            *("pg_basebackup", "--pgdata", str(self.data), "--host", self._of.host),
            *("--port", str(self._of.port), "--username", self._of.user, "--wal-method", "stream"),
            *("--write-recovery-conf", "--checkpoint", "fast", "--no-sync"),
        )


class Pair:
    """The primary and its standby, which change places; `on_move` is told of the primary's port."""

    def __init__(self, version: str, loop: Loop, on_move: Callable[[int], None]) -> None:
        self._binaries = binaries(version)
        self._loop, self._on_move = loop, on_move
        self.primary: PostgresServer = Primary(*self._binaries, SETTINGS)
        self.standby: Standby | None = None
        self.logs: list[str] = []  # of servers that are gone
        self.may_be_down = False  # a fault has it down, and brings it back itself
        self.following = False

    def start(self) -> None:
        """The primary with the schema, the notes of what happens, and the login of all daemons."""
        self.primary.start()
        self.primary.create_database(DATABASE)
        migrate(self.primary.dsn(DATABASE))
        with self.connect() as connection:
            connection.execute(NOTES.read_bytes())
            connection.execute(
                sql.SQL("create role {} login password {}").format(
                    sql.Identifier(LOGIN), sql.Literal(self.primary.password)
                )
            )
            for group in _GROUPS:
                connection.execute(f"grant flowforge_{group} to {LOGIN}".encode())
            connection.execute(
                b"create table public.effect (task_run_id bigint, attempt bigint, token bigint);"
                b"grant insert on public.effect to chaos; grant select on flowforge.run to chaos"
            )

    def connect(self, **parameters: Any) -> Connection:
        """As the administrator, whom no fault's time-outs concern."""
        return self.primary.connect(
            DATABASE,
            connect_timeout=3,
            application_name="laboratory",
            options="-c statement_timeout=0 -c idle_in_transaction_session_timeout=0"
            " -c default_transaction_read_only=off -c synchronous_commit=local",
            **parameters,
        )

    def ask(self, query: str, *parameters: object) -> list[tuple[object, ...]]:
        """One statement of the administrator."""
        with self.connect() as connection:
            cursor = connection.execute(query.encode(), parameters or None)
            return cursor.fetchall() if cursor.description else []

    def follow(self) -> Task:
        """Make a standby and let commits wait for it."""
        copying = self._loop.background(Standby, *self._binaries, self.primary)
        yield copying.done
        self.standby = copying.result()
        self.standby.launch()
        yield from self._await_standby()

    def _await_standby(self) -> Task:
        streams = "select 1 from pg_stat_replication where state = 'streaming'"
        yield self._loop.repeat(0.2, lambda: bool(self.ask(streams)))
        self._synchronous(True)

    def _synchronous(self, on: bool) -> None:
        self.following = on
        self.primary.configure({"synchronous_standby_names": "*" if on else ""})
        if self.primary.process is not None and self.primary.is_running():
            self.primary.process.send_signal(signal.SIGHUP)

    def kill_standby(self) -> Task:
        """It dies, commits wait; a moment later the primary goes on alone, until it is back."""
        assert self.standby is not None
        self.standby.kill()
        yield after(0.7)
        self._synchronous(False)
        yield after(0.5)
        self.standby.launch()
        yield from self._await_standby()

    def fail_over(self, notice: float, returned: Callable[[], None]) -> Task:
        """The primary dies for good; after `notice` seconds the standby takes its place, and gets a standby
        of its own."""
        old, new = self.primary, self.standby
        assert new is not None
        self.following, self.may_be_down = False, True
        old.kill()
        yield after(notice)
        promotion = self._loop.background(_promote, new)
        yield promotion.done
        promotion.result()
        self.primary, self.standby, self.may_be_down = new, None, False
        self._on_move(new.port)
        returned()
        self.logs.append(old.log())
        old.remove()
        yield from self.follow()

    def come_back(self, down: float, returned: Callable[[], None]) -> Task:
        """Start the primary, which is down, after so many seconds."""
        yield after(down)
        self.primary.launch()
        yield self._loop.repeat(0.05, self.primary.answers)
        self.may_be_down = False
        returned()

    def look(self) -> None:
        """Nobody but a fault lets a server be down."""
        if not self.may_be_down and not self.primary.is_running():
            self.primary.launch()

    def log(self) -> str:
        """What all servers that were primary have logged."""
        return "".join([*self.logs, self.primary.log()])

    def remove(self) -> None:
        for server in (self.primary, self.standby):
            if server is not None:
                server.remove()


def _promote(server: PostgresServer) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            with server.connect(connect_timeout=3) as connection:
                row = connection.execute("select pg_promote(true, 30)").fetchone()
            assert row == (True,), "the standby was not promoted"
            return
        except psycopg.Error:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)
