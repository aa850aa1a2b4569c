"""A process that runs handlers, one at a time, for the worker that started it.

It is a fresh interpreter that imports the handlers' modules by itself, and shares nothing with the worker but
one socket: tasks and requests to stop come in, progress and reports go out. It ends when that socket does,
which is when the worker ends, however that came about.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from flowforge import log, stopping, streams, threads, tracing
from flowforge.config import Config
from flowforge.errors import FlowForgeError
from flowforge.loading import load_workflows
from flowforge.worker.claim import Claim
from flowforge.worker.context import Context
from flowforge.worker.execution import (
    Execution,
    Finish,
    Release,
    Report,
    StopReason,
    causes,
    is_of_memory,
    leave_if_forked,
    report_of,
    tell_log,
    unstarted,
)
from flowforge.worker.failures import reason_of
from flowforge.worker.pool import LeavingPool, run_alone

_log = log.of("worker")

REPORT_EVERY = 0.5
"""Seconds between two looks for progress to report."""

EXIT_FOR_NOW = 75
"""The exit code of a child that was refused a thread or memory, or one of whose modules was refused anything
by the system, and that may be started later: the worker has imported the same modules."""

NOTED_LIMIT = 5.0
"""Seconds that a commit waits for the worker to know of it."""

_LEAST_MEMORY = 8
"""MiB that a memory limit has to leave to handlers once they are imported."""


class Setup(NamedTuple):
    """The first message to a child. `sources` are MODULE[:NAME], as the worker got them; `handlers` names
    those that have to be found there."""

    config: Config
    sources: tuple[str, ...]
    handlers: frozenset[str]


class Task(NamedTuple):
    """Run the handler of this claim; `deadline` is by time.monotonic(), which all processes of a machine
    share."""

    claim: Claim
    deadline: float | None


class Stop(NamedTuple):
    """Tell the handler of the last Task to stop."""

    reason: StopReason


class Noted(NamedTuple):
    """The worker knows that the handler's transaction commits."""


class Ready(NamedTuple):
    """The first message of a child: it can run handlers, or `problem` says why not."""

    problem: str = ""


class Progress(NamedTuple):
    """What the handler said with ctx.progress."""

    fraction: float
    message: str | None


class RenewSoon(NamedTuple):
    """The handler's transaction was rolled back, and with it what it had added to the lease."""


class Committing(NamedTuple):
    """The handler's transaction is about to commit, which ends the lease, and waits for Noted; or it was
    refused."""

    committing: bool


class Ended(NamedTuple):
    """The handler has ended. `finished`: its own transaction has finished the task run. `broken_off`: why the
    report gives it back as crashed. `spent`: this process is of no further use."""

    report: Report
    finished: bool
    broken_off: str
    spent: bool


class _Execution(Execution):
    """The child's own; the worker's learns of what it has to know by messages."""

    __slots__ = ("_tell", "noted")

    def __init__(self, task: Task, tell: Callable[[Execution, object], None]) -> None:
        now = time.monotonic()
        super().__init__(task.claim, now, now)
        self.deadline = task.deadline
        self._tell = tell
        self.noted = threading.Event()

    def commits(self, committing: bool) -> None:
        super().commits(committing)
        self.noted.clear()
        self._tell(self, Committing(committing))
        if committing:
            # Else a renewal that finds the task run finished might be taken for a lost lease.
            self.noted.wait(NOTED_LIMIT)


class Child:
    """The child's side. `run` returns when the worker wants no more of it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._given: queue.SimpleQueue[_Execution | None] = queue.SimpleQueue()
        # What runs: messages of anything else, such as a thread that an earlier handler left, are not sent.
        self._execution: _Execution | None = None
        self._told: tuple[float, str | None] | None = None
        self._pid = os.getpid()
        self._spans: tracing.Spans = tracing.no_span

    def run(self) -> None:
        """Handlers run in the main thread, where libraries expect to be that insist on it."""
        setup: Setup = self._connection.recv()
        log.configure(setup.config.log_format, setup.config.log_level)
        try:
            handlers = _load(setup)
            # Afterwards, since a module may set up logging by itself.
            log.configure_others(setup.config.log_format, setup.config.log_level, setup.sources)
            self._spans = tracing.spans(setup.config)
            threads.start(threading.Thread(target=self._listen, name="flowforge-worker", daemon=True))
            limit_memory(setup.config.memory_limit)
        except (MemoryError, threads.NoThread) as error:
            _log.warning("a process for handlers cannot run them now", error=str(error))
            sys.exit(EXIT_FOR_NOW)
        except FlowForgeError as error:
            if isinstance(error.__cause__, MemoryError | OSError):
                _log.warning("a process for handlers cannot run them now", error=str(error))
                sys.exit(EXIT_FOR_NOW)
            self._send(Ready(str(error)))
            return
        self._send(Ready())
        while (execution := self._given.get()) is not None:
            self._execute(execution, handlers[execution.claim.handler], setup.config)

    def _execute(self, execution: Execution, handler: Callable[[Any], Any], config: Config) -> None:
        begun, returned, raised = False, None, None
        pool = LeavingPool()
        try:
            begun = execution.begin()
            if begun:
                with self._spans(execution):
                    context = contextvars.copy_context()
                    context.run(tell_log, execution)
                    returned = context.run(handler, Context(execution, self, config))
                    if inspect.iscoroutine(returned):
                        returned = context.run(run_alone, execution, returned, pool)
        except BaseException as exc:  # noqa: BLE001 -- SystemExit of a handler is its failure, not the process's
            raised = exc
        leave_if_forked(self._pid, raised)
        execution.end()
        _flush()
        # What has eaten all its memory may hold on to it.
        spent = raised is not None and is_of_memory(raised)
        if raised is not None and spent:
            _make_room(raised)
        # The next attempt must not meet what this one was told to stop and cannot.
        spent = spent or (execution.stop_reason is not None and pool.busy)
        try:
            report = report_of(execution, returned, raised) if begun else unstarted(execution)
        except MemoryError as exc:
            _make_room(exc)
            report = report_of(execution, None, exc)
        broken_off = ""
        if isinstance(report, Release) and report.reason == "crashed":
            broken_off = reason_of(execution)
        elif execution.out_of_memory and config.memory_limit and isinstance(report, Finish):
            report = report._replace(
                error=f"memory limit of {config.memory_limit} MiB exceeded: {report.error}"
            )
        ended = Ended(report, execution.finished, broken_off, spent or execution.out_of_memory)
        # Its traceback holds this frame: together they would keep all that the handler had, and the next one
        # would have less of the memory.
        returned = raised = execution.lost_by = None
        with self._sending:
            self._report_progress(execution)
            self._execution = None
            self._send(ended)

    # -- what is sent

    def renew_soon(self, execution: Execution) -> None:
        """As the lease keeper's, for the context: the keeper is the worker's."""
        self._tell(execution, RenewSoon())

    def _tell(self, execution: Execution, message: object) -> None:
        with self._sending:
            if execution is self._execution:
                self._send(message)

    def _report_progress(self, execution: Execution) -> None:
        progress = execution.progress
        if execution is self._execution and progress is not None and progress is not self._told:
            self._told = progress
            self._send(Progress(*progress))

    def _send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except OSError:
            self._cut_off()

    # -- what is received, in a thread of its own

    def _listen(self) -> None:
        try:
            while True:
                execution = self._execution
                if not self._connection.poll(None if execution is None else REPORT_EVERY):
                    if execution is not None:
                        with self._sending:
                            self._report_progress(execution)
                    continue
                message = self._connection.recv()
                if isinstance(message, Task):
                    execution = self._execution = _Execution(message, self._tell)
                    self._told = None
                    self._given.put(execution)
                elif execution is not None and isinstance(message, Stop):
                    execution.stop(message.reason)
                elif execution is not None:
                    execution.noted.set()
        except EOFError:
            if self._execution is not None:
                os._exit(1)  # what runs here is nobody's any more
            self._given.put(None)
        except OSError:
            self._cut_off()
        except BaseException:  # noqa: BLE001 -- deaf, it is of no use
            _log.exception("a process for handlers cannot go on")
            os._exit(1)

    def _cut_off(self) -> None:
        _log.error("the socket to the worker is closed; did a handler close it?")
        os._exit(1)


def _load(setup: Setup) -> dict[str, Callable[[Any], Any]]:
    found = {
        name: task.function
        for workflow in load_workflows(setup.sources)
        for name, task in workflow.handlers.items()
    }
    if missing := setup.handlers - found.keys():
        raise FlowForgeError(f"{', '.join(setup.sources)} held handler {min(missing)!r} only in the worker")
    return found


def _flush() -> None:
    """As the process may be killed at any moment."""
    for name in ("stdout", "stderr"):
        with contextlib.suppress(Exception):  # a handler may have done anything to it
            getattr(sys, name).flush()


def limit_memory(limit: int) -> None:
    """Let this process have no more than `limit` MiB of private memory, 0: no limit. What asks for more gets
    MemoryError, or in C what that library makes of it. Linux counts what a process was given, used or not.

    Raises FlowForgeError when too little would be left."""
    if limit == 0:
        return
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = limit * 1024 * 1024
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))
        bytearray(_LEAST_MEMORY * 1024 * 1024)
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        raise FlowForgeError(
            f"a memory limit of {limit} MiB leaves less than {_LEAST_MEMORY} MiB to handlers once they are "
            "imported"
        ) from None


def _make_room(raised: BaseException) -> None:
    """For the report of what ran out of memory: without the limit, and without what its frames hold."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    for each in causes(raised):
        traceback.clear_frames(each.__traceback__)


def _die_with(parent: int) -> None:
    """Let Linux kill this process when the worker ends, even while a handler holds the interpreter."""
    stopping.end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before


def main() -> None:
    """The process. Its arguments: its end of the socket to the worker, the worker's process id."""
    descriptor, parent = map(int, sys.argv[1:3])
    _die_with(parent)
    del sys.argv[1:]
    stopping.leave_to_worker()
    streams.never_wait()
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    os.register_at_fork(after_in_child=connection.close)  # that the socket ends with this process
    with contextlib.suppress(EOFError):
        Child(connection).run()
