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
    """Standard output, or error, of a command or, between serve_daemon and serve_command, of a daemon, which
    it never lets wait or fail. Errors of a command that cannot be written are let go, too: whom to tell?"""

    unread = False
    """Whether whoever read it has gone."""
    lost = 0
    """Lines let go since the last one that was written, or a part of them."""
    refused = ""
    """Why the last write came to nothing; empty when it did not."""
    _torn = False  # what was written last is the beginning of what was let go
    _sender: _Sender | None = None  # of a daemon
    _on_unread: Callable[[], object] | None = None
    _left, _since = PATIENCE, 0.0

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno, "w", closefd=False)
        self._is_output = fileno == 1
        self._file = _file(fileno)

    def write(self, data: Any, /) -> int:
        sender = self._sender
        self.refused = ""
        if self._is_output and (sender is None or _file(self.fileno()) != self._file):
            # As any program; a handler has put a file of its own in the place.
            return super().write(data)
        try:
            if not self._written(memoryview(data), sender):
                self._lose(data, "nobody reads it")
            elif self.lost and sender is not None and bytes(data[-1:]) == b"\n":
                lost, self.lost = self.lost, 0
                of = "output" if self._is_output else "error"
                # Not to be left out, whatever the level.
                log.of("log").error(
                    "lines were lost: read too slowly, or no room on a disk", of=f"standard {of}", count=lost
                )
        except ValueError as exc:  # closed by the main thread meanwhile
            self._lose(data, str(exc))
        except OSError as exc:
            self._lose(data, str(exc))
            if exc.errno == errno.EPIPE:
                self.reader_gone()
        return len(data)

    def serve_daemon(self, on_unread: Callable[[], object] | None = None) -> None:
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

    def watched(self) -> int | None:
        """A descriptor that tells when the reader goes. Not a terminal's: what runs on without it may."""
        fileno = self.fileno() if self._sender is None else self._sender.fileno
        mode = os.fstat(fileno).st_mode
        return fileno if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None

    def _lose(self, data: Any, why: str) -> None:
        self.lost += max(1, bytes(data).count(b"\n"))
        self.refused = why

    def _written(self, whole: memoryview, sender: _Sender | None) -> bool:
        """Whether all of it was. A line that was torn is ended before."""
        send = super().write if sender is None else sender.send
        if self._torn:
            whole = memoryview(b"\n" + bytes(whole))
        left, had_room = whole, False
        try:
            while left:
                written = send(left)
                if written is not None:
                    left, had_room = left[written:], False
                elif sender is None or had_room or not self._has_room(sender):
                    # Whoever shares it has made it non-blocking, or made use of the room that there was.
                    return False
                else:
                    had_room = True
        finally:
            if sent := len(whole) - len(left):
                self._torn = len(left) > 0 and whole[sent - 1] != ord("\n")
        return True

    def _has_room(self, sender: _Sender) -> bool:
        begun = time.monotonic()
        if begun - self._since > PATIENCE_FOR:
            self._left, self._since = PATIENCE, begun
        found = _has_room(sender.fileno, max(0.0, self._left))
        self._left -= time.monotonic() - begun
        return found


_of_daemons: list[Stream] = []


def _forked() -> None:
    for stream in [*_of_daemons]:
        stream.serve_command()


os.register_at_fork(after_in_child=_forked)  # what a handler forks is no daemon


def _file(fileno: int) -> tuple[int, int]:
    found = os.fstat(fileno)
    return found.st_dev, found.st_ino


def _has_room(fileno: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fileno, select.POLLOUT)
    return any(not event & select.POLLNVAL for _, event in poll.poll(seconds * 1000))


def _sender(stream: Stream) -> _Sender:
    """Without ever waiting, and nothing changes for others who share the pipe, the terminal or the socket."""
    fileno = stream.fileno()
    mode = os.fstat(fileno).st_mode
    if stat.S_ISSOCK(mode):
        return _of_socket(fileno)
    # A descriptor of its own in any case: what a handler puts in the place is not for the log.
    if not stat.S_ISFIFO(mode) and not os.isatty(fileno):
        return _of(io.FileIO(os.dup(fileno), "w"))  # which makes nobody wait
    try:
        # Opened anew: to be made non-blocking, a duplicate would be one with theirs.
        return _of(io.FileIO(f"/proc/self/fd/{fileno}", "w", opener=_open))
    except OSError:  # such as of a pipe that another user made
        own = io.FileIO(os.dup(fileno), "w")

    def write_if_there_is_room(data: memoryview | bytes) -> int | None:
        # A pipe takes so much whole, or has no room for it.
        return own.write(data[: select.PIPE_BUF]) if _has_room(own.fileno(), 0) else None

    return _of(own)._replace(send=write_if_there_is_room)


def _of(own: io.FileIO) -> _Sender:
    return _Sender(own.write, own.fileno(), own.close)


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


class _Taken(NamedTuple):
    """What was standard output or error is written through the stream."""

    stream: Stream
    text: TextIO


_taken: dict[str, _Taken] = {}
_waits = True  # until `never_wait`


def let_errors_be_lost() -> None:
    """From now on standard error is written if it can be."""
    _take("stderr")


def serve() -> None:
    """The same, and standard output is ready for `read_or_stopped`. To be called before modules of handlers
    are imported, which may keep what they find."""
    _take("stderr")
    _take("stdout")


def never_wait() -> None:
    """From now on, and to the end of the process, both let go what cannot be written."""
    global _waits
    serve()
    _waits = False
    for each in _taken.values():
        each.stream.serve_daemon()


class Readers:
    """Who reads what a daemon tells."""

    def __init__(self, log_of: Stream | None) -> None:
        self._log_of = log_of

    def exit_code(self, code: int) -> int:
        """The exit code of a daemon that would end with `code`, in view of who read its log."""
        return EXIT_PIPE if code == EXIT_OK and self._log_of is not None and self._log_of.unread else code


@contextlib.contextmanager
def read_or_stopped() -> Iterator[Readers]:
    """Within the block the process is a daemon: it waits for nobody who reads its log, or what its handlers
    print, and stops when nobody reads the log any more. A log that nobody reads tells nothing.

    For programs that have called `serve`."""
    taken = {name: each for name, each in _taken.items() if not each.stream.closed}
    # What a module has put in their place, such as a wrapper around them, stays there.
    in_place = {name for name, each in taken.items() if getattr(sys, name, None) is each.text}
    errors = taken["stderr"].stream if "stderr" in taken and _is_behind_errors(taken["stderr"]) else None
    # A hang-up counts as one request with whatever else tells of the end: Ctrl-C ends the reader, too.
    on_unread = {"stdout": _warn, "stderr": None if errors is None else stopping.hang_up}
    for name, each in taken.items():
        each.stream.serve_daemon(on_unread[name])
    try:
        with _watched(errors):
            yield Readers(errors)
    finally:
        for name, each in taken.items():
            with contextlib.suppress(Exception):  # a handler may have done anything to it
                each.text.flush()
            if name in in_place:
                setattr(sys, name, each.text)  # or put anything in its place
            each.stream.serve_command()


def _is_behind_errors(taken: _Taken) -> bool:
    """Whether the log may be written through it, and not to a file that a module has put in its place."""
    try:
        return (log.stream() or sys.stderr).fileno() == taken.stream.fileno()
    except Exception:  # noqa: BLE001 -- there is none, or a wrapper without a descriptor
        return True


def mend() -> None:
    """What modules of handlers have closed at their import: the next connection would be standard output, and
    handlers print into it. A stream that is gone above its descriptor, which is not, is made anew."""
    for fileno in range(3):
        try:
            os.fstat(fileno)
        except OSError:
            # The lowest number that is free, which this is.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for fileno, name in ((1, "stdout"), (2, "stderr")):
        if not hasattr(sys, name) or log.is_lost(getattr(sys, name)):
            setattr(sys, name, _made_anew(fileno, name))
            if name in _taken:
                _take(name)
                if not _waits:
                    _taken[name].stream.serve_daemon()
    log.find_stream()


def _made_anew(fileno: int, name: str) -> TextIO:
    """Encoded as what Python began with."""
    kind: dict[str, Any] = {"encoding": None, "errors": "backslashreplace", "write_through": False}
    with contextlib.suppress(AttributeError):  # there was none
        kind = {key: getattr(getattr(sys, f"__{name}__"), key) for key in kind}
    write_through = kind.pop("write_through")
    anew: io.TextIOWrapper = open(fileno, "w", buffering=1, closefd=False, **kind)  # noqa: SIM115 -- for good
    anew.reconfigure(write_through=write_through)
    return anew


def _warn() -> None:
    log.of("log").warning("nobody reads standard output any more; what is printed is let go")


@contextlib.contextmanager
def _watched(stream: Stream | None) -> Iterator[None]:
    """Within the block it is noticed when the reader goes, though there is nothing to tell it."""
    fileno = None if stream is None else stream.watched()
    if stream is None or fileno is None:
        yield
        return
    poll = select.poll()
    poll.register(fileno, 0)
    end, ends = os.pipe()
    poll.register(end, select.POLLIN)

    def watch() -> None:
        while True:
            for found, _ in poll.poll():
                if found == end:
                    return
                poll.unregister(found)
                stream.reader_gone()

    watching = None
    with contextlib.suppress(threads.NoThread):  # it is noticed at the next line, then
        watching = threads.start(threading.Thread(target=watch, name="flowforge-reader", daemon=True))
    try:
        yield
    finally:
        os.close(ends)
        if watching is not None:
            watching.join()
        os.close(end)


def _take(name: str) -> None:
    of = getattr(sys, name)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file
        stream: Any = Stream(of.fileno())
        if name == "stderr":
            # Without a buffer, which would write once more what Ctrl-C interrupts just after it was written.
            text = io.TextIOWrapper(stream, of.encoding, "replace", write_through=True)
        elif of.write_through:  # as by PYTHONUNBUFFERED
            text = io.TextIOWrapper(stream, of.encoding, of.errors, write_through=True)
        else:
            buffer = io.BufferedWriter(stream)
            text = io.TextIOWrapper(buffer, of.encoding, of.errors, line_buffering=of.line_buffering)
        setattr(sys, name, text)
        _taken[name] = _Taken(stream, text)


HANG_UP = 1.0
"""Seconds that the SIGHUP of a terminal which has gone may take."""


def sleep_while_read(seconds: float) -> None:
    """Sleep. Raises OSError as a write would, once whoever read standard output has gone, though there is
    nothing to tell."""
    until = time.monotonic() + seconds
    poll = select.poll()
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file
        poll.register(sys.stdout.fileno(), 0)
    for fileno, event in poll.poll(seconds * 1000):
        if event & (select.POLLERR | select.POLLHUP):
            is_terminal = stat.S_ISCHR(os.fstat(fileno).st_mode)
            if is_terminal:
                time.sleep(HANG_UP)  # the signal says more
            number = errno.EIO if is_terminal else errno.EPIPE
            raise OSError(number, os.strerror(number))
    time.sleep(max(0.0, until - time.monotonic()))


def refused() -> str:
    """Why what a daemon printed last came to nothing; empty when it did not."""
    return _taken["stdout"].stream.refused if "stdout" in _taken else ""
