"""Standard error as the commands write it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

from flowforge import log, stopping
from flowforge.exits import EXIT_OK, EXIT_PIPE

PATIENCE = 1.0
"""Seconds of every PATIENCE_FOR that a daemon waits for whoever reads its log too slowly. Then lines are let
go until there is room: every thread that has something to log would stand still, and leases run out."""

PATIENCE_FOR = 10.0
"""Seconds."""


class Messages(io.FileIO):
    """A file for messages: where they cannot be written, nobody can be told, and all else goes on."""

    unread = False
    """Whether whoever read them has gone."""
    lost = 0
    """Messages let go since the last one that was written, or a part of them."""
    _torn = False  # what was written last is the beginning of a message that was let go
    _daemon = False
    _own: io.FileIO | socket.socket | None = None  # by which nobody waits
    _asks = False  # for room, first, since there is none
    _left, _since = PATIENCE, 0.0

    def write(self, data: Any, /) -> int:
        try:
            if not self._written(memoryview(data)):
                self.lost += 1
            elif self.lost and self._daemon and data[-1:] == b"\n":
                lost, self.lost = self.lost, 0
                # Not to be left out, whatever the level.
                log.of("log").error("read too slowly; lines were lost", count=lost)
        except ValueError:  # closed by the main thread meanwhile
            self.lost += 1
        except OSError as error:
            if error.errno == errno.EPIPE and not self.unread:
                self.unread = True
                self._stop()
        return len(data)

    def serve_daemon(self) -> None:
        """From now on the process is a daemon: it does not wait for its readers, and stops when they are
        gone. A log that nobody reads tells nothing, and handlers that print would fail."""
        self._daemon = True
        try:
            self._own = _without_waiting(self.fileno())
        except OSError:  # such as of a pipe that another user made
            self._asks = True
        self._stop()

    def serve_command(self) -> None:
        """No longer."""
        self._daemon = self._asks = False
        own, self._own = self._own, None
        if own is not None:
            own.close()

    def close(self) -> None:
        self.serve_command()
        super().close()

    def _send(self, data: memoryview | bytes) -> int | None:
        """How much was written, or None."""
        own = self._own
        if isinstance(own, socket.socket):
            with contextlib.suppress(BlockingIOError):
                return own.send(data, socket.MSG_DONTWAIT)
            return None
        if own is not None:
            return own.write(data)
        if not self._asks:
            return super().write(data)
        # A pipe takes so much whole, or has no room for it.
        return super().write(data[: select.PIPE_BUF]) if self._has_room() else None

    def _written(self, left: memoryview) -> bool:
        """Whether all of it was."""
        if self._torn and self._send(b"\n"):
            self._torn = False
        begun = False
        while left:
            written = self._send(left)
            if written is not None:
                left, begun = left[written:], True
            elif self._own is None or not self._has_room():
                # Without one of its own, whoever shares the file has made it non-blocking.
                self._torn |= begun
                return False
        return True

    def _has_room(self) -> bool:
        begun = time.monotonic()
        if begun - self._since > PATIENCE_FOR:
            self._left, self._since = PATIENCE, begun
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        found = poll.poll(max(0.0, self._left) * 1000)
        self._left -= time.monotonic() - begun
        return bool(found)

    def _stop(self) -> None:
        if self._daemon and self.unread:
            # Which counts as one request with whatever else tells of the end: Ctrl-C ends the reader, too.
            stopping.hang_up()


def _without_waiting(fileno: int) -> io.FileIO | socket.socket | None:
    """By what to write to a pipe, a terminal or a socket without ever waiting, and nothing changes for others
    who share it; None for what makes nobody wait. Raises OSError where it cannot be had."""
    mode = os.fstat(fileno).st_mode
    if stat.S_ISSOCK(mode):
        blocking = os.get_blocking(fileno)
        peer = socket.socket(fileno=os.dup(fileno))
        peer.settimeout(None)  # whatever is the default: with one, Python itself waits
        os.set_blocking(fileno, blocking)
        return peer
    if not stat.S_ISFIFO(mode) and not os.isatty(fileno):
        return None
    # Opened anew: to be made non-blocking, a duplicate would be one with theirs.
    return io.FileIO(f"/proc/self/fd/{fileno}", "w", opener=_open)


def _open(path: str, _flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def let_errors_be_lost() -> None:
    """From now on standard error is written if it can be."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file
        raw: Any = Messages(sys.stderr.fileno(), "w", closefd=False)
        # Without a buffer, which would write once more what Ctrl-C interrupts just after it was written.
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "replace", write_through=True)
        os.register_at_fork(after_in_child=raw.serve_command)  # what a handler forks is no daemon


@contextlib.contextmanager
def read_or_stopped() -> Iterator[None]:
    """Within the block the process writes its log as a daemon does."""
    messages = getattr(sys.stderr, "buffer", None)
    if not isinstance(messages, Messages):
        yield
        return
    messages.serve_daemon()
    try:
        yield
    finally:
        messages.serve_command()


def exit_code(code: int) -> int:
    """The exit code of a daemon that would end with `code`, in view of who read its log."""
    unread = getattr(getattr(sys.stderr, "buffer", None), "unread", False)
    return EXIT_PIPE if unread and code == EXIT_OK else code
