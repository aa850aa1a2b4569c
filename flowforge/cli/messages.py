"""Standard error as the commands write it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from flowforge.exits import EXIT_OK, EXIT_PIPE


class _Messages(io.FileIO):
    """A file for messages: where they cannot be written, nobody can be told, and all else goes on."""

    unread = False
    """Whether whoever read them has gone."""
    daemon = False
    """Whether the process then stops: a log that nobody reads tells nothing, and handlers that print fail."""

    def write(self, data: Any, /) -> int:
        left = memoryview(data)
        try:
            while left:
                written = super().write(left)
                if written is None:  # whoever shares the file has made it non-blocking, and it is full
                    break
                left = left[written:]
        except OSError as error:
            if error.errno == errno.EPIPE and not self.unread:
                self.unread = True
                self.stop()
        return len(data)

    def stop(self) -> None:
        if self.daemon and self.unread:
            os.kill(os.getpid(), signal.SIGTERM)


def let_errors_be_lost() -> None:
    """From now on standard error is written if it can be."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is no file
        raw: Any = _Messages(sys.stderr.fileno(), "w", closefd=False)
        # Without a buffer, which would write once more what Ctrl-C interrupts just after it was written.
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, "replace", write_through=True)


@contextlib.contextmanager
def read_or_stopped() -> Iterator[None]:
    """Within the block the process is told to stop, as by SIGTERM, once nobody reads its log any more."""
    messages = getattr(sys.stderr, "buffer", None)
    if not isinstance(messages, _Messages):
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
