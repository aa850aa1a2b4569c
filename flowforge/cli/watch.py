"""Watching a run: the command `watch`, and what `trigger --wait` and the demo show while they wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from flowforge.cli.changes import Changes, change_line, fraction_of, shown_state, waits_of
from flowforge.cli.common import (
    STATES,
    console,
    counted,
    database,
    database_option,
    duration,
    find_database,
    json_option,
    print_json,
    run_argument,
    say,
    seconds,
    state_text,
)
from flowforge.cli.snapshots import Snapshot, goes_on, lasting_snapshots
from flowforge.errors import DatabaseUnavailable, WaitTimeout, first_line
from flowforge.exits import EXIT_FAILED
from flowforge.log import visible

if TYPE_CHECKING:
    from rich.console import Console, Group


def follow(looks: Iterator[Snapshot], *, out: Console, as_json: bool = False) -> Snapshot:
    """Shows the run of `looks` until it has ended, and returns how it ended: a live picture on a terminal,
    one line for each change in a pipe, or one JSON document for each change. Raises what `looks` raises.
    """
    last: Snapshot | None = None
    changes = Changes()
    if out.is_terminal and not as_json:
        from rich.live import Live

        with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
            for last in looks:
                live.update(picture(last, max(8, out.size.height)), refresh=True)
    else:

        def tell(found: Iterator[dict[str, Any]]) -> None:
            for change in found:
                if as_json:
                    print_json(change)
                else:
                    out.print(visible(change_line(change)))

        try:
            for last in looks:
                tell(changes.since(last))
        except WaitTimeout:
            if last is not None:
                tell(changes.untold(last.run["run_id"]))
            raise
    assert last is not None  # noqa: S101 - there is one at least
    return last


def looks_at(
    run_id: int,
    database_url: str | None,
    timeout: float | None,
    *,
    out: Console,
    as_json: bool = False,
    found: bool = False,
) -> Iterator[Snapshot]:
    """The run for `follow`, through outages of the database, of which standard error is told, or a terminal
    above the picture; the first look too where the run is known to be there. Raises FlowForgeError."""
    url = find_database(database_url).database_url  # which `up`, while it is away, does not tell

    def tell(text: str) -> None:
        if out.is_terminal and not as_json:
            out.print(visible(text))
        else:
            say(text, err=True)

    return lasting_snapshots(lambda left: database(url, within=left), run_id, timeout, tell, found)


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
        busy = sorted(shown, key=lambda task: rank.get(shown_state(task), 4))
        kept = {task["task_run_id"] for task in busy[: room - 1]}
        shown = [task for task in shown if task["task_run_id"] in kept]
    table = Table.grid(padding=(0, 2, 0, 0))
    for task in shown:
        took = duration(task["duration"])
        name = Text(visible(task["task"]))
        state = state_text(shown_state(task))
        table.add_row(state, name, _bar(task), Text(took or "", style="dim"), _note(task))
    parts: list[Any] = [title, table]
    if len(shown) < len(snapshot.tasks):
        seen = {task["task_run_id"] for task in shown}
        rest = Counter(shown_state(task) for task in snapshot.tasks if task["task_run_id"] not in seen)
        states = ", ".join(f"{count} {state}" for state, count in sorted(rest.items()))
        parts.append(Text(f"… and {counted(rest.total(), 'more task')}: {states}", style="dim"))
    return Group(*parts)


def _bar(task: dict[str, Any]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    fraction = fraction_of(task)
    if fraction is None or shown_state(task) == "pending":  # what it waits for needs the room
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
    if waits := waits_of(task):
        parts.append(f"waits: {waits}")
    if task["attempt"] > 1:
        of = f" of {task['max_attempts']}" if task["attempt"] <= task["max_attempts"] else ""
        parts.append(f"attempt {task['attempt']}{of}")
    if task["progress_message"] and task["state"] == "running":
        parts.append(" ".join(task["progress_message"].split()))
    return Text(visible(", ".join(parts)), style="dim", overflow="ellipsis", no_wrap=True)


@contextmanager
def telling_how_to_go_on(run_id: int, timeout: float | None, may_watch: bool = True) -> Iterator[None]:
    """A wait for the run, whose end before the run's says how to go on."""
    try:
        yield
    except WaitTimeout as error:
        away = error.__cause__
        if not isinstance(away, DatabaseUnavailable):
            raise WaitTimeout(f"not ended after {timeout:g} s. {goes_on(run_id, may_watch)}") from None
        unknown = f"as far as is known: {away}{'' if str(away).endswith('?') else '.'}"
        raise WaitTimeout(f"not ended after {timeout:g} s, {unknown} {goes_on(run_id, may_watch)}") from away
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
    change. A database that goes away is waited for. Exit code 0 when the run succeeded, 1 when it failed
    or was cancelled. Ctrl-C, SIGTERM and SIGHUP end the watching, within seconds where the database is
    silent, and the run goes on.

    \b
    Examples:
      flowforge watch 12
      flowforge watch 12 --json | jq 'select(.event == "run")'
    """
    out = console()
    with telling_how_to_go_on(run_id, timeout):
        last = follow(
            looks_at(run_id, database_url, timeout, out=out, as_json=as_json), out=out, as_json=as_json
        )
    if last.run["state"] != "succeeded":
        ctx.exit(EXIT_FAILED)
