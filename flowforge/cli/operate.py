"""The commands of operators: queues, workers, pause, resume, redispatch, prune."""

from __future__ import annotations

from typing import Any

import click

from flowforge.cli.common import (
    command,
    database,
    database_option,
    duration,
    json_option,
    local_time,
    print_json,
    print_table,
    say,
    seconds,
    select,
)
from flowforge.exits import EXIT_FAILED

_queue_argument = click.argument("queue", metavar="QUEUE")
_PRUNE_BATCH = 1000  # runs deleted by one transaction
_PRUNE_LIMIT = 3600.0  # seconds for a step: the runs may have had millions of elements


@click.command()
@database_option
@json_option
@click.pass_context
def queues(ctx: click.Context, database_url: str | None, as_json: bool) -> None:
    """List the queues, and what waits in them.

    For how long, and how fast it is worked off. Waiting are task runs in line; dispatched are those on
    their way to a worker, at most as many as the window; later are those that were given back, and are
    offered again after a delay. Exit code 1 when there is no queue.

    \b
    Examples:
      flowforge queues
      flowforge queues --json
    """
    found = _all(database_url, "select * from flowforge.queue_status order by queue")
    if as_json:
        for each in found:
            print_json(each)
    elif found:
        columns = {"queue": "queue", "state": "state", "eligible": "waiting", "age": "oldest"}
        columns |= {
            "dispatched": "dispatched",
            "reoffered": "later",
            "window_size": "window",
            "pace": "claims/s",
        }
        print_table(columns | {"capacity": "capacity"}, map(_queue_row, found))
    else:
        click.echo(f"No queues yet; a definition makes them: {command('define MODULE')}", err=True)
    if not found:
        ctx.exit(EXIT_FAILED)


def _queue_row(queue: dict[str, Any]) -> dict[str, object]:
    return queue | {
        "state": "paused" if queue["paused_at"] else "open",
        "age": duration(queue["oldest_eligible_age"]),
        "pace": None if queue["drain_rate"] is None else f"{queue['drain_rate']:.2g}",
    }


@click.command()
@database_option
@json_option
@click.pass_context
def workers(ctx: click.Context, database_url: str | None, as_json: bool) -> None:
    """List the workers, and what each runs.

    Those that announced themselves; exit code 1 when there is none. A worker that has not been seen for
    two minutes is told as silent; what it held is offered again when its leases run out, announced or
    not.

    \b
    Examples:
      flowforge workers
      flowforge workers --json
    """
    found = _all(database_url, "select * from flowforge.worker_status order by worker")
    if as_json:
        for each in found:
            print_json(each)
    elif found:
        columns = {"worker": "worker", "state": "state", "running": "running", "capacity": "capacity"}
        print_table(columns | {"queues": "queues", "seen": "last seen"}, map(_worker_row, found))
    else:
        click.echo("No worker has announced itself.", err=True)
    if not found:
        ctx.exit(EXIT_FAILED)


def _worker_row(worker: dict[str, Any]) -> dict[str, object]:
    return worker | {
        "state": "alive" if worker["alive"] else "silent",
        "queues": ", ".join(worker["queues"]),
        "seen": local_time(worker["seen_at"]),
    }


@click.command()
@_queue_argument
@database_option
@json_option
def pause(queue: str, database_url: str | None, as_json: bool) -> None:
    """Stop dispatching from a queue.

    What is dispatched already still runs. Pausing again changes nothing.

    \b
    Example:
      flowforge pause reports
    """
    changed = _operate(database_url, "pause_queue", queue)
    _tell(as_json, queue, changed, "is paused", "was paused already")


@click.command()
@_queue_argument
@database_option
@json_option
def resume(queue: str, database_url: str | None, as_json: bool) -> None:
    """Dispatch from a paused queue again. Resuming again changes nothing.

    \b
    Example:
      flowforge resume reports
    """
    changed = _operate(database_url, "resume_queue", queue)
    _tell(as_json, queue, changed, "is open again", "was not paused")


def _tell(as_json: bool, queue: str, changed: bool, done: str, as_it_was: str) -> None:
    if as_json:
        print_json({"queue": queue, "changed": changed})
    else:
        say(f"Queue {queue} {done if changed else as_it_was}.")


@click.command()
@_queue_argument
@database_option
@json_option
def redispatch(queue: str, database_url: str | None, as_json: bool) -> None:
    """Publish again what waits in a queue.

    As after the broker lost its messages. Harmless when it did not: doubled messages are recognised by
    the claim. By itself this happens when a message stays unclaimed for too long, and at once when the
    publisher finds the queue gone.

    \b
    Example:
      flowforge redispatch default
    """
    armed = _operate(database_url, "redispatch", queue)
    if as_json:
        print_json({"queue": queue, "published_again": armed})
    else:
        say(f"Queue {queue}: {armed} to be published again.")


def _with_unit(text: str) -> float:
    """A length of time. What is deleted for good shall not hang on what a bare number is taken for."""
    length = seconds(text)
    if not text.strip()[-1:].isalpha():
        number = text.strip().rstrip(".")
        raise click.BadParameter(f"{text!r} has no unit; write {number}s, {number}m, {number}h or {number}d")
    return length


@click.command()
@click.option(
    "--older-than",
    "age",
    type=_with_unit,
    required=True,
    metavar="TIME",
    help="Only runs that ended longer ago than this, such as 30d or 12h, with its unit.",
)
@database_option
@json_option
def prune(age: float, database_url: str | None, as_json: bool) -> None:
    """Delete runs that ended long ago.

    With their task runs, results and attempts, for good. It goes in steps of 1,000 runs, each of its own
    transaction: it may be interrupted and called again. The idempotency keys of deleted runs become free.

    \b
    Examples:
      flowforge prune --older-than 30d
    """
    deleted = 0
    with database(database_url, "flowforge_operator") as connection:
        query = "select flowforge.prune(make_interval(secs => %s), %s) as deleted"
        while step := select(connection, query, [age, _PRUNE_BATCH], _PRUNE_LIMIT)[0]["deleted"]:
            deleted += step
            if not as_json:
                click.echo(f"{deleted:,} runs deleted …", err=True)
    if as_json:
        print_json({"runs_deleted": deleted})
    else:
        click.echo(f"{deleted:,} {'run' if deleted == 1 else 'runs'} deleted.")


def _all(database_url: str | None, query: str) -> list[dict[str, Any]]:
    with database(database_url) as connection:
        return select(connection, query)


def _operate(database_url: str | None, function: str, queue: str) -> Any:
    """What an operator's function of one queue answers."""
    with database(database_url, "flowforge_operator") as connection:
        [row] = select(connection, f"select flowforge.{function}(%s) as answer", [queue])
        return row["answer"]
