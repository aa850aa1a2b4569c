"""Watching a run: the command `watch`, and what `trigger --wait` and the demo show while they wait."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

from flowforge.cli.common import (
    STATES,
    command,
    counted,
    database,
    database_option,
    duration,
    json_option,
    local_waits,
    print_json,
    run_argument,
    seconds,
    select,
    state_text,
)
from flowforge.errors import NotFound, WaitTimeout, first_line
from flowforge.exits import EXIT_FAILED
from flowforge.log import visible

if TYPE_CHECKING:
    from rich.console import Console, Group

    from flowforge import db

_POLL = 0.2
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
    deadline = None if timeout is None else time.monotonic() + timeout
    executions: object = None
    while True:
        present = snapshot(connection, run_id)
        before = executions
        executions = [(each["attempt"], each["fencing_token"], each["repeated"]) for each in present.tasks]
        if executions != before:
            present.attempts = select(connection, _ATTEMPTS, [run_id, run_id])
        yield present
        if present.ended:
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout
        time.sleep(_POLL)


def follow(
    connection: db.Connection,
    run_id: int,
    *,
    out: Console,
    as_json: bool = False,
    timeout: float | None = None,
) -> Snapshot:
    """Shows the run until it has ended, and returns how it ended: a live picture on a terminal, one line for
    each change in a pipe, or one JSON document for each change. Raises NotFound, WaitTimeout.
    """
    last: Snapshot | None = None
    changes = Changes()
    if out.is_terminal and not as_json:
        from rich.live import Live

        with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
            for last in snapshots(connection, run_id, timeout):
                live.update(picture(last, max(8, out.size.height)), refresh=True)
    else:
        for last in snapshots(connection, run_id, timeout):
            for change in changes.since(last):
                if as_json:
                    print_json(change)
                else:
                    out.print(visible(change_line(change)))
    assert last is not None  # noqa: S101 - snapshots yields at least once
    return last


@dataclass
class Changes:
    """What is new in a snapshot compared with those before it."""

    now: Callable[[], float] = time.monotonic
    _states: dict[object, object] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)
    _progress: dict[str, tuple[float, str | None]] = field(default_factory=dict)
    _attempts: set[tuple[int, int]] | None = None
    _elements: Counter[str] = field(default_factory=Counter)
    _repeated: dict[str, int] = field(default_factory=dict)
    _waits: dict[str, tuple[str | None, float | None]] = field(default_factory=dict)

    def since(self, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
        """The changes as documents: of tasks, of attempts at them, of their progress, of what they wait for,
        and of the run when it has ended.
        """
        run = snapshot.run
        run_changed = self._new(None, run["state"])
        if run_changed and not snapshot.ended:
            yield {"event": "run"} | run
        head = {"event": "attempt", "run_id": run["run_id"]}
        attempts = [head | change for change in self._of_attempts(snapshot)]
        yield from (change for change in attempts if change["map_index"] is None)
        for task in snapshot.tasks:
            name = task["task"]
            if self._new(name, (task["state"], task["attempt"])) and task["state"] != "pending":
                kept = ("task", "state", "attempt", "duration", "worker", "error")
                yield {"event": "task", "run_id": run["run_id"]} | {key: task[key] for key in kept}
            fraction = _fraction(task)
            if fraction is not None and task["state"] in ("pending", "running"):
                step, message = int(fraction / _STEP), task["progress_message"]
                # Another message at the same place is another phase; one for each row would be too many.
                before = self._progress.get(name, (fraction, None))
                self._progress[name] = fraction, message
                moved = step > self._steps.get(name, 0)
                if moved or (message is not None and before[0] == fraction and before[1] != message):
                    self._steps[name] = step
                    change = {"event": "progress", "run_id": run["run_id"], "task": name}
                    change |= {"done": task["done"], "total": task["map_count"]} if task["map_count"] else {}
                    change |= {"message": message} if message is not None else {}
                    yield change | {"fraction": fraction}
        yield from (change for change in attempts if change["map_index"] is not None)
        for name, count in self._of_repetitions(snapshot).items():
            yield {"event": "repetitions", "run_id": run["run_id"], "task": name, "repeated": count}
        for waits, names in self._of_waits(snapshot).items():
            yield {"event": "waits", "run_id": run["run_id"], "tasks": names, "waits": waits}
        if run_changed and snapshot.ended:
            yield {"event": "run"} | run

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

    def _of_repetitions(self, snapshot: Snapshot) -> dict[str, int]:
        """How many attempts at a map's elements another one followed, each time that has doubled."""
        found = {}
        for task in snapshot.tasks:
            doublings = ((task["repeated"] or 0) // _ATTEMPTS_TOLD).bit_length()
            if doublings > self._repeated.setdefault(task["task"], max(1, doublings)):
                self._repeated[task["task"]] = doublings
                found[task["task"]] = task["repeated"]
        return found

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

    def _new(self, key: object, value: object) -> bool:
        if self._states.get(key) == value:
            return False
        self._states[key] = value
        return True


def change_line(change: dict[str, Any]) -> str:
    """A change as a line of text."""
    if change["event"] == "progress":
        of = f" ({change['done']} of {change['total']})" if "total" in change else ""
        message = f" {' '.join(change['message'].split())}" if "message" in change else ""
        return f"{change['task']}: {change['fraction']:.0%}{of}{message}"
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


def picture(snapshot: Snapshot, height: int) -> Group:
    """A snapshot for a terminal of that height: the run, and its tasks or the most telling of them."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    run = snapshot.run
    title = Text.assemble(
        ("run ", "dim"),
        (str(run["run_id"]), "bold"),
        ("  ", ""),
        (visible(run["workflow"]), "bold"),
        (f" v{run['version']}   ", "dim"),
        state_text(run["state"]),
        (f"   {duration(run['duration']) or ''}", "dim"),
    )
    room = height - 4
    shown = snapshot.tasks
    if len(shown) > room:
        rank = {"failed": 0, "running": 1, "ready": 2, "cancelled": 3, "pending": 5}
        busy = sorted(shown, key=lambda task: 1 if _expanded(task) else rank.get(task["state"], 4))
        kept = {task["task_run_id"] for task in busy[: room - 1]}
        shown = [task for task in shown if task["task_run_id"] in kept]
    table = Table.grid(padding=(0, 2, 0, 0))
    for task in shown:
        took = duration(task["duration"])
        name = Text(visible(task["task"]))
        table.add_row(_task_state(task), name, _bar(task), Text(took or "", style="dim"), _note(task))
    parts: list[Any] = [title, table]
    if len(shown) < len(snapshot.tasks):
        seen = {task["task_run_id"] for task in shown}
        rest = Counter(task["state"] for task in snapshot.tasks if task["task_run_id"] not in seen)
        states = ", ".join(f"{count} {state}" for state, count in sorted(rest.items()))
        parts.append(Text(f"… and {counted(rest.total(), 'more task')}: {states}", style="dim"))
    return Group(*parts)


def _expanded(task: dict[str, Any]) -> bool:
    return task["state"] == "pending" and task["map_count"] is not None


def _task_state(task: dict[str, Any]) -> Any:
    return state_text("running" if _expanded(task) else task["state"])


def _waits(task: dict[str, Any]) -> str | None:
    """What a task that could go on waits for; a map, when none of its elements is at work."""
    waits, at = task["waits"], task["available_at"]
    if _expanded(task):
        waits, at = (None if task["running"] else task["next_waits"]), task["next_at"]
    elif task["state"] not in ("pending", "ready") or task["unmet"]:
        waits = None
    elif waits and waits.startswith("until ") and task["attempt"] > 1:
        waits = None  # told with the attempt that failed
    return None if waits is None else local_waits(waits, at)


def _fraction(task: dict[str, Any]) -> float | None:
    if task["map_count"]:
        return float(task["done"] or 0) / float(task["map_count"])
    return None if task["progress"] is None else float(task["progress"])


def _bar(task: dict[str, Any]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    fraction = _fraction(task)
    if fraction is None:
        return Text("")
    done = task["state"] in STATES and task["state"] not in ("pending", "ready", "running")
    style = "green" if task["state"] == "succeeded" else "red" if task["failed"] else "cyan"
    return ProgressBar(
        total=1.0, completed=1.0 if done else fraction, width=28, complete_style=style, finished_style=style
    )


def _note(task: dict[str, Any]) -> Any:
    from rich.text import Text

    if task["state"] == "failed" and task["error"]:
        error = visible(first_line(task["error"]))
        return Text(error, style="red", overflow="ellipsis", no_wrap=True)
    parts = []
    if task["map_count"] is not None:
        done = task["map_count"] if task["state"] == "succeeded" else task["done"] or 0
        parts.append(f"{done} of {task['map_count']}")
        if task["failed"]:
            parts.append(f"{task['failed']} failed")
    elif task["waits"] and task["state"] in ("pending", "ready"):
        parts.append(f"waits: {local_waits(task['waits'], task['available_at'])}")
    if task["attempt"] > 1:
        of = f" of {task['max_attempts']}" if task["attempt"] <= task["max_attempts"] else ""
        parts.append(f"attempt {task['attempt']}{of}")
    if task["progress_message"] and task["state"] == "running":
        parts.append(" ".join(task["progress_message"].split()))
    return Text(visible(", ".join(parts)), style="dim", overflow="ellipsis", no_wrap=True)


def goes_on(run_id: int, may_watch: bool = True) -> str:
    """What to tell whoever no longer waits for a run, and perhaps may not watch it."""
    watching = f"{command(f'watch {run_id}')}{'' if may_watch else ' (takes flowforge_reader)'}"
    return f"Run {run_id} goes on: {watching}, or {command(f'cancel {run_id}')}"


@contextmanager
def telling_how_to_go_on(run_id: int, timeout: float | None, may_watch: bool = True) -> Iterator[None]:
    """A wait for the run, whose end before the run's says how to go on."""
    try:
        yield
    except WaitTimeout:
        raise WaitTimeout(f"not ended after {timeout:g} s. {goes_on(run_id, may_watch)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(goes_on(run_id, may_watch)) from None


@click.command()
@run_argument
@click.option("--timeout", type=seconds, metavar="TIME", help="Stop watching after this long (exit code 9).")
@database_option
@json_option
@click.pass_context
def watch(
    ctx: click.Context, run_id: int, timeout: float | None, database_url: str | None, as_json: bool
) -> None:
    """Watch a run until it has ended.

    A live picture on a terminal; one line for each change in a pipe; with --json one document for each
    change. Exit code 0 when the run succeeded, 1 when it failed or was cancelled.

    \b
    Examples:
      flowforge watch 12
      flowforge watch 12 --json | jq 'select(.event == "run")'
    """
    from flowforge.cli.common import console

    with telling_how_to_go_on(run_id, timeout), database(database_url) as connection:
        last = follow(connection, run_id, out=console(), as_json=as_json, timeout=timeout)
    if last.run["state"] != "succeeded":
        ctx.exit(EXIT_FAILED)
