"""What is new in one look at a run compared with those before it, and how it is said."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flowforge.cli.common import duration, local_waits
from flowforge.cli.snapshots import ATTEMPTS_TOLD, Snapshot
from flowforge.errors import first_line

_STEP = 0.1  # a map in a pipe says how far it is at every tenth
_PATIENCE = 3.0  # seconds that the same is waited for before a pipe is told
_NAMES_TOLD = 5  # tasks that wait for the same thing and are named


@dataclass
class Changes:
    """What is new in a snapshot compared with those before it."""

    now: Callable[[], float] = time.monotonic
    _states: dict[object, object] = field(default_factory=dict)
    _steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    _progress: dict[str, tuple[float, str | None]] = field(default_factory=dict)
    _attempts: set[tuple[int, int]] | None = None
    _elements: Counter[str] = field(default_factory=Counter)
    _repeated: dict[str, int] = field(default_factory=dict)
    _waits: dict[str, tuple[str | None, float | None]] = field(default_factory=dict)

    def since(self, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
        """The changes as documents: of tasks, of attempts at them, of their progress, of what they wait for,
        and of the run when it has ended. A task comes after those it depends on, and after its attempts.
        """
        run = snapshot.run
        run_changed = self._new(None, run["state"])
        if run_changed and not snapshot.ended:
            yield {"event": "run"} | run
        attempts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for attempt in self._of_attempts(snapshot):
            attempts[attempt["task"]].append(attempt)
        for task in snapshot.tasks:  # in topological order, as their ids ascend
            for event, change in self._of_task(task, attempts[task["task"]]):
                yield {"event": event, "run_id": run["run_id"]} | change
        for waits, names in self._of_waits(snapshot).items():
            yield {"event": "waits", "run_id": run["run_id"], "tasks": names, "waits": waits}
        if run_changed and snapshot.ended:
            yield {"event": "run"} | run

    def _of_task(
        self, task: dict[str, Any], attempts: list[dict[str, Any]]
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new of one task, of its elements too, in the order in which it happened."""
        yield from (("attempt", attempt) for attempt in attempts)
        if repeated := self._of_repetitions(task):
            yield "repetitions", {"task": task["task"], "repeated": repeated}
        if self._new(task["task"], (task["state"], task["attempt"])) and task["state"] != "pending":
            kept = ("task", "state", "attempt", "duration", "worker", "error")
            yield "task", {key: task[key] for key in kept}
        if progress := self._of_progress(task):
            yield "progress", progress

    def _of_progress(self, task: dict[str, Any]) -> dict[str, Any] | None:
        """How far a task is, at every tenth; a map also when it is expanded, and each time that more of its
        elements run than ever, doubled."""
        fraction = fraction_of(task)
        if fraction is None or task["state"] not in ("pending", "running"):
            return None
        name, message, running = task["task"], task["progress_message"], task["running"] or 0
        change: dict[str, Any] = {"task": name, "fraction": fraction}
        if task["map_count"]:
            change |= {"done": task["done"] or 0, "total": task["map_count"], "running": running}
        if message is not None:
            change |= {"message": message}
        # Another message at the same place is another phase; one for each row would be too many.
        before = self._progress.get(name, (fraction, None))
        self._progress[name] = fraction, message
        is_phase = message is not None and before[0] == fraction and before[1] != message
        told = self._steps.get(name, (-1 if task["map_count"] else 0, 0))
        now = int(fraction / _STEP), running.bit_length()
        if not is_phase and now[0] <= told[0] and now[1] <= told[1]:
            return None
        self._steps[name] = now[0], max(now[1], told[1])
        return change

    def _of_attempts(self, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
        """New failed attempts; of a map's elements the first few. The first look tells those whose successors
        wait: what went before them is history.
        """
        first, known = self._attempts is None, self._attempts or set()
        self._attempts = known | {(each["task_run_id"], each["fencing_token"]) for each in snapshot.attempts}
        for each in snapshot.attempts:
            if (each["task_run_id"], each["fencing_token"]) in known or (first and not each["waiting"]):
                continue
            if each["map_index"] is not None:
                self._elements[each["task"]] += 1
                if self._elements[each["task"]] > ATTEMPTS_TOLD:
                    continue
            kept = ("task", "map_index", "attempt", "outcome", "error", "again_in")
            yield {key: each[key] for key in kept}

    def _of_repetitions(self, task: dict[str, Any]) -> int:
        """How many attempts at a map's elements another one followed, each time that has doubled, else 0."""
        doublings = ((task["repeated"] or 0) // ATTEMPTS_TOLD).bit_length()
        if doublings <= self._repeated.setdefault(task["task"], max(1, doublings)):
            return 0
        self._repeated[task["task"]] = doublings
        return int(task["repeated"])

    def _of_waits(self, snapshot: Snapshot) -> dict[str, list[str]]:
        """The tasks that have waited for the same thing for a while, by what that is."""
        found: dict[str, list[str]] = defaultdict(list)
        for task in snapshot.tasks:
            waits, now = _untold_waits(task), self.now()
            before, since = self._waits.get(task["task"], (None, None))
            if waits != before:
                self._waits[task["task"]] = waits, now
            elif waits is not None and since is not None and now - since >= _PATIENCE:
                self._waits[task["task"]] = waits, None  # told
                found[waits].append(task["task"])
        return found

    def untold(self, run_id: int) -> Iterator[dict[str, Any]]:
        """What tasks wait for that have not waited long enough for `since` to tell."""
        found: dict[str, list[str]] = defaultdict(list)
        for task, (waits, since) in self._waits.items():
            if waits is not None and since is not None:
                found[waits].append(task)
        for waits, names in found.items():
            yield {"event": "waits", "run_id": run_id, "tasks": names, "waits": waits}

    def _new(self, key: object, value: object) -> bool:
        if self._states.get(key) == value:
            return False
        self._states[key] = value
        return True


def change_line(change: dict[str, Any]) -> str:
    """A change as a line of text."""
    if change["event"] == "progress":
        if "total" in change:
            return f"{change['task']}: {elements_done(change['done'], change['total'], change['running'])}"
        message = f" {' '.join(change['message'].split())}" if "message" in change else ""
        return f"{change['task']}: {change['fraction']:.0%}{message}"
    if change["event"] == "waits":
        names = change["tasks"][:_NAMES_TOLD]
        more = f" and {left} more" if (left := len(change["tasks"]) - len(names)) else ""
        return f"{', '.join(names)}{more}: waits: {change['waits']}"
    if change["event"] == "repetitions":
        return f"{change['task']}: {change['repeated']} attempts at elements have failed or were lost so far"
    if change["event"] == "attempt":
        return _attempt_line(change)
    took = duration(change["duration"])
    after = f" after {took}" if took and change["state"] in ("succeeded", "failed", "cancelled") else ""
    if change["event"] == "run":
        return f"run {change['run_id']} of {change['workflow']}: {change['state']}{after}"
    attempt = f", attempt {change['attempt']}" if change["attempt"] > 1 else ""
    error = f": {first_line(change['error'])}" if change["error"] and change["state"] == "failed" else ""
    return f"{change['task']}: {change['state']}{after}{attempt}{error}"


def _attempt_line(change: dict[str, Any]) -> str:
    element = "" if change["map_index"] is None else f"[{change['map_index']}]"
    what = f"{change['task']}{element}: attempt {change['attempt']} {change['outcome'].replace('_', ' ')}"
    error = f": {first_line(change['error'])}" if change["error"] else ""
    left = change["again_in"]
    again = f"; again in {duration(left)}" if left and left.total_seconds() > 0 else ""
    return f"{what}{error}{again}"


def elements_done(done: int, total: int, running: int) -> str:
    """How far a map is."""
    return f"{done} of {total} done{f', {running} running' if running else ''}"


def is_expanded(task: dict[str, Any]) -> bool:
    return task["state"] == "pending" and task["map_count"] is not None


def shown_state(task: dict[str, Any]) -> str:
    """The state that is shown: a map of which something has begun is running."""
    return "running" if is_expanded(task) and (task["running"] or task["done"]) else str(task["state"])


def waits_of(task: dict[str, Any]) -> str | None:
    """What a task waits for; a map, when none of its elements is at work."""
    waits, at = task["waits"], task["available_at"]
    if is_expanded(task):
        waits, at = (None if task["running"] else task["next_waits"]), task["next_at"]
    elif task["state"] not in ("pending", "ready"):
        waits = None
    return None if waits is None else local_waits(waits, at)


def _untold_waits(task: dict[str, Any]) -> str | None:
    """What one that could go on waits for, and nothing else tells."""
    waits = waits_of(task)
    if not is_expanded(task) and (
        task["unmet"] or (waits and waits.startswith("until ") and task["attempt"] > 1)
    ):
        return None  # they are told of, or the attempt that failed is
    return waits


def fraction_of(task: dict[str, Any]) -> float | None:
    if task["map_count"]:
        return float(task["done"] or 0) / float(task["map_count"])
    return None if task["progress"] is None else float(task["progress"])
