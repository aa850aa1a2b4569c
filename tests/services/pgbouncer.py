"""PgBouncer in transaction mode in front of a PostgreSQL server."""

import os
import signal
import subprocess
from types import TracebackType
from typing import Self

from psycopg import OperationalError, connect, conninfo

from tests.services import debian
from tests.services.postgres import PostgresServer
from tests.services.process import Scratch, free_port, kill_tree, start_child, wait_until

CONFIGURATION = """\
[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {pool_size}
"""


class PgBouncer:
    """A pooler that shares at most `pool_size` of the server's sessions among all its clients, each for a
    transaction at a time; a context manager. It asks for no password, and runs as the server's user."""

    def __init__(self, server: PostgresServer, pool_size: int) -> None:
        self.port = free_port()
        self._server = server
        self._program = debian.found("pgbouncer", "usr/sbin/pgbouncer")
        self._scratch = Scratch("pgbouncer")
        self._configuration = self._scratch.path / "pgbouncer.ini"
        self._configuration.write_text(
            CONFIGURATION.format(
                host=server.host,
                port=server.port,
                user=server.user,
                own_port=self.port,
                pool_size=pool_size,
            )
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        account = self._server.account
        for path in (self._scratch.path, self._configuration):
            if account:
                os.chown(path, account.pw_uid, account.pw_gid)
        self._process = process = start_child(
            [str(self._program), str(self._configuration)],
            log=self._scratch.path / "log",
            env={"LC_ALL": "C", "LD_LIBRARY_PATH": debian.library_path(self._program.parents[2])},
            death_signal=signal.SIGKILL,
            uid=account.pw_uid if account else None,
            gid=account.pw_gid if account else None,
        )
        try:
            wait_until(lambda: process.poll() is not None or self._answers(), "PgBouncer's start")
            if process.poll() is not None:
                raise RuntimeError(f"PgBouncer did not start: {(self._scratch.path / 'log').read_text()}")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            kill_tree(self._process)
        self._scratch.remove()

    def dsn(self, dbname: str) -> str:
        """A connection string to a database of the server."""
        return conninfo.make_conninfo(
            "", host="127.0.0.1", port=self.port, dbname=dbname, user=self._server.user
        )

    def _answers(self) -> bool:
        try:
            connect(self.dsn("postgres")).close()
        except OperationalError:
            return False
        return True
