"""Saying which attempts fail, in a bounded number of lines."""

from __future__ import annotations

import threading
import time

from flowforge import log
from flowforge.worker.execution import Execution, Finish, Release, Report

_log = log.of("worker")

MOST = 20
"""How many failures are told of in a second; the rest is counted."""

_MOST_CHARACTERS = 300


class Failures:
    """Logs what comes of handlers that failed. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._second = 0
        self._told = self._untold = 0

    def tell(self, execution: Execution, report: Report) -> None:
        """`report` was made of `execution`: log it if it is a failure."""
        if isinstance(report, Finish) and report.outcome == "failed":
            event, error = "attempt failed", report.error
        elif isinstance(report, Release) and report.reason == "crashed":
            event, error = "attempt broken off; giving the task run back", reason_of(execution)
        else:
            return
        with self._lock:
            self._turn(int(time.monotonic()))
            if self._told == MOST:
                self._untold += 1
                return
            self._told += 1
        _log.warning(event, **execution.claim.named(), error=_first_line(error))

    def flush(self) -> None:
        """Tell of what was only counted until now. To be called about once a second, and at the end."""
        with self._lock:
            self._turn(-1)

    def _turn(self, second: int) -> None:
        if second != self._second:
            if self._untold:
                _log.warning("more attempts failed", count=self._untold)
            self._second, self._told, self._untold = second, 0, 0


def reason_of(execution: Execution) -> str:
    """Why one that is given back as crashed is."""
    if execution.broken_off:
        return execution.broken_off
    if execution.commit_unknown:
        return "the connection of ctx.transaction() was lost while committing"
    if execution.lost_by is not None:
        return f"the connection of ctx.transaction() was lost: {execution.lost_by}"
    return execution.stop_reason.value if execution.stop_reason else ""


def _first_line(error: str | None) -> str:
    return (error or "").strip().partition("\n")[0][:_MOST_CHARACTERS]
