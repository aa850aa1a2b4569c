"""A private PostgreSQL server: initialised, started, and stopped with the process that started it.

What is kept lives in one directory: `data` (the cluster; survives and is used again), `pgpass` (the generated
password), `postgres.log`, `lock`, and while the server runs `run` (its socket) and `dsn`.

The server inherits the lock's descriptor: the lock is free only when launcher and server are both gone, so
two servers never meet in one directory, also right after a launcher was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict

from flowforge import stopping
from flowforge.binaries import Owner, find_binaries, make_directory, run_as, server_owner
from flowforge.errors import EmbeddedPostgresError

DATABASE = "flowforge"
USER = "flowforge"
# Crash recovery of a large cluster takes its time; a server that ends is noticed at once.
START_SECONDS = 300.0
STOP_SECONDS = 60.0
# What the directory may hold; a file system of its own has lost+found from the start.
_OWN_NAMES = frozenset(
    {"data", "data.new", "pgpass", "postgres.log", "postgres.log.1", "lock", "run", "dsn", "lost+found"}
)
_PORT = 5432  # of its socket's name
_LONGEST_SOCKET_NAME = ".s.PGSQL.65535"
_SOCKET_PATH_MAX = 103  # sun_path of the smaller systems, without its terminator
_LOG_MAX_BYTES = 10_000_000
_PR_SET_PDEATHSIG = 1


def default_directory() -> Path:
    """Where the embedded server keeps its data unless told: the user's data home, or /var/lib for root."""
    home = os.environ.get("XDG_DATA_HOME")
    if home:
        return Path(home) / "flowforge" / "postgres"
    if os.geteuid() == 0:  # the server runs as another user, who has no business in root's home
        return Path("/var/lib/flowforge/postgres")
    return Path.home() / ".local" / "share" / "flowforge" / "postgres"


def running_dsn(directory: Path | None = None) -> str | None:
    """The connection string of the server that some process runs in `directory`, or None when none does."""
    directory = directory or default_directory()
    try:
        with (directory / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError):
            return (directory / "dsn").read_text().strip()
    except OSError:
        pass
    return None


def directory_of(dsn: str) -> Path | None:
    """The directory of the embedded server that `dsn` names, or None when it names another one."""
    with contextlib.suppress(psycopg.Error, OSError):
        passfile = conninfo_to_dict(dsn).get("passfile")
        if passfile and (directory := Path(str(passfile)).parent).joinpath("lock").exists():
            return directory
    return None


def _die_with_parent() -> Callable[[], None] | None:
    """What the server's process does before it becomes the server, so that it ends with its launcher.

    The signal, SIGINT, is PostgreSQL's fast and clean shutdown. Linux only; elsewhere a killed launcher
    leaves the server running, and the next start says so.
    """
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def arrange() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)
        if os.getppid() != parent:  # it died before the signal was arranged
            os._exit(1)

    return arrange


class EmbeddedPostgres:
    """A PostgreSQL server in a directory of its own; start() and stop(), or a context manager.

    Listens on a Unix socket in a private directory, and on 127.0.0.1 only when `port` is given. Start it from
    a thread that lives as long as it shall: the kernel stops it with the thread that started it.
    `durable=False` trades safety against power loss for speed; for data that is thrown away.
    """

    def __init__(
        self, directory: Path | None = None, *, port: int | None = None, durable: bool = True
    ) -> None:
        self.directory = (directory or default_directory()).absolute()
        self.log = self.directory / "postgres.log"
        self._data = self.directory / "data"
        self._port = port
        self._durable = durable
        self._sockets = self.directory / "run"
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    @contextlib.contextmanager
    def temporary(cls) -> Iterator[Self]:
        """A running server whose directory is removed when the context ends."""
        directory = tempfile.TemporaryDirectory(prefix="flowforge-")
        server = cls(Path(directory.name), durable=False)
        try:
            if os.geteuid() == 0:
                Path(directory.name).chmod(0o711)  # the server's user must pass through it
            server.start()
            yield server
        finally:
            with stopping.held_back():  # whoever loses patience would leave all of it
                server.stop()
                directory.cleanup()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def dsn(self) -> str:
        """The connection string; it names the password file and holds no password, so it may be shown. The
        one without a port works with a port as well."""
        return self._dsn(DATABASE)

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Initialises the directory if it is new, starts the server and waits until it accepts connections.

        Raises EmbeddedPostgresError when the directory holds other things or is used by another process, its
        data belongs to another major version, there are no binaries, or the server does not come up (with the
        end of its log).
        """
        owner = server_owner()
        binaries = find_binaries(owner)
        self._refuse_strangers()
        self._make_directory(owner)
        self._lock = lock = self._take_lock()
        try:
            self._check_port()
            self._sockets = self._make_socket_directory(owner)
            self._initialise(binaries, owner)
            self._check_version(binaries, owner)
            self._drop_stale_pid()
            with stopping.held_back():  # a server that is nobody's would keep the directory
                self._process = self._launch(binaries, owner, lock)
            self._await_ready(self._process)
            _write_private(self.directory / "dsn", self.dsn + "\n")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the server cleanly and frees the directory. Does nothing when it is not running."""
        if self._process is not None:
            for how, patience in (
                (signal.SIGINT, STOP_SECONDS),
                (signal.SIGQUIT, STOP_SECONDS),
                (signal.SIGKILL, None),
            ):
                if self._process.poll() is None:
                    self._process.send_signal(how)
                try:
                    self._process.wait(patience)
                    break
                except subprocess.TimeoutExpired:
                    continue
            self._process = None
        if self._lock is not None:
            (self.directory / "dsn").unlink(missing_ok=True)
            shutil.rmtree(self._sockets, ignore_errors=True)
            os.close(self._lock)
            self._lock = None

    def log_tail(self, lines: int = 5) -> str:
        """The last lines of the server's log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def _dsn(self, database: str) -> str:
        address = f"127.0.0.1:{self._port}" if self._port else ""
        parameters = {} if self._port else {"host": str(self._sockets)}
        parameters["passfile"] = str(self.directory / "pgpass")
        return f"postgresql://{USER}@{address}/{database}?{urlencode(parameters, safe='/', quote_via=quote)}"

    def _refuse_strangers(self) -> None:
        """Refuses a directory with contents that are not an embedded server's, before anything is changed."""
        try:
            found = {each.name for each in self.directory.iterdir()}
        except OSError:  # not there yet, or of no use: told by what makes it
            return
        if not (found <= _OWN_NAMES or {"lock", "pgpass"} <= found):
            raise EmbeddedPostgresError(
                f"{self.directory} holds other things, such as {min(found - _OWN_NAMES)!r}: choose an empty "
                "or new directory with --data-dir"
            )

    def _make_directory(self, owner: Owner | None) -> None:
        try:
            # The server's user must pass through root's directory; what lies in it is closed one by one.
            make_directory(self.directory, 0o711 if owner else 0o700)
            if not os.access(self.directory, os.W_OK | os.X_OK):
                raise PermissionError(f"not writable by {pwd.getpwuid(os.geteuid()).pw_name}")
        except OSError as error:
            raise EmbeddedPostgresError(
                f"cannot keep data in {self.directory} ({error}): choose another directory with --data-dir"
            ) from error
        if owner is not None and not owner.reaches(self.directory):
            raise EmbeddedPostgresError(
                f"{self.directory} cannot be reached by user {owner.name}, as whom PostgreSQL runs when "
                "started by root: choose another directory with --data-dir"
            )

    def _take_lock(self) -> int:
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + STOP_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 32, 0).decode(errors="replace").strip()
                # A dead holder's server is on its way down; a live one is here to stay.
                if (holder.isdigit() and Path(f"/proc/{holder}").exists()) or time.monotonic() > deadline:
                    os.close(lock)
                    raise EmbeddedPostgresError(
                        f"{self.directory} is in use by process {holder or '(unknown)'}: stop that one, or "
                        "choose another directory with --data-dir"
                    ) from None
                time.sleep(0.05)
            else:
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
                return lock

    def _check_port(self) -> None:
        """PostgreSQL tells of it in five lines of its log."""
        if self._port is None:
            return
        try:
            socket.create_server(("127.0.0.1", self._port)).close()
        except OSError as error:
            raise EmbeddedPostgresError(
                f"port {self._port} of 127.0.0.1 cannot be had ({os.strerror(error.errno or 0)}): "
                "choose another --port"
            ) from None

    def _make_socket_directory(self, owner: Owner | None) -> Path:
        directory = self.directory / "run"
        shutil.rmtree(directory, ignore_errors=True)
        if len(os.fsencode(directory / _LONGEST_SOCKET_NAME)) > _SOCKET_PATH_MAX:
            directory = Path(tempfile.mkdtemp(prefix="ff-"))
            if len(os.fsencode(directory / _LONGEST_SOCKET_NAME)) > _SOCKET_PATH_MAX:
                directory.rmdir()
                directory = Path(tempfile.mkdtemp(prefix="ff-", dir="/tmp"))
        else:
            directory.mkdir(mode=0o700)
        if self._port not in (None, _PORT):
            # PostgreSQL calls its socket after the port: that connection strings without one still work.
            (directory / f".s.PGSQL.{_PORT}").symlink_to(f".s.PGSQL.{self._port}")
        _give(directory, owner)
        return directory

    def _initialise(self, binaries: Path, owner: Owner | None) -> None:
        if self._data.exists():
            return
        # Renamed when whole: an initdb cut short leaves nothing to trip over.
        new = self.directory / "data.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        _give(new, owner)
        password = secrets.token_urlsafe(24)
        password_file = self._sockets / "password"
        _write_private(password_file, password + "\n")
        _give(password_file, owner)
        command = [str(binaries / "initdb"), "--pgdata", str(new), "--username", USER]
        command += ["--auth", "scram-sha-256", "--pwfile", str(password_file), "--encoding", "UTF8"]
        command += ["--locale", "C"]
        if not self._durable:
            command.append("--no-sync")
        done = self._run(command, owner)
        password_file.unlink()
        if done.returncode != 0:
            raise EmbeddedPostgresError(
                f"initdb failed in {new}: {done.stderr.decode(errors='replace').strip()}"
            )
        _write_private(self.directory / "pgpass", f"*:*:*:{USER}:{password}\n")
        new.rename(self._data)

    def _check_version(self, binaries: Path, owner: Owner | None) -> None:
        try:
            have = (self._data / "PG_VERSION").read_text().strip()
        except OSError as error:
            raise EmbeddedPostgresError(f"{self._data} is no PostgreSQL data directory ({error})") from error
        told = self._run([str(binaries / "postgres"), "--version"], owner).stdout.decode(errors="replace")
        found = re.search(r"\b(\d+)(?:\.|devel|beta|rc)", told)
        if found is None:
            raise EmbeddedPostgresError(
                f"{binaries / 'postgres'} does not tell its version: {told.strip()!r}"
            )
        if found[1] != have:
            raise EmbeddedPostgresError(
                f"{self._data} was made by PostgreSQL {have}, and {binaries} is PostgreSQL {found[1]}: set "
                f"FLOWFORGE_PG_BIN to the binaries of PostgreSQL {have}, or choose another directory "
                "with --data-dir"
            )

    def _drop_stale_pid(self) -> None:
        """Removes a postmaster.pid whose process id by now is a stranger's: PostgreSQL would refuse to start.

        One that names a dead process is PostgreSQL's own to judge: it also looks for the shared memory.
        """
        pid_file = self._data / "postmaster.pid"
        try:
            process = Path("/proc") / pid_file.read_text().splitlines()[0].strip()
            if not (process / "cwd").samefile(self._data):
                pid_file.unlink()
        except (OSError, IndexError):
            return

    def _launch(self, binaries: Path, owner: Owner | None, lock: int) -> subprocess.Popen[bytes]:
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > _LOG_MAX_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))
        settings = {
            "listen_addresses": "127.0.0.1" if self._port else "",
            "port": str(self._port or _PORT),
            "unix_socket_directories": str(self._sockets),
            "unix_socket_permissions": "0700",
            "cluster_name": "flowforge",
            "log_checkpoints": "off",
        }
        if not self._durable:
            settings |= {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
        command = [str(binaries / "postgres"), "-D", str(self._data)]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with open(os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log:  # noqa: PTH123
            # A session of its own: Ctrl-C goes to the foreground group, and the server outlives the daemons.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
                # One call into libc, prepared before the fork: safe with threads about.
                preexec_fn=_die_with_parent(),
                **run_as(owner),
            )

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with psycopg.connect(self._dsn("postgres"), autocommit=True, connect_timeout=5) as connection:
                    known = connection.execute(
                        "select from pg_database where datname = %s", (DATABASE,)
                    ).fetchone()
                    if known is None:
                        connection.execute(f"create database {DATABASE}")
                    # By default "$user" comes first, and the login is called like FlowForge's own schema:
                    # tables that handlers and people make would land in there. A setting of theirs is kept.
                    own = connection.execute(
                        "select from pg_db_role_setting s join pg_database d on d.oid = s.setdatabase "
                        "where d.datname = %s and s.setrole = 0 "
                        "and exists (select from unnest(s.setconfig) c where c like 'search_path=%%')",
                        (DATABASE,),
                    ).fetchone()
                    if own is None:
                        connection.execute(f"alter database {DATABASE} set search_path to public")
                    return
            except psycopg.OperationalError as error:
                if process.poll() is not None:
                    raise EmbeddedPostgresError(
                        f"PostgreSQL did not start; its log {self.log} ends with:\n{self.log_tail()}"
                    ) from error
                if time.monotonic() > deadline:
                    raise EmbeddedPostgresError(f"PostgreSQL does not accept connections: {error}") from error
                time.sleep(0.02)

    def _run(self, command: list[str], owner: Owner | None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, **run_as(owner)
        )


def _give(path: Path, owner: Owner | None) -> None:
    if owner is not None:
        os.chown(path, owner.uid, owner.gid)


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
        file.write(text)
