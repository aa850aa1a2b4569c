"""Watching a run: the command `watch`, and what `trigger --wait` and the demo show while they wait."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
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
    print_json,
    run_argument,
    seconds,
    select,
    state_text,
)
from flowforge.cli.exits import EXIT_FAILED
from flowforge.errors import NotFound, WaitTimeout, first_line

if TYPE_CHECKING:
    from rich.console import Console, Group

    from flowforge import db

_POLL = 0.2
_STEP = 0.1  # a map in a pipe says how far it is at every tenth

_RUN = """
    select run_id, workflow, version, state, duration, task_runs, succeeded, failed, cancelled, skipped
    from flowforge.run_status where run_id = %s
"""
_TASKS = """
    select s.task_run_id, s.task, s.state, s.waits, s.attempt, s.max_attempts, s.duration, s.worker,
        s.progress, s.progress_message, s.map_count, s.error, e.done, e.failed
    from flowforge.task_run_status s
    left join (
        select m.task, count(*) filter (where m.finished_at is not null) as done,
            count(*) filter (where m.state = 'failed') as failed
        from flowforge.task_run_status m
        where m.run_id = %s and m.map_index is not null and not m.superseded group by m.task
    ) e on e.task = s.task
    where s.run_id = %s and s.map_index is null order by s.task_run_id
"""


@dataclass
class Snapshot:
    """A run and its tasks (maps as one row each) at one moment."""

    run: dict[str, Any]
    tasks: list[dict[str, Any]]

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
    while True:
        present = snapshot(connection, run_id)
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
                    out.print(change_line(change))
    assert last is not None  # noqa: S101 - snapshots yields at least once
    return last


@dataclass
class Changes:
    """What is new in a snapshot compared with those before it."""

    _states: dict[object, object] = field(default_factory=dict)
    _steps: dict[str, int] = field(default_factory=dict)

    def since(self, snapshot: Snapshot) -> Iterator[dict[str, Any]]:
        """The changes as documents: of tasks, of their progress, and of the run when it has ended."""
        run = snapshot.run
        run_changed = self._new(None, run["state"])
        if run_changed and not snapshot.ended:
            yield {"event": "run"} | run
        for task in snapshot.tasks:
            name = task["task"]
            if self._new(name, (task["state"], task["attempt"])) and task["state"] != "pending":
                kept = ("task", "state", "attempt", "duration", "worker", "error")
                yield {"event": "task", "run_id": run["run_id"]} | {key: task[key] for key in kept}
            fraction = _fraction(task)
            if fraction is not None and task["state"] in ("pending", "running"):
                step = int(fraction / _STEP)
                if step > self._steps.get(name, 0):
                    self._steps[name] = step
                    change = {"event": "progress", "run_id": run["run_id"], "task": name}
                    change |= {"done": task["done"], "total": task["map_count"]} if task["map_count"] else {}
                    yield change | {"fraction": fraction}
        if run_changed and snapshot.ended:
            yield {"event": "run"} | run

    def _new(self, key: object, value: object) -> bool:
        if self._states.get(key) == value:
            return False
        self._states[key] = value
        return True


def change_line(change: dict[str, Any]) -> str:
    """A change as a line of text."""
    if change["event"] == "progress":
        of = f" ({change['done']} of {change['total']})" if "total" in change else ""
        return f"{change['task']}: {change['fraction']:.0%}{of}"
    took = duration(change["duration"])
    after = f" after {took}" if took and change["state"] in ("succeeded", "failed", "cancelled") else ""
    if change["event"] == "run":
        return f"run {change['run_id']} of {change['workflow']}: {change['state']}{after}"
    attempt = f", attempt {change['attempt']}" if change["attempt"] > 1 else ""
    error = f": {first_line(change['error'])}" if change["error"] and change["state"] == "failed" else ""
    return f"{change['task']}: {change['state']}{after}{attempt}{error}"


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
        (run["workflow"], "bold"),
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
        table.add_row(
            _task_state(task), Text(task["task"]), _bar(task), Text(took or "", style="dim"), _note(task)
        )
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
        return Text(first_line(task["error"]), style="red", overflow="ellipsis", no_wrap=True)
    parts = []
    if task["map_count"] is not None:
        done = task["map_count"] if task["state"] == "succeeded" else task["done"] or 0
        parts.append(f"{done} of {task['map_count']}")
        if task["failed"]:
            parts.append(f"{task['failed']} failed")
    elif task["waits"] and task["state"] in ("pending", "ready"):
        parts.append(f"waits: {task['waits']}")
    if task["attempt"] > 1:
        of = f" of {task['max_attempts']}" if task["attempt"] <= task["max_attempts"] else ""
        parts.append(f"attempt {task['attempt']}{of}")
    if task["progress_message"] and task["state"] == "running":
        parts.append(task["progress_message"])
    return Text(", ".join(parts), style="dim", overflow="ellipsis", no_wrap=True)


def goes_on(run_id: int) -> str:
    """What to tell whoever no longer waits for a run."""
    return f"Run {run_id} goes on: {command(f'watch {run_id}')}, or {command(f'cancel {run_id}')}"


@contextmanager
def telling_how_to_go_on(run_id: int, timeout: float | None) -> Iterator[None]:
    """A wait for the run, whose end before the run's says how to go on."""
    try:
        yield
    except WaitTimeout:
        raise WaitTimeout(f"not ended after {timeout:g} s. {goes_on(run_id)}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(goes_on(run_id)) from None


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
