"""The command conformance: whether a worker does what the protocol asks of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from flowforge.cli.common import (
    console,
    counted,
    database_option,
    find_database,
    json_option,
    print_json,
    seconds,
)
from flowforge.errors import FlowForgeError, from_database
from flowforge.exits import EXIT_FAILED

if TYPE_CHECKING:
    from flowforge.conformance import Verdict


@click.command(context_settings={"allow_interspersed_args": False})
@database_option
@click.option(
    "--worker-url",
    default="",
    metavar="URL",
    help="Connection string with the worker's own login and password; not this command's.",
)
@click.option(
    "--amqp-url", metavar="URL", help="RabbitMQ to deliver by. [FLOWFORGE_AMQP_URL; else PostgreSQL]"
)
@click.option("--clause", "names", multiple=True, metavar="NAME", help="Try only this one; may be repeated.")
@click.option("--patience", type=seconds, default="20s", help="Time that the worker has for each step.")
@click.option("--force", is_flag=True, help="Go on where the database is in use.")
@json_option
@click.argument("arguments", nargs=-1, required=True, metavar="COMMAND...")
@click.pass_context
def conformance(
    ctx: click.Context,
    database_url: str | None,
    worker_url: str,
    amqp_url: str | None,
    names: tuple[str, ...],
    patience: float,
    force: bool,
    as_json: bool,
    arguments: tuple[str, ...],
) -> None:
    """Tell whether a worker of yours does what the protocol asks.

    COMMAND starts it. It is told its servers and its queue by PGHOST and the like, FLOWFORGE_DATABASE_URL,
    FLOWFORGE_AMQP_URL, FLOWFORGE_NAMESPACE and FLOWFORGE_QUEUES, and has to know the handlers
    conformance.echo, .nested, .fail, .unstorable and .tick: docs/worker-protocol.md tells of all. It meets
    losses of connections, of answers and of leases.

    Give it a database for the purpose, migrated, and the login that migrated it: it cancels its runs at the
    end, but its workflows stay. Where there are others, or another daemon is at work, it refuses. Neither
    server may insist on TLS. Exit code 0 when every clause holds, 1 otherwise.

    \b
    Examples:
      flowforge conformance --database-url service=scratch -- node worker.mjs ./handlers.mjs
      flowforge conformance --clause renews --clause lost -- ./worker.sh handlers
    """
    from flowforge import log
    from flowforge.conformance import CLAUSES, examine
    from flowforge.conformance.target import in_use

    log.configure("text", "error")  # of the scheduler and publisher that it runs
    config = find_database(database_url)
    if amqp_url is not None:
        config = config.replace(amqp_urls=amqp_url)
    known = {each.name for each in CLAUSES}
    if unknown := [name for name in names if name not in known]:
        raise click.BadParameter(f"there is no clause {unknown[0]}; there are: {', '.join(sorted(known))}")
    clauses = [each for each in CLAUSES if config.uses_broker or not each.needs_broker]
    clauses = [each for each in clauses if not names or each.name in names]
    with _answering():
        shown = "" if force else in_use(config)
    if shown:
        raise click.UsageError(
            f"{shown}: the database is in use, and what conformance makes in it stays; give it one of its "
            "own, or --force"
        )
    violated = 0
    # The worker is ended, and its runs are cancelled, however this ends.
    with _answering():
        for verdict in examine(config, worker_url, arguments, clauses, patience):
            violated += not verdict.holds
            if as_json:
                print_json(dataclasses.asdict(verdict))
            else:
                _print(verdict)
    if not as_json:
        delivery = "RabbitMQ" if config.uses_broker else "PostgreSQL alone"
        total = f"{counted(len(clauses), 'clause')} of the protocol, delivered by {delivery}"
        click.echo(f"{total}: {f'{violated} violated' if violated else 'all hold'}")
    if violated:
        ctx.exit(EXIT_FAILED)


@contextmanager
def _answering() -> Iterator[None]:
    """Tells of what is no fault of the worker's."""
    import psycopg

    try:
        yield
    except OSError as error:
        raise FlowForgeError(f"conformance cannot go on, whatever the worker is like: {error}") from error
    except psycopg.Error as error:
        raise from_database(error) from error


def _print(verdict: Verdict) -> None:
    from rich.text import Text

    from flowforge.log import visible

    out = console()
    sign, style = ("✔ ", "green") if verdict.holds else ("✖ ", "bold red")
    word = sign if out.is_terminal else "holds    " if verdict.holds else "violated "
    out.print(Text.assemble((f"{word}{verdict.clause:<25}", style), f" {verdict.sentence}"))
    if verdict.seen:
        out.print(Text.assemble((f"{'':>10}-> ", "dim"), visible(" ".join(verdict.seen.split()))))
