"""Writes docs/commands.md from the commands themselves: ./dev run python -m tests.python.commands"""

import inspect
import re
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

import click

from flowforge.cli import cli
from flowforge.cli.common import database_option, json_option
from flowforge.exits import EXITS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"

_HEAD = """\
# Commands

`flowforge COMMAND`; `python -m flowforge COMMAND` is the same. Each has `--help`. Lengths of time are written
as `90`, `1.5s`, `10m`, `2h` or `1d`. An option goes before its variable; all variables, and the file of
`--config`, are in [settings.md](settings.md).

This file is generated from `flowforge/cli/`; a test compares the two. After changing a command, write it
anew: `./dev run python -m tests.python.commands`.

What a command answers goes to standard output; errors, and what is only for people, to standard error.

## Exit codes

Of every command and daemon; which of them a command uses in a way of its own is told there.

| code | meaning |
|---|---|
"""


@click.command()
@database_option
@json_option
def _common() -> None:
    """What most commands have."""


def _paragraphs(text: str) -> str:
    """The help as Markdown: what click prints as it stands is code."""
    done = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if not paragraph.startswith("\b\n"):
            done.append(re.sub(r"(?<![\w`-])(--[a-z-]+|FLOWFORGE_\w+)", r"`\1`", paragraph))
            continue
        title, _, lines = paragraph.removeprefix("\b\n").partition("\n")
        done.append(f"{title}\n\n```\n{textwrap.dedent(lines)}\n```")
    return "\n\n".join(done)


def _option(option: click.Option, context: click.Context) -> str:
    """A row: the names and what they take, the default, the variable, the meaning."""
    text = option.help or ""
    variable = re.search(r" ?\[(FLOWFORGE_\w+)(?:; ([^\]]*))?\]$", text)
    text = text[: variable.start()] if variable else text
    default = re.search(r" ?Default: (.*)\.$", text)
    text = text[: default.start()] if default else text
    names = ", ".join(f"`{name}`" for name in option.opts)
    if option.secondary_opts:
        names += f" / {', '.join(f'`{name}`' for name in option.secondary_opts)}"
    kinds = [] if option.is_flag else [option.make_metavar(context).strip("[]").replace("|", " or ")]
    told = default[1] if default else variable[2].removeprefix("else ") if variable and variable[2] else ""
    if not told and not option.is_flag:
        told = "required" if option.required else str(option.to_info_dict()["default"] or "none")
    cells = [" ".join([names, *kinds]), told, f"`{variable[1]}`" if variable else "", text]
    return f"| {' | '.join(cells)} |"


def _entry(name: str, command: click.Command, common: Mapping[str, str]) -> str:
    context = click.Context(command, info_name=name, parent=click.Context(cli, info_name="flowforge"))
    usage = " ".join(["flowforge", name, *command.collect_usage_pieces(context)])
    rows = {each.opts[0]: _option(each, context) for each in command.params if isinstance(each, click.Option)}
    shared = [option for option in common if rows.get(option) == common[option]]
    parts = [f"## {name}", f"```\n{usage}\n```", _paragraphs(command.help or "")]
    if own := [row for option, row in rows.items() if option not in shared]:
        parts.append(_table(own))
    if shared:
        parts.append(
            f"Also {' and '.join(f'`{option}`' for option in shared)}, as [above](#options-of-most-commands)."
        )
    return "\n\n".join(parts)


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["| option | default | variable | meaning |", "|---|---|---|---|", *rows])


def page() -> str:
    """The page as it should be."""
    codes = "\n".join(f"| {code} | {meaning} |" for code, meaning in EXITS.items())
    context = click.Context(cli, info_name="flowforge")
    program = [
        _option(each, context)
        for each in cli.params
        if isinstance(each, click.Option) and each.name == "path"
    ]
    entries = [_HEAD + codes, "## Before the command", _table(program)]
    options = [each for each in _common.params if isinstance(each, click.Option)]
    common = {each.opts[0]: _option(each, context) for each in options}
    entries += ["## Options of most commands", _table(common.values())]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        entries.append(_entry(name, command, common))
    return "\n\n".join(entries) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
