"""The command show: one run, its tasks, and what became of their executions."""

from __future__ import annotations

from typing import Any

import click

from flowforge.cli.changes import elements_done, is_expanded, shown_state, waits_of
from flowforge.cli.common import (
    command,
    console,
    counted,
    database,
    database_option,
    duration,
    json_option,
    local_time,
    local_waits,
    print_json,
    print_json_text,
    print_table,
    run_argument,
    say,
    select,
    state_text,
)
from flowforge.cli.snapshots import ELEMENTS
from flowforge.errors import FlowForgeError, NotFound, first_line
from flowforge.log import visible

# So many errors are shown in full. Whoever needs those of a whole map takes --json.
_FULL_ERRORS = 3
_CANCELLED = "the run was cancelled"

_REPEATED = """
    select count(distinct a.task_run_id) as elements from flowforge.attempt_status a
    join flowforge.task_run_status s on s.task_run_id = a.task_run_id
    where a.run_id = %s and s.run_id = %s and a.map_index is not null
        and not s.superseded and s.state <> 'failed' and a.fencing_token < s.fencing_token
        and a.worker is not null -- else it was cancelled before anybody had claimed it
"""


@click.command()
@run_argument
@click.option("--elements", is_flag=True, help="List every element of maps, not only the failed ones.")
@click.option("--input", "with_input", is_flag=True, help="Print only the run's input, as JSON.")
@click.option("--output", "task", metavar="TASK", help="Print only this task's output, as JSON.")
@database_option
@json_option
def show(
    run_id: int,
    elements: bool,
    with_input: bool,
    task: str | None,
    database_url: str | None,
    as_json: bool,
) -> None:
    """Show a run and its tasks.

    Their states, what each waits for, attempts, durations, workers and errors; of a map its own row, and the
    elements that failed. Then how earlier executions of them ended.

    \b
    Examples:
      flowforge show 12
      flowforge show 12 --output report > report.json
      flowforge show 12 --input
    """
    if with_input:
        _print_input(database_url, run_id)
        return
    if task is not None:
        _print_output(database_url, run_id, task)
        return
    with database(database_url) as connection:
        found = select(connection, "select * from flowforge.run_status where run_id = %s", [run_id])
        if not found:
            raise NotFound(f"there is no run {run_id}; see which there are: {command('runs')}")
        tasks = select(
            connection,
            "select * from flowforge.task_run_status where run_id = %s "
            "and (map_index is null or %s or state = 'failed' and not superseded) order by task_run_id",
            [run_id, elements],
        )
        attempts = select(
            connection,
            "select * from flowforge.attempt_status where run_id = %s order by task_run_id, fencing_token",
            [run_id],
        )
        [repeated] = select(connection, _REPEATED, [run_id, run_id])
        maps = {each["task"]: each for each in select(connection, ELEMENTS, [run_id])}
    [run] = found
    if as_json:
        print_json({"run": run, "tasks": tasks, "attempts": attempts})
        return
    _print_run(run)
    click.echo()
    columns = {"task": "task", "state": "state", "attempt": "attempt", "took": "duration", "worker": "worker"}
    print_table(columns | {"note": "notes"}, [_task_row(each, maps) for each in tasks])
    # Of what waits for a worker again, the last execution is an earlier one too, of the same token.
    shown = {
        each["task_run_id"]: (each["attempt"], each["fencing_token"] + (each["state"] == "ready"))
        for each in tasks
    }
    earlier = [
        each
        for each in attempts
        if (each["attempt"], each["fencing_token"]) < shown.get(each["task_run_id"], (0, 0))
    ]
    if earlier:
        click.echo("\nEarlier executions:")
        columns = {"task": "task", "attempt": "attempt", "outcome": "outcome", "took": "duration"}
        print_table(columns | {"worker": "worker", "note": "notes"}, [_attempt_row(each) for each in earlier])
    if not elements and repeated["elements"]:
        more = command(f"show {run_id} --elements")
        say(f"\n{counted(repeated['elements'], 'element')} took more than one execution; {more}")
    _print_errors(run_id, tasks, attempts)


def _print_input(database_url: str | None, run_id: int) -> None:
    with database(database_url) as connection:
        query = "select input::text as input from flowforge.run_input where run_id = %s"
        found = select(connection, query, [run_id])
    if not found:
        raise NotFound(f"there is no run {run_id}; see which there are: {command('runs')}")
    print_json_text(found[0]["input"])


def _print_output(database_url: str | None, run_id: int, task: str) -> None:
    with database(database_url, "flowforge_client") as connection:
        [found] = select(
            connection,
            "select flowforge.task_output(run_id => %s::bigint, task => %s)::text as output",
            [run_id, task],
        )
    if found["output"] is None:  # an output that is null would be the text of it
        raise FlowForgeError(f"task {task!r} of run {run_id} has not succeeded: it has no output")
    print_json_text(found["output"])


def _print_errors(run_id: int, tasks: list[dict[str, Any]], attempts: list[dict[str, Any]]) -> None:
    """What the table does not say of the errors, of the latest of them only: it has the first line of each
    failed task."""
    # A task that is attempted again keeps the error of the attempt before.
    made_by = {(each["task_run_id"], each["error"]): each["attempt"] for each in attempts}
    told = [each for each in tasks if each["error"] and _is_more_to_tell(each)]
    # What has not ended was attempted before, and has the latest error of all.
    told.sort(key=lambda each: (each["finished_at"] is None, each["finished_at"] or 0))
    for each in told[-_FULL_ERRORS:]:
        click.echo()
        attempt = made_by.get((each["task_run_id"], each["error"]), each["attempt"])
        click.secho(visible(f"{_task_name(each)}, attempt {attempt}:"), bold=True)
        say("\n".join(f"  {line}".rstrip() for line in visible(each["error"].strip()).split("\n")))
    if (left := len(told) - _FULL_ERRORS) > 0:
        say(f"\nLeft out: {counted(left, 'more error')}; {command(f'show {run_id} --json')}")


def _is_more_to_tell(task: dict[str, Any]) -> bool:
    error = task["error"].strip()
    if task["state"] == "failed":
        return "\n" in error
    return not (task["state"] == "cancelled" and error == _CANCELLED)


def _print_run(run: dict[str, Any]) -> None:
    from rich.text import Text

    out = console()
    facts: dict[str, Any] = {
        "state": state_text(run["state"]) if out.is_terminal else run["state"],
        "triggered": local_time(run["created_at"]),
        "finished": local_time(run["finished_at"]),
        "duration": duration(run["duration"]),
        "priority": run["priority"] or None,
        "key": run["idempotency_key"],
        "labels": ", ".join(f"{key}={value}" for key, value in run["labels"].items()),
        "cancelled": ": ".join(filter(None, (local_time(run["cancel_requested_at"]), run["cancel_reason"]))),
    }
    out.print(
        Text.assemble(
            ("Run ", ""),
            (str(run["run_id"]), "bold"),
            " of ",
            (visible(run["workflow"]), "bold"),
            f" v{run['version']}",
        )
    )
    for name, value in facts.items():
        if value:
            shown = value if isinstance(value, Text) else visible(" ".join(str(value).split()))
            out.print(Text.assemble((f"  {name:<10} ", "dim"), shown))


def _task_name(task: dict[str, Any]) -> str:
    return task["task"] if task["map_index"] is None else f"{task['task']}[{task['map_index']}]"


def _task_row(task: dict[str, Any], maps: dict[str, dict[str, Any]]) -> dict[str, object]:
    notes = []
    none = {"done": 0, "running": 0, "next_waits": None, "next_at": None}
    elements = maps.get(task["task"], none)
    if is_expanded(task):
        task = task | elements
        notes.append(elements_done(elements["done"], task["map_count"], elements["running"]))
    if waits := waits_of(task):
        notes.append(f"waits: {waits}")
    elif task["waits"] and not is_expanded(task):
        notes.append(local_waits(task["waits"], task["lease_expires_at"]))
    if task["map_count"] is not None and task["state"] != "pending":
        notes.append(counted(task["map_count"], "element"))
        if elements["running"]:  # of a run that is being cancelled
            notes[-1] += f", {elements['running']} still running"
    if task["progress"] is not None and task["state"] == "running":
        notes.append(f"{task['progress']:.0%} {task['progress_message'] or ''}".strip())
    if task["reaps"] and task["state"] != "failed":  # else the error says it
        notes.append(f"taken back {task['reaps']} of at most {task['max_reaps']} times from a lost worker")
    if task["error"] and task["state"] == "failed":
        notes.append(first_line(task["error"])[:200])
    ran = task["started_at"] is not None
    # Each retry of the run grants a budget of its own, which the number goes beyond.
    of = f"/{task['max_attempts']}" if task["attempt"] <= task["max_attempts"] else ""
    return {
        "task": _task_name(task),
        "state": state_text(shown_state(task)),
        "attempt": f"{task['attempt']}{of}" if ran else None,
        "took": duration(task["duration"]),
        "worker": task["worker"],
        "note": "; ".join(notes),
    }


def _attempt_row(attempt: dict[str, Any]) -> dict[str, object]:
    return {
        "task": _task_name(attempt),
        "attempt": str(attempt["attempt"]),
        "outcome": attempt["outcome"],
        "took": duration(attempt["duration"]),
        "worker": attempt["worker"],
        "note": first_line(attempt["error"] or "")[:200],
    }
