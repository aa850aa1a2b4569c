"""What wakes: in a process with thousands of open files too, and after any error."""

import os
import resource
import threading
from collections.abc import Callable, Iterator

import pytest
from psycopg.conninfo import make_conninfo

from flowforge.listen import Listener, Waker
from tests.python.proxy import Proxy
from tests.python.workbench import Bench, Witness
from tests.services.database import Database
from tests.services.process import wait_until

BEYOND_SELECT = 1024  # the first descriptor that select.select refuses


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many files are open that every further descriptor is beyond what select.select takes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < BEYOND_SELECT:
        opened.append(os.open(os.devnull, os.O_RDONLY))
    yield
    for each in opened:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def listening(db: Database) -> Iterator[Callable[[Callable[[], None]], Listener]]:
    """Starts a listener on the channel `probe`."""
    started: list[Listener] = []

    def start(wake: Callable[[], None]) -> Listener:
        listener = Listener(db.dsn, ["probe"], wake, name="probe")
        listener.start()
        started.append(listener)
        return listener

    yield start
    for each in started:
        each.close()


def test_a_waker_and_a_listener_work_beyond_1024_descriptors(
    db: Database, many_files: None, listening: Callable[[Callable[[], None]], Listener]
) -> None:
    waker = Waker()
    assert waker.fileno() > BEYOND_SELECT
    assert not waker.is_set()
    listener = listening(waker.set)
    assert listener.listening.wait(60)
    assert waker.wait(60)
    waker.clear()
    with db.connect() as conn:
        conn.execute("notify probe")
    assert waker.wait(60)


def test_a_worker_with_thousands_of_open_files_is_woken(bench: Bench, many_files: None) -> None:
    witness = Witness()
    bench.define(witness.workflow)
    # It never looks by itself a second time: only what it is told lets it go on.
    with bench.worker(witness.workflow, poll_interval=3600) as worker:
        for _ in range(2):
            assert bench.wait_run(bench.trigger(witness.workflow)) == ["succeeded"]
    assert worker.code == 0


def test_a_listener_outlasts_what_nobody_foresaw(
    db: Database, listening: Callable[[Callable[[], None]], Listener], caplog: pytest.LogCaptureFixture
) -> None:
    woken = threading.Semaphore(0)
    mistakes = [ValueError("mistake"), KeyError("mistake")]

    def wake() -> None:
        if mistakes:
            raise mistakes.pop()
        woken.release()

    listener = listening(wake)
    assert woken.acquire(timeout=60)
    wait_until(listener.listening.is_set, "LISTEN")
    with db.connect() as conn:
        conn.execute("notify probe")
    assert woken.acquire(timeout=60)
    events = [each.getMessage() for each in caplog.records if each.exc_info]
    assert events == ["unforeseen error of the listener; starting anew"] * 2


def test_a_listener_outlasts_a_path_that_dies_before_it_listens(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Proxy(db.server.port) as proxy:

        def tested(*_: object) -> bool:
            proxy.stall("flowforge probe listen")
            proxy.stall()  # but not the next one
            return True

        monkeypatch.setattr("flowforge.listen.hears", tested)
        dsn = make_conninfo(db.server.dsn(db.name, tcp=True), port=proxy.port)
        listener = Listener(dsn, ["probe"], lambda: None, name="probe", check_timeout=0.2)
        listener.start()
        try:
            assert listener.listening.wait(60)
        finally:
            listener.close()
