"""A program that is asked to stop while it starts or ends does so in order."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from flowforge import Client, stopping
from flowforge.config import Config
from flowforge.exits import EXIT_CONFIG, EXIT_PIPE
from flowforge.stopping import SIGNALS, Remembered, Stop, hang_up, held_back, interrupting, signals
from flowforge.worker import daemon
from tests.python.daemons import CHECKOUT, TIMEOUT
from tests.python.running import running
from tests.services.database import Database
from tests.services.process import wait_until

pytestmark = pytest.mark.usefixtures("hears_hang_ups")

MODULE = """
import atexit, os, signal
from flowforge import Workflow

class Late:
    # While the interpreter tears its modules down.
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)

late = Late()
workflow = Workflow("w")
workflow.task(name="task")(lambda ctx: None)
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_signal_before_the_daemon_runs_or_after_it_is_no_sudden_end(db: Database, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODULE)
    worker = subprocess.run(
        [sys.executable, "-m", "flowforge", "worker", "own"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "FLOWFORGE_DATABASE_URL": db.dsn},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert worker.returncode == 0, worker.stderr
    assert "started" not in worker.stderr


@pytest.fixture(params=["a full pipe", "a full disk"])
def unwritable(request: pytest.FixtureRequest) -> Iterator[int]:
    """A descriptor of what takes nothing more."""
    if request.param == "a full disk":
        unread, full = None, os.open("/dev/full", os.O_WRONLY)
    else:
        unread, full = os.pipe()
        os.set_blocking(full, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(full, bytes(4096))
        os.set_blocking(full, True)
    yield full
    for each in (unread, full):
        if each is not None:
            os.close(each)


WORKFLOW = """
from flowforge import Workflow
workflow = Workflow("w")
workflow.task(name="task")(lambda ctx: None)
"""


def ended(unwritable: int, directory: Path, dsn: str, command: str, code: str) -> tuple[int, str]:
    """How `flowforge COMMAND` ends with this standard output and a module that has this code and a workflow;
    with its log."""
    (directory / "own.py").write_text(f"{code}\n{WORKFLOW}")
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "FLOWFORGE_DATABASE_URL": dsn}
    environment.pop("PYTHONUNBUFFERED", None)
    process = subprocess.run(
        [sys.executable, "-m", "flowforge", command, "own"],
        cwd=directory,
        env=environment,
        stdout=unwritable,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return process.returncode, process.stderr


def test_what_handlers_print_and_nobody_takes_changes_no_end(
    db: Database, tmp_path: Path, unwritable: int
) -> None:
    """The interpreter would wait for ever, or make a code of its own of it."""
    code = "import os, signal; print('of a handler'); os.kill(os.getpid(), signal.SIGTERM)"
    exit_code, told = ended(unwritable, tmp_path, db.dsn, "worker", code)
    assert exit_code == 0, told


def test_up_goes_on_when_nobody_takes_what_it_tells(db: Database, tmp_path: Path, unwritable: int) -> None:
    """It says so, and can be asked to stop meanwhile. So it can when it is done."""
    code = """
import logging, os, signal

class Stopping(logging.Handler):
    def emit(self, record):
        if "standard output" in record.getMessage():
            logging.getLogger("flowforge").removeHandler(self)
            os.kill(os.getpid(), signal.SIGTERM)

logging.getLogger("flowforge").addHandler(Stopping())
"""
    exit_code, told = ended(unwritable, tmp_path, db.dsn, "up", code)
    assert exit_code == 0, told
    assert told.count("standard output cannot be written") == 2


@pytest.mark.parametrize("command", [("scheduler",), ("worker", "own"), ("up", "own")])
def test_a_daemon_whose_log_nobody_reads_any_more_stops(
    db: Database, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """It could tell of nothing, and whatever a handler prints would fail."""
    (tmp_path / "own.py").write_text(WORKFLOW)
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "FLOWFORGE_DATABASE_URL": db.dsn}
    done = subprocess.run(
        [sys.executable, "-m", "flowforge", *command],
        cwd=tmp_path, env=environment, stdout=writer, stderr=writer, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    os.close(writer)
    assert done.returncode == EXIT_PIPE


WAITING = """
import pathlib, time
from flowforge import Workflow
workflow = Workflow("w")

@workflow.task()
def task(ctx):
    pathlib.Path("begun").touch()
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
"""


@pytest.mark.parametrize("command", [[], ["nohup"]])
def test_a_reader_that_ctrl_c_ends_too_makes_no_second_request(
    db: Database, tmp_path: Path, command: list[str]
) -> None:
    """As in `flowforge worker own 2>&1 | tee log`: handlers get their grace time."""
    (tmp_path / "own.py").write_text(WAITING)
    reader, writer = os.pipe()
    with Client(db.dsn) as client, running(Config(database_url=db.dsn)):
        client.define({"name": "w", "tasks": [{"name": "task"}]})
        run = client.trigger("w")
        with subprocess.Popen(
            [*command, sys.executable, "-m", "flowforge", "worker", "own", "--grace", "600"],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=writer,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "FLOWFORGE_DATABASE_URL": db.dsn},
        ) as process:  # fmt: skip
            os.close(writer)
            wait_until((tmp_path / "begun").exists, "the handler")
            os.close(reader)
            process.send_signal(signal.SIGINT)
            (tmp_path / "go").touch()
            assert process.wait(TIMEOUT) == EXIT_PIPE
        assert client.wait(run, timeout=TIMEOUT).state == "succeeded"


TALKING = """
import logging
from flowforge import Workflow
workflow = Workflow("w")

@workflow.task()
def task(ctx):
    for _ in range(200):
        logging.getLogger("own").warning("x" * 999)
        print("y" * 999, flush=True)
"""


@pytest.mark.parametrize("isolation", ["threads", "processes"])
@pytest.mark.parametrize("leaves", [False, True])
def test_handlers_need_no_reader(db: Database, tmp_path: Path, isolation: str, leaves: bool) -> None:
    """Neither one who is too slow, nor one who has gone meanwhile."""
    (tmp_path / "own.py").write_text(TALKING)
    reader, writer = os.pipe()
    with Client(db.dsn) as client, running(Config(database_url=db.dsn)):
        client.define({"name": "w", "tasks": [{"name": "task"}]})
        with subprocess.Popen(
            [sys.executable, "-m", "flowforge", "worker", "own", "--isolation", isolation],
            cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "FLOWFORGE_DATABASE_URL": db.dsn},
        ) as process:  # fmt: skip
            os.close(writer)
            assert process.stderr is not None
            assert b"started" in process.stderr.readline()
            run = client.trigger("w")
            if leaves:
                process.stderr.close()
                os.close(reader)
                assert process.wait(TIMEOUT) == EXIT_PIPE
            else:
                assert client.wait(run, timeout=TIMEOUT).state == "succeeded"
                process.terminate()
                assert process.wait(TIMEOUT) == 0
                os.close(reader)
    with db.connect() as connection:
        ended = connection.execute("select state::text from flowforge.task_run").fetchall()
    assert ended in ([("succeeded",)], [("ready",)])


ODD = """
import io, os, sys
from flowforge import Workflow
workflow = Workflow("w")

@workflow.task()
def task(ctx):
    if hasattr(sys, "stdout"):
        print("printed", flush=True)

ODD
"""


@pytest.mark.parametrize("isolation", ["threads", "processes"])
@pytest.mark.parametrize(
    "odd",
    [
        "os.close(1)",
        "os.close(2)",
        "os.closerange(1, 3)",
        "del sys.stdout",
        "del sys.stderr",
        "sys.stderr.close()",
        "sys.stderr.detach(); sys.stdout.close()",
        "sys.stderr = io.TextIOWrapper(sys.stderr.detach(), write_through=True)",
        "sys.stderr.close(); sys.stderr = io.open(2, 'w', closefd=False, buffering=1)",
    ],
)
def test_whatever_a_module_does_to_the_streams_its_worker_works(
    db: Database, tmp_path: Path, odd: str, isolation: str
) -> None:
    """And no print gets into the log, or a connection."""
    (tmp_path / "own.py").write_text(ODD.replace("ODD", odd))
    log = tmp_path / "log"
    with Client(db.dsn) as client, running(Config(database_url=db.dsn)), log.open("wb") as file:
        client.define({"name": "w", "tasks": [{"name": "task"}]})
        run = client.trigger("w")
        with subprocess.Popen(
            [sys.executable, "-m", "flowforge", "worker", "own", "--isolation", isolation],
            cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=file,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "FLOWFORGE_DATABASE_URL": db.dsn},
        ) as process:  # fmt: skip
            try:
                assert client.wait(run, timeout=TIMEOUT).state == "succeeded"
            finally:
                process.terminate()
            assert process.wait(TIMEOUT) == 0
    told = log.read_text()
    assert "printed" not in told
    assert "Error" not in told
    assert "error" not in told
    assert told.count("stopped") == (0 if "2" in odd.partition(";")[0] or "3" in odd else 1)


def test_a_log_that_is_read_too_slowly_holds_up_no_daemon(db: Database) -> None:
    """Nor its end."""
    reader, writer = os.pipe()
    with io.FileIO(reader) as read, io.FileIO(writer, "w") as full:
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        with subprocess.Popen(
            [sys.executable, "-m", "flowforge", "scheduler"],
            env={**os.environ, "FLOWFORGE_DATABASE_URL": db.dsn}, stderr=full,
        ) as process:  # fmt: skip
            with db.connect() as connection:
                ticked = "select reaper_ticked_at is not null from flowforge.scheduler"
                wait_until(lambda: connection.execute(ticked).fetchone() == (True,), "its first tick")
            process.terminate()
            assert process.wait(TIMEOUT) == 0
        full.close()
        assert read.readall().strip(b"\0") == b""


def test_a_program_that_ran_a_worker_may_go_on() -> None:
    """Only the command line, which has nothing else to do, ends its process in a while."""
    before = threading.enumerate()
    assert daemon.run({}, Config()) == EXIT_CONFIG  # there is no database
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    added = [each for each in timers if each not in before]
    for each in added:
        each.cancel()
    assert added == []


def test_requests_are_taken_over_each_once() -> None:
    asked: list[str] = []

    def request(name: str) -> Callable[[], None]:
        return lambda: asked.append(name)

    handler = Remembered()
    handler(15, None)
    handler.take(request("first"))
    handler.take(request("second"))
    assert asked == ["first"]


def test_requests_that_are_held_back_count_afterwards() -> None:
    told: list[str] = []

    def interrupt(number: int, _frame: object) -> NoReturn:
        told.append(signal.Signals(number).name)
        raise KeyboardInterrupt

    def work() -> None:
        with held_back():
            for number in SIGNALS:
                signal.raise_signal(number)
            told.append("done")

    before = [signal.signal(number, interrupt) for number in SIGNALS]
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
        assert told[0] == "done"
        assert sorted(told[1:]) == ["SIGHUP", "SIGINT", "SIGTERM"]
        assert [signal.getsignal(number) for number in SIGNALS] == [interrupt] * 3
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_the_end_of_a_terminal_asks_to_stop() -> None:
    """Once, though both the shell and the system tell of it, with a SIGTERM before or after it or not; and
    not where it is ignored, as under nohup."""
    before = signal.signal(signal.SIGHUP, remembered := Remembered())
    try:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
        with signals(Stop()) as stop:
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            assert (stop.requested, stop.immediate) == (True, False)
            signal.raise_signal(signal.SIGINT)
            assert stop.immediate
        assert signal.getsignal(signal.SIGHUP) is remembered
        time.sleep(stopping.TWICE)
        with signals(Stop()) as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            assert (stop.requested, stop.immediate) == (True, False)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals(Stop()) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_is_sent_twice_at_once_is_one_request(number: int) -> None:
    """As by timeout(1), to the process and to its group."""
    with signals(Stop()) as stop:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert (stop.requested, stop.immediate) == (True, False)
        for _ in range(4):  # as of a key that is held down
            time.sleep(stopping.TWICE / 2)
            signal.raise_signal(number)
        assert stop.immediate


@pytest.fixture
def signals_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals_restored")
@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("again", SIGNALS)
def test_further_signals_do_not_interrupt_what_cleans_up(
    first: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the Ctrl-C of somebody whom it takes too long; after long any, since the first may be lost."""
    monkeypatch.setattr(stopping, "AT_ONCE", 600.0)
    monkeypatch.setattr(stopping, "AT_LAST", 600.0)
    cleaned: list[int] = []

    def work() -> None:
        with interrupting():
            try:
                signal.raise_signal(first)
            finally:
                signal.raise_signal(again)
                cleaned.append(first)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == [first]
    signal.raise_signal(again)
    monkeypatch.setattr(stopping, "AT_ONCE", -1.0)
    with pytest.raises(KeyboardInterrupt) if again == signal.SIGINT else contextlib.nullcontext():
        signal.raise_signal(again)
    monkeypatch.setattr(stopping, "AT_ONCE", 600.0)
    monkeypatch.setattr(stopping, "AT_LAST", -1.0)
    with pytest.raises(KeyboardInterrupt) if again != signal.SIGINT else contextlib.nullcontext():
        signal.raise_signal(again)


def test_what_was_not_interrupted_leaves_the_signals_as_they_were() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with interrupting():
        pass
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_reader_that_goes_under_nohup_is_held_back_too() -> None:
    """Whoever handles SIGTERM is told."""
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with signals(Stop()) as stop:
            with held_back():
                hang_up()
                assert not stop.requested
            assert (stop.requested, stop.immediate) == (True, False)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_what_is_ignored_or_deadly_is_not_held_back() -> None:
    """There is nobody to be told."""
    before = [signal.signal(number, signal.SIG_IGN) for number in SIGNALS]
    try:
        with held_back():
            assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * 3
            signal.raise_signal(SIGNALS[0])
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_requests_that_come_while_those_held_back_are_told_count() -> None:
    """Its handler is not yet what it was, then."""
    told: list[int] = []

    def again(number: int, _frame: object) -> None:
        told.append(number)
        if len(told) < len(SIGNALS):
            signal.raise_signal(SIGNALS[len(told)])

    before = [signal.signal(number, again) for number in SIGNALS]
    try:
        with held_back():
            signal.raise_signal(SIGNALS[0])
        assert told == [*SIGNALS]
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


UNREAD = """
import sys, threading, time
from flowforge import stopping

stopping.LAST_MOMENT = 0.1
sys.stdout = open(1, "w", buffering=2_000_000)
print("x" * 1_000_000)
"""


@pytest.mark.parametrize(
    "end",
    [
        "stopping.end_now(7)",
        "threading.Thread(target=time.sleep, args=[3600]).start(); stopping.end_soon(7)",
        "out = sys.stdout; del sys.stdout; stopping.end_now(7)",
    ],
)
def test_output_that_nobody_reads_keeps_no_program_from_its_end(end: str) -> None:
    """As of a supervisor that hangs itself."""
    with subprocess.Popen(
        [sys.executable, "-c", UNREAD + end], cwd=CHECKOUT, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.wait(TIMEOUT) == 7
        finally:
            process.kill()


def test_a_second_request_that_nobody_takes_over_ends_the_start() -> None:
    handler = Remembered()
    handler(signal.SIGTERM, None)
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGINT, None)
