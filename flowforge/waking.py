"""A flag to wait for, which threads, signal handlers and whoever hears notifications set."""

from __future__ import annotations

import math
import os
import select
import socket
from contextlib import suppress


def readable(seconds: float | None, *filenos: int) -> set[int]:
    """Wait until one of these descriptors can be read or has an error to tell, at most `seconds`; those that
    do. Unlike select.select it knows no largest descriptor: a program may have thousands open."""
    poll = select.poll()
    for each in filenos:
        poll.register(each, select.POLLIN)
    return {each for each, _ in poll.poll(None if seconds is None else math.ceil(max(seconds, 0.0) * 1000))}


class Waker:
    """A flag to wait for. `set` takes no lock, so that a signal handler may call it while its thread is in
    `wait` (threading.Event would deadlock there)."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._inode = os.fstat(self.fileno()).st_ino

    def set(self) -> None:
        """Wake whoever waits, or the next one who will. Safe from any thread and from signal handlers."""
        with suppress(OSError):
            self._writer.send(b"x")

    def is_set(self) -> bool:
        """Whether `wait` would return at once."""
        return self.wait(0)

    def wait(self, seconds: float | None) -> bool:
        """Wait until set, at most `seconds`; whether it was set. The flag stays set. True also when its
        descriptor was closed, or is another's by now: then nothing could ever set it."""
        return bool(readable(seconds, self.fileno())) or self._is_gone()

    def _is_gone(self) -> bool:
        try:
            return os.fstat(self.fileno()).st_ino != self._inode
        except OSError:
            return True

    def clear(self) -> None:
        """Unset the flag."""
        with suppress(OSError):
            while self._reader.recv(4096):
                pass

    def fileno(self) -> int:
        """A descriptor that is readable while the flag is set."""
        return self._reader.fileno()

    def __del__(self) -> None:
        with suppress(AttributeError):  # there were no descriptors for them
            self._reader.close()
            self._writer.close()
