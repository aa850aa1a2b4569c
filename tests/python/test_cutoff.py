"""Calls whose answer does not come are ended, and no others."""

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest

from flowforge import cutoff, threads
from flowforge import db as database
from tests.python.proxy import Proxy
from tests.services.database import Database

TIMEOUT = 30.0


@pytest.fixture
def conn(db: Database) -> Iterator[database.Connection]:
    with database.connect(db.dsn, application_name="test") as conn:
        yield conn


def test_a_call_that_is_not_answered_says_so(conn: database.Connection) -> None:
    told = pytest.raises(psycopg.OperationalError, match=r"^no answer within 0\.1 s$")
    with told, cutoff.answered_within(conn, 0.1):
        conn.execute("select pg_sleep(600)")
    assert database.connection_lost(conn)


def test_a_guard_ends_a_call_whose_answer_never_comes(db: Database) -> None:
    with Proxy(db.server.port) as proxy:
        dsn = db.server.dsn(db.name, tcp=True) + f" port={proxy.port} sslmode=disable"
        with database.connect(dsn, application_name="test") as conn:
            with cutoff.guard(conn, TIMEOUT):
                conn.execute("select 1")
            proxy.stalled = True
            with pytest.raises(psycopg.OperationalError) as caught, cutoff.guard(conn, 0.2):
                conn.execute("select 1")
            assert database.is_transient(caught.value)
            assert database.connection_lost(conn)


def test_guards_that_ended_sever_nothing_and_the_earliest_goes_first(db: Database) -> None:
    with (
        database.connect(db.dsn, application_name="a") as a,
        database.connect(db.dsn, application_name="b") as b,
    ):
        with cutoff.guard(a, 0.05):
            pass
        with cutoff.guard(a, TIMEOUT), pytest.raises(psycopg.OperationalError), cutoff.guard(b, 0.1):
            b.execute("select pg_sleep(300)")
        assert a.execute("select 1").fetchall() == [(1,)]


def test_a_guard_that_cannot_start_its_thread_leaves_the_next_one_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    watchdog = cutoff._Watchdog()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(threads.NoThread):
                watchdog.add(1, ours.fileno(), TIMEOUT)
        assert watchdog._open == {}
        watchdog.add(1, ours.fileno(), 0.0)
        theirs.settimeout(TIMEOUT)
        assert theirs.recv(1) == b""
        watchdog.remove(1)


def test_a_guard_waits_as_long_again_for_who_has_not_read_an_answer_yet() -> None:
    """Its thread has not come to it, beside one that computes; the server is not at fault."""
    watchdog = cutoff._Watchdog()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(TIMEOUT)
        theirs.send(b"an answer")
        begun = time.monotonic()
        watchdog.add(1, ours.fileno(), 0.2)
        assert theirs.recv(1) == b""
        assert time.monotonic() - begun >= 0.4
        watchdog.remove(1)


def test_a_guard_needs_no_descriptor_when_it_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be none left at that moment, and it looks only once."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    watchdog = cutoff._Watchdog()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(TIMEOUT)
        watchdog.add(1, ours.fileno(), 3600)
        monkeypatch.setattr(os, "dup", refuse)
        watchdog.shorten(1, 0.0)
        assert theirs.recv(1) == b""
        watchdog.remove(1)


def test_guards_work_in_the_child_of_a_fork() -> None:
    """Whatever another thread did at that moment. What is guarded in the parent is nothing to it."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with cutoff._watchdog._changed:
            held.set()
            done.wait(TIMEOUT)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(TIMEOUT)
        outer, inner = cutoff._watchdog.key(), cutoff._watchdog.key()
        cutoff._watchdog.add(outer, ours.fileno(), 3600)
        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(TIMEOUT)
        if (child := os.fork()) == 0:
            signal.alarm(int(TIMEOUT))
            cutoff._watchdog.add(inner, ours.fileno(), 0.0)
            heard = theirs.recv(1)
            cutoff._watchdog.remove(inner)
            cutoff._watchdog.remove(outer)
            os._exit(0 if heard == b"" and cutoff._watchdog._open == {} else 1)
        done.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        cutoff._watchdog.remove(outer)


def test_a_guard_that_has_ended_leaves_nothing_behind(db: Database) -> None:
    """However far away its end was."""

    def kept() -> int:
        held = [each for each in vars(cutoff._watchdog).values() if isinstance(each, dict | list)]
        return sum(map(len, held)) + len(list(Path("/proc/self/fd").iterdir()))

    with database.connect(db.dsn, application_name="a") as conn, cutoff.guard(conn, TIMEOUT):
        before = kept()
        for _ in range(1000):
            with cutoff.guard(conn, TIMEOUT):
                assert kept() > before
        assert kept() == before
        assert conn.execute("select 1").fetchone() == (1,)


def test_a_guard_may_be_shortened_by_another_thread_and_not_once_it_has_ended(db: Database) -> None:
    with database.connect(db.dsn, application_name="a") as conn:
        with cutoff.guard(conn, 3600) as ended:
            pass
        ended(0)
        with cutoff.guard(conn, 3600) as shorten:
            shorten(7200)
            timer = threading.Timer(0.1, shorten, [0.1])
            timer.start()
            with pytest.raises(psycopg.OperationalError):
                conn.execute("select pg_sleep(300)")
            timer.join()


def test_a_cutoff_ends_a_call_and_never_raises_nor_strikes_another(db: Database) -> None:
    """Whatever has become of the connection: in use, lost and noticed, or closed, and its descriptor given to
    the next one."""
    with database.connect(db.dsn, application_name="a") as conn:
        cut = cutoff.Cutoff(conn)
        timer = threading.Timer(0.1, cut.cut)
        timer.start()
        with pytest.raises(psycopg.OperationalError):
            conn.execute("select pg_sleep(300)")
        timer.join()
        with pytest.raises(psycopg.OperationalError):
            conn.fileno()
        cut.cut()
        with pytest.raises(psycopg.OperationalError):
            cutoff.Cutoff(conn)
    with database.connect(db.dsn, application_name="b") as other:
        cut.cut()
        cut.close()
        with database.connect(db.dsn, application_name="c") as third:
            cut.cut()
            cut.close()
            assert [each.execute("select 1").fetchone() for each in (other, third)] == [(1,), (1,)]
