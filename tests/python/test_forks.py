"""What handlers fork is told of signals as it should be, and what came before the fork is told once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flowforge import Client, stopping
from flowforge.config import Config
from flowforge.stopping import SIGNALS, Stop, signals
from tests.python.daemons import CHECKOUT, TIMEOUT
from tests.python.running import running
from tests.services.database import Database
from tests.services.process import is_alive, wait_until

WORKFLOW = """
import multiprocessing, os, pathlib, time
from concurrent.futures import ProcessPoolExecutor
from flowforge import Workflow

fork = multiprocessing.get_context("fork")
workflow = Workflow("w")

def endless():
    pathlib.Path("new").write_text(str(os.getpid()))
    pathlib.Path("new").rename("pooled")
    while True:
        time.sleep(0.01)

def child():
    pathlib.Path("new").write_text(str(os.getpid()))
    pathlib.Path("new").rename("begun")
    while not pathlib.Path("go").exists():
        time.sleep(0.01)

@workflow.task()
def task(ctx):
    forked = fork.Process(target=child)
    forked.start()
    AFTER
    forked.join()
    return forked.exitcode
"""


pytestmark = pytest.mark.usefixtures("hears_hang_ups")

ISOLATION = pytest.mark.parametrize("isolation", ["threads", "processes"])


@contextmanager
def worker(
    db: Database, directory: Path, isolation: str, after: str, grace: str = "600"
) -> Iterator[tuple[Client, int, subprocess.Popen[bytes]]]:
    """A worker whose only handler forks; with a client, and the run."""
    (directory / "own.py").write_text(WORKFLOW.replace("AFTER", after))
    with Client(db.dsn) as client, running(Config(database_url=db.dsn)):
        client.define({"name": "w", "tasks": [{"name": "task"}]})
        run = client.trigger("w")
        with subprocess.Popen(
            [sys.executable, "-m", "flowforge", "worker", "own", "--grace", grace, "--isolation", isolation],
            cwd=directory,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "FLOWFORGE_DATABASE_URL": db.dsn},
        ) as process:
            try:
                yield client, run, process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


@ISOLATION
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_terminal_s_signal_does_not_take_the_grace_time_from_a_handler(
    db: Database, tmp_path: Path, isolation: str, number: int
) -> None:
    """It is sent to all processes."""
    with worker(db, tmp_path, isolation, "") as (client, run, process):
        wait_until((tmp_path / "begun").exists, "the child", TIMEOUT)
        os.killpg(process.pid, number)
        (tmp_path / "go").touch()
        assert process.wait(TIMEOUT) == 0
        assert client.wait(run, timeout=TIMEOUT).outputs == {"task": 0}


@pytest.mark.parametrize(
    ("after", "name"),
    [("", "begun"), ("ProcessPoolExecutor(1, fork).submit(endless).result()", "pooled")],
    ids=["process", "pool"],
)
def test_what_was_spared_ends_with_the_worker(db: Database, tmp_path: Path, after: str, name: str) -> None:
    """It is executed elsewhere by then. A pool's processes catch whatever is raised in them."""
    with worker(db, tmp_path, "threads", after, grace="0.1") as (_, _, process):
        wait_until((tmp_path / name).exists, "the child", TIMEOUT)
        pid = int((tmp_path / name).read_text())
        os.killpg(process.pid, signal.SIGINT)
        process.wait(TIMEOUT)
        wait_until(lambda: not is_alive(pid), "the end of the child", TIMEOUT)


SPARED = """
import os, signal, sys, threading, time
from flowforge import stopping

stopping.remember()
(go, goes), (told, tells) = os.pipe(), os.pipe()

def fork():
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(600)
        os.close(goes)
        BLOCKS
        handler = signal.getsignal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert handler._spared
        os.write(tells, b"spared")
        os.read(go, 1)
        os.write(tells, b"lives")
        while True:
            signal.pause()
    print(child, flush=True)
    os.close(tells)
    assert os.read(told, 9) == b"spared"

thread = threading.Thread(target=fork)
thread.start()
thread.join()
while len(os.listdir("/proc/self/task")) > 1:
    time.sleep(0.01)
os.write(goes, b"x")
assert os.read(told, 9) == b"lives"
"""


@pytest.mark.parametrize("blocks", ["pass", "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])"])
def test_what_was_spared_outlives_the_thread_that_made_it(blocks: str) -> None:
    """As one that a handler was given for its time; and not the process, whatever it blocks."""
    program = SPARED.replace("BLOCKS", blocks)
    with subprocess.Popen([sys.executable, "-c", program], cwd=CHECKOUT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert process.wait(TIMEOUT) == 0
        wait_until(lambda: not is_alive(child), "the end of the child", TIMEOUT)


@ISOLATION
def test_a_handler_can_end_its_children(db: Database, tmp_path: Path, isolation: str) -> None:
    """As pools do; and the worker is asked nothing by that."""
    with worker(db, tmp_path, isolation, "forked.terminate()") as (client, run, process):
        assert client.wait(run, timeout=TIMEOUT).outputs == {"task": -signal.SIGTERM}
        process.terminate()
        assert process.wait(TIMEOUT) == 0


@pytest.fixture
def no_prctl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "end_with_parent", lambda _: None)


@pytest.mark.usefixtures("no_prctl")
def test_the_second_request_is_for_a_child_too() -> None:
    child = stopping._Child()
    child(signal.SIGINT, None)
    child(signal.SIGHUP, None)
    time.sleep(stopping.TWICE)
    with pytest.raises(KeyboardInterrupt):
        child(signal.SIGINT, None)


@pytest.mark.usefixtures("no_prctl")
def test_so_is_the_first_when_its_parent_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    child = stopping._Child()
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        child(signal.SIGINT, None)


@pytest.fixture
def hang_up_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up_restored")
def test_whoever_has_a_use_for_sighup_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who ignores it, as under nohup, has none."""
    asked: list[int] = []
    monkeypatch.setattr(stopping, "end_with_parent", asked.append)

    def reload(_number: int, _frame: object) -> None: ...

    for handler, taken in ((signal.SIG_DFL, True), (signal.SIG_IGN, True), (reload, False)):
        signal.signal(signal.SIGHUP, handler)
        child = stopping._Child()
        child(signal.SIGINT, None)
        assert signal.getsignal(signal.SIGHUP) is (child if taken else handler)
    assert asked == [signal.SIGHUP, signal.SIGHUP]


@pytest.mark.usefixtures("hang_up_restored")
def test_a_parent_that_ends_before_its_end_is_asked_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux tells of an end that is still to come."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    monkeypatch.setattr(stopping, "end_with_parent", lambda _: monkeypatch.setattr(os, "getppid", lambda: 1))
    stopping._Child()(signal.SIGINT, None)
    assert sent == [(os.getpid(), signal.SIGKILL)]


@pytest.mark.parametrize("blocked", [set[int](), set(SIGNALS)])
def test_whatever_is_raised_at_a_fork_the_signals_come_again(
    blocked: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the handler of what came just before, when the mask is asked for and when it is set."""
    real: Callable[..., Any] = signal.pthread_sigmask
    before = real(signal.SIG_BLOCK, [])

    def interrupted(how: int, mask: Any) -> Any:
        found = real(how, mask)
        if how == signal.SIG_BLOCK and set(mask) == blocked:
            raise KeyboardInterrupt
        return found

    with signals(Stop()):
        monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stopping._hold_signals()
        stopping._let_signals_come()
    assert real(signal.SIG_BLOCK, []) == before


def test_signals_that_are_somebody_else_s_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(signal, "pthread_sigmask", refuse)
    stopping._hold_signals()
    stopping._let_signals_come()


def test_a_process_for_handlers_leaves_all_signals_to_its_worker() -> None:
    program = (
        "import signal; from flowforge import stopping; stopping.leave_to_worker();"
        "[signal.raise_signal(each) for each in stopping.SIGNALS]; print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"alive\n"
