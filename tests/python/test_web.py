"""The operators' page, as a browser gets it: what it shows, and that it obeys nothing of that."""

import asyncio
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from flowforge import web, web_server
from flowforge.config import Config
from flowforge.errors import DatabaseError, MissingPrivilege, SchemaError
from flowforge.exits import EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from tests.python.cluster import PROGRAM
from tests.python.shell import Shell
from tests.services.database import Database
from tests.services.process import wait_until

HOSTILE = """<script>alert('x')</script>"&amp;\x1b[31m</title></svg>"""


class Site:
    """`flowforge web` as a process of its own, for a login that may only read."""

    def __init__(self, database_url: str) -> None:
        self._process = subprocess.Popen(
            [PROGRAM, "web", "--port", "0", "--database-url", database_url], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", self.said)
        self.port = int(found[1]) if found else 0

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        self.headers = answer.headers
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def stop(self, *numbers: int) -> int:
        for number in numbers or [signal.SIGTERM]:
            self._process.send_signal(number)
        try:
            code = self._process.wait(60)
        finally:
            self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


@pytest.fixture
def site(db: Database) -> Iterator[Site]:
    site = Site(db.create_login("flowforge_reader"))
    yield site
    assert site.stop() == 0


def trigger(db: Database, name: str) -> int:
    spec = {
        "name": name,
        "tasks": [{"name": name}, {"name": "each", "map": name}, {"name": "end", "after": [name, "each"]}],
    }
    with db.connect() as conn:
        conn.execute("select flowforge.define_workflow(%s)", [Jsonb(spec)])
        row = conn.execute("select flowforge.trigger(%s, '\"the input\"')", [name]).fetchone()
        assert row is not None
        return int(row[0])


def test_runs_queues_workers_and_figures_are_shown(db: Database, site: Site) -> None:
    run = trigger(db, "etl")
    with db.connect() as conn:
        conn.execute("select flowforge.announce_worker('worker 7', array['default'], 3)")
        conn.execute("select flowforge.pause_queue('default')")
    status, runs = site.get("/")
    assert status == 200
    assert f'<a href="/runs/{run}">{run}</a>' in runs
    assert '<span class="pending">pending</span>' in runs
    status, page = site.get(f"/runs/{run}")
    assert status == 200
    assert page.count("<rect ") == 3
    assert page.count("<path ") == 3
    assert "1 of 1 upstreams are not done" in page
    assert "the input" not in page
    assert "<td>worker 7</td>" in site.get("/workers")[1]
    assert "<td>default</td>" in site.get("/queues")[1]
    assert "<td>runs that have not ended</td>" in site.get("/health")[1]


def test_older_runs_are_on_further_pages(db: Database, site: Site) -> None:
    trigger(db, "etl")
    with db.connect() as conn:
        conn.execute("select flowforge.trigger_many('etl', array_fill('1'::jsonb, array[60]))")
    shown = re.findall(r'href="/runs/(\d+)"', site.get("/")[1])
    (older,) = re.findall(r'href="(/\?before=\d+)"', site.get("/")[1])
    assert len(shown) == 50
    rest = re.findall(r'href="/runs/(\d+)"', site.get(older)[1])
    assert sorted(map(int, shown + rest)) == list(range(1, 62))
    for odd in ("x", "-1", "9" * 40, "%00", "1;2", "²"):
        assert site.get(f"/?before={odd.encode().hex() if odd == '²' else odd}")[0] == 200


def test_what_is_shown_is_not_obeyed(db: Database, site: Site) -> None:
    """Names, reasons and errors of others are text to the browser, whatever stands in them."""
    run = trigger(db, "plain")
    with db.connect() as conn:
        # The functions refuse some of such names; the page must not rely on it.
        conn.execute("alter table flowforge.workflow disable trigger user")
        for table, column in (("workflow", "name"), ("queue", "name"), ("task", "name")):
            conn.execute(
                f"update flowforge.{table} set {column} = %s where {column} in ('plain', 'default')".encode(),
                [HOSTILE],
            )
        conn.execute(
            "select flowforge.announce_worker(%s, array['default'], 3)", ["<img src=x onerror=alert(1)>"]
        )
        conn.execute("select flowforge.cancel_run(%s, %s)", [run, HOSTILE])
    for path in ("/", f"/runs/{run}", "/queues", "/workers"):
        status, page = site.get(path)
        assert status == 200
        assert "<script" not in page
        assert "<img" not in page
        assert "\x1b" not in page
        assert page.count("</title>") == 1 + page.count("<g>")
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;" in site.get("/")[1]
    assert site.headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_requests_that_are_none_of_its_business_are_refused(db: Database, site: Site) -> None:
    assert site.get("/runs/12345")[0] == 404
    for digits in (19, 30, 4301, 20_000):
        assert site.get(f"/runs/{'9' * digits}")[0] == 404
    assert site.get("/runs/x")[0] == 404
    assert site.get("/", "POST")[0] == 405
    # A site whose name is made to point here.
    assert site.get("/", Host="evil.example")[0] == 400
    with db.connect() as conn:
        conn.execute("drop schema flowforge cascade")
    status, page = site.get("/")
    assert status == 503
    assert "The database cannot be read; the log" in page


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]])
def test_a_client_that_reads_slowly_does_not_hold_up_the_end(db: Database, signals: list[int]) -> None:
    with db.connect() as conn:
        conn.execute(
            "insert into flowforge.worker (name, queues, capacity, started_at, seen_at)"
            " select i::text, array[repeat('x', 20000)], 1, now(), now() from generate_series(1, 1000) i"
        )
    site = Site(db.create_login("flowforge_reader"))
    with socket.create_connection(("127.0.0.1", site.port)) as client:
        client.sendall(b"GET /workers HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")  # of more than any buffer holds
        assert site.stop(*signals) == (0 if len(signals) == 1 else EXIT_INTERRUPTED)


def ask(config: Config, path: str, *, listening: str = "127.0.0.1", host: str = "localhost") -> list[Any]:
    """What the application answers, without a server."""
    said: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        said.append(message.get("status") or message["body"].decode())

    headers = [(b"host", host.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(web.application(config, listening)(scope, receive, send))
    return said


OWN = ["localhost", "LOCALHOST:80", "127.0.0.1:8080", "127.9.9.9", "[::1]", "[::1]:8080"]
OTHERS = ["evil.example:80", "127.0.0.1.evil.example", "", "[::1", "[::2]:8080", "10.0.0.1"]


@pytest.mark.parametrize("listening", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "0:0::1"])
def test_at_addresses_of_this_machine_alone_only_its_own_names_are_answered(listening: str) -> None:
    for expected, hosts in ((404, OWN), (400, OTHERS)):
        found = {host: ask(Config(), "/nothing", listening=listening, host=host)[0] for host in hosts}
        assert found == dict.fromkeys(hosts, expected)


@pytest.mark.parametrize("listening", ["::", "10.0.0.1"])
def test_at_other_addresses_every_name_is_answered(listening: str) -> None:
    for host in OWN + OTHERS:
        assert ask(Config(), "/nothing", listening=listening, host=host)[0] == 404


def test_a_database_that_answers_no_more_holds_no_request(
    db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the page says nothing of hosts and logins; the log does."""
    monkeypatch.setattr(web, "LIMIT", 0.5)
    monkeypatch.setattr(web, "STATEMENT_TIMEOUT", "15s")
    with db.connect() as conn:
        conn.execute("begin; lock table flowforge.run in access exclusive mode")
        status, page = ask(Config(database_url=db.dsn), "/")
        conn.execute("rollback")
    assert status == 503
    assert "The database cannot be read; the log of flowforge web says why." in page
    assert "statement timeout" not in caplog.records[-1].__dict__["keys"]["error"]
    status, page = ask(Config(database_url="host=/nowhere user=somebody"), "/")
    assert status == 503
    assert "/nowhere" not in page
    assert "/nowhere" in caplog.records[-1].__dict__["keys"]["error"]


# -- its server


@contextlib.contextmanager
def serving(app: Any = None) -> Iterator[tuple[web_server.Server, int]]:
    """The page's server without a database, in a thread; and its port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = web_server.Server(app or web.application(Config()))
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
        thread.start()
        try:
            yield server, listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def ends(client: socket.socket) -> bool:
    """Whether the server closes the connection, after whatever it had to say."""
    client.settimeout(30)
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


GET = b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [GET + b"X: "],
        [GET + b"\r\n", GET],  # the second one, when the first was answered
        [GET + b"\r\n" + GET + b"X: "],
    ],
)
def test_a_connection_that_makes_no_request_is_closed(
    monkeypatch: pytest.MonkeyPatch, sent: list[bytes]
) -> None:
    monkeypatch.setattr(web_server, "REQUEST_LIMIT", 0.5)
    with serving() as (server, port), contextlib.ExitStack() as held:
        server.config.timeout_keep_alive = 600  # uvicorn's own, after an answer
        client = held.enter_context(socket.create_connection(("127.0.0.1", port)))
        for part in sent:
            client.sendall(part)
            if part.endswith(b"\r\n\r\n"):
                assert client.recv(65536).startswith(b"HTTP/1.1 404")
        assert ends(client)


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_that_nobody_reads_is_not_kept(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Neither one that the page has made, nor one that is still made."""
    monkeypatch.setattr(web_server, "ANSWER_LIMIT", 0.5)
    monkeypatch.setattr(web_server, "REQUEST_LIMIT", 600.0)

    async def large(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 30_000_000, "more_body": not whole})
        if not whole:
            await send({"type": "http.response.body", "body": b"x"})

    with serving(large) as (server, port), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(GET + b"\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: not server.server_state.connections, "the end of the connection", 30)


def test_an_answer_may_take_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "REQUEST_LIMIT", 0.5)
    released = threading.Event()

    async def slow(_scope: Any, _receive: Any, send: Any) -> None:
        await asyncio.to_thread(released.wait, 60)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    with serving(slow) as (_, port), socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(GET + b"\r\n")
        with socket.create_connection(("127.0.0.1", port)) as later:
            assert ends(later)
        released.set()
        assert client.recv(100).startswith(b"HTTP/1.1 200")


def test_an_answer_may_be_read_for_longer_than_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "REQUEST_LIMIT", 0.5)
    size = 30_000_000

    async def large(_scope: Any, _receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * size})

    with serving(large) as (_, port):
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        client.request("GET", "/")
        answer = client.getresponse()
        with socket.create_connection(("127.0.0.1", port)) as later:
            assert ends(later)
        assert len(answer.read()) == size
        client.close()


def test_connections_beyond_the_most_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(web_server, "REQUEST_LIMIT", 600.0)
    with serving() as (_, port), contextlib.ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(4)]
        assert ends(silent.pop())
        silent.pop().close()

        def answered() -> bool:
            with socket.create_connection(("127.0.0.1", port)) as client, contextlib.suppress(OSError):
                client.sendall(GET + b"\r\n")
                return client.recv(100).startswith(b"HTTP/1.1 404")
            return False

        wait_until(answered, "an answer in the place of one that went")


def test_a_want_of_descriptors_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """However often the server tries again."""
    server = web_server.Server(web.application(Config()))
    loop = asyncio.new_event_loop()

    async def start() -> None:
        await server.startup([])
        for _ in range(3):
            loop.call_exception_handler(
                {"message": "accept", "exception": OSError(24, "Too many open files")}
            )
        loop.call_exception_handler({"message": "another fault"})

    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    loop.run_until_complete(start())
    loop.close()
    assert [each.getMessage() for each in caplog.records] == [
        "a connection could not be accepted",
        "another fault",
    ]
    assert server.config.backlog == web_server.MOST_CONNECTIONS, "as often it would be told at once"


@pytest.mark.parametrize("host", ["", "a..b", b"a\xff".decode(errors="surrogateescape")])
def test_an_address_that_is_none_is_refused(db: Database, host: str) -> None:
    """Above all an empty one, such as of a variable that is not set, which to the system is all addresses."""
    shell = Shell(db.create_login("flowforge_reader"))
    told = shell("web", "--host", host, "--port", 0, code=EXIT_CONFIG if host else EXIT_USAGE).stderr
    assert ("cannot listen on 'a" if host else "it is empty") in told


def test_a_second_signal_waits_for_nothing(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "GRACE", float("inf"))
    released, ended = threading.Event(), threading.Event()

    def stuck(_server: Any, **_: Any) -> None:
        released.wait(20)
        ended.set()

    monkeypatch.setattr(web_server.Server, "run", stuck)

    def stop_twice(_address: str) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)

    try:
        config = Config(database_url=db.create_login("flowforge_reader"))
        assert web.serve(config, "127.0.0.1", 0, stop_twice) == EXIT_INTERRUPTED
        assert not ended.is_set()
    finally:
        released.set()


@pytest.mark.parametrize("fault", [None, MemoryError("no memory")])
def test_a_server_that_ends_by_itself_is_told(
    db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception | None
) -> None:
    def end(_server: Any, **_: Any) -> None:
        if fault:
            raise fault

    monkeypatch.setattr(web_server.Server, "run", end)
    config = Config(database_url=db.create_login("flowforge_reader"))
    assert web.serve(config, "127.0.0.1", 0, lambda _: None) == EXIT_FAILED
    said = [each.getMessage() for each in caplog.records]
    assert said == [*(["the server failed"] if fault else []), "the server has ended by itself"]


# -- its login


def start(dsn: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Starts with that login, and is told to stop at once."""
    monkeypatch.setattr(
        web_server.Server, "run", lambda server, **_: wait_until(lambda: server.should_exit, "")
    )
    stop = lambda _: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    return web.serve(Config(database_url=dsn), "127.0.0.1", 0, stop)


def test_a_login_that_can_show_no_page_is_refused(db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for group, lacks in (("client", "SELECT on health, queue_status"), ("", "USAGE on schema flowforge")):
        dsn = db.create_login(f"flowforge_{group}") if group else db.create_login()
        with pytest.raises(MissingPrivilege, match=f'{lacks}.*; remedy: grant flowforge_reader to "'):
            start(dsn, monkeypatch)
    with pytest.raises(DatabaseError, match=r"the login does not exist|wrong login or password"):
        start(f"{db.dsn} user=nobody_of_that_name", monkeypatch)
    dsn = db.create_login("flowforge_reader")
    with db.connect() as conn:
        conn.execute(
            "create or replace function flowforge.schema_version() returns bigint language sql return 1"
        )
    with pytest.raises(SchemaError, match="the schema has version 1"):
        start(dsn, monkeypatch)


@pytest.mark.parametrize("group", ["reader", "operator", "owner", "superuser", "nowhere"])
def test_a_login_that_is_more_than_a_reader_is_warned_of(
    db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, group: str
) -> None:
    """A database that is not there yet is waited for."""
    warned = {"reader": "", "superuser": "a superuser", "nowhere": "cannot be read yet"}
    dsn = {"superuser": db.dsn, "nowhere": "host=/nowhere"}.get(group) or db.create_login(
        f"flowforge_{group}"
    )
    assert start(dsn, monkeypatch) == EXIT_OK
    said = [each.getMessage() for each in caplog.records]
    expected = warned.get(group, f"a member of flowforge_{group}")
    assert len(said) == bool(expected)
    assert all(expected in each for each in said)
