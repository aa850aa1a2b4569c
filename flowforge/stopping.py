"""Signals that ask a program to stop while there is nothing to stop yet, or nothing any more, or while it is
not to be interrupted; and its end.

Apart from the runner, whose imports alone take longer than some patience. `runner.signals` takes over.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_EXIT_FORCED = 130

LAST_MOMENT = 3.0
"""Seconds that threads get to end which handlers have left, and which the interpreter waits for."""


class Remembered:
    """A signal handler that counts requests until someone takes them over. A second one that nobody has taken
    over, or that comes when all is done, ends the program at once."""

    def __init__(self) -> None:
        self._requests: list[None] = []  # not a number: the other signal may come while one is counted
        self._taken = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self._requests.append(None)
        if len(self._requests) > 1:
            if self._taken:
                os._exit(_EXIT_FORCED)
            raise KeyboardInterrupt

    def take(self, request: Callable[[], None]) -> None:
        """Call `request` for each so far, and begin anew."""
        requests, self._requests, self._taken = self._requests, [], True
        for _ in requests:
            request()


def remember() -> None:
    """From now on SIGTERM and SIGINT wait for `runner.signals`, and leave the exit code alone after it. For
    programs, in their main thread."""
    handler = Remembered()
    for number in SIGNALS:
        signal.signal(number, handler)
    # Later the interpreter would set what is deadly by default, while it still tears its modules down.
    atexit.register(_ignore)


def _ignore() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within the block SIGTERM and SIGINT interrupt nothing; whoever handles them is told at its end. Outside
    of the main thread, where they interrupt nothing either, it does nothing."""
    within = True
    came: list[tuple[int, FrameType | None]] = []
    before: dict[int, Callable[[int, FrameType | None], object]] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        if within:
            came.append((number, frame))
        else:
            before[number](number, frame)

    with contextlib.ExitStack() as after:  # which goes on to its end, whatever is raised on the way
        if threading.current_thread() is threading.main_thread():
            for each in SIGNALS:
                handler = signal.getsignal(each)
                if callable(handler):  # not what is ignored, or ends the process
                    before[each] = handler
                    after.callback(signal.signal, each, handler)
                    signal.signal(each, hold)
        try:
            yield
        finally:
            within = False
            for number, frame in came:
                after.callback(before[number], number, frame)


def end_soon(code: int) -> None:
    """The program is done: let it end with `code`, in a moment if threads that handlers have left hold it up.

    The interpreter joins all that are no daemons, and those of every concurrent.futures pool, daemons or not.
    """
    watch = threading.Timer(LAST_MOMENT, end_now, [code])
    watch.daemon = True
    watch.start()
    # By then it has joined them, and what a program's own functions do at its end may take longer.
    atexit.register(watch.cancel)


def end_now(code: int) -> None:
    """End the process with `code`, whatever still runs."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):  # a handler may have closed it
            stream.flush()
    os._exit(code)
