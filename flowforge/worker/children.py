"""The worker's side of handlers that run in processes of their own.

Such a process is started when it is first needed, runs one handler at a time, and is used again; it is
replaced when it has died, when it was killed, after a number of tasks, or when it ran out of memory. Killing
is what makes a time limit hard: whatever a handler does, in C or in an endless loop, its slot comes back.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from flowforge import log
from flowforge.config import Config
from flowforge.errors import FlowForgeError
from flowforge.waking import Waker
from flowforge.worker import child
from flowforge.worker.execution import Execution, Report, StopReason, judge, unstarted

_log = log.of("worker")

START_LIMIT = 60.0
"""Seconds that a task run is kept waiting for a process to be ready to run handlers. It is then given back,
and the process goes on starting for the next: on a busy machine all that start at once take their time."""

START_PATIENCE = 120.0
"""Seconds after which a process that is still not ready is replaced, as its import of a module may hang. The
next ones get twice the time of the last: what takes that long by itself must come to its end."""

START_AGAIN = 1.0
"""Seconds until the next try when there can be no more processes."""

REFUSED_FOR = 10.0
"""Seconds that it counts as a problem that there could be no more processes, unless there is a new one."""

END_MOMENT = 1.0
"""Seconds that a process with nothing to do gets to end by itself, before it is killed."""

# The worker's sys.path from the beginning: what a present directory holds must not get in between.
_MAIN = "import sys; sys.path[:] = sys.argv[3:]; from flowforge.worker.child import main; main()"
_FOR_NOW = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class NotStarted(FlowForgeError):
    """A process for handlers cannot be started, or is of no use."""


class NotReady(Exception):
    """A process is still starting."""


class Died(Exception):
    """A process has died of the handler it ran; says how."""


class Process:
    """A process of handlers, and with it what they have started: all of its process group. `wake` and `kill`
    are for any thread, the rest for one at a time. It dies with the thread that made it."""

    def __init__(self, setup: child.Setup) -> None:
        """Raises OSError when it cannot be started."""
        self.tasks = 0
        self._begun = time.monotonic()
        self._ready = False
        self._waker = Waker()
        self._lock = threading.Lock()
        self._reaped = False
        ours, theirs = socket.socketpair()
        with ours, theirs:
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(descriptor), str(os.getpid()), *sys.path],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a group of its own to be killed, out of a terminal's reach
            )
            self._connection = Connection(ours.detach())
        with suppress(OSError):  # it has ended already; `run` will see
            self._connection.send(setup)

    def run(
        self, execution: Execution, renew_soon: Callable[[Execution], None], on_ready: Callable[[], None]
    ) -> child.Ended | None:
        """Run the handler of `execution`, telling `on_ready` first; None when it was told to stop before.
        Raises Died; NotReady; NotStarted, or OSError when that may pass."""
        self._waker.clear()
        execution.runs_in(self)
        if not self._get_ready(execution):
            return None
        on_ready()
        self.tasks += 1
        told = None
        try:
            self._connection.send(child.Task(execution.claim, execution.deadline))
            while True:
                if (reason := execution.stop_reason) is not told and reason is not None:
                    told = reason
                    self._connection.send(child.Stop(reason))
                for message in self._messages():
                    if isinstance(message, child.Ended):
                        return message
                    if isinstance(message, child.Progress):
                        execution.progress = (message.fraction, message.message)
                    elif isinstance(message, child.Committing):
                        execution.commits(message.committing)
                        if message.committing:
                            self._connection.send(child.Noted())
                    else:
                        renew_soon(execution)
        except Exception as error:
            # A handler may also have written to the socket: what cannot be read is no better than its end.
            raise Died(self.close()) from error

    def _get_ready(self, execution: Execution) -> bool:
        """Wait until it can run handlers, or `execution` is told to stop: it goes on starting, for the
        next."""
        until = time.monotonic() + START_LIMIT
        try:
            while not self._ready and execution.stop_reason is None:
                for message in self._messages():
                    if message.problem:
                        self.close()
                        raise NotStarted(f"a process for handlers cannot run them: {message.problem}")
                    self._ready = True
                if not self._ready and time.monotonic() > until:
                    raise NotReady
        except (EOFError, OSError):
            how = self.close()
            if self._process.returncode in (child.EXIT_FOR_NOW, -signal.SIGKILL):
                raise OSError(errno.EAGAIN, f"it ended before it was ready: {how}") from None
            raise NotStarted(f"a process for handlers ended before it was ready: {how}") from None
        return execution.stop_reason is None

    def _messages(self) -> Generator[Any]:
        """What has come within a second, or until `wake`. Raises EOFError when the process has ended."""
        poll = select.poll()
        poll.register(self._connection.fileno(), select.POLLIN)
        poll.register(self._waker.fileno(), select.POLLIN)
        # What a handler has started may hold the socket open for longer than the process lives.
        if not poll.poll(1000) and self._has_ended() and not poll.poll(0):
            raise EOFError
        self._waker.clear()
        while self._connection.poll():
            yield self._connection.recv()

    def wake(self) -> None:
        """Let it look whether its handler was told to stop."""
        self._waker.set()

    def kill(self) -> None:
        """End it at once, and all that handlers have started in its process group."""
        with self._lock:
            # Once it is reaped the number may be another's.
            if not self._reaped:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _has_ended(self) -> bool:
        """Unlike Popen.poll this leaves it to be reaped, so that its number stays that of its group."""
        try:
            return bool(os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        except ChildProcessError:  # somebody else has reaped it: a handler that waits for any child
            self._reaped = True
            return True

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._begun

    @property
    def ready(self) -> bool:
        """Whether it can run handlers, as far as can be told while it runs none."""
        return self._ready or self._connection.poll()

    @property
    def usable(self) -> bool:
        """Whether it can be given a task, as far as can be told while it runs none."""
        return not self._has_ended() and not (self._ready and self._connection.poll())

    def dismiss(self) -> None:
        """Let it end by itself, which it does when it has nothing to do."""
        if not self._ready:
            self.kill()
        self._connection.close()

    def close(self) -> str:
        """End it and wait for that; how it ended. What is left of its group is killed."""
        self.dismiss()
        until, pause = time.monotonic() + END_MOMENT, 0.001
        while not (ended := self._has_ended()) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self.kill()
        with self._lock:
            self._reaped = True
        code = self._process.wait()
        if not ended:
            return "it lost its socket to the worker, and was killed"
        return f"exit code {code}" if code >= 0 else _name(-code)


class Children:
    """The processes of one worker. `run` is for the threads of its slots, each of which needs one at most."""

    def __init__(
        self,
        config: Config,
        sources: Iterable[str],
        handlers: frozenset[str],
        renew_soon: Callable[[Execution], None],
    ) -> None:
        """`sources` are the modules (MODULE[:NAME]) that hold the handlers of the names `handlers`."""
        self.handlers = handlers
        self._setup = child.Setup(config, tuple(sources), handlers)
        self._recycle_after, self._renew_soon = config.recycle_after, renew_soon
        self._lock = threading.Lock()
        self._idle: list[Process] = []
        self._late: set[Process] = set()  # those that task runs have waited for in vain
        self._refused, self._refused_at = "", 0.0
        self._patience = START_PATIENCE
        self._closed = False

    @property
    def problem(self) -> str:
        """Why handlers have no process at present, or nothing."""
        if self._late:
            return f"a process for handlers is not ready after {START_LIMIT:g} s"
        return self._refused

    def run(self, execution: Execution) -> Report:
        """Run the handler of `execution` to its end. Raises NotStarted when no process can."""
        ended = None
        try:
            process = self._take()
            try:
                ended = process.run(execution, self._renew_soon, lambda: self._is_ready(process))
            except NotReady:
                with self._lock:
                    self._late.add(process)
                _log.warning("a process for handlers is slow to start; giving the task run back")
            except BaseException:
                with self._lock:
                    self._late.discard(process)
                raise
        except Died as death:
            execution.broken_off = f"the handler's process died: {death}"
            return judge(execution, None, None)
        except OSError as error:
            if error.errno not in _FOR_NOW:
                raise NotStarted(f"a process for handlers cannot be started: {error}") from error
            self._refused = f"no process for handlers can be started: {error}"
            self._refused_at = time.monotonic()
            _log.warning("no process for handlers can be started; trying again", error=str(error))
            time.sleep(START_AGAIN)
            return unstarted(execution)
        report = unstarted(execution) if ended is None else _report(execution, ended)
        self._give_back(process, execution, spent=ended is not None and ended.spent)
        return report

    def _is_ready(self, process: Process) -> None:
        with self._lock:
            self._late.discard(process)
            # That there are some for others tells nothing of those that are missing.
            if process.tasks == 0 or time.monotonic() - self._refused_at > REFUSED_FOR:
                self._refused = ""
            if process.tasks == 0 and process.age < START_PATIENCE:
                self._patience = START_PATIENCE

    def close(self) -> None:
        """End the processes that are idle, and those that are not after their task."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.dismiss()
        for process in idle:
            process.close()

    def _take(self) -> Process:
        while True:
            with self._lock:
                ready = [each for each in self._idle if each.ready]
                starting = [each for each in self._idle if each not in ready]
                hung = [each for each in starting if each.age > self._patience]
                process = next((each for each in reversed([*starting, *ready]) if each not in hung), None)
                self._idle = [each for each in self._idle if each is not process and each not in hung]
                self._late.difference_update(ready, hung)
                if hung:
                    self._patience *= 2
            for each in hung:
                _log.warning(
                    "a process for handlers does not get ready; it is replaced", seconds=int(each.age)
                )
                each.close()
            if process is None:
                return Process(self._setup)
            if process.usable:
                return process
            _log.warning("a process for handlers ended while it had nothing to do", error=process.close())

    def _give_back(self, process: Process, execution: Execution, *, spent: bool) -> None:
        with self._lock:
            spent = spent or self._closed or process.tasks >= self._recycle_after
            if not spent:
                execution.runs_in(None)  # before another one does
                self._idle.append(process)
        if spent:
            process.close()


def _report(execution: Execution, ended: child.Ended) -> Report:
    execution.finished, execution.broken_off = ended.finished, ended.broken_off
    if execution.finished or execution.stop_reason in (StopReason.LOST, StopReason.TIME_LIMIT):
        return judge(execution, None, None)  # whatever it says, it is too late
    return ended.report


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
