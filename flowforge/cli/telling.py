"""What commands that run until they are stopped tell on standard output."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from flowforge import log, streams, threads

T = TypeVar("T")

_MOMENT = 1.0
"""Seconds until it counts as read by nobody."""


def tell(write: Callable[[T], None], what: T) -> None:
    """Call `write`, which writes `what` on standard output. When nobody takes it, as where a pipe is full or
    closed, or a disk is, the log says so, and the command goes on: it may be asked to stop meanwhile."""
    refused: list[object] = []

    def written() -> None:
        try:
            write(what)
            if why := streams.refused():
                refused.append(why)
        except Exception as error:  # noqa: BLE001 -- a module of handlers may have done anything to it
            refused.append(error)

    thread = threading.Thread(target=written, name="flowforge-tell", daemon=True)
    try:
        threads.start(thread).join(_MOMENT)
    except threads.NoThread as error:
        refused.append(error)
    if refused or thread.is_alive():
        why = str(refused[0]) if refused else "nobody reads it"
        log.of("flowforge").warning("standard output cannot be written", error=why)
