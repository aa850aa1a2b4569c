"""The operators' page, as a browser gets it: what it shows, and that it obeys nothing of that."""

import asyncio
import http.client
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg.types.json import Jsonb

from flowforge import web
from flowforge.config import Config
from flowforge.exits import EXIT_INTERRUPTED
from tests.python.cluster import PROGRAM
from tests.services.database import Database

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
