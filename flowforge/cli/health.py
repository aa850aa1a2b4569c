"""The command about daemons: health."""

from __future__ import annotations

import click

from flowforge.cli.common import json_option, print_json, say, seconds
from flowforge.config import Config
from flowforge.errors import ConfigError
from flowforge.exits import EXIT_FAILED


@click.command()
@click.argument("file", required=False)
@click.option(
    "--max-age",
    type=seconds,
    default="30s",
    metavar="TIME",
    help="How old the report of a daemon that is well may be; it makes one every few seconds. Default: 30 s.",
)
@json_option
@click.pass_context
def health(ctx: click.Context, /, file: str | None, max_age: float, as_json: bool) -> None:
    """Tell whether a daemon of this machine is well.

    Reads FILE, else the one of FLOWFORGE_HEALTH_FILE, in which the daemon reports. Exit code 0 when it said
    of late that it works; 1 when it cannot reach the database or the broker, when something fails, when it
    hangs or has ended. For health checks of containers and supervisors.

    \b
    Examples:
      flowforge health /run/flowforge/scheduler
      FLOWFORGE_HEALTH_FILE=/tmp/health flowforge health --max-age 10s
    """
    file = file or Config.from_environment().health_file
    if not file:
        raise ConfigError("no health file: name it, or set FLOWFORGE_HEALTH_FILE, as the daemon has it")
    from flowforge.health import read_health

    well, line = read_health(file, max_age)
    if as_json:
        print_json({"well": well, "report": line})
    else:
        say(line)
    ctx.exit(0 if well else EXIT_FAILED)
