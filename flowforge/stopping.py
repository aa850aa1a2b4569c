"""Requests to stop, by signals too while there is nothing to stop yet, or nothing any more, or while it is
not to be interrupted; and a program's end.

It imports little: what the daemons import takes longer than some patience, and signals are taken before.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from flowforge import threads
from flowforge.waking import Waker

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_EXIT_FORCED = 130

LAST_MOMENT = 3.0
"""Seconds that threads get to end which handlers have left, and which the interpreter waits for."""


class Stop:
    """A request to stop, shared by the threads of a process: asked once, take nothing new; asked twice, stop
    now."""

    def __init__(self) -> None:
        # One entry for each request. To count is to read and then write, and a second request may come in
        # between, from another thread or from a signal handler, which no lock may keep waiting.
        self._requests: list[None] = []
        self._flag = Waker()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def requested(self) -> bool:
        """Whether to take nothing new."""
        return len(self._requests) > 0

    @property
    def immediate(self) -> bool:
        """Whether to stop now, finished or not."""
        return len(self._requests) > 1

    def request(self) -> None:
        """Ask to stop. Safe from any thread and from signal handlers."""
        self._requests.append(None)
        self._flag.set()
        for callback in self._callbacks:
            callback()

    def on_request(self, callback: Callable[[], None]) -> None:
        """Call `callback` at every request, in the thread or signal handler that asks: it must take no lock.
        Called at once when a request was made already."""
        self._callbacks.append(callback)
        if self.requested:
            callback()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a request, at most `seconds`; whether there was one, or what tells of one is lost."""
        return self._flag.wait(seconds)


TOGETHER = 5.0
"""Seconds within which a SIGHUP and another signal are one request."""


TWICE = 0.1
"""Seconds within which a signal that comes again is the same request, as where timeout(1) sends it to the
process and then to the group that the process is in."""


class _Requests:
    """Which signals are requests of their own. The end of a terminal, or of who reads the log, is told more
    than once, and often together with a SIGTERM or Ctrl-C: all of that is one."""

    def __init__(self) -> None:
        self._came: list[tuple[int, float, bool]] = []

    def counts(self, number: int, requested: bool) -> bool:
        """Whether signal `number` is one more; `requested`: there was a request, perhaps by no signal."""
        # Entered at once, and judged by its place: another may strike in the middle of this.
        mine = number, time.monotonic(), requested
        self._came.append(mine)
        counts, hung_up = False, float("-inf")
        last: dict[int, float] = {}
        for place, each in enumerate(self._came):
            number, when, requested = each
            if number == signal.SIGHUP:
                counts = place == 0 and not requested
                hung_up = when if counts else hung_up
            else:
                is_new = when - last.get(number, float("-inf")) > TWICE
                counts, hung_up = is_new and when - hung_up > TOGETHER, float("-inf")
                last[number] = when if is_new else last[number]
            if each is mine:
                break
        return counts


class Remembered:
    """A signal handler that counts requests until someone takes them over. A second one that nobody has taken
    over, or that comes when all is done, ends the program at once."""

    def __init__(self) -> None:
        self._requests: list[None] = []  # not a number: the other signal may come while one is counted
        self._taken = False
        self.which = _Requests()

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if not self.which.counts(number, bool(self._requests)):
            return
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


@contextlib.contextmanager
def signals(stop: Stop) -> Iterator[Stop]:
    """Within the block SIGTERM, SIGINT, and SIGHUP unless it is ignored, ask `stop`; so do those that came
    before and were remembered. Main thread only."""

    which = _Requests()

    def ask(number: int, _frame: FrameType | None) -> None:
        if which.counts(number, stop.requested):
            stop.request()

    before = {number: signal.signal(number, ask) for number in heard()}
    for handler in before.values():
        if isinstance(handler, Remembered):
            which = handler.which
            handler.take(stop.request)
    try:
        yield stop
    finally:
        _restore(before)


AT_ONCE = 1.0
"""Seconds after which a further Ctrl-C is pressed by somebody whom the cleaning up takes too long."""

AT_LAST = 10.0
"""Seconds after which any signal counts again: the first may have been lost, such as in a finalizer."""


@contextlib.contextmanager
def interrupting() -> Iterator[None]:
    """Within the block SIGTERM, and SIGHUP unless it is ignored, interrupt as Ctrl-C does, so that what is
    under way is cleaned up. Further ones do not for a while, which is short for Ctrl-C, also after the block,
    which is to be the program's end. Outside of the main thread, which alone they interrupt, it does
    nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    raised: list[float] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        pause = AT_ONCE if number == signal.SIGINT else AT_LAST
        if not raised or time.monotonic() - raised[-1] > pause:
            # Not before: another one that struck in between would keep this from raising.
            raised.append(time.monotonic())
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in heard()}
    try:
        yield
    finally:
        if not raised:
            _restore(before)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # as one is that was not set by Python, and cannot be
            signal.signal(number, handler)


def heard() -> list[signal.Signals]:
    """The signals that ask to stop: not SIGHUP where it is ignored, as under nohup."""
    return [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def hang_up() -> None:
    """As if by SIGHUP, also where that is ignored: whoever handles SIGTERM is told. From any thread of a
    daemon, whose handlers only ask."""
    handler = signal.getsignal(signal.SIGTERM)
    if callable(handler) and _is_ours(signal.SIGTERM):
        handler(signal.SIGHUP, None)


def remember() -> None:
    """From now on SIGTERM, SIGINT, and SIGHUP unless it is ignored, wait for `signals`, and leave the exit
    code alone after it. For programs, in their main thread."""
    handler = Remembered()
    for number in heard():
        signal.signal(number, handler)
    # Later the interpreter would set what is deadly by default, while it still tears its modules down.
    # This comes first, and so is called last.
    atexit.register(_end)


_masks = threading.local()  # of signals, before the fork that the thread is about to make


def _is_ours(number: int) -> bool:
    return getattr(signal.getsignal(number), "__module__", None) == __name__


def _hold_signals() -> None:
    """Until the child of a fork has handlers of its own: what came before would be asked of its parent."""
    _masks.before = None
    if any(map(_is_ours, SIGNALS)):
        # Known before anything is held: either call runs handlers, which may raise.
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _let_signals_come() -> None:
    if (before := getattr(_masks, "before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Not looked for in the child of a fork, where another thread may hold the lock of that.
_C = ctypes.CDLL(None)


def end_with_parent(number: int) -> None:
    """Let Linux send this process that signal when its parent ends, or the thread of it that made it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        _C.prctl(pr_set_pdeathsig, number)


class _Child:
    """A signal handler for the child of a fork, such as a handler makes. What a terminal sends to all of its
    processes is for the parent, which gives its handlers time to finish; from then on, on Linux, the child
    ends with it: with the process that made it, be that the worker or not. The second request is for the
    child too, and so is the first when the parent has gone."""

    def __init__(self) -> None:
        self._which = _Requests()
        self._parent = os.getppid()
        self._spared = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._spared:
            self._end_if_alone()
        if self._which.counts(number, self._spared):
            if self._spared or self._is_alone():  # which runs on by itself, as any program does
                raise KeyboardInterrupt
            self._spared = True
            # It comes as well when only the thread ends that made this process, and means nothing then: from
            # now on a SIGHUP is no request of its own. A use that the program has for it is left alone.
            if _is_ours(signal.SIGHUP) or signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, signal.SIG_IGN):
                signal.signal(signal.SIGHUP, self)
                end_with_parent(signal.SIGHUP)
                self._end_if_alone()

    def _is_alone(self) -> bool:
        return os.getppid() != self._parent

    def _end_if_alone(self) -> None:
        if self._is_alone():
            # Not by an exception: the processes of a pool would catch that, and wait for their next call. Nor
            # by what the program may have blocked, or has a use of its own for.
            os.kill(os.getpid(), signal.SIGKILL)


def leave_to_worker() -> None:
    """From now on the signals, which a service manager or a terminal may send to all processes, are for the
    process that has started this one. What this one executes does not inherit that, as it would what is
    ignored; nor does what it forks."""

    def pass_over(_number: int, _frame: FrameType | None) -> None:
        pass

    for number in heard():
        signal.signal(number, pass_over)


def _leave_to_parent() -> None:
    """In the child of a fork signals are no requests to stop, and SIGTERM, by which pools end their children,
    is deadly."""
    try:
        handler = _Child()
        for number in filter(_is_ours, SIGNALS):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else handler)
    finally:
        _let_signals_come()


os.register_at_fork(before=_hold_signals, after_in_parent=_let_signals_come, after_in_child=_leave_to_parent)

_at_end: list[Callable[[], None]] = []


def _end() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    for each in _at_end:
        each()


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within the block SIGTERM, SIGINT and SIGHUP interrupt nothing; whoever handles them is told at its end.
    Outside of the main thread, where they interrupt nothing either, it does nothing."""
    within = True
    came: deque[tuple[int, FrameType | None]] = deque()
    before: dict[int, Callable[[int, FrameType | None], object]] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if not within:
            tell()

    def tell() -> None:
        """Each once, whatever is raised, and whichever thread comes to it."""
        try:
            number, frame = came.popleft()
        except IndexError:
            return
        try:
            # A SIGHUP that is ignored, of which hang_up tells, is for whoever handles SIGTERM.
            before[number if number in before else signal.SIGTERM](number, frame)
        finally:
            tell()

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
            after.callback(tell)


def end_soon(code: int) -> None:
    """The program is done: let it end with `code`, in a moment if threads that handlers have left hold it up.

    The interpreter joins all that are no daemons, and those of every concurrent.futures pool, daemons or not.
    """
    # Both from here: once the interpreter ends, there are no new threads.
    for watch in (_timer(LAST_MOMENT, _flush_and_end, code), _timer(2 * LAST_MOMENT, os._exit, code)):
        with contextlib.suppress(threads.NoThread):
            threads.start(watch)
            # By then it has joined them, and what a program's own functions do at its end may take longer.
            atexit.register(watch.cancel)
    _at_end.append(_written_or_end(code))


def _written_or_end(code: int) -> Callable[[], None]:
    """What a program that was remembered does at its very end, so that the interpreter finds nothing left to
    write: it would wait for ever where nobody reads, and where it fails it would have an exit code of its
    own."""
    begun = threading.Event()

    def limit() -> None:
        begun.wait()
        time.sleep(LAST_MOMENT)
        os._exit(code)

    def write() -> None:
        begun.set()
        for name in ("stderr", "stdout"):
            with contextlib.suppress(AttributeError, ValueError):  # there is none, or it is closed
                try:
                    getattr(sys, name).flush()
                except OSError:
                    os._exit(code)

    with contextlib.suppress(threads.NoThread):
        threads.start(threading.Thread(target=limit, name="flowforge-end", daemon=True))
    return write


def end_now(code: int) -> None:
    """End the process with `code`, whatever still runs; in a moment if nobody takes what is left to be
    written."""
    with contextlib.suppress(threads.NoThread):  # rather without it, then
        threads.start(_timer(LAST_MOMENT, os._exit, code))
        _flush_and_end(code)
    os._exit(code)


def _timer(seconds: float, end: Callable[[int], object], code: int) -> threading.Timer:
    timer = threading.Timer(seconds, end, [code])
    timer.daemon = True
    return timer


def _flush_and_end(code: int) -> None:
    logging.shutdown()
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):  # a handler may have done anything to it
            getattr(sys, name).flush()
    os._exit(code)
