"""Standard error as the commands write it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any

from flowforge import log
from flowforge.exits import EXIT_OK, EXIT_PIPE

PATIENCE = 1.0
"""Seconds that a daemon waits for whoever reads its log too slowly. Then lines are let go until there is
room: every thread that has something to log would stand still, and leases run out."""


class Messages(io.FileIO):
    """A file for messages: where they cannot be written, nobody can be told, and all else goes on."""

    unread = False
    """Whether whoever read them has gone."""
    daemon = False
    """Whether the process then stops: a log that nobody reads tells nothing, and handlers that print fail."""
    lost = 0
    """Messages let go since the last one that was written."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        try:
            while left:
                # So much a pipe takes whole, or has no room for.
                part = left[: select.PIPE_BUF] if self.daemon else left
                written = super().write(part) if not self.daemon or self._has_room() else None
                if written is None:  # or whoever shares the file has made it non-blocking, and it is full
                    self.lost += 1
                    return len(data)
                left = left[written:]
        except OSError as error:
            if error.errno == errno.EPIPE and not self.unread:
                self.unread = True
                self.stop()
        else:
            if self.lost and self.daemon:
                lost, self.lost = self.lost, 0
                log.of("log").warning("read too slowly; lines were lost", count=lost)
        return len(data)

    def _has_room(self) -> bool:
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        return bool(poll.poll(0 if self.lost else PATIENCE * 1000))

    def stop(self) -> None:
        if self.daemon and self.unread:
            os.kill(os.getpid(), signal.SIGTERM)


def let_errors_be_lost() -> None:
    """From now on standard error is written if it can be."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file
        raw: Any = Messages(sys.stderr.fileno(), "w", closefd=False)
        # Without a buffer, which would write once more what Ctrl-C interrupts just after it was written.
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "replace", write_through=True)


@contextlib.contextmanager
def read_or_stopped() -> Iterator[None]:
    """Within the block the process is told to stop, as by SIGTERM, once nobody reads its log any more."""
    messages = getattr(sys.stderr, "buffer", None)
    if not isinstance(messages, Messages):
        yield
        return
    messages.daemon = True
    messages.stop()
    try:
        yield
    finally:
        messages.daemon = False


def exit_code(code: int) -> int:
    """The exit code of a daemon that would end with `code`, in view of who read its log."""
    unread = getattr(getattr(sys.stderr, "buffer", None), "unread", False)
    return EXIT_PIPE if unread and code == EXIT_OK else code
