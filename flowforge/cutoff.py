"""Ends calls whose answer does not come: for whoever waits on a connection it is lost then."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg

from flowforge import threads
from flowforge.waking import readable


def sever(fileno: int) -> None:
    """Shut the socket behind `fileno` down, so that whoever waits on it gets an error at once. Safe from any
    thread, also where no descriptor is left."""
    with suppress(OSError):
        same = socket.socket(fileno=fileno)
        try:
            same.shutdown(socket.SHUT_RDWR)
        finally:
            same.detach()


class Cutoff:
    """Cuts one connection, from any thread or signal handler, whatever has become of it: neither call raises.

    The connection object cannot be asked for its socket at that moment: it belongs to another thread, raises
    once it has noticed a loss, and the descriptor that it names may be somebody else's by then. So this holds
    a descriptor of its own from the beginning.
    """

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        """Raises psycopg.Error when `conn` is lost, OSError when there is no descriptor left."""
        self._socket = socket.socket(fileno=os.dup(conn.fileno()))
        # A closed descriptor may be another's at once. A signal handler may strike inside either call.
        self._lock = threading.RLock()

    def cut(self) -> None:
        """Whoever waits on the connection gets an error at once, and nothing of it commits any more."""
        with self._lock, suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection, which needs to be closed by itself."""
        with self._lock, suppress(OSError):
            self._socket.close()


class _Watchdog:
    """One thread that severs connections whose guard has run out. It keeps what is guarded at present, which
    is a handful, and nothing of what was."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Until when, a descriptor of our own, and for how long again if the answer is there and not read yet.
        self._open: dict[int, tuple[float, int, float]] = {}
        self._keys = itertools.count()
        self._wakes_at = float("inf")
        self._started = False

    def key(self) -> int:
        return next(self._keys)

    def add(self, key: int, fileno: int, seconds: float) -> None:
        with self._changed:
            if not self._started:
                threads.start(threading.Thread(target=self._run, name="flowforge-watchdog", daemon=True))
                self._started = True
            self._open[key] = (time.monotonic() + seconds, os.dup(fileno), seconds)
            self._wake_for(key)

    def shorten(self, key: int, seconds: float) -> None:
        with self._changed:
            if key in self._open:
                until, copy, again = self._open[key]
                self._open[key] = (min(until, time.monotonic() + seconds), copy, min(again, seconds))
                self._wake_for(key)

    def remove(self, key: int) -> None:
        with self._changed:
            entry = self._open.pop(key, None)
            if entry is not None:  # as in the child of a fork, which has forgotten it
                os.close(entry[1])

    def forget(self) -> None:
        """Begin anew in the child of a fork: without the thread, whatever another one held at that moment."""
        self._changed = threading.Condition()
        for _, copy, _ in list(self._open.values()):
            with suppress(OSError):
                os.close(copy)
        self._open.clear()
        self._wakes_at, self._started = float("inf"), False

    def _wake_for(self, key: int) -> None:
        # Only if it would sleep for too long: most guards end long before it has to look.
        if self._open[key][0] < self._wakes_at:
            self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for key, (until, copy, again) in self._open.items():
                    if until > now:
                        continue
                    if again and readable(0, copy):
                        # The caller is late, not the server: beside a handler that computes, say.
                        self._open[key] = (now + again, copy, 0.0)
                    else:
                        sever(copy)
                        self._open[key] = (float("inf"), copy, 0.0)
                self._wakes_at = min((until for until, *_ in self._open.values()), default=float("inf"))
                self._changed.wait(None if self._wakes_at == float("inf") else self._wakes_at - now)


_watchdog = _Watchdog()
os.register_at_fork(after_in_child=_watchdog.forget)


@contextmanager
def answered_within(conn: psycopg.Connection[Any], seconds: float) -> Generator[None]:
    """Bound the calls on `conn` inside the block as `guard` does; then it is lost, and the error says so.

    Raises psycopg.OperationalError."""
    until = time.monotonic() + seconds
    try:
        with guard(conn, seconds):
            yield
    except psycopg.OperationalError as exc:
        if exc.sqlstate is None and time.monotonic() >= until:
            digits = 0 if seconds >= 10 else 1
            raise psycopg.OperationalError(f"no answer within {seconds:.{digits}f} s") from exc
        raise
    except OSError as exc:  # no descriptor or thread left for it
        raise psycopg.OperationalError(str(exc)) from exc


@contextmanager
def guard(conn: psycopg.Connection[Any], seconds: float) -> Generator[Callable[[float], None]]:
    """Bound the calls on `conn` inside the block: after `seconds` its socket is shut down, so that a call
    that waits for a server that no longer answers (a half-open path that keepalives don't notice) fails as a
    lost connection. It gets as long once more if something of the answer is there and has not been read: its
    thread has not come to it. What it gives, any thread or signal handler may call, with fewer seconds from
    now.

    Raises OSError where there is no descriptor or no thread for it."""
    key = _watchdog.key()
    try:  # with the key known: what another thread or a signal raises may strike once it is added
        _watchdog.add(key, conn.fileno(), seconds)
        yield partial(_watchdog.shorten, key)
    finally:
        _watchdog.remove(key)
