"""The command line: `flowforge COMMAND`. What each part needs is imported when the part runs."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import traceback
from typing import Any

import click

from flowforge import __version__, stopping, streams
from flowforge.cli.common import WrongArgument
from flowforge.errors import FlowForgeError
from flowforge.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_USAGE, EXITS, exit_code
from flowforge.log import visible

# Where each command is, in the order of the help.
_COMMANDS = {
    "up": "daemons",
    "demo": "demo",
    "define": "workflows",
    "workflows": "workflows",
    "graph": "graph",
    "trigger": "runs",
    "runs": "runs",
    "show": "show",
    "watch": "watch",
    "cancel": "runs",
    "retry": "runs",
    "queues": "operate",
    "workers": "operate",
    "pause": "operate",
    "resume": "operate",
    "redispatch": "operate",
    "prune": "operate",
    "doctor": "doctor",
    "conformance": "conformance",
    "config": "settings",
    "migrate": "daemons",
    "scheduler": "daemons",
    "publisher": "daemons",
    "worker": "daemons",
    "health": "health",
    "web": "web",
}

_UNTIL_STOPPED = {"up", "scheduler", "publisher", "worker", "web"}
_WAITING = {"demo", "trigger", "watch", "conformance"}

_EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:<4} {meaning}" for code, meaning in EXITS.items())


class _Commands(click.Group):
    """The commands, each imported when asked for; foreseeable errors end as one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click gives it
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(
            importlib.import_module(f"flowforge.cli.{_COMMANDS[cmd_name]}"), cmd_name
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS and (near := difflib.get_close_matches(args[0], _COMMANDS, 1)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except OSError as error:  # of --help and --version
            sys.exit(_told_in_vain(error))
        except KeyboardInterrupt:  # click would end with 1
            sys.exit(EXIT_INTERRUPTED)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlowForgeError as error:
            click.secho("error: ", err=True, fg="red", nl=False)
            click.echo(visible("\n".join([str(error), *getattr(error, "__notes__", ())])), err=True)
            ctx.exit(EXIT_USAGE if isinstance(error, WrongArgument) else exit_code(error))
        except UnicodeEncodeError as error:
            if error.encoding != "utf-8" or error.reason != "surrogates not allowed":
                raise
            click.secho("error: ", err=True, fg="red", nl=False)
            click.echo(f"not text in UTF-8: {error.object!a}", err=True)
            ctx.exit(EXIT_USAGE)
        except OSError as error:
            code = _told_in_vain(error)
            ctx.exit(EXIT_INTERRUPTED if _was_interrupted(error) else code)
        except KeyboardInterrupt as error:
            click.echo(err=True)
            if str(error):
                click.echo(str(error), err=True)
            ctx.exit(EXIT_INTERRUPTED)


def _told_in_vain(error: OSError) -> int:
    """The exit code when output cannot be written. Raises `error` where it is no such."""
    if not _is_of_output(error):
        if error.errno != errno.EPIPE:
            raise error
        traceback.print_exc()  # click would take it for one of the output
        return EXIT_FAILED
    _forget_output()
    if error.errno == errno.EPIPE:
        return EXIT_PIPE
    click.secho("error: ", err=True, fg="red", nl=False)
    click.echo(f"cannot write to standard output: {error.strerror}", err=True)
    return EXIT_FAILED


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether it arose while an interruption was cleaned up after, as on a terminal that has hung up."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _is_of_output(error: OSError) -> bool:
    """Whether it arose where text is printed, or it was found that nobody reads it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    name = frame.f_code.co_name
    of_output = module == streams.__name__ and name in ("write", "sleep_while_read")
    return of_output or module.partition(".")[0] in ("click", "rich")


def _forget_output() -> None:
    """The interpreter would try to write what is left once more at its end, and tell of that."""
    with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError, ValueError):  # noqa: PTH123
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


@click.group(
    cls=_Commands,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="flowforge")
@click.option(
    "--config", "path", metavar="FILE", help="TOML file with settings, under FLOWFORGE_*. [FLOWFORGE_CONFIG]"
)
def cli(path: str | None) -> None:
    """FlowForge runs workflows durably: what is to be done lives in PostgreSQL, workers do it.

    \b
    Try it out:           flowforge demo
    Run your workflows:   flowforge up my_project.workflows
    Start one:            flowforge trigger etl --input '{"day": "2025-01-31"}' --wait
    Look at it:           flowforge runs;  flowforge show 1;  flowforge watch 1

    \b
    In production:        flowforge migrate; flowforge define my_project.workflows;
                          then flowforge scheduler and flowforge worker my_project.workflows

    The database is the one of --database-url or FLOWFORGE_DATABASE_URL, else the embedded one that `flowforge
    up` is running.
    """
    if path is not None:
        # For whatever reads settings in this process, or in a child of it.
        os.environ["FLOWFORGE_CONFIG"] = path


def find_command(arguments: list[str]) -> str | None:
    """The command among the program's arguments."""
    if arguments[:1] == ["--config"]:
        arguments = arguments[2:]
    elif arguments and arguments[0].startswith("--config="):
        arguments = arguments[1:]
    return arguments[0] if arguments else None


def _open_what_is_closed() -> None:
    """Else the next file or connection would be standard output or error, and a library write into it. What
    is written to an output that was closed is refused, as ever."""
    for fileno, flags in (0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY):
        try:
            os.fstat(fileno)
        except OSError:
            # The lowest number that is free, which this is. For what this program starts, too.
            os.set_inheritable(os.open(os.devnull, flags), True)
            if fileno > 0:
                setattr(sys, ("stdout", "stderr")[fileno - 1], open(fileno, "w", closefd=False))  # noqa: SIM115


def main() -> None:
    """The entry point of the program `flowforge`."""
    _open_what_is_closed()
    # Text of the database in whatever encoding the terminal has: better a replacement than a traceback.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    name = find_command(sys.argv[1:])
    if name in _UNTIL_STOPPED:
        streams.serve()
        # Before anything that takes a while: what is asked to stop so early ends as it would later.
        stopping.remember()
    else:
        streams.let_errors_be_lost()
        # Ctrl-C, also where a script started this in the background and so had SIGINT ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        # What waits learns of it as of Ctrl-C, from here on: its imports take a while.
        with stopping.interrupting() if name in _WAITING else contextlib.nullcontext():
            cli(prog_name="flowforge")
    except KeyboardInterrupt:  # before click, or after it
        stopping.end_now(EXIT_INTERRUPTED)
    except SystemExit as end:
        if name in _UNTIL_STOPPED:
            stopping.end_soon(end.code if isinstance(end.code, int) else 0)
        elif end.code == EXIT_INTERRUPTED:
            stopping.end_now(EXIT_INTERRUPTED)  # further signals would have an exit code of their own
        raise
