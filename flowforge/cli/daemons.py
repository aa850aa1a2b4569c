"""The commands that run: migrate, scheduler, publisher, worker, up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowforge.cli.common import F, database_option, find_database, json_option, print_json, seconds

if TYPE_CHECKING:
    from flowforge.config import Config
    from flowforge.up import Up


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_log_options = _options(
    click.option(
        "--log-format", type=click.Choice(["text", "json"]), help="Form of the log. [FLOWFORGE_LOG_FORMAT]"
    ),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Least important line that is logged. [FLOWFORGE_LOG_LEVEL]",
    ),
    click.option(
        "--health-file",
        metavar="FILE",
        help="File to keep the state of health in. [FLOWFORGE_HEALTH_FILE]",
    ),
)
_broker_options = _options(
    click.option(
        "--amqp-url",
        "amqp_urls",
        metavar="URL",
        help="RabbitMQ URLs, comma separated; none: PostgreSQL alone. With a password better given by the "
        "environment, which other users of the machine cannot read. [FLOWFORGE_AMQP_URL]",
    ),
    click.option("--namespace", metavar="NAME", help="Prefix of exchanges and queues. [FLOWFORGE_NAMESPACE]"),
)
_worker_options = _options(
    click.option(
        "-c",
        "--concurrency",
        type=click.IntRange(1, 10_000),
        help="Handlers that run at the same time. [FLOWFORGE_CONCURRENCY]",
    ),
    click.option(
        "-q",
        "--queue",
        "queues",
        multiple=True,
        help="Queue to take work from; repeatable. [FLOWFORGE_QUEUES]",
    ),
    click.option(
        "--lease",
        type=seconds,
        metavar="TIME",
        help="Lease of a claim, renewed while it runs. [FLOWFORGE_LEASE]",
    ),
    click.option(
        "--grace",
        type=seconds,
        metavar="TIME",
        help="Time for handlers to finish after SIGTERM. [FLOWFORGE_GRACE]",
    ),
)


def _configured(database_url: str | None, flags: dict[str, Any]) -> Config:
    """The configuration of a daemon, and its log set up."""
    return _logging(find_database(database_url).replace(**_given(flags)))


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value not in (None, ())}


def _logging(config: Config) -> Config:
    from flowforge import log

    log.configure(config.log_format, config.log_level)
    return config


@click.command()
@database_option
@click.option(
    "--create-roles/--no-create-roles",
    default=True,
    help="Whether to create the group roles that are missing. Default: yes.",
)
@json_option
def migrate(database_url: str | None, create_roles: bool, as_json: bool) -> None:
    """Bring the database's schema to this release.

    Safe to repeat, and to run several times at once: run it before the daemons of a new release start. The
    login needs CREATE on the database and CREATEROLE; it need not be a superuser.

    \b
    Example:
      flowforge migrate --database-url postgresql://admin@db/flowforge
    """
    from dataclasses import asdict

    from flowforge.migrate import migrate as run_migrate

    report = run_migrate(_logging(find_database(database_url)).database_url, create_roles)
    if as_json:
        print_json(asdict(report))
        return
    applied = f"applied {', '.join(report.applied)}" if report.applied else "no migration was pending"
    roles = f"; created roles {', '.join(report.roles)}" if report.roles else ""
    click.echo(f"The schema is up to date: {applied}{roles}; {report.functions} functions in place.")


@click.command()
@database_option
@click.option(
    "--poll-interval",
    type=seconds,
    metavar="TIME",
    help="Longest wait between two looks. [FLOWFORGE_POLL_INTERVAL]",
)
@_log_options
@click.pass_context
def scheduler(ctx: click.Context, /, database_url: str | None, **flags: Any) -> None:
    """Run the scheduler, which dispatches what can run.

    It also sees to it that nothing is forgotten: work of lost workers, lost messages, delayed starts. One is
    enough; more are harmless and take over from each other. Stops on SIGTERM or Ctrl-C.

    \b
    Example:
      flowforge scheduler --log-format json
    """
    from flowforge import runner
    from flowforge.scheduler import Scheduler

    config = _configured(database_url, flags)
    ctx.exit(runner.run(Scheduler(config), config))


@click.command()
@database_option
@_broker_options
@_log_options
@click.pass_context
def publisher(ctx: click.Context, /, database_url: str | None, **flags: Any) -> None:
    """Run the publisher, which hands dispatches to RabbitMQ.

    Only needed with a broker. Stops on SIGTERM or Ctrl-C.

    The broker's URL holds a password, so it belongs into the environment and not into the arguments.

    \b
    Example:
      FLOWFORGE_AMQP_URL="$(cat /run/secrets/amqp-url)" flowforge publisher
    """
    from flowforge import runner
    from flowforge.publisher import Publisher

    config = _configured(database_url, flags)
    ctx.exit(runner.run(Publisher(config), config))


@click.command()
@click.argument("modules", nargs=-1, required=True, metavar="MODULE[:NAME]...")
@database_option
@_worker_options
@_broker_options
@_log_options
@click.pass_context
def worker(ctx: click.Context, /, modules: tuple[str, ...], database_url: str | None, **flags: Any) -> None:
    """Run a worker for the workflows of Python modules.

    It runs their handlers. On SIGTERM or Ctrl-C it takes nothing new, lets handlers finish for the grace time
    and gives back the rest; asked a second time it stops at once.

    \b
    Examples:
      flowforge worker my_project.workflows
      flowforge worker my_project.workflows:etl -c 16 -q default -q reports
    """
    from flowforge.cli.loading import load_workflows
    from flowforge.worker import daemon

    config = _configured(database_url, flags)
    ctx.exit(daemon.run(daemon.handlers_of(load_workflows(modules)), config))


@click.command()
@click.argument("modules", nargs=-1, metavar="[MODULE[:NAME]]...")
@database_option
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the embedded PostgreSQL keeps its data. Default: the user's data directory.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Let the embedded PostgreSQL listen on this port of 127.0.0.1 too.",
)
@_worker_options
@_broker_options
@_log_options
@json_option
@click.pass_context
def up(
    ctx: click.Context,
    /,
    modules: tuple[str, ...],
    database_url: str | None,
    data_dir: Path | None,
    port: int | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Run everything here: PostgreSQL, scheduler, worker.

    Brings up a private PostgreSQL (unless --database-url or FLOWFORGE_DATABASE_URL names one), creates the
    schema, registers the workflows of the given modules and runs them, and the publisher too when a broker
    is configured. The data survives and is used again. Other commands find the database by themselves. Ctrl-C
    stops all of it.

    \b
    Examples:
      flowforge up my_project.workflows
      flowforge up my_project.workflows --data-dir ./data --port 5433
    """
    from flowforge import up as everything
    from flowforge.cli.loading import load_workflows
    from flowforge.config import Config
    from flowforge.embedded import EmbeddedPostgres

    config = Config.from_environment().replace(database_url=database_url, **_given(flags))
    server = None if config.database_url else EmbeddedPostgres(data_dir, port=port)
    if server is None and (data_dir or port):
        raise click.UsageError(
            "--data-dir and --port are for the embedded PostgreSQL, but a database is given."
        )
    workflows = load_workflows(modules)
    code = everything.run(_logging(config), workflows, server=server, ready=_ready(as_json))
    if code:
        ctx.exit(code)
    if not as_json:
        click.echo("Stopped.")


def _ready(as_json: bool) -> Callable[[Up], None]:
    def announce(up: Up) -> None:
        from flowforge.config import without_password

        url = without_password(up.database_url)
        if as_json:
            print_json({"ready": True, "pid": os.getpid(), "database_url": url, "workflows": up.workflows})
            return
        lines = ["FlowForge is ready."]
        if up.directory is not None:
            lines.append(f"  data       {up.directory}")
        lines.append(f"  database   {url}")
        if up.workflows:
            lines.append(f"  workflows  {', '.join(up.workflows)}")
            lines.append(f"Start a run from another terminal: flowforge trigger {up.workflows[0]} --wait")
        lines.append("Press Ctrl-C to stop.")
        click.echo("\n".join(lines))

    return announce
