"""The operators' page, as a browser gets it: what it shows, and that it obeys nothing of that."""

import http.client
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from psycopg.types.json import Jsonb

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

    def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(60)
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
    assert site.get(f"/runs/{'9' * 30}")[0] == 404
    assert site.get("/runs/x")[0] == 404
    assert site.get("/", "POST")[0] == 405
    # A site whose name is made to point here.
    assert site.get("/", Host="evil.example")[0] == 400
    with db.connect() as conn:
        conn.execute("drop schema flowforge cascade")
    status, page = site.get("/")
    assert status == 503
    assert "cannot be read" in page
