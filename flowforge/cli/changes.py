"""What there is to tell of a run that is under way: how it stands, again and again, and what is new."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowforge.cli.common import ANSWER_LIMIT, command, duration, local_waits, select
from flowforge.errors import DatabaseUnavailable, FlowForgeError, NotFound, WaitTimeout, first_line

if TYPE_CHECKING:
    from flowforge import db

_POLL = 0.2
_LONGEST_PAUSE = 5.0  # while the database is away
_LAST_LOOK = 2.0  # seconds that a look may take beyond the end of the waiting
_STEP = 0.1  # a map in a pipe says how far it is at every tenth
_PATIENCE = 3.0  # seconds that the same is waited for before a pipe is told
_ATTEMPTS_TOLD = 5  # failed attempts at the elements of one map that are told one by one
_NAMES_TOLD = 5  # tasks that wait for the same thing and are named

_RUN = """
    select run_id, workflow, version, state, duration, task_runs, succeeded, failed, cancelled, skipped
    from flowforge.run_status where run_id = %s
"""
_TASKS = """
    select s.task_run_id, s.task, s.state, s.waits, s.attempt, s.max_attempts, s.duration, s.worker,
        s.progress, s.progress_message, s.map_count, s.unmet, s.available_at, s.fencing_token, s.error,
        e.done, e.failed, e.running, e.next_waits, e.next_at, e.repeated
    from flowforge.task_run_status s
    left join (
        select m.task, count(*) filter (where m.finished_at is not null) as done,
            count(*) filter (where m.state = 'failed') as failed,
            count(*) filter (where m.state = 'running') as running,
            min(m.waits) filter (where m.state in ('pending', 'ready')) as next_waits,
            min(m.available_at) filter (where m.state in ('pending', 'ready')) as next_at,
            sum(m.attempt - 1 + m.reaps)::bigint as repeated
        from flowforge.task_run_status m
        where m.run_id = %s and m.map_index is not null and not m.superseded group by m.task
    ) e on e.task = s.task
    where s.run_id = %s and s.map_index is null order by s.task_run_id
"""
# The last ones, at each task and at the elements of each map, of those attempts that another one follows.
_ATTEMPTS = f"""
    select f.* from (
        select a.task_run_id, a.task, a.map_index, a.attempt, a.fencing_token, a.outcome, a.error, a.ended_at,
            l.waiting,
            case when l.waiting then s.available_at - flowforge._reading() end as again_in,
            row_number() over (partition by a.task, a.map_index is null order by a.ended_at desc) as place
        from flowforge.attempt_status a
        join flowforge.task_run_status s on s.task_run_id = a.task_run_id
        cross join lateral (
            select s.state in ('pending', 'ready') and a.fencing_token = s.fencing_token as waiting) l
        where a.run_id = %s and s.run_id = %s and (l.waiting or a.fencing_token < s.fencing_token)
            and a.outcome in ('failed', 'timed_out', 'lease_expired', 'crashed', 'released')) f
    where f.place <= {_ATTEMPTS_TOLD} order by f.ended_at
"""  # noqa: S608 - a constant


@dataclass
class Snapshot:
    """A run and its tasks (maps as one row each) at one moment."""

    run: dict[str, Any]
    tasks: list[dict[str, Any]]
    attempts: list[dict[str, Any]] = field(default_factory=list)  # that failed, and that another one follows

    @property
    def ended(self) -> bool:
        return self.run["state"] in ("succeeded", "failed", "cancelled")


def snapshot(connection: db.Connection, run_id: int) -> Snapshot:
    """The run as it stands. Raises NotFound."""
    runs = select(connection, _RUN, [run_id])
    if not runs:
        raise NotFound(f"there is no run {run_id}; see which there are: {command('runs')}")
    return Snapshot(runs[0], select(connection, _TASKS, [run_id, run_id]))


def snapshots(connection: db.Connection, run_id: int, timeout: float | None = None) -> Iterator[Snapshot]:
    """The run as it stands, again and again; the last one has ended. Raises NotFound, WaitTimeout."""
    from flowforge.cutoff import answered_within

    deadline = None if timeout is None else time.monotonic() + timeout
    executions: object = None
    while True:
        left = ANSWER_LIMIT if deadline is None else max(0.0, deadline - time.monotonic()) + _LAST_LOOK
        # Of one moment, or an attempt may show whose upstreams do not.
        with answered_within(connection, min(ANSWER_LIMIT, left)), connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            present = snapshot(connection, run_id)
            before = executions
            executions = [
                (each["attempt"], each["fencing_token"], each["repeated"]) for each in present.tasks
            ]
            if executions != before:
                present.attempts = select(connection, _ATTEMPTS, [run_id, run_id])
        yield present
        if present.ended:
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout
        time.sleep(_POLL)


def lasting_snapshots(
    connect: Callable[[float | None], AbstractContextManager[db.Connection]],
    run_id: int,
    timeout: float | None,
    tell: Callable[[str], object],
    found: bool = False,
) -> Iterator[Snapshot]:
    """The same on connections of `connect`, which is told how many seconds are left: once the run was found,
    or with `found`, a database that is away is waited for, and `tell` is told so, and when it is back. Raises
    WaitTimeout, FlowForgeError."""
    from flowforge.db import Backoff

    deadline = None if timeout is None else time.monotonic() + timeout
    backoff = Backoff(cap=_LONGEST_PAUSE)
    away = False
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            with connect(left) as connection:
                for present in snapshots(connection, run_id, left):
                    if away:
                        tell("The database is back.")
                    found, away = True, False
                    backoff.reset()
                    yield present
            return
        except DatabaseUnavailable as error:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0:
                raise WaitTimeout from error
            if not found:
                raise
            if not away:
                away = True
                tell(f"Waiting for the database to come back: {error}")
            pause = backoff.next()
            time.sleep(pause if left is None else min(pause, left))
        except WaitTimeout:
            raise
        except FlowForgeError as error:
            if found:
                error.add_note(goes_on(run_id))
            raise


def goes_on(run_id: int, may_watch: bool = True) -> str:
    """What to tell whoever no longer waits for a run, and perhaps may not watch it."""
    watching = f"{command(f'watch {run_id}')}{'' if may_watch else ' (takes flowforge_reader)'}"
    return f"Run {run_id} goes on: {watching}, or {command(f'cancel {run_id}')}"


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
                if self._elements[each["task"]] > _ATTEMPTS_TOLD:
                    continue
            kept = ("task", "map_index", "attempt", "outcome", "error", "again_in")
            yield {key: each[key] for key in kept}

    def _of_repetitions(self, task: dict[str, Any]) -> int:
        """How many attempts at a map's elements another one followed, each time that has doubled, else 0."""
        doublings = ((task["repeated"] or 0) // _ATTEMPTS_TOLD).bit_length()
        if doublings <= self._repeated.setdefault(task["task"], max(1, doublings)):
            return 0
        self._repeated[task["task"]] = doublings
        return int(task["repeated"])

    def _of_waits(self, snapshot: Snapshot) -> dict[str, list[str]]:
        """The tasks that have waited for the same thing for a while, by what that is."""
        found: dict[str, list[str]] = defaultdict(list)
        for task in snapshot.tasks:
            waits, now = _waits(task), self.now()
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


def _waits(task: dict[str, Any]) -> str | None:
    """What a task that could go on waits for; a map, when none of its elements is at work."""
    waits, at = task["waits"], task["available_at"]
    if is_expanded(task):
        waits, at = (None if task["running"] else task["next_waits"]), task["next_at"]
    elif task["state"] not in ("pending", "ready") or task["unmet"]:
        waits = None
    elif waits and waits.startswith("until ") and task["attempt"] > 1:
        waits = None  # told with the attempt that failed
    return None if waits is None else local_waits(waits, at)


def fraction_of(task: dict[str, Any]) -> float | None:
    if task["map_count"]:
        return float(task["done"] or 0) / float(task["map_count"])
    return None if task["progress"] is None else float(task["progress"])
