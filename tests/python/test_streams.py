"""Standard output and error as daemons write them: nobody who reads them too slowly holds them up."""

import io
import os
import pty
import re
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from flowforge import log, streams
from flowforge.streams import Stream
from tests.python.daemons import CHECKOUT

TIMEOUT = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE", 0.01)


@pytest.fixture(params=["pipe", "terminal", "socket"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Of what is read, and written with waiting."""
    if request.param == "socket":
        ours, theirs = socket.socketpair()
        reader, writer = ours.detach(), theirs.detach()
    else:
        reader, writer = os.pipe() if request.param == "pipe" else pty.openpty()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def refuse(*_: object) -> NoReturn:
    raise PermissionError


def daemon(writer: int) -> Any:
    raw = Stream(writer)
    raw.serve_daemon(None)
    raw._left = 0.01
    return raw


def drained(reader: int) -> bytes:
    os.set_blocking(reader, False)
    found = b""
    while True:
        try:
            found += os.read(reader, 1 << 16)
        except BlockingIOError:
            return found.replace(b"\r\n", b"\n")


def test_lines_are_let_go_and_counted_once_there_is_room(ends: tuple[int, int]) -> None:
    """Whole: no line is glued to the beginning of another."""
    reader, writer = ends
    raw = daemon(writer)

    def fill() -> None:
        while raw.lost < 20:
            log.of("test").info("x" * (30 if raw.lost else 3000))

    with io.TextIOWrapper(raw, write_through=True) as stream:
        log.configure(stream=stream)
        try:
            thread = threading.Thread(target=fill, daemon=True)
            thread.start()
            thread.join(TIMEOUT)
            assert not thread.is_alive()
            before = drained(reader)
            log.of("test").info("there is room")
            print("half", file=stream)
            told = drained(reader).decode()
        finally:
            log.reset()
    notice = r'\S+ error +log: lines were lost: .* of="standard error" count=\d\d+'
    assert re.search(
        rf"^\S+ info +test: there is room\n{notice}\nhalf\n$",
        told.removeprefix("" if before.endswith(b"\n") else "\n"),
    )


def test_the_notice_does_not_part_a_line(ends: tuple[int, int]) -> None:
    """Such as that of a handler's print, which is written in two."""
    reader, writer = ends
    raw = daemon(writer)
    while not raw.lost:
        raw.write(b"x" * 999 + b"\n")
    drained(reader)
    with io.TextIOWrapper(raw, write_through=True) as stream:
        log.configure(stream=stream, level="error")
        try:
            print("of a handler", file=stream)
        finally:
            log.reset()
    lines = drained(reader).decode().strip("\n").split("\n")
    assert lines[0] == "of a handler"
    assert "lines were lost" in lines[1]


def test_where_no_description_of_its_own_can_be_had_there_is_no_waiting_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as of a pipe that another user has made."""
    monkeypatch.setattr(streams, "_open", refuse)
    reader, writer = os.pipe()
    raw = daemon(writer)

    def fill() -> None:
        while raw.lost < 3:
            raw.write(b"x" * 9999 + b"\n")

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    drained(reader)
    raw.write(b"there is room\n")
    assert drained(reader).startswith(b"\nthere is room\n")
    os.close(reader)
    os.close(writer)


def test_a_time_out_that_sockets_have_by_default_is_none_of_the_log_s() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.setdefaulttimeout(3600)
        try:
            raw = daemon(theirs.fileno())
        finally:
            socket.setdefaulttimeout(None)
        assert theirs.getblocking()
        assert os.get_blocking(theirs.fileno())
        while not raw.lost:
            raw.write(b"x" * 4096)
        raw.close()


def test_patience_is_not_begun_anew_by_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a slow reader would set the pace of all threads."""
    monkeypatch.setattr(streams, "PATIENCE_FOR", 3600.0)
    reader, writer = os.pipe()
    raw = daemon(writer)
    while raw._left > 0:
        raw.write(b"x" * 4095 + b"\n")
    waits = []

    class Poll:
        def register(self, *_: int) -> None: ...

        def poll(self, timeout: float) -> list[int]:
            waits.append(timeout)
            return []

    monkeypatch.setattr(select, "poll", Poll)
    for _ in range(100):
        os.read(reader, 4096)
        raw.write(b"x" * 4095 + b"\n")
        raw.write(b"x" * 4095 + b"\n")
    assert len(waits) >= 100
    assert set(waits) == {0.0}
    os.close(reader)
    os.close(writer)


def test_a_file_gets_each_message_in_one_write(tmp_path: Any) -> None:
    """So that two daemons may share it."""
    writes = []
    with (tmp_path / "log").open("ab", buffering=0) as file:
        raw = daemon(file.fileno())
        raw.write(b"x" * 10_000)
        writes.append((tmp_path / "log").stat().st_size)
    assert writes == [10_000]


@pytest.mark.parametrize("instead", [os.devnull, None])
def test_whatever_a_handler_does_to_the_descriptor_nobody_spins(
    ends: tuple[int, int], instead: str | None
) -> None:
    """As who silences a library does. What is told still goes to where it went."""
    reader, writer = ends
    mine = os.dup(writer)
    raw = daemon(mine)
    while not raw.lost:
        raw.write(b"x" * 4095 + b"\n")
    if instead is None:
        os.close(mine)
    else:
        nowhere = os.open(instead, os.O_WRONLY)
        os.dup2(nowhere, mine)
        os.close(nowhere)
    lost = raw.lost
    thread = threading.Thread(target=raw.write, args=[b"more\n"], daemon=True)
    thread.start()
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    assert raw.lost == lost + 1
    drained(reader)
    raw.write(b"there is room")
    assert b"there is room" in drained(reader)
    if instead is not None:
        os.close(mine)


FULL_DISK = """
import resource, signal
from flowforge import log
from flowforge.streams import Stream

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
raw = Stream(2)
raw.serve_daemon(None)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50, most))
raw.write(b"x" * 99 + b"\\n")
raw.write(b"y\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
log.configure()
raw.write(b"there is room\\n")
"""


def test_a_full_disk_tears_no_line_for_good(tmp_path: Path) -> None:
    """Once there is room, what comes is a line of its own, and it is told that others were lost."""
    with (tmp_path / "log").open("wb") as file:
        command = [sys.executable, "-c", FULL_DISK]
        subprocess.run(command, cwd=CHECKOUT, stderr=file, timeout=TIMEOUT, check=True)
    torn, whole, notice = (tmp_path / "log").read_text().splitlines()
    assert (torn, whole) == ("x" * 50, "there is room")
    assert notice.endswith('no room on a disk of="standard error" count=2')


def test_a_line_is_not_glued_to_a_torn_one_when_its_reader_comes_back() -> None:
    """In the moment for which it is waited for."""
    reader, writer = os.pipe()
    raw = daemon(writer)
    while not raw._torn:
        raw.write(b"x" * 9999 + b"\n")
    raw._left = TIMEOUT

    def read() -> None:
        found.append(os.read(reader, 1 << 20))
        while not found[-1].endswith(b"line\n"):
            found.append(os.read(reader, 1 << 20))

    found: list[bytes] = []
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    raw.write(b"whole line\n")
    thread.join(TIMEOUT)
    assert b"".join(found).splitlines()[-1] == b"whole line"
    os.close(reader)
    os.close(writer)


def program(code: str, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """A program of this code, which is to become a daemon."""
    environment = {each: value for each, value in os.environ.items() if each != "PYTHONUNBUFFERED"}
    environment |= options.pop("env", {})
    begun = "import io, logging, os, sys, time\nfrom flowforge import log, streams\nstreams.serve()\n"
    return subprocess.run(
        [sys.executable, "-c", begun + code],
        cwd=CHECKOUT,
        env=environment,
        timeout=TIMEOUT,
        check=True,
        **options,
    )


def test_what_a_handler_forks_waits_for_who_reads_it() -> None:
    """Nothing else is held up by it, and its text is whole."""
    code = """
streams.PATIENCE = streams.Stream._left = 0.0
with streams.read_or_stopped():
    if os.fork() == 0:
        sys.stderr.write("x" * 1_000_000)
        sys.stderr.flush()
        os._exit(0)
    os.wait()
"""
    assert len(program(code, stderr=subprocess.PIPE).stderr) == 1_000_000


def test_what_modules_take_at_their_import_waits_for_nobody() -> None:
    """Such as a handler of the standard library's logging."""
    code = """
logging.basicConfig(stream=sys.stdout)
logging.raiseExceptions = True
out = sys.stdout
with streams.read_or_stopped():
    for _ in range(100):
        logging.warning("x" * 9999)
        out.write("y" * 9999)
"""
    reader, writer = os.pipe()
    program(code, stdout=writer, stderr=subprocess.DEVNULL)
    os.close(reader)
    os.close(writer)


def test_what_is_made_anew_for_a_module_that_closed_it_waits_for_nobody_either() -> None:
    """In a process for handlers."""
    code = """
streams.never_wait()
sys.stderr.close()
streams.mend()
streams.PATIENCE = streams.Stream._left = 0.0
for _ in range(100):
    sys.stderr.write("x" * 9999)
"""
    reader, writer = os.pipe()
    program(code, stderr=writer)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("lost", ["close", "detach"])
def test_what_is_made_anew_is_written_as_before(lost: str) -> None:
    """Neither escaped nor kept in a buffer."""
    code = f"""
sys.stdout.{lost}()
streams.mend()
sys.stdout.write("\\u00fc")
os._exit(0)
"""
    env = {"PYTHONIOENCODING": "latin-1:strict", "PYTHONUNBUFFERED": "1", "LC_ALL": "C", "PYTHONUTF8": "0"}
    assert program(code, stdout=subprocess.PIPE, env={**env, "PYTHONCOERCECLOCALE": "0"}).stdout == b"\xfc"


def test_what_has_a_method_named_closed_is_not_lost() -> None:
    code = """
class Tee:
    def __init__(self, of): self.of = of
    def __getattr__(self, name): return getattr(self.of, name)
    def closed(self): return False
sys.stdout = tee = Tee(sys.stdout)
streams.mend()
assert sys.stdout is tee
"""
    program(code)


@pytest.mark.parametrize("unbuffered", [False, True])
def test_what_is_printed_comes_when_python_would_write_it_and_in_order(unbuffered: bool) -> None:
    code = """
print("imported")
with streams.read_or_stopped():
    print("of a handler")
    sys.stderr.write("done")
    os._exit(0)
"""
    code = code.replace("os._exit(0)", "") if not unbuffered else code
    env = {"PYTHONUNBUFFERED": "1"} if unbuffered else {}
    assert program(code, stdout=subprocess.PIPE, env=env).stdout == b"imported\nof a handler\n"


def test_a_handler_may_put_a_file_in_the_place_of_standard_output(tmp_path: Path) -> None:
    """Or whatever object: the daemon ends as ever."""
    code = f"""
with streams.read_or_stopped() as readers:
    kept = os.dup(1)
    file = os.open({str(tmp_path / "captured")!r}, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    print("captured", flush=True)
    os.dup2(kept, 1)
    print("printed", flush=True)
    sys.stdout = object()
sys.exit(readers.exit_code(0))
"""
    assert program(code, stdout=subprocess.PIPE).stdout == b"printed\n"
    assert (tmp_path / "captured").read_text() == "captured\n"


@pytest.mark.parametrize("make", ["w", "TextIOWrapper"])
def test_a_module_may_wrap_what_it_finds(make: str) -> None:
    """As some do to colour it, or to keep a copy: the log waits for nobody nevertheless, and it stays."""
    code = f"""
class Wrapper:
    def __init__(self, of):
        self.of = of
    def write(self, text):
        return self.of.write(text)
    def flush(self):
        self.of.flush()
w = Wrapper
TextIOWrapper = lambda of: io.TextIOWrapper(of.buffer, write_through=True)
log.configure()
sys.stderr = wrapper = {make}(sys.stderr)
with streams.read_or_stopped():
    for _ in range(100):
        log.of("test").warning("x" * 9999)
        print("y" * 9999, file=sys.stderr)
    assert sys.stderr is wrapper
assert sys.stderr is wrapper
"""
    reader, writer = os.pipe()
    program(code, stderr=writer)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_module_may_close_what_it_replaces(name: str) -> None:
    code = f"""
sys.{name}.close()
sys.{name} = new = open(os.devnull, "w")
with streams.read_or_stopped() as readers:
    print("x", file=sys.{name})
assert sys.{name} is new
sys.exit(readers.exit_code(0))
"""
    program(code, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("log_is_there", [True, False])
def test_a_module_s_own_file_for_errors_is_left_to_it(tmp_path: Path, log_is_there: bool) -> None:
    """Who is told to stop when the reader of what it left goes is whose log that was, and nobody else."""
    code = f"""
stopping.remember()
if {log_is_there}:
    log.configure()
sys.stderr = new = open({str(tmp_path / "own")!r}, "w")
log.configure() if not {log_is_there} else None
with streams.read_or_stopped() as readers:
    print("x", file=sys.stderr)
    logging.StreamHandler(streams._taken["stderr"].text).handle(logging.makeLogRecord({{"msg": "y"}}))
assert sys.stderr is new
sys.exit(readers.exit_code(0) != (141 if {log_is_there} else 0))
"""
    reader, writer = os.pipe()
    os.close(reader)
    program("from flowforge import stopping" + code, stderr=writer)
    os.close(writer)
    assert (tmp_path / "own").read_text() == "x\n"


def test_a_handler_s_own_pipe_is_not_the_log_s(tmp_path: Path) -> None:
    """Whose reader may go without anybody else being told to stop."""
    code = """
log.configure()
with streams.read_or_stopped() as readers:
    kept = os.dup(2)
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    os.close(writer)
    log.of("test").warning("meanwhile")
    os.dup2(kept, 2)
sys.exit(readers.exit_code(0))
"""
    with (tmp_path / "log").open("wb") as file:
        program(code, stderr=file)
    assert "meanwhile" in (tmp_path / "log").read_text()
    # Nor where no description of its own can be had.
    refuse = "def refuse(*_):\n    raise PermissionError\nstreams._open = refuse\n"
    assert b"meanwhile" in program(refuse + code, stderr=subprocess.PIPE).stderr


def test_a_daemon_serves_on_when_only_its_output_is_not_read_any_more() -> None:
    """As of `up`, of which somebody wanted the first line."""
    code = """
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
streams.serve()
log.configure()
with streams.read_or_stopped() as readers:
    os.close(reader)
    print("x", flush=True)
    print("y", flush=True)
    assert "Broken pipe" in streams.refused()
sys.exit(readers.exit_code(0))
"""
    told = program(code, stderr=subprocess.PIPE).stderr.decode()
    assert told.count("nobody reads standard output any more") == 1
