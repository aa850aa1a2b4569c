"""Where a process dies on purpose in tests."""

from __future__ import annotations

import os
import signal

_passes: dict[str, int] = {}


def crash_point(name: str) -> None:
    """For tests: kill this process as by kill -9 when FLOWFORGE_CRASH_AT names this point, as in
    `publisher:after-confirm`, or `publisher:after-confirm@3` for the third time it is passed. Not without
    FLOWFORGE_TEST_CRASHES=1: one stray variable shall never kill a daemon."""
    wanted, _, turn = os.environ.get("FLOWFORGE_CRASH_AT", "").partition("@")
    if wanted == name and os.environ.get("FLOWFORGE_TEST_CRASHES") == "1":
        _passes[name] = _passes.get(name, 0) + 1
        if _passes[name] >= int(turn or 1):
            os.kill(os.getpid(), signal.SIGKILL)
