"""The command graph: a workflow's tasks and dependencies, as a Mermaid flowchart."""

from __future__ import annotations

import re
from graphlib import TopologicalSorter
from typing import Any

import click

from flowforge.cli.common import (
    Integer,
    command,
    database,
    database_option,
    json_option,
    print_json,
    select,
)
from flowforge.errors import NotFound

_DEFAULT_RULE = "all_succeeded"
# Of ASCII only letters, digits, spaces and what joins two of them stand as they are: all else may mean
# something to Mermaid, or to the Markdown that it reads in labels.
_SPECIAL = re.compile(r"(?<![^\W_])[._-]|[._-](?![^\W_])|[^\w .-]", re.ASCII)


@click.command()
@click.argument("workflow")
@click.option("--version", type=Integer(1, 2**63 - 1), help="A version other than the current one.")
@database_option
@json_option
def graph(workflow: str, version: int | None, database_url: str | None, as_json: bool) -> None:
    """Print a workflow's graph, as Mermaid.

    An arrow runs from a task to one that waits for it. Maps have double sides, and the arrow from what they
    are mapped over says so; a trigger rule other than all_succeeded stands below the task's name. Mermaid
    is drawn by GitHub, GitLab, many editors, and https://mermaid.live.

    \b
    Examples:
      flowforge graph etl
      flowforge graph etl --version 1 --json | jq .definition
    """
    with database(database_url) as connection:
        found = select(
            connection,
            "select workflow, version, definition from flowforge.workflow_version_status "
            "where workflow = %s and case when %s::bigint is null then is_current else version = %s end",
            [workflow, version, version],
        )
        known = found or select(
            connection, "select versions from flowforge.workflow_status where workflow = %s", [workflow]
        )
    if not known:
        raise NotFound(f"there is no workflow {workflow!r}; see which there are: {command('workflows')}")
    if not found:
        raise NotFound(
            f"workflow {workflow!r} has no version {version}; its versions are 1 to {known[0]['versions']}"
        )
    [row] = found
    drawn = mermaid(row["definition"])
    if as_json:
        print_json(row | {"mermaid": drawn})
    else:
        click.echo(drawn, nl=False)


def mermaid(definition: dict[str, Any]) -> str:
    """The flowchart of a normalised definition. Nodes are t0, t1, … in topological order."""
    by_name = {task["name"]: task for task in definition["tasks"]}
    order = TopologicalSorter({name: task["after"] for name, task in by_name.items()}).static_order()
    tasks = [by_name[name] for name in order]
    nodes = {task["name"]: f"t{number}" for number, task in enumerate(tasks)}
    lines = ["flowchart TD"]
    for task in tasks:
        rule = f"<br/>{task['when']}" if task["when"] != _DEFAULT_RULE else ""
        left, right = ("[[", "]]") if task["map"] else ("[", "]")
        lines.append(f'    {nodes[task["name"]]}{left}"{_escaped(task["name"])}{rule}"{right}')
    for task in tasks:
        for upstream in task["after"]:
            arrow = "-->|map|" if upstream == task["map"] else "-->"
            lines.append(f"    {nodes[upstream]} {arrow} {nodes[task['name']]}")
    return "\n".join(lines) + "\n"


def _escaped(name: str) -> str:
    """A name as the text of a label: what is not plain becomes a character's number."""

    def plain(character: str) -> bool:
        return ord(character) > 127 and character.isprintable()

    return _SPECIAL.sub(lambda found: found[0] if plain(found[0]) else f"#{ord(found[0])};", name)
