"""The commands that run: migrate, scheduler, publisher, worker, up."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from flowforge import streams
from flowforge.cli.common import (
    F,
    Integer,
    acting,
    database_option,
    find_database,
    holds_secret,
    json_option,
    misnamed_settings,
    named_by_arguments,
    print_json,
    say,
    seconds,
)
from flowforge.cli.registration import warn_of_unregistered
from flowforge.cli.telling import tell
from flowforge.config import Config, call_by_option, given, variable, without_password
from flowforge.errors import ConfigError

if TYPE_CHECKING:
    from flowforge.definition import Workflow
    from flowforge.up import Up


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _setting(
    *flags: str, name: str, text: str, default: str | None = None, **options: Any
) -> Callable[[F], F]:
    """An option that overrides the setting `name`, with its default and its variable in the help."""
    field = next(each for each in dataclasses.fields(Config) if each.name == name)
    if default is None:
        default = f"{field.default:g} s" if isinstance(field.default, float) else str(field.default)
    return click.option(*flags, help=f"{text} Default: {default}. [{variable(field)}]", **options)


_log_options = _options(
    _setting("--log-format", name="log_format", text="Form of the log.", type=click.Choice(["text", "json"])),
    _setting(
        "--log-level",
        name="log_level",
        text="Least important line that is logged.",
        type=click.Choice(["debug", "info", "warning", "error"]),
    ),
    _setting(
        "--health-file",
        name="health_file",
        text="File to keep the state of health in.",
        default="none",
        metavar="FILE",
    ),
)
_metrics_options = _options(
    _setting(
        "--metrics-port",
        name="metrics_port",
        text="Port to serve metrics on, for Prometheus.",
        default="none",
        type=Integer(0, 65_535),
        metavar="PORT",
    ),
    _setting(
        "--metrics-host",
        name="metrics_host",
        text="Address to open that port on.",
        metavar="HOST",
    ),
)
_broker_options = _options(
    _setting(
        "--amqp-url",
        "amqp_urls",
        name="amqp_urls",
        text="RabbitMQ URLs, comma separated. With a password better given by the environment, which other "
        "users of the machine cannot read.",
        default="none, PostgreSQL alone",
        metavar="URL",
    ),
    _setting(
        "--namespace",
        name="namespace",
        text="Prefix of exchanges and queues.",
        default="none",
        metavar="NAME",
    ),
)
_worker_options = _options(
    _setting(
        "-c",
        "--concurrency",
        name="concurrency",
        text="Handlers that run at the same time.",
        type=Integer(1, 10_000),
    ),
    _setting(
        "-q",
        "--queue",
        "queues",
        name="queues",
        text="Queue to take work from; repeatable.",
        default="those that the tasks of the given workflows name",
        multiple=True,
    ),
    _setting(
        "--lease",
        name="lease",
        text="Lease of a claim, renewed while it runs.",
        type=seconds,
        metavar="TIME",
    ),
    _setting(
        "--grace",
        name="grace",
        text="Time for handlers to finish after SIGTERM or Ctrl-C; what then still runs is given back.",
        type=seconds,
        metavar="TIME",
    ),
    _setting(
        "--isolation",
        name="isolation",
        text="Where handlers run whose tasks do not say so: threads, or processes that can be killed.",
        type=click.Choice(["threads", "processes"]),
    ),
    _setting(
        "--memory-limit",
        name="memory_limit",
        text="MiB that a process of handlers may have.",
        default="0, no limit",
        type=Integer(0, 1_048_576),
        metavar="MIB",
    ),
    _setting(
        "--recycle-after",
        name="recycle_after",
        text="Tasks after which a process of handlers is replaced.",
        type=Integer(1, 1_000_000),
        metavar="N",
    ),
    _setting(
        "--tracing",
        name="tracing",
        text="Whether each execution of a handler is a span of OpenTelemetry.",
        default="off",
        type=click.Choice(["on", "off"]),
    ),
)


def _configured(database_url: str | None, flags: dict[str, Any]) -> Config:
    """The configuration of a daemon, and its log set up."""
    return _logging(_replaced(find_database(database_url), flags))


def _replaced(config: Config, flags: dict[str, Any]) -> Config:
    """The configuration with the options that were given, each blamed by its own name."""
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in flags and (value := flags[option.name]) not in (None, ()):
            context.call_on_close(call_by_option(option.name, option.opts[-1]))
            try:
                config = config.replace(**{option.name: value})
            except ConfigError as error:
                raise click.BadParameter(f"it {str(error).partition(' ')[2]}", param=option) from None
    return config


def _serving(config: Config, queues: Iterable[str], workflows: Iterable[Workflow]) -> Config:
    """The configuration of a worker for these workflows: with their queues, unless `queues` of the command
    line or the environment say which."""
    wanted = sorted({queue for workflow in workflows for queue in workflow.queues})
    if not queues and "queues" not in given():
        return config.replace(queues=tuple(wanted) or None)
    if left := [queue for queue in wanted if queue not in config.queues]:
        from flowforge import log

        log.of("worker").warning("tasks on these queues wait for another worker", queue=",".join(left))
    return config


def _loaded(modules: tuple[str, ...], config: Config) -> list[Workflow]:
    """The workflows of the modules, and what their handlers log set up, unless a module has done that."""
    from flowforge import log
    from flowforge.loading import load_workflows

    with named_by_arguments():
        workflows = load_workflows(modules)
    log.configure_others(config.log_format, config.log_level, modules)
    return workflows


def _serve(ctx: click.Context, run: Callable[[], int]) -> NoReturn:
    """Run a daemon until it is told to stop, or nobody reads its log any more."""
    with streams.read_or_stopped() as readers:
        code = run()
    ctx.exit(readers.exit_code(code))


def _logging(config: Config) -> Config:
    from flowforge import log

    log.configure(config.log_format, config.log_level)
    for line in misnamed_settings():
        log.of("settings").warning(line)
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
    from flowforge.migrate import migrate as run_migrate

    config = _logging(find_database(database_url))
    with acting():
        report = run_migrate(config.database_url, create_roles)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    applied = f"applied {', '.join(report.applied)}" if report.applied else "no migration was pending"
    roles = f"; created roles {', '.join(report.roles)}" if report.roles else ""
    click.echo(f"The schema is up to date: {applied}{roles}; {report.functions} functions in place.")


@click.command()
@database_option
@_setting(
    "--poll-interval",
    name="poll_interval",
    text="Longest wait between two looks.",
    type=seconds,
    metavar="TIME",
)
@_log_options
@_metrics_options
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
    _serve(ctx, lambda: runner.run(Scheduler(config), config))


@click.command()
@database_option
@_broker_options
@_log_options
@_metrics_options
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
    _serve(ctx, lambda: runner.run(Publisher(config), config))


@click.command()
@click.argument("modules", nargs=-1, required=True, metavar="MODULE[:NAME]...")
@database_option
@_worker_options
@_broker_options
@_log_options
@_metrics_options
@click.pass_context
def worker(ctx: click.Context, /, modules: tuple[str, ...], database_url: str | None, **flags: Any) -> None:
    """Run a worker for the workflows of Python modules.

    NAME is the Python variable that holds one workflow of the module. The worker runs their handlers, and
    serves the queues that their tasks name ("default" for those that name none) unless --queue says which. On
    SIGTERM or Ctrl-C it takes nothing new, lets handlers finish for the grace time and gives back the rest;
    asked a second time it stops at once.

    \b
    Examples:
      flowforge worker my_project.workflows
      flowforge worker my_project.workflows:etl -c 16 -q default -q reports
    """
    from flowforge.worker import daemon

    config = _configured(database_url, flags)
    workflows = _loaded(modules, config)
    config = _serving(config, flags["queues"], workflows)
    warn_of_unregistered(config, workflows)
    handlers = daemon.handlers_of(workflows)
    _serve(ctx, lambda: daemon.run(handlers, config, sources=modules))


@click.command()
@click.argument("modules", nargs=-1, metavar="[MODULE[:NAME]]...")
@database_option
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path, resolve_path=True),
    help="Where the embedded PostgreSQL keeps its data. Default: ~/.local/share/flowforge/postgres; "
    "for root /var/lib/flowforge/postgres.",
)
@click.option(
    "--port",
    type=Integer(1, 65535),
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
    is configured. It serves the queues that their tasks name ("default" for those that name none) unless
    --queue says which. NAME is the Python variable that holds one workflow of the module. The data survives
    and is used again.

    Other commands find the database by themselves while its data is where it is by default. Ctrl-C stops all
    of it once handlers have finished; a second one at once, with exit code 130.

    \b
    Examples:
      flowforge up my_project.workflows
      flowforge up my_project.workflows --data-dir ./data --port 5433
    """
    from flowforge import stopping
    from flowforge import up as everything
    from flowforge.embedded import EmbeddedPostgres

    config = _replaced(Config.from_environment().replace(database_url=database_url), flags)
    server = None if config.database_url else EmbeddedPostgres(data_dir, port=port)
    if server is None:
        _check_given(database_url, own=data_dir or port)
    _logging(config)
    workflows = _loaded(modules, config)
    config = _serving(config, flags["queues"], workflows)
    left: list[bool] = []
    served: list[bool] = []
    announce = _ready(as_json)

    def ready(what: Up) -> None:
        served.append(True)
        announce(what)

    if server is not None and not as_json:
        say("Starting PostgreSQL …", err=True)
    with acting(), streams.read_or_stopped() as readers:
        code = everything.run(
            config, workflows, sources=modules, server=server, ready=ready,
            abandoned=lambda: left.append(True),
        )  # fmt: skip
    if not code and not as_json:
        tell(say, "Stopped." if served else "Stopped before it was ready.")
    if left:
        stopping.end_now(readers.exit_code(code))
    ctx.exit(readers.exit_code(code))


def _check_given(database_url: str | None, own: object) -> None:
    """Refuses a database that `up` was given and that is of no use; `own`: it was asked for one of its
    own, too."""
    from flowforge.embedded import directory_of, running_dsn

    config = find_database(database_url)  # refuses what is no connection string
    source = "--database-url" if database_url else given()["database_url"][1]
    unset = "unset it" if source.isupper() else "leave it out"
    if own:
        raise click.UsageError(
            f"--data-dir and --port are for the embedded PostgreSQL, but {source} names a database; "
            f"{unset} to have the embedded one."
        )
    directory = directory_of(config.database_url)
    if directory is not None and running_dsn(directory) is None:
        raise ConfigError(
            f"{source} names the embedded PostgreSQL in {directory}, which does not run: {unset}, and "
            "`flowforge up` starts it (with --data-dir where the data is not at its default place)"
        )


def _ready(as_json: bool) -> Callable[[Up], None]:
    def announce(up: Up) -> None:
        url = without_password(up.database_url)
        if as_json:
            defined = [dataclasses.asdict(each) for each in up.workflows]
            state = {"ready": True, "pid": os.getpid(), "database_url": url, "workflows": defined}
            tell(print_json, state)
            return
        lines = ["FlowForge is ready."]
        if up.directory is not None:
            lines.append(f"  data       {up.directory}")
        lines.append(f"  database   {shlex.quote(url)}")
        lines += [
            f"  workflow   {each.workflow} v{each.version}{' (new)' if each.created else ''}"
            for each in up.workflows
        ]
        if up.workflows:
            lines.append(_next_step(up))
        lines.append("Press Ctrl-C to stop.")
        tell(say, "\n".join(lines))

    return announce


def _next_step(up: Up) -> str:
    """How to start a run from another terminal, as a command that works there as it stands."""
    from flowforge.embedded import default_directory

    command = f"flowforge trigger {shlex.quote(up.workflows[0].workflow)} --input '{{}}' --wait"
    where = "Start a run from another terminal"
    if up.directory != default_directory():
        if not holds_secret(up.database_url):
            command += f" --database-url {shlex.quote(up.database_url)}"
        else:
            where += ", with FLOWFORGE_DATABASE_URL set to this database's connection string"
    return f"{where}: {command}"
