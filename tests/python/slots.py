"""An executor of handlers, and what it reported."""

import errno
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from flowforge.worker.claim import Claim
from flowforge.worker.execution import Execution, Finish, Report
from flowforge.worker.executor import Executor
from tests.services.process import wait_until

LIMIT = 1000
OUT_OF_TIME = Finish("failed", error=f"time limit of {LIMIT} s exceeded")


def an_execution(handler: str = "h", time_limit: float | None = None) -> Execution:
    claim = Claim(
        1, uuid.uuid4(), 1, 1, 1, "w", "t", handler, "null", "{}", "{}", None, None, 30.0, time_limit, 0.0
    )
    return Execution(claim, time.monotonic(), time.monotonic())


def no_descriptors() -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


class Slots:
    """An executor with what it reported."""

    def __init__(self, slots: int = 2, **handlers: Callable[[Any], Any]) -> None:
        self.reports: list[tuple[Execution, Report]] = []
        self.broken: list[str] = []
        self.executor = Executor(
            handlers, slots, self._context, lambda *each: self.reports.append(each), self.broken.append
        )

    def _context(self, execution: Execution) -> SimpleNamespace:
        return SimpleNamespace(execution=execution, check=execution.raise_if_stopped)

    def start(self, handler: str, time_limit: float | None = None) -> Execution:
        assert self.executor.reserve(1, timeout=10) == 1
        execution = an_execution(handler, time_limit)
        self.executor.start([execution])
        return execution

    def report(self, execution: Execution) -> Report:
        def mine() -> list[Report]:
            return [report for of, report in self.reports if of is execution]

        wait_until(lambda: bool(mine()), "a report")
        [report] = mine()
        return report

    def run(self, handler: str, time_limit: float | None = None) -> Report:
        return self.report(self.start(handler, time_limit))

    def run_out(self, execution: Execution) -> None:
        """The time limit passes now, rather than so many seconds after the start of a thread that may take
        longer."""
        execution.deadline = execution.alarm = time.monotonic()
        self.executor._look.set()

    def free(self) -> int:
        count = self.executor.reserve(1000, timeout=0)
        self.executor.give_back(count)
        return count
