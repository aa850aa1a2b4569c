"""The commands about runs but for those that show one: trigger, runs, cancel, retry."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from flowforge.cli.common import (
    ANSWER_LIMIT,
    Integer,
    acting,
    command,
    counted,
    database,
    database_option,
    duration,
    find_database,
    json_option,
    known_at_least,
    local_time,
    parse_json,
    print_json,
    print_table,
    read_json,
    run_argument,
    say,
    seconds,
    select,
    state_text,
)
from flowforge.cli.snapshots import goes_on
from flowforge.cli.watch import follow, looks_at, telling_how_to_go_on
from flowforge.errors import (
    DatabaseUnavailable,
    FlowForgeError,
    MissingPrivilege,
    NotFound,
    NotReadable,
    WaitTimeout,
    first_line,
)
from flowforge.exits import EXIT_FAILED
from flowforge.streams import sleep_while_read

if TYPE_CHECKING:
    from flowforge.client import Client, RunResult

_MOMENT = 2.0  # seconds that the request may take beyond the time for the wait
_STATES = ("pending", "running", "cancelling", "succeeded", "failed", "cancelled")


def _json(value: str) -> Any:
    """JSON as text, @FILE, or - for standard input, which @- is too."""
    source = value.removeprefix("@")
    try:
        return read_json(source) if value == "-" or source != value else parse_json(value)
    except OSError as error:
        name = "standard input" if source == "-" else source
        raise click.BadParameter(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"not JSON: {error}") from None


def _label(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE")
    return key, value


@click.command()
@click.argument("workflow")
@click.option(
    "-i",
    "--input",
    "value",
    type=_json,
    default="{}",
    metavar="JSON|@FILE|-",
    help="Input: JSON, or in a file or - (also @-) standard input. Default: {}.",
)
@click.option("--idempotency-key", metavar="KEY", help="The same key and input give the same run.")
@click.option("--version", type=Integer(min=1), help="Version of the workflow. Default: the current one.")
@click.option("--priority", type=int, default=0, help="The larger goes first. Default: 0.")
@click.option(
    "--delay", type=seconds, metavar="TIME", default="0", help="Time before anything of it is dispatched."
)
@click.option("-l", "--label", "labels", type=_label, multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option("-w", "--wait", is_flag=True, help="Watch it on standard error until it has ended.")
@click.option(
    "--timeout", type=seconds, metavar="TIME", help="With --wait: stop waiting after this long (exit code 9)."
)
@database_option
@json_option
@click.pass_context
def trigger(
    ctx: click.Context,
    workflow: str,
    value: Any,
    idempotency_key: str | None,
    version: int | None,
    priority: int,
    delay: float,
    labels: tuple[tuple[str, str], ...],
    wait: bool,
    timeout: float | None,
    database_url: str | None,
    as_json: bool,
) -> None:
    """Start a run of WORKFLOW and print its id.

    With --wait it prints the outputs of the last tasks instead, and ends with the run: exit code 0 when it
    succeeded, 1 when it failed or was cancelled. A database that goes away is waited for. The run goes on
    when the waiting ends before it, by Ctrl-C, SIGTERM, SIGHUP or --timeout. The login needs
    flowforge_client, and for the picture flowforge_reader.

    \b
    Examples:
      flowforge trigger etl --input '{"day": "2025-01-31"}'
      flowforge trigger etl --input @input.json --idempotency-key etl-2025-01-31 --wait
      generate | flowforge trigger etl --input - --delay 10m -l team=data
    """
    from flowforge.client import Client

    if len(dict(labels)) < len(labels):
        raise click.UsageError("A label is given twice: each key can have one value.")
    if timeout is not None and not wait:
        raise click.UsageError("--timeout is for --wait.")
    url = find_database(database_url).database_url  # which `up`, while it is away, does not tell
    deadline = None if timeout is None else time.monotonic() + timeout
    limit = ANSWER_LIMIT if timeout is None else min(ANSWER_LIMIT, timeout + _MOMENT)
    with Client(url, call_timeout=limit) as client:
        run_id = None
        try:
            run_id = _start(
                client,
                deadline,
                workflow,
                value,
                idempotency_key=idempotency_key,
                version=version,
                priority=priority,
                delay=delay,
                labels=dict(labels),
            )
            if not wait:
                with known_at_least(_which(run_id)):
                    print_json({"run_id": run_id, "workflow": workflow}) if as_json else click.echo(run_id)
                return
            result = _await(client, url, run_id, timeout, deadline, quiet=as_json)
        except BaseException as error:
            # Whatever happened to the waiting: the caller learns which run it is.
            if run_id is not None and wait and as_json:
                with known_at_least(_which(run_id)):
                    print_json({"run_id": run_id, "workflow": workflow})
            if isinstance(error, KeyboardInterrupt) and not str(error):  # between any two steps
                known = _unknown(workflow, idempotency_key) if run_id is None else goes_on(run_id)
                raise KeyboardInterrupt(known) from None
            names_it = isinstance(error, WaitTimeout | NotReadable)
            if run_id is not None and isinstance(error, FlowForgeError) and not names_it:
                error.__notes__ = [goes_on(run_id)]
            raise
    _print_result(result, as_json)
    if not result.succeeded:
        ctx.exit(EXIT_FAILED)


def _start(client: Client, deadline: float | None, workflow: str, value: Any, **options: Any) -> int:
    """The id of a new run, or of the one that its idempotency key names."""
    with acting("flowforge_client"):
        try:
            return client.trigger(workflow, value, **options)
        except NotFound as error:
            if "no version" in str(error):
                raise
            raise NotFound(
                f"there is no workflow {workflow!r}; see which there are: {command('workflows')}; "
                f"register it: {command('define MODULE')}"
            ) from error
        except DatabaseUnavailable as error:
            if deadline is None or time.monotonic() < deadline:
                raise
            raise WaitTimeout(f"{error}; whether there is a run now is not known") from error


def _which(run_id: int) -> str:
    return f"The run's id is {run_id}."


def _unknown(workflow: str, idempotency_key: str | None) -> str:
    """What to tell whoever interrupted the request for a run."""
    if idempotency_key is not None:
        return "Whether there is a run now is not known: the same command gives it, or starts it."
    return (
        f"Whether there is a run now is not known: {command(f'runs --workflow {shlex.quote(workflow)}')}. "
        "With --idempotency-key the same command could be given again, and would start no second one."
    )


def _await(
    client: Client, url: str, run_id: int, timeout: float | None, deadline: float | None, *, quiet: bool
) -> RunResult:
    """How the run ended; meanwhile, unless `quiet`, a picture of it on standard error."""
    from rich.console import Console

    def left() -> float | None:
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    may_read = True  # what a picture is made of, until that is refused
    if not quiet:
        out = Console(stderr=True, highlight=False, markup=False, soft_wrap=not sys.stderr.isatty())
        try:
            with telling_how_to_go_on(run_id, timeout):
                follow(looks_at(run_id, url, left(), out=out, found=True), out=out)
        except MissingPrivilege:
            # A client may ask for the result of its run, and not see how it gets on.
            may_read = False
            click.echo(f"Waiting for run {run_id} (a live picture takes flowforge_reader).", err=True)
    with telling_how_to_go_on(run_id, timeout, may_read), acting("flowforge_client"):
        return client._wait(run_id, left(), sleep_while_read)


def _print_result(result: RunResult, as_json: bool) -> None:
    if as_json:
        with known_at_least(_which(result.run_id)):
            print_json(vars(result))
        return
    for task, output in result.outputs.items():
        say(f"{task}: {json.dumps(output, ensure_ascii=False)}")
    if result.too_large:
        what = command(f"show {result.run_id} --output TASK")
        click.echo(f"The outputs are too large to be shown together; each by: {what}", err=True)
    for task, error in result.errors.items():
        say(f"{task} failed: {first_line(error)}", err=True)
    if result.errors:
        click.echo(f"More: {command(f'show {result.run_id}')}", err=True)


@click.command()
@click.option("--workflow", help="Only runs of this workflow.")
@click.option("--state", type=click.Choice(_STATES), help="Only runs in this state.")
@click.option("-n", "--limit", type=Integer(1, 1000), default=20, help="At most so many. Default: 20.")
@click.option("--after", type=Integer(min=1), metavar="RUN", help="Only runs older than this one.")
@database_option
@json_option
@click.pass_context
def runs(
    ctx: click.Context,
    workflow: str | None,
    state: str | None,
    limit: int,
    after: int | None,
    database_url: str | None,
    as_json: bool,
) -> None:
    """List runs, the newest first. Exit code 1 when there is none.

    Further pages: give the last id of a page as --after.

    \b
    Examples:
      flowforge runs --state failed
      flowforge runs --workflow etl --after 1200 --json
    """
    found = _find_runs(database_url, workflow, state, after, limit + 1)
    page = found[:limit]
    if as_json:
        for run in page:
            print_json(run)
    elif page:
        columns = {
            "run_id": "run",
            "workflow": "workflow",
            "state": "state",
            "tasks": "tasks done",
            "failed": "failed",
        }
        columns |= {"created": "triggered", "took": "duration"}
        print_table(columns, [_run_row(run) for run in page])
        if len(found) > limit:
            click.echo(f"More: add --after {page[-1]['run_id']}", err=True)
    else:
        click.echo("No runs found.", err=True)
    if not page:
        ctx.exit(EXIT_FAILED)


def _find_runs(
    database_url: str | None, workflow: str | None, state: str | None, after: int | None, limit: int
) -> list[dict[str, Any]]:
    with database(database_url) as connection:
        workflow_id = None
        if workflow is not None:
            known = select(
                connection,
                "select workflow_id from flowforge.workflow_status where workflow = %s",
                [workflow],
            )
            if not known:
                raise NotFound(f"there is no workflow {workflow!r}")
            workflow_id = known[0]["workflow_id"]
        return select(connection, *runs_query(workflow_id, state, after, limit))


def runs_query(
    workflow_id: int | None, state: str | None, after: int | None, limit: int
) -> tuple[str, list[object]]:
    """The query for a page of runs, and its parameters. Only the conditions that are given, and those that
    name an index, so that the plan walks the right one from its end, however long the history is."""
    given = {"workflow_id = %s": workflow_id, "state = %s": state, "run_id < %s": after}
    conditions = [condition for condition, value in given.items() if value is not None]
    if state in ("failed", "cancelled"):
        conditions.append("unsuccessful")
    elif state not in (None, "succeeded"):
        conditions.append("finished_at is null")
    where = f" where {' and '.join(conditions)}" if conditions else ""
    query = f"select * from flowforge.run_status{where} order by run_id desc limit %s"  # noqa: S608 - constants
    return query, [*(value for value in given.values() if value is not None), limit]


def _run_row(run: dict[str, Any]) -> dict[str, object]:
    done = run["task_runs"] - run["pending"] - run["ready"] - run["running"]
    return {
        "run_id": run["run_id"],
        "workflow": f"{run['workflow']} v{run['version']}",
        "state": state_text(run["state"]),
        "tasks": f"{done}/{run['task_runs']}",
        "failed": run["failed"] or None,
        "created": local_time(run["created_at"]),
        "took": duration(run["duration"]),
    }


@click.command()
@run_argument
@click.option("--reason", help="Kept with the run.")
@database_option
@json_option
@click.pass_context
def cancel(
    ctx: click.Context, run_id: int, reason: str | None, database_url: str | None, as_json: bool
) -> None:
    """Cancel a run.

    Nothing more of it starts, and running handlers are told when their worker next renews its lease: within
    a third of that, 10 s by default. A success that still comes counts.

    Exit code 1 when it was asked for before, or the run has ended.

    \b
    Example:
      flowforge cancel 12 --reason 'wrong input'
    """
    from flowforge.client import Client

    url = find_database(database_url).database_url
    with acting("flowforge_client"), Client(url, call_timeout=ANSWER_LIMIT) as client:
        changed = client.cancel(run_id, reason=reason)
        if as_json:
            print_json({"run_id": run_id, "changed": changed})
        elif changed:
            click.echo(f"Run {run_id} is being cancelled.")
        else:
            click.echo(f"Run {run_id} was not changed: {_why_not_cancelled(client, run_id)}.")
    if not changed:
        ctx.exit(EXIT_FAILED)


def _why_not_cancelled(client: Client, run_id: int) -> str:
    try:
        state = client.result(run_id).state
    except NotReadable:  # an output, which only a run that has ended has
        return "it has ended"
    return "it is being cancelled already" if state == "running" else f"it has ended ({state})"


@click.command()
@run_argument
@click.option("--from", "from_task", metavar="TASK", help="Run this task and everything below it again.")
@click.option("--request-id", metavar="ID", help="Asking again with the same id resets nothing further.")
@database_option
@json_option
@click.pass_context
def retry(
    ctx: click.Context,
    run_id: int,
    from_task: str | None,
    request_id: str | None,
    database_url: str | None,
    as_json: bool,
) -> None:
    """Run again what failed in a run.

    That is what failed or was cancelled, and what was skipped because of it.

    Exit code 1 when there was nothing to run again, 10 while what would be reset is still running.

    \b
    Examples:
      flowforge retry 12
      flowforge retry 12 --from parse --request-id ticket-7
    """
    from flowforge.client import Client

    url = find_database(database_url).database_url
    with acting("flowforge_operator"), Client(url, call_timeout=ANSWER_LIMIT) as client:
        reset = client.retry(run_id, from_task=from_task, request_id=request_id)
    told = f"Run {run_id}: {counted(reset, 'task run') if reset else 'nothing'} to run again."
    with known_at_least(told):
        print_json({"run_id": run_id, "reset": reset}) if as_json else click.echo(told)
    if not reset:
        ctx.exit(EXIT_FAILED)
