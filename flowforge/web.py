"""A read-only page for operators, as HTML that the server makes whole: runs, a run with its graph, queues,
workers, figures of health. It and web_server, which has uvicorn, alone need the extra `web`.

It reads the views of flowforge_reader, one read-only transaction a page, and shows no input and no output.
Whoever reaches the port sees all of it: there are no logins, so it listens on 127.0.0.1 unless told else."""

from __future__ import annotations

import html
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
from psycopg.rows import dict_row, tuple_row

from flowforge import connecting, cutoff, db, log, threads
from flowforge.config import Config
from flowforge.errors import (
    ConfigError,
    DatabaseError,
    DatabaseUnavailable,
    FlowForgeError,
    MissingPrivilege,
    first_line,
    from_database,
)
from flowforge.exits import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from flowforge.extras import installing
from flowforge.log import visible
from flowforge.stopping import Stop, signals

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

Row = dict[str, Any]

PAGE = 50  # runs
MOST_TASKS = 300  # of a run
STATEMENT_TIMEOUT = "5s"
LIMIT = 20.0  # seconds for all statements of a page, whatever has become of the server
GRACE = 5.0  # seconds that requests under way have at the end

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_COLOURS = {
    "succeeded": "#2e7d32", "failed": "#c62828", "cancelled": "#6d4c41", "cancelling": "#6d4c41",
    "running": "#1565c0", "ready": "#00838f", "pending": "#757575", "skipped": "#9e9e9e",
}  # fmt: skip
_STYLE = """
body{font:15px system-ui,sans-serif;margin:1.5em;color:#222} nav a{margin-right:1.2em} h1{font-size:1.3em}
table{border-collapse:collapse;margin:1em 0} td,th{text-align:left;padding:.25em .8em;vertical-align:top}
td{max-width:40em;overflow-wrap:anywhere;white-space:pre-wrap;border-top:1px solid #ddd}
svg{max-width:100%;height:auto}
""" + "".join(f".{state}{{color:{colour};font-weight:600}}" for state, colour in _COLOURS.items())


def serve(config: Config, host: str, port: int, ready: Callable[[str], None]) -> int:
    """Serve the page until SIGTERM or SIGINT; `ready` is given its address. Main thread only. The exit code:
    after a second signal, which waits for no request, it is EXIT_INTERRUPTED, and EXIT_FAILED when the server
    ends by itself.

    Raises ConfigError when the extra is not installed, or the port cannot be listened on there; SchemaError,
    MissingPrivilege or DatabaseError when no page could be made with this login."""
    try:
        from flowforge.web_server import Server

        server = Server(application(config, host))
    except ImportError:
        raise ConfigError(f"what serves pages is not installed: {installing('web')}") from None
    _check_login(config)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # First, since create_server leaves its socket open over what is no name.
        socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        listening = socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter of what is no name of a host
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host!r} port {port}: {why}") from None
    stop = Stop()
    stop.on_request(lambda: setattr(server, "should_exit", True))

    def main() -> None:
        # Signals are ours, so that the process ends with 0: in its own thread the server leaves them alone.
        try:
            server.run(sockets=[listening])
        except BaseException as error:  # noqa: BLE001 -- a server that cannot start exits
            log.of("web").error("the server failed", error=first_line(error), kind=type(error).__name__)

    thread = threading.Thread(target=main, name="flowforge-web", daemon=True)
    with listening, signals(stop):
        threads.start(thread)
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.getsockname()[1]}/")
        until = float("inf")
        while thread.is_alive() and not stop.immediate and time.monotonic() < until:
            thread.join(0.1)
            if stop.requested:
                until = min(until, time.monotonic() + GRACE)
    if not stop.requested:
        log.of("web").error("the server has ended by itself")
        return EXIT_FAILED
    return EXIT_INTERRUPTED if stop.immediate else EXIT_OK


_VIEWS = (
    "health",
    "queue_status",
    "run_status",
    "task_run_status",
    "worker_status",
    "workflow_version_status",
)


def _check_login(config: Config) -> None:
    """Tell at the start what would keep every page from being made, and warn of a login that may do more than
    read. A database that cannot be reached may come back: it keeps nothing from starting."""
    try:
        with _reading(config, tuple_row) as connection:
            connecting.check_start(connection, ["schema_version"], "flowforge_reader")
            ((login, hidden, more),) = connection.execute(
                """
                select session_user::text,
                    array(select c.relname::text from pg_catalog.pg_class c
                          where c.relnamespace = 'flowforge'::regnamespace and c.relname = any(%s)
                             and not has_table_privilege(c.oid, 'select') order by 1),
                    case when (select rolsuper from pg_catalog.pg_roles where rolname = session_user)
                        then 'a superuser'
                        else (select 'a member of ' || rolname from pg_catalog.pg_roles
                              where rolname in ('flowforge_operator', 'flowforge_owner')
                                 and pg_has_role(session_user, oid, 'member') order by 1 limit 1) end
                """,
                [list(_VIEWS)],
            ).fetchall()
    except (psycopg.Error, OSError) as exc:
        error = from_database(exc) if isinstance(exc, psycopg.Error) else DatabaseUnavailable(str(exc))
        if isinstance(exc, psycopg.Error) and (reason := db.refusal(exc)):
            raise DatabaseError(f"the database refuses the connection: {reason} ({first_line(exc)})") from exc
        if not isinstance(error, DatabaseUnavailable):
            raise error from exc
        log.of("web").warning("the database cannot be read yet", error=str(error))
        return
    if hidden:
        raise MissingPrivilege(
            f'login "{login}" lacks SELECT on {", ".join(hidden)}; '
            f'remedy: grant flowforge_reader to "{login}"'
        )
    if more:
        log.of("web").warning(
            f"login {login} is {more}: the page needs flowforge_reader, and should have no more"
        )


def application(config: Config, host: str = "127.0.0.1") -> Starlette:
    """The page as an ASGI application. On a loopback address it answers to the names of such only, so that no
    other site's script can reach it through a name that it points there."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    def page(title: str, make: Callable[[psycopg.Connection[Row], Request], str | None]) -> Any:
        # Not async: each request has a thread of its own, which the database may keep waiting.
        def answer(request: Request) -> HTMLResponse:
            status, body = 200, None
            try:
                with _reading(config) as connection:
                    body = make(connection, request)
                if body is None:
                    status, body = 404, "<p>There is no such run.</p>"
            except (psycopg.Error, FlowForgeError, OSError) as error:
                # Such texts name hosts and logins.
                log.of("web").warning("the database cannot be read", error=first_line(error))
                status, body = 503, "<p>The database cannot be read; the log of flowforge web says why.</p>"
            return HTMLResponse(_whole(title, body), status, headers=_HEADERS)

        return answer

    return Starlette(
        routes=[
            Route("/", page("Runs", _runs), methods=["GET"]),
            Route("/runs/{run}", page("Run", _run), methods=["GET"]),
            Route("/queues", page("Queues", _view("queue_status", "queue")), methods=["GET"]),
            Route("/workers", page("Workers", _view("worker_status", "worker")), methods=["GET"]),
            Route("/health", page("Health", _view("health", "name")), methods=["GET"]),
        ],
        middleware=[Middleware(_ThisMachine)] if _is_local(host) else [],
    )


class _ThisMachine:
    """Refuses requests to other names than this machine's own for itself."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        try:
            name = urlsplit(f"//{Headers(scope=scope).get('host', '')}").hostname or ""
        except ValueError:  # a bracket without the other
            name = ""
        app = self._app if _is_local(name) else PlainTextResponse("Invalid host header", 400)
        await app(scope, receive, send)


def _is_local(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@contextmanager
def _reading(config: Config, rows: Any = dict_row) -> Generator[psycopg.Connection[Any]]:
    """A connection whose transaction, which ends with the block, reads and does so for a short time."""
    connection: Any = db.connect(
        config.database_url,
        application_name="flowforge web",
        connect_timeout=config.connect_timeout,
        prepared_statements=False,
        read_write=False,
    )
    connection.row_factory = rows
    connection.read_only = True
    with connection, cutoff.guard(connection, LIMIT), connection.transaction():
        connection.execute(f"set local statement_timeout = '{STATEMENT_TIMEOUT}'")
        yield connection


def _text(value: object) -> str:
    """Any value as HTML: whatever names and errors hold is shown, and means nothing to a browser."""
    if value is None:
        return ""
    if hasattr(value, "isoformat"):
        value = f"{value:%Y-%m-%d %H:%M:%S %Z}"
    return html.escape(visible(", ".join(map(str, value)) if isinstance(value, list) else str(value)))


def _state(state: str) -> str:
    return f'<span class="{_text(state)}">{_text(state)}</span>'


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{_text(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _whole(title: str, body: str) -> str:
    places = {"/": "Runs", "/queues": "Queues", "/workers": "Workers", "/health": "Health"}
    links = "".join(f'<a href="{place}">{name}</a>' for place, name in places.items())
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>FlowForge: {_text(title)}</title>'
        f"<style>{_STYLE}</style><nav>{links}</nav><h1>{_text(title)}</h1>{body}</html>"
    )


def _runs(connection: psycopg.Connection[Row], request: Request) -> str:
    before = _number(request.query_params.get("before", ""))
    rows = connection.execute(
        "select run_id, workflow, version, state, created_at, duration, task_runs, succeeded, failed"
        " from flowforge.run_status where run_id < %s order by run_id desc limit %s",
        [2**63 - 1 if before is None else before, PAGE],
    ).fetchall()
    table = _table(
        list(rows[0]) if rows else ["no runs"],
        (
            [
                f'<a href="/runs/{row["run_id"]}">{row["run_id"]}</a>' if name == "run_id"
                else _state(row["state"]) if name == "state" else _text(row[name])
                for name in row
            ]
            for row in rows
        ),
    )  # fmt: skip
    older = f'<a href="/?before={rows[-1]["run_id"]}">older</a>' if len(rows) == PAGE else ""
    return table + older


def _number(text: str) -> int | None:
    """The number of a run that there may be."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _run(connection: psycopg.Connection[Row], request: Request) -> str | None:
    run = _number(request.path_params["run"])
    found = connection.execute("select * from flowforge.run_status where run_id = %s", [run]).fetchone()
    if found is None:
        return None
    told = {key: found[key] for key in ("workflow", "version", "created_at", "duration", "cancel_reason")}
    tasks = connection.execute(
        "select task, map_index, state, waits, queue, attempt, worker, duration, error"
        " from flowforge.task_run_status where run_id = %s and not superseded"
        " and (map_index is null or state in ('failed', 'running'))"
        " order by map_index is not null, task_run_id limit %s",
        [run, MOST_TASKS],
    ).fetchall()
    version = connection.execute(
        "select definition from flowforge.workflow_version_status where workflow = %s and version = %s",
        [found["workflow"], found["version"]],
    ).fetchone()
    states = {row["task"]: row["state"] for row in tasks if row["map_index"] is None}
    return (
        f"<p>Run {run}: {_state(found['state'])}</p>"
        + _table(list(told), [[_text(value) for value in told.values()]])
        + _graph(version["definition"]["tasks"] if version else [], states)
        + _table(
            list(tasks[0]) if tasks else [],
            ([_state(row[key]) if key == "state" else _text(row[key]) for key in row] for row in tasks),
        )
    )


def _graph(tasks: list[Row], states: dict[str, str]) -> str:
    """The tasks in columns, each to the right of all that it waits for."""
    if not 0 < len(tasks) <= MOST_TASKS:
        return ""
    above = {
        # What a map is mapped over may be named twice.
        task["name"]: dict.fromkeys([*task.get("after", []), *filter(None, [task.get("map")])])
        for task in tasks
    }
    column: dict[str, int] = {}
    while len(column) < len(above):
        for name in above.keys() - column.keys():
            if all(each in column for each in above[name]):
                column[name] = 1 + max((column[each] for each in above[name]), default=-1)
    placed: dict[str, tuple[int, int]] = {}
    height: dict[int, int] = {}
    for name in above:
        placed[name] = column[name] * 220, height.get(column[name], 0) * 50
        height[column[name]] = height.get(column[name], 0) + 1
    parts = []
    for name, (x, y) in placed.items():
        for each in above[name]:
            left, top = placed[each]
            parts.append(f'<path d="M{left + 170} {top + 20} L{x} {y + 20}" stroke="#999" fill="none"/>')
        shown, state = name if len(name) <= 20 else f"{name[:19]}…", states.get(name, "")
        parts.append(
            f"<g><title>{_text(name)}: {_text(state)}</title>"
            f'<rect x="{x}" y="{y}" width="170" height="36" rx="5" fill="#fff"'
            f' stroke="{_COLOURS.get(state, "#999")}" stroke-width="2"/>'
            f'<text x="{x + 10}" y="{y + 23}" font-size="13">{_text(shown)}</text></g>'
        )
    wide, high = (max(height) + 1) * 220, max(height.values()) * 50
    return f'<svg viewBox="-2 -2 {wide} {high}" width="{wide}" role="img">{"".join(parts)}</svg>'


def _view(view: str, order: str) -> Callable[[psycopg.Connection[Row], Request], str]:
    def make(connection: psycopg.Connection[Row], _request: Request) -> str:
        query = f"select * from flowforge.{view} order by {order} limit 1000"  # noqa: S608 -- our own names
        rows = connection.execute(query.encode()).fetchall()
        return _table(list(rows[0]) if rows else ["none"], [list(map(_text, row.values())) for row in rows])

    return make
