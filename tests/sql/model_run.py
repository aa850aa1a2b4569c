"""One run of the model: what it waits for, what its rules decide, how it is settled, retried and ended.

Nothing is counted: what a task run waits for, whether its rule holds and whether the run has ended are worked
out from the graph each time, so that no mistake in counting can be made twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

TERMINAL = frozenset({"succeeded", "failed", "cancelled", "skipped"})


def rule_met(rule: str, upstreams: list[str]) -> bool:
    """Whether a task runs, given the final states of its upstreams."""
    succeeded = upstreams.count("succeeded")
    failed = upstreams.count("failed") + upstreams.count("cancelled")
    return {
        "all_succeeded": succeeded == len(upstreams),
        "all_done": True,
        "any_failed": failed > 0,
        "any_succeeded": succeeded > 0,
        "none_failed": failed == 0,
    }[rule]


@dataclass(frozen=True)
class Task:
    """A task as defined. Durations are seconds; `after` names every upstream, the mapped one too."""

    name: str
    after: tuple[str, ...] = ()
    map: str | None = None
    rule: str = "all_succeeded"
    queue: str = "default"
    priority: int = 0
    max_attempts: int = 1
    delay: float = 1
    jitter: float = 0.25
    lease: float | None = None
    time_limit: float | None = None
    start_within: float | None = None
    max_reaps: int = 2

    def spec(self) -> dict[str, Any]:
        retry = {"max_attempts": self.max_attempts, "delay": self.delay, "backoff": 2, "jitter": self.jitter}
        spec: dict[str, Any] = {"name": self.name, "after": self.after, "queue": self.queue, "retry": retry}
        spec |= {"priority": self.priority, "max_reaps": self.max_reaps, "map": self.map}
        spec |= {"lease": self.lease, "time_limit": self.time_limit, "start_within": self.start_within}
        return spec | ({"when": self.rule} if self.after else {})

    def back_off(self, failures: int) -> tuple[timedelta, timedelta]:
        """Shortest and longest wait before the next attempt."""
        delay = self.delay * 2 ** (failures - 1)
        return timedelta(seconds=delay), timedelta(seconds=delay * (1 + self.jitter))


@dataclass
class TaskRun:
    id: int
    task: Task
    available_at: datetime  # the earliest time; `available_by` is the latest that it may be
    available_by: datetime
    priority: int = 0
    index: int | None = None  # None: the task's own row, not an element of a map
    generation: int = 0
    item: Any = None
    state: str = "pending"
    settled: bool = False
    attempt: int = 1
    failures: int = 0
    reaps: int = 0
    token: int = 0
    width: int | None = None  # elements of the map; None: not expanded
    dispatch: UUID | None = None
    earlier: set[UUID] = field(default_factory=set)  # dispatch ids of earlier attempts
    answered: set[int] = field(default_factory=set)  # tokens under which a finish was accepted
    claim: UUID | None = None
    lease: timedelta | None = None
    lease_end: datetime | None = None
    deadline: datetime | None = None
    start_by: datetime | None = None
    start_by_claimed: datetime | None = None  # as it was when it was claimed
    unknown_since: datetime | None = None
    in_line: bool = False  # eligible: waits since `available_at`
    reoffered: bool = False  # ready, but out of the window until it is due and has been moved into it
    output: Any = None

    def end_lease(self) -> None:
        self.claim = self.lease = self.lease_end = self.deadline = None

    def hold(self, now: datetime, lease: timedelta, *, shorten: bool) -> None:
        """Set the end of the lease, never past the time limit."""
        ends = [now + lease, *([self.deadline] if self.deadline else [])]
        self.lease = lease
        self.lease_end = min(ends) if shorten or not self.lease_end else max(self.lease_end, min(ends))

    def become(self, state: str) -> None:
        self.state = state
        self.start_by = None
        self.in_line = self.reoffered = False
        self.end_lease()

    def next_attempt(self) -> None:
        self.become("pending")
        self.settled = False
        if self.dispatch:
            self.earlier.add(self.dispatch)
            self.attempt += 1
        self.dispatch = None

    def offer(self, when: datetime) -> None:
        within = self.task.start_within
        self.start_by = when + timedelta(seconds=within) if within is not None else None

    def adopt(self, available_at: datetime, now: datetime) -> None:
        """Take over a time that was chosen within its bounds."""
        # By now it may have been in line, and wait for an upstream again.
        latest = now if self.state == "pending" else self.available_by
        assert self.available_at <= available_at <= max(self.available_by, latest), "delay out of its bounds"
        self.in_line = False
        if self.available_by > self.available_at and self.state == "ready" and self.unknown_since is None:
            self.offer(available_at)
        self.available_at = self.available_by = available_at

    def line_up(self, available_at: datetime, now: datetime) -> None:
        """Take over since when it is in line; a retry may have put it there anew."""
        assert self.available_at <= available_at <= now
        self.available_at = self.available_by = available_at
        self.in_line = True

    def enter_window(self, now: datetime) -> None:
        assert self.reoffered
        assert self.available_at <= now
        self.reoffered = False
        if self.start_by is not None:
            self.start_by += now - self.available_at

    def wait(self, now: datetime, shortest: timedelta, longest: timedelta) -> None:
        self.available_at, self.available_by = now + shortest, now + longest


@dataclass
class Run:
    id: int
    workflow: str
    tasks: dict[str, Task]
    rows: list[TaskRun]
    input: Any = None
    state: str = "running"
    cancelling: bool = False
    finished_at: datetime | None = None
    # Task and answer by request id.
    retries: dict[str, tuple[str | None, int]] = field(default_factory=dict)

    def own(self, name: str) -> TaskRun:
        return next(row for row in self.rows if row.task.name == name and row.index is None)

    def elements(self, own: TaskRun) -> list[TaskRun]:
        return [
            row
            for row in self.rows
            if row.task is own.task and row.index is not None and row.generation == own.generation
        ]

    def upstream(self, row: TaskRun) -> list[TaskRun]:
        return [self.own(name) for name in row.task.after]

    def unmet(self, row: TaskRun) -> int:
        if row.index is not None:
            return 0
        others = self.upstream(row) if row.width is None else self.elements(row)
        return sum(not other.settled for other in others)

    def waits_for_expansion(self, row: TaskRun) -> bool:
        own_of_map = row.task.map is not None and row.index is None
        return own_of_map and row.state == "pending" and row.width is None and self.unmet(row) == 0

    def below(self, names: Iterable[str]) -> set[str]:
        found = set(names)
        for name, task in self.tasks.items():  # in topological order
            if found & set(task.after):
                found.add(name)
        return found

    def judge(self) -> None:
        """Decide for what waits for nothing more: skipped by its rule, or the end of a map."""
        for row in self.rows:
            if row.index is None and row.state == "pending" and self.unmet(row) == 0:
                if row.width is not None:
                    elements = self.elements(row)
                    succeeded = all(element.state == "succeeded" for element in elements)
                    row.become("succeeded" if succeeded else "failed")
                    row.output = [element.output for element in elements] if succeeded else None
                elif row.task.after and not rule_met(
                    row.task.rule, [upstream.state for upstream in self.upstream(row)]
                ):
                    row.become("skipped")

    def settle(self, now: datetime, only: set[int] | None = None) -> int:
        """Count what has finished (`only` these, when a call is bounded), level by level, and end the run."""
        settled = 0
        while due := [
            row
            for row in self.rows
            if row.state in TERMINAL and not row.settled and (only is None or row.id in only)
        ]:
            for row in due:
                row.settled = True
            settled += len(due)
            self.judge()
        if settled and all(row.settled for row in self.rows):
            own = {row.state for row in self.rows if row.index is None}
            self.state = "cancelled" if "cancelled" in own else "failed" if "failed" in own else "succeeded"
            self.finished_at = now
        return settled

    def retry_part(self, from_task: str | None) -> set[str]:
        if from_task is not None:
            return self.below([from_task])
        part: set[str] = set()
        for name, task in self.tasks.items():
            state = self.own(name).state
            if state in ("failed", "cancelled") or (state == "skipped" and part & set(task.after)):
                part.add(name)
        return part

    def refuses_retry(self, from_task: str | None) -> bool:
        """Call on a settled run."""
        if self.state == "running" and self.cancelling:
            return True
        concerned = [self.own(name) for name in self.below(self.retry_part(from_task))]
        return any(
            row.state in ("ready", "running") or (row.state == "pending" and row.width is not None)
            for row in concerned
        )

    def retry(self, now: datetime, from_task: str | None) -> int:
        part = self.retry_part(from_task)
        reset: list[TaskRun] = []
        for name in part:
            own, upstream = self.own(name), set(self.tasks[name].after)
            again = self.tasks[name].map is not None and (from_task is not None or bool(part & upstream))
            if not again:
                reset += [e for e in self.elements(own) if e.state in ("failed", "cancelled")]
            if own.state in TERMINAL:
                reset.append(own)
                if again:
                    own.generation, own.width = own.generation + 1, None
        for row in reset:
            row.next_attempt()
            row.failures = row.reaps = 0
            row.output = row.unknown_since = None
            row.wait(now, timedelta(), timedelta())
        if part:
            self.state, self.cancelling, self.finished_at = "running", False, None
            self.judge()
            self.settle(now)
        return len(reset)
