"""Workers whose handlers run in processes of their own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from flowforge.definition import Workflow
from tests.python.workbench import Bench, RunningWorker
from tests.services.process import has_ended, wait_until

FLOWS = "tests.python.isolated_flows"
LEASE = 3600
"""So long that nothing which the tests wait for comes of its end."""


class Scene:
    """A bench, workers whose handlers are isolated, and the files by which handlers and test tell each
    other."""

    def __init__(self, bench: Bench, directory: Path) -> None:
        self.bench, self.directory, self.before = bench, directory, set[psutil.Process]()
        self._witness, self._go = directory / "witness", directory / "go"
        bench.execute("create table public.booked (value bigint)")

    def trigger(self, workflow: Workflow, **value: Any) -> int:
        self.bench.define(workflow)
        return self.bench.trigger(workflow, {"witness": str(self._witness), "go": str(self._go), **value})

    def pids(self) -> list[int]:
        """The processes of the executions so far."""
        return list(map(int, self._witness.read_text().split())) if self._witness.exists() else []

    def await_executions(self, count: int = 1) -> list[int]:
        wait_until(lambda: len(self.pids()) >= count, f"{count} executions")
        return self.pids()

    def go(self) -> None:
        self._go.touch()

    @contextlib.contextmanager
    def worker(self, *workflows: Workflow, **settings: Any) -> Iterator[RunningWorker]:
        """A worker for the time of the block, after which no process is left and nothing is broken."""
        given = {"isolation": "processes", "lease": LEASE, "sources": [FLOWS], **settings}
        self.before = set(psutil.Process().children())
        with self.bench.worker(*workflows, **given) as running:
            yield running
        assert not set(psutil.Process().children()) - self.before
        assert self.bench.violations() == []

    def run(self, workflow: Workflow, **value: Any) -> dict[str, Any]:
        """One run to its end; its task."""
        return self.ended(self.trigger(workflow, **value))

    def ended(self, run: int) -> dict[str, Any]:
        self.bench.wait_run(run)
        return self.bench.task(run, "task")


def gone(pid: int) -> bool:
    try:
        return has_ended(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True
