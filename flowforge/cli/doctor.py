"""The command doctor: what is wrong with a set-up, and what to do about it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from flowforge.cli.common import (
    command,
    console,
    counted,
    database_option,
    find_database,
    json_option,
    print_json,
)
from flowforge.errors import ConfigError
from flowforge.exits import EXIT_FAILED

if TYPE_CHECKING:
    from flowforge.doctor import Finding, Status

_SIGNS = {
    "ok": ("✔", "green"),
    "warning": ("!", "yellow"),
    "problem": ("✖", "bold red"),
    "skipped": ("↷", "dim"),
}
_ROLES = ("client", "worker", "scheduler", "publisher", "operator", "reader")


@click.command()
@click.option("--role", type=click.Choice(_ROLES), help="What the login of this set-up has to be able to be.")
@database_option
@json_option
@click.pass_context
def doctor(ctx: click.Context, role: str | None, database_url: str | None, as_json: bool) -> None:
    """Tell what is wrong with this set-up, and what to do.

    It looks at the settings, the database, the daemons, what is stuck, and RabbitMQ where it is configured,
    and changes nothing. A login in flowforge_operator sees all of it; what another one may not see is
    skipped. Exit code 1 when there is a problem, 0 when there are but warnings.

    \b
    Examples:
      flowforge doctor
      flowforge --config publisher.toml doctor --role publisher
      flowforge doctor --json | jq 'select(.status == "problem")'
    """
    counts: Counter[Status] = Counter()
    skipped: list[Finding] = []  # for one and the same reason: they stand in one line
    for finding in _findings(database_url, role):
        counts[finding.status] += 1
        if as_json:
            print_json(dataclasses.asdict(finding))
            continue
        if skipped and (finding.status, finding.detail) != ("skipped", skipped[0].detail):
            _print_skipped(skipped)
            skipped = []
        if finding.status == "skipped":
            skipped.append(finding)
        else:
            # At once: the next check may take long.
            _print(finding)
    if not as_json:
        _print_skipped(skipped)
        told = [counted(counts["problem"], "problem"), counted(counts["warning"], "warning")]
        told += [f"{counts['skipped']} skipped", f"{counts['ok']} ok"]
        click.echo(", ".join(told))
    if counts["problem"]:
        ctx.exit(EXIT_FAILED)


def _findings(database_url: str | None, role: str | None) -> Iterator[Finding]:
    from flowforge.config import given
    from flowforge.doctor import CHECKS, Finding, examine, settings

    try:
        config, sources = find_database(database_url), given()
    except ConfigError as error:
        yield Finding(
            "settings", "problem", str(error), f"correct it; {command('config')} lists what there is"
        )
        for check, _, _ in CHECKS:
            yield Finding(check, "skipped", "the settings are wrong")
        return
    where = "--database-url" if database_url else sources.get("database_url", (None, "flowforge up"))[1]
    yield settings(config, sources, where)
    yield from examine(config, where, role, command)


def _print_skipped(findings: list[Finding]) -> None:
    if findings:
        first, *others = findings
        more = f"; so are {len(others)} more checks" if others else ""
        _print(dataclasses.replace(first, detail=first.detail + more))


def _print(finding: Finding) -> None:
    from rich.text import Text

    from flowforge.log import visible

    out = console()
    sign, style = _SIGNS[finding.status]
    label = f"{sign} {finding.check:<20}" if out.is_terminal else f"{finding.status:<8} {finding.check:<20}"
    out.print(Text.assemble((label, style), f" {visible(' '.join(finding.detail.split()))}"))
    if finding.remedy:
        out.print(Text.assemble((f"{'':>10}-> ", "dim"), visible(" ".join(finding.remedy.split()))))
