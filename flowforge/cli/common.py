"""What the commands share: the database, output for people and for programs, durations and states."""

from __future__ import annotations

import errno
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flowforge.errors import (
    READ_ONLY,
    ConfigError,
    DatabaseError,
    DatabaseUnavailable,
    FlowForgeError,
    MissingPrivilege,
    NotFound,
    SchemaError,
    from_database,
    refusal,
)
from flowforge.log import UNSEEN, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from flowforge import db
    from flowforge.config import Config

F = TypeVar("F", bound=Callable[..., Any])

# -- options


def _given(_: click.Context, __: click.Parameter, url: str | None) -> str | None:
    """The connection string of the option. An empty one is no wish for the embedded database, but a variable
    that was not set."""
    if url is not None and not (url := url.strip()):
        raise click.BadParameter("it is empty; leave it out for the one of FLOWFORGE_DATABASE_URL or `up`")
    if url is not None and not url.isascii():
        try:
            url.encode()
        except UnicodeEncodeError:
            raise ConfigError("--database-url is not text in UTF-8") from None
    return url


database_option = click.option(
    "--database-url",
    metavar="URL",
    callback=_given,
    help="PostgreSQL connection string. [FLOWFORGE_DATABASE_URL; else the embedded server of `flowforge up`]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one document, or one a line for lists."
)


def seconds(text: str) -> float:
    """The type of an option that is a length of time: 90, 1.5s, 10m, 2h, 1d."""
    from flowforge.config import length_of_time

    try:
        return length_of_time(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not a length of time such as 90, 1.5s, 10m, 2h or 1d"
        ) from None


class WrongArgument(ConfigError):
    """What the arguments name, a module or a file, will not do. It is no setting, and ends as wrong use."""


@contextmanager
def named_by_arguments() -> Iterator[None]:
    """What is wrong within the block is so with what the arguments name."""
    try:
        yield
    except ConfigError as error:
        raise WrongArgument(str(error)) from error.__cause__


class Integer(click.IntRange):
    """A whole number within bounds, called so in messages."""

    name = "integer"


run_argument = click.argument("run_id", type=Integer(1, 2**63 - 1), metavar="RUN")


def parse_json(text: str) -> Any:
    """The value of JSON text. Raises ValueError also for the constants that Python adds to JSON."""
    return json.loads(text, parse_constant=_refuse_constant)


def read_json(source: str) -> Any:
    """The value of the JSON in a file, or of - for standard input: UTF-8 whatever the locale says.

    Raises OSError if it cannot be read, ValueError if it is not JSON.
    """
    if source != "-":
        return parse_json(Path(source).read_bytes().decode())
    stdin: Any = getattr(sys, "stdin", None)
    if stdin is None:
        raise OSError(errno.EBADF, "it is closed")
    binary = getattr(stdin, "buffer", None)  # not where a module put something else there, or detached it
    return parse_json(stdin.read() if binary is None else binary.read().decode())


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def command(arguments: str) -> str:
    """A command to go on with, as it works in this place: with the database that the present one was given,
    unless that holds a password.
    """
    context = click.get_current_context(silent=True)
    url = context.params.get("database_url") if context else None
    option = f" --database-url {shlex.quote(url)}" if url and not holds_secret(url) else ""
    return f"flowforge {arguments}{option}"


def holds_secret(url: str) -> bool:
    """Whether the connection string may hold a password, or another secret."""
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    from flowforge.config import is_secret, without_password

    try:
        given = conninfo_to_dict(url)
    except (psycopg.Error, UnicodeEncodeError):
        return True
    return any(map(is_secret, given)) or url != without_password(url)


# -- the database

ANSWER_LIMIT = 60.0
"""Seconds until a server that has not answered is given up."""


def find_database(url: str | None) -> Config:
    """The configuration of the environment, with the database that the command shall use.

    Raises ConfigError, saying what to do, when there is none.
    """
    from flowforge.client import A_CONNECTION_STRING, is_connection_string
    from flowforge.config import Config, given
    from flowforge.embedded import running_dsn

    config = Config.from_environment().replace(database_url=url)
    if config.database_url and not is_connection_string(config.database_url):
        source = "--database-url" if url else given()["database_url"][1]
        raise ConfigError(f"{source} is not {A_CONNECTION_STRING}")
    if not config.database_url:
        found = running_dsn()
        if found is None:
            hints = "".join(f"; {line}" for line in misnamed_settings())
            raise ConfigError(
                "no database: set FLOWFORGE_DATABASE_URL, give --database-url, or start `flowforge up`"
                f"{hints}"
            )
        config = config.replace(database_url=found)
        # Perhaps another one was meant. What else is misnamed, daemons and `config` tell.
        for line in misnamed_settings():
            if "FLOWFORGE_DATABASE_URL?" in line:
                say(f"{line} This is the database of `flowforge up`.", err=True)
    return config


def misnamed_settings() -> list[str]:
    """What to say of variables that are no settings."""
    from flowforge.config import unknown_variables

    return [
        f"there is no setting {name}{f', did you mean {near}?' if near else ''}"
        for name, near in unknown_variables().items()
    ]


@contextmanager
def database(
    url: str | None, role: str = "flowforge_reader", within: float | None = None
) -> Iterator[db.Connection]:
    """A connection to the database, made `within` so many seconds, whose errors are this project's own and
    say what to do next: to members of `role`, what is done on it is allowed.

    Raises FlowForgeError.
    """
    import psycopg

    from flowforge import db

    config = find_database(url)
    with acting(role):
        try:
            with db.connect(
                config.database_url,
                application_name="flowforge cli",
                connect_timeout=config.connect_timeout,
                prepared_statements=config.prepared_statements,
                read_write=False,
                within=within,
            ) as connection:
                yield connection
        except psycopg.Error as error:
            raise from_database(error) from error


@contextmanager
def acting(role: str | None = None) -> Iterator[None]:
    """Adds to the errors of the block what to do next. `role` is the one that may do what is done in it."""
    try:
        yield
    except FlowForgeError as error:
        better = _explained(error, role)
        if better is error:
            raise
        raise better from error.__cause__


def _explained(error: FlowForgeError, role: str | None) -> FlowForgeError:
    import psycopg

    text = str(error)
    if isinstance(error, DatabaseError) and error.sqlstate == "42P01":  # no such table or view
        return SchemaError(f"{text}: the schema is missing or too old; run {_migrating()}")
    if isinstance(error, SchemaError) and "`flowforge migrate`" in text:
        return SchemaError(text.replace("`flowforge migrate`", _migrating()))
    # With a state it is what the server itself said.
    if isinstance(error, DatabaseUnavailable) and error.sqlstate is None and READ_ONLY not in text:
        return DatabaseUnavailable(f"{text}: is PostgreSQL running at the given address?", error.sqlstate)
    # Without the database's own hint, which is for SQL.
    bare = re.sub(r" \([A-Z][^()]*\.\)$", "", text)
    if isinstance(error, NotFound) and (where := _listed_by(bare)):
        return NotFound(f"{bare}; see which there are: {command(where)}")
    if isinstance(error, MissingPrivilege) and role is not None:
        return MissingPrivilege(f"{text}; remedy: grant {role} to {_login()}")
    cause = error.__cause__
    if isinstance(error, DatabaseError) and isinstance(cause, psycopg.Error) and (why := refusal(cause)):
        return DatabaseError(
            f"{text}: {why}; check the connection string (--database-url or FLOWFORGE_DATABASE_URL)",
            error.sqlstate,
        )
    return error


def _login() -> str:
    """The present command's login as SQL names it, or words where the connection string does not tell."""
    from psycopg import pq
    from psycopg.conninfo import conninfo_to_dict

    context = click.get_current_context(silent=True)
    with suppress(FlowForgeError):
        dsn = find_database(context.params.get("database_url") if context else None).database_url
        given = conninfo_to_dict(dsn)
        user = given.get("user")
        if not user and "service" not in given:
            defaults = {each.keyword: each.val for each in pq.Conninfo.get_defaults()}
            user = (defaults.get(b"user") or b"").decode(errors="replace")
        if user:
            return '"' + str(user).replace('"', '""') + '"'
    return "this login"


def _listed_by(text: str) -> str | None:
    """The command that lists what there is in place of what an error of the database has not found."""
    if found := re.search(r"^there is no task .* in run (\d+)$|^run (\d+) has no task ", text):
        return f"show {found[1] or found[2]}"
    if found := re.search(r"^there is no (run|queue|workflow) (\d+|'[^']*'|\"[^\"]*\")$", text):
        return f"{found[1]}s"
    return "workflows" if re.search(r"^workflow .* has no version \d+$", text) else None


def _migrating() -> str:
    """The command that migrates the database of the present one."""
    context = click.get_current_context(silent=True)
    told = command("migrate")
    is_secret = context is not None and context.params.get("database_url") and "--database-url" not in told
    return f"`{told}`{' with the same --database-url' if is_secret else ''}"


def select(
    connection: db.Connection, query: str, params: Sequence[Any] = (), limit: float | None = None
) -> list[dict[str, Any]]:
    """The rows of a query as dictionaries. It has `limit` seconds, or ANSWER_LIMIT."""
    from psycopg.rows import dict_row

    from flowforge.cutoff import answered_within

    with (
        answered_within(connection, limit or ANSWER_LIMIT),
        connection.cursor(row_factory=dict_row) as cursor,
    ):
        return cursor.execute(query, params).fetchall()


# -- output for programs


def print_json(value: object) -> None:
    """One JSON document on one line; durations are numbers of seconds, times ISO 8601."""
    print_json_text(json.dumps(value, default=_plain, ensure_ascii=False))


def print_json_text(text: str) -> None:
    """JSON on one line, in which no character means anything to a terminal."""
    click.echo(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _plain(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value)


@contextmanager
def known_at_least(what: str) -> Iterator[None]:
    """What is printed within the block tells of something that was done, and is not safe to repeat: when that
    cannot be written, standard error says `what`."""
    try:
        yield
    except OSError:
        say(what, err=True)
        raise


# -- output for people


def say(text: str, *, err: bool = False) -> None:
    """Prints text, which may hold some of the database, on standard output or, with `err`, error."""
    click.echo(visible(text), err=err)


STATES = {
    "pending": ("○", "dim"),
    "ready": ("◔", "yellow"),
    "running": ("●", "cyan"),
    "succeeded": ("✔", "green"),
    "failed": ("✖", "bold red"),
    "cancelled": ("⊘", "magenta"),
    "cancelling": ("⊘", "magenta"),
    "skipped": ("↷", "dim"),
}


def console() -> Console:
    """Standard output as rich knows it: colours on a terminal unless NO_COLOR says otherwise."""
    from rich.console import Console

    class Told(Console):
        def on_broken_pipe(self) -> None:  # rich would end the program, with a code that says something else
            raise

    return Told(highlight=False, soft_wrap=not sys.stdout.isatty(), emoji=False, markup=False)


def state_text(state: str) -> Text:
    """A state with its sign and colour."""
    from rich.text import Text

    sign, style = STATES.get(state, (" ", ""))
    return Text(f"{sign} {state}", style=style)


def print_table(columns: Mapping[str, str], rows: Iterable[Mapping[str, object]]) -> None:
    """Rows under the headings of `columns` (key: heading): a table on a terminal; in a pipe plain aligned
    columns, whole, without signs and colours. A cell is text, a rich Text, or None.
    """
    out = console()
    rows = list(rows)
    if out.is_terminal:
        from rich.table import Table

        table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
        for key, heading in columns.items():
            right = bool(rows) and all(_is_number(row.get(key)) for row in rows)
            table.add_column(heading, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(_cell(row.get(key)) for key in columns))
        out.print(table)
        return
    lines = [[heading.lower().replace(" ", "_") for heading in columns.values()]]
    lines += [[_in_pipe(row.get(key)) for key in columns] for row in rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(padded).rstrip())


def _is_number(value: object) -> bool:
    return value is None or isinstance(value, int | float) or str(value)[:1].isdigit()


def _cell(value: object) -> Any:
    from rich.text import Text

    if value is None:
        return Text("")
    return value if isinstance(value, Text) else Text(visible(str(value)))


def _in_pipe(value: object) -> str:
    if value is None or str(value) == "":
        return "-"
    text = str(value)
    if text[:2].rstrip() in {sign for sign, _ in STATES.values()}:
        text = text[2:]
    return visible(" ".join(text.split()))


def counted(number: int, thing: str) -> str:
    """1 task, 2 tasks."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def duration(value: timedelta | None) -> str | None:
    """A length of time for people: 12 ms, 3.4 s, 2 min 05 s, 3 h 07 min, 2 d 04 h."""
    if value is None:
        return None
    seconds = value.total_seconds()
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 24 else f"{hours // 24} d {hours % 24:02} h"


def local_time(value: datetime | None) -> str | None:
    """A time in the zone of the reader."""
    return None if value is None else value.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def local_waits(waits: str, at: datetime | None) -> str:
    """What a task run waits for, in words; a time in them, which is `at`, in the zone of the reader."""
    return re.sub(
        r"^(until|(?:.*; )?to be offered again at|its worker is silent: .* until) .+$",
        lambda found: f"{found[1]} {local_time(at)}",
        waits,
    )
