"""The command about settings: config."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from flowforge.cli.common import json_option, misnamed_settings, print_json, print_table, say
from flowforge.config import Config, given, key, variable, without_password


@click.command()
@json_option
def config(as_json: bool) -> None:
    """List the settings: what holds, and where it is from.

    From the environment, else from the TOML file of --config or FLOWFORGE_CONFIG, else the default; options
    of a command go before all of them. Without a database, it is that of a running `up`. Passwords are not
    shown. A bad value is an error, as it is for each command; a variable FLOWFORGE_* that is no setting is
    warned of.

    \b
    Examples:
      flowforge config
      flowforge --config flowforge.toml config
      flowforge config --json
    """
    from flowforge.embedded import running_dsn

    holds, sources = Config.from_environment(), given()
    if not holds.database_url and (found := running_dsn()):  # as all other commands do
        holds = holds.replace(database_url=found)
        sources["database_url"] = found, "flowforge up"
    for line in misnamed_settings():
        say(f"warning: {line}", err=True)
    rows = []
    for each in dataclasses.fields(Config):
        value = _shown(each, getattr(holds, each.name))
        source = sources[each.name][1] if each.name in sources else "default"
        rows.append({"setting": key(each), "value": value, "from": source, "variable": variable(each)})
    if as_json:
        for row in rows:
            print_json(row)
        return
    table = [row | {"value": _text(row["value"])} for row in rows]
    print_table({"setting": "setting", "value": "value", "from": "from"}, table)


def _shown(each: dataclasses.Field[Any], value: Any) -> Any:
    if not each.metadata.get("secret"):
        return list(value) if isinstance(value, tuple) else value
    return [without_password(url) for url in value] if isinstance(value, tuple) else without_password(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, list) else str(value)
