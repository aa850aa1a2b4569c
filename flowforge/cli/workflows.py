"""The commands about workflows: define, workflows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from flowforge.cli.common import (
    ANSWER_LIMIT,
    acting,
    command,
    database,
    database_option,
    find_database,
    json_option,
    local_time,
    named_by_arguments,
    print_json,
    print_table,
    read_json,
    say,
    select,
)
from flowforge.errors import ConfigError, DatabaseError
from flowforge.exits import EXIT_FAILED
from flowforge.loading import load_workflows


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="MODULE[:NAME]...|FILE.json|-")
@database_option
@json_option
def define(sources: tuple[str, ...], database_url: str | None, as_json: bool) -> None:
    """Register workflows, of Python modules or as JSON.

    New content becomes the current version, which further triggers run; known content changes nothing. Runs
    under way keep their version. A workflow has to be registered before it can be triggered: run this
    when a new release of your workflows is installed. `flowforge up` does it by itself. If one is refused,
    none is registered.

    NAME is the Python variable that holds one workflow of the module.
    FILE.json, or - for standard input, holds one definition, as define_workflow in SQL takes it.

    \b
    Examples:
      flowforge define my_project.workflows
      flowforge define my_project.workflows:etl --json
      flowforge define etl.json
    """
    from flowforge.client import Client

    files = [source for source in sources if source == "-" or source.endswith(".json")]
    with named_by_arguments():
        found = load_workflows(source for source in sources if source not in files)
        definitions: list[tuple[str, Any]] = [(f"workflow {each.name!r}", each) for each in found]
        definitions += [_read(each) for each in files]
    url = find_database(database_url).database_url
    with acting("flowforge_client"), Client(url, call_timeout=ANSWER_LIMIT) as client:
        try:
            registered = client.define_all([definition for _, definition in definitions])
        except DatabaseError as error:
            where, text = "" if error.position is None else definitions[error.position][0], str(error)
            if where in text:
                raise
            raise type(error)(f"{where}: {text}", error.sqlstate) from error.__cause__
    for defined in registered:
        if as_json:
            print_json(asdict(defined))
        else:
            is_new = "new" if defined.created else "known already"
            say(f"{defined.workflow} v{defined.version}: {is_new}")


def _read(source: str) -> tuple[str, Any]:
    """The definition in a file or standard input, after what an error is to blame."""
    name = "standard input" if source == "-" else source
    try:
        return name, read_json(source)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None


@click.command()
@database_option
@json_option
@click.pass_context
def workflows(ctx: click.Context, database_url: str | None, as_json: bool) -> None:
    """List the registered workflows. Exit code 1 when there is none.

    Each with its current version, which a trigger runs unless told otherwise, the number of its tasks, when
    that version was registered, and how many versions there are.

    \b
    Examples:
      flowforge workflows
      flowforge workflows --json
    """
    with database(database_url) as connection:
        found = select(
            connection,
            "select workflow, version, tasks, registered_at, versions from flowforge.workflow_status "
            "order by workflow",
        )
    if as_json:
        for each in found:
            print_json(each)
    elif found:
        columns = {"workflow": "workflow", "version": "version", "tasks": "tasks"}
        columns |= {"registered": "registered", "versions": "versions"}
        print_table(columns, [each | {"registered": local_time(each["registered_at"])} for each in found])
    else:
        click.echo(f"No workflows are registered; register some: {command('define MODULE')}", err=True)
    if not found:
        ctx.exit(EXIT_FAILED)
