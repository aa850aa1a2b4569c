"""What wakes: in a process with thousands of open files too, and after any error."""

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator

import pytest
from psycopg.conninfo import make_conninfo

from flowforge.listen import Listener
from flowforge.waking import Waker
from tests.python.proxy import Proxy
from tests.python.workbench import Bench, Witness
from tests.services.database import Database
from tests.services.process import wait_until

TIMEOUT = 30.0
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


def test_a_waker_stays_set_until_cleared() -> None:
    waker = Waker()
    assert not waker.is_set()
    for _ in range(100_000):
        waker.set()  # never blocks, whoever waits or not
    assert waker.wait(TIMEOUT)
    assert waker.is_set()
    waker.clear()
    assert not waker.is_set()
    threading.Timer(0.01, waker.set).start()
    assert waker.wait(TIMEOUT)


@pytest.fixture
def woken() -> threading.Semaphore:
    """Released once for each call of `wake`."""
    return threading.Semaphore(0)


def backend(db: Database, name: str) -> int | None:
    with db.connect() as conn:
        query = (
            "select pid from pg_stat_activity where application_name = %s and datname = current_database()"
        )
        row = conn.execute(query, [name]).fetchone()
    return None if row is None else int(row[0])


def test_a_listener_wakes_after_listening_and_for_each_notification(
    db: Database, woken: threading.Semaphore
) -> None:
    listener = Listener(db.dsn, ["one", "Two's"], woken.release, name="test")
    listener.start()
    try:
        assert woken.acquire(timeout=TIMEOUT)
        with db.connect() as conn:
            for channel in ("one", "Two's"):
                conn.execute("select pg_notify(%s, '')", [channel])
                assert woken.acquire(timeout=TIMEOUT)
            # In autocommit, never inside a transaction: else the server's queue of notifications fills up.
            query = """select state from pg_stat_activity
                where application_name = 'flowforge test listen' and datname = current_database()"""
            assert conn.execute(query).fetchall() == [("idle",)]
    finally:
        listener.close()
    assert not listener.is_alive()
    wait_until(lambda: backend(db, "flowforge test listen") is None, "the end of its session")


def test_a_listener_that_loses_its_connection_comes_back_and_wakes(
    db: Database, woken: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "flowforge")
    listener = Listener(db.dsn, ["one"], woken.release, name="test")
    listener.start()
    try:
        assert woken.acquire(timeout=TIMEOUT)
        with db.connect() as conn:
            conn.execute("select pg_terminate_backend(%s)", [backend(db, "flowforge test listen")])
            assert woken.acquire(timeout=TIMEOUT)  # whatever was committed meanwhile is to be looked at
            conn.execute("notify one")
            assert woken.acquire(timeout=TIMEOUT)
    finally:
        listener.close()
    assert [record.getMessage() for record in caplog.records] == [
        "listening connection lost; reconnecting",
        "listening again on a new connection",
    ]


def test_a_listener_on_a_dead_path_is_replaced(db: Database, woken: threading.Semaphore) -> None:
    with Proxy(db.server.port) as proxy:
        dsn = db.server.dsn(db.name, tcp=True) + f" port={proxy.port} sslmode=disable connect_timeout=2"
        listener = Listener(dsn, ["one"], woken.release, name="test", check_every=0.2, check_timeout=0.5)
        listener.start()
        try:
            assert woken.acquire(timeout=TIMEOUT)
            proxy.stalled = True
            wait_until(lambda: not listener.listening.is_set(), "the dead path to be noticed")
            proxy.stalled = False
            assert woken.acquire(timeout=TIMEOUT)
            with db.connect() as conn:
                conn.execute("notify one")
            assert woken.acquire(timeout=TIMEOUT)
        finally:
            listener.close()


def test_where_notifications_never_arrive_one_warning_is_given_and_polling_is_left(
    db: Database, woken: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(db.server.port, pooled=True) as proxy:
        dsn = db.server.dsn(db.name, tcp=True) + f" port={proxy.port} sslmode=disable"
        listener = Listener(dsn, ["one"], woken.release, name="test")
        listener.start()
        listener.join(TIMEOUT)
        assert listener.polling_only
        assert not listener.is_alive()
        listener.close()
    assert [record.getMessage() for record in caplog.records] == [
        "LISTEN hears nothing (a pooler?); going on by polling only"
    ]
    assert backend(db, "flowforge test listen") is None


def test_a_waker_for_which_there_are_no_descriptors_is_no_more_than_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("flowforge.waking.socket.socketpair", fail)
    with pytest.raises(OSError, match="Too many open files"):
        Waker()


def test_a_waker_whose_descriptor_is_anothers_by_now_says_so() -> None:
    """A handler may have closed it; the next connection takes its number."""
    waker = Waker()
    assert not waker.wait(0)
    reader, writer = os.pipe()
    os.dup2(reader, waker.fileno())
    assert waker.wait(0)
    for each in (reader, writer):
        os.close(each)
