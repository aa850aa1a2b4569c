"""The start of threads, which the system may refuse for a moment."""

from __future__ import annotations

import threading

from flowforge.errors import FlowForgeError


class NoThread(FlowForgeError, OSError):
    """There can be no more threads at present. It may pass, as a want of descriptors; at the start of a
    program it is the program's end."""


def start(thread: threading.Thread) -> threading.Thread:
    """Start `thread`; the same. After NoThread, which this raises, it may be started again."""
    try:
        thread.start()
    except RuntimeError as exc:
        raise NoThread(f"no thread can be started: {exc}") from exc
    return thread
