"""Standard output and error as FlowForge's programs write them: where nobody reads them, or too slowly,
nothing fails and nobody waits."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TextIO

from flowforge import log, stopping, threads
from flowforge.exits import EXIT_OK, EXIT_PIPE

PATIENCE = 1.0
"""Seconds of every PATIENCE_FOR that a daemon waits for whoever reads its log too slowly. Then lines are let
go until there is room: every thread that has something to log would stand still, and leases run out."""

PATIENCE_FOR = 10.0
"""Seconds."""


class _Sender(NamedTuple):
    """How a daemon writes."""

    send: Callable[[memoryview | bytes], int | None]
    """How much of it was written, without waiting; None: there is no room."""
    fileno: int
    """What has the room."""
    close: Callable[[], None]


class Stream(io.FileIO):
    """A file for what is told: where it cannot be written, nobody can be told, and all else goes on."""

    unread = False
    """Whether whoever read it has gone."""
    lost = 0
    """Writes let go since the last one that was done, or a part of them."""
    refused = ""
    """Why the last write came to nothing; empty when it did not."""
    _torn = False  # what was written last is the beginning of what was let go
    _sender: _Sender | None = None  # of a daemon
    _on_unread: Callable[[], object] | None = None
    _left, _since = PATIENCE, 0.0

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno, "w", closefd=False)

    def write(self, data: Any, /) -> int:
        self.refused = ""
        try:
            if not self._written(memoryview(data)):
                self.lost += 1
                self.refused = "nobody reads it"
            elif self.lost and self._sender is not None and data[-1:] == b"\n":
                lost, self.lost = self.lost, 0
                # Not to be left out, whatever the level.
                log.of("log").error("lines were lost: read too slowly, or no room on a disk", count=lost)
        except ValueError:  # closed by the main thread meanwhile
            self.lost += 1
        except OSError as error:
            self.refused = str(error)
            if error.errno == errno.EPIPE:
                self.reader_gone()
            else:  # such as of a disk that is full
                self.lost += 1
        return len(data)

    def serve_daemon(self, on_unread: Callable[[], object] | None) -> None:
        """From now on nothing waits for its reader; what is called when that has gone."""
        self._on_unread = on_unread
        self._sender = _sender(self)
        _of_daemons.append(self)
        if self.unread and on_unread is not None:
            on_unread()

    def serve_command(self) -> None:
        """No longer."""
        sender, self._sender, self._on_unread = self._sender, None, None
        if sender is not None:
            _of_daemons.remove(self)
            sender.close()

    def close(self) -> None:
        self.serve_command()
        super().close()

    def reader_gone(self) -> None:
        """Nobody will read what is written from now on."""
        if not self.unread:
            self.unread = True
            if self._on_unread is not None:
                self._on_unread()

    @property
    def watched(self) -> int | None:
        """A descriptor that tells when the reader goes. Not a terminal's: what runs on without it may."""
        fileno = self.fileno() if self._sender is None else self._sender.fileno
        mode = os.fstat(fileno).st_mode
        return fileno if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None

    def _written(self, left: memoryview) -> bool:
        """Whether all of it was."""
        send = super().write if self._sender is None else self._sender.send
        if self._torn and send(b"\n"):
            self._torn = False
        begun = had_room = False
        try:
            while left:
                written = send(left)
                if written is not None:
                    left, begun, had_room = left[written:], True, False
                elif had_room or not self._has_room():
                    return False  # of room that there was, somebody else made use
                else:
                    had_room = True
        finally:
            self._torn |= begun and len(left) > 0
        return True

    def _has_room(self) -> bool:
        if self._sender is None:  # whoever shares the file has made it non-blocking
            return False
        begun = time.monotonic()
        if begun - self._since > PATIENCE_FOR:
            self._left, self._since = PATIENCE, begun
        found = _has_room(self._sender.fileno, max(0.0, self._left))
        self._left -= time.monotonic() - begun
        return found


_of_daemons: list[Stream] = []


def _has_room(fileno: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fileno, select.POLLOUT)
    return any(not event & select.POLLNVAL for _, event in poll.poll(seconds * 1000))


def _sender(stream: Stream) -> _Sender:
    """Without ever waiting, and nothing changes for others who share the pipe, the terminal or the socket."""
    fileno = stream.fileno()

    def write(data: memoryview | bytes) -> int | None:
        return io.FileIO.write(stream, data)

    def write_if_there_is_room(data: memoryview | bytes) -> int | None:
        # A pipe takes so much whole, or has no room for it.
        return write(data[: select.PIPE_BUF]) if _has_room(fileno, 0) else None

    def nothing() -> None:
        pass

    try:
        mode = os.fstat(fileno).st_mode
        if stat.S_ISSOCK(mode):
            return _of_socket(fileno)
        if stat.S_ISFIFO(mode) or os.isatty(fileno):
            # Opened anew: to be made non-blocking, a duplicate would be one with theirs.
            own = io.FileIO(f"/proc/self/fd/{fileno}", "w", opener=_open)
            return _Sender(own.write, own.fileno(), own.close)
    except OSError:  # such as of a pipe that another user made
        return _Sender(write_if_there_is_room, fileno, nothing)
    return _Sender(write, fileno, nothing)  # which makes nobody wait


def _of_socket(fileno: int) -> _Sender:
    blocking = os.get_blocking(fileno)
    peer = socket.socket(fileno=os.dup(fileno))
    peer.settimeout(None)  # whatever is the default: with one, Python itself waits
    os.set_blocking(fileno, blocking)

    def send(data: memoryview | bytes) -> int | None:
        with contextlib.suppress(BlockingIOError):
            return peer.send(data, socket.MSG_DONTWAIT)
        return None

    return _Sender(send, peer.fileno(), peer.close)


def _open(path: str, _flags: int) -> int:
    return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _forked() -> None:
    for stream in [*_of_daemons]:
        stream.serve_command()


os.register_at_fork(after_in_child=_forked)  # what a handler forks is no daemon


def let_errors_be_lost() -> None:
    """From now on standard error is written if it can be."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file
        sys.stderr = _told_by(Stream(sys.stderr.fileno()), sys.stderr)


def never_wait() -> None:
    """From now on, and to the end of the process, standard output and error let go what cannot be written."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            of = getattr(sys, name)
            stream = Stream(of.fileno())
            setattr(sys, name, _told_by(stream, of))
            stream.serve_daemon(None)


class Readers:
    """Who reads what a daemon tells."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    def exit_code(self, code: int) -> int:
        """The exit code of a daemon that would end with `code`, in view of its readers."""
        return EXIT_PIPE if code == EXIT_OK and any(stream.unread for stream in self.streams) else code


@contextlib.contextmanager
def read_or_stopped() -> Iterator[Readers]:
    """Within the block the process is a daemon: it waits for nobody who reads its log, or what its handlers
    print, and stops when they have gone. A log that nobody reads tells nothing.

    For a program that lets its errors be lost."""
    readers, errors, printed = Readers(), getattr(sys.stderr, "buffer", None), sys.stdout
    if not isinstance(errors, Stream):
        yield readers
        return
    readers.streams.append(errors)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file
        told = Stream(printed.fileno())
        sys.stdout = _told_by(told, printed)
        readers.streams.append(told)
    # Which counts as one request with whatever else tells of the end: Ctrl-C ends the reader, too.
    for stream in readers.streams:
        stream.serve_daemon(stopping.hang_up)
    try:
        with _watched(readers.streams):
            yield readers
    finally:
        with contextlib.suppress(ValueError):
            sys.stdout.flush()
        sys.stdout = printed
        for stream in readers.streams:
            stream.serve_command()


@contextlib.contextmanager
def _watched(streams: list[Stream]) -> Iterator[None]:
    """Within the block it is noticed when a reader goes, though there is nothing to tell it."""
    poll = select.poll()
    of = {fileno: stream for stream in streams if (fileno := stream.watched) is not None}
    for fileno in of:
        poll.register(fileno, 0)
    end, ends = os.pipe()
    poll.register(end, select.POLLIN)

    def watch() -> None:
        while True:
            for fileno, event in poll.poll():
                if fileno == end:
                    return
                poll.unregister(fileno)
                if not event & select.POLLNVAL:
                    of[fileno].reader_gone()

    watching = None
    if of:
        with contextlib.suppress(threads.NoThread):  # it is noticed at the next line, then
            watching = threads.start(threading.Thread(target=watch, name="flowforge-readers", daemon=True))
    try:
        yield
    finally:
        os.close(ends)
        if watching is not None:
            watching.join()
        os.close(end)


def _told_by(raw: Stream, stream: TextIO) -> TextIO:
    """Text for `raw` as `stream` has it."""
    if stream is sys.stderr:
        # Without a buffer, which would write once more what Ctrl-C interrupts just after it was written.
        whole: Any = raw
        return io.TextIOWrapper(whole, stream.encoding, "replace", write_through=True)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=getattr(stream, "line_buffering", False),
        write_through=getattr(stream, "write_through", False),
    )


def refused() -> str:
    """Why what a daemon printed last came to nothing; empty when it did not."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.refused if isinstance(raw, Stream) else ""
