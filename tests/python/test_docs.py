"""What the documents show works: their code runs, their commands and files exist."""

import json
import re
import types
from pathlib import Path

import click
import pytest

from flowforge import Client
from flowforge.cli import cli
from tests.python.workbench import Bench
from tests.services.database import Database

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]


def blocks(page: str, language: str) -> list[str]:
    """The code blocks of a language, indented ones too."""
    text = (ROOT / page).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    assert found, f"{page} shows no {language}"
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, body in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for name in re.findall(r"`((?:sql|tests|flowforge|docs|benchmarks)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    for command in re.findall(r"`(?:\$ )?flowforge ([a-z]+)", page.read_text()):
        assert command in cli.list_commands(click.Context(cli)), command


def test_the_python_of_the_readme_runs(bench: Bench) -> None:
    (code,) = blocks("README.md", "python")
    module = types.ModuleType("etl")
    exec(compile(code, "README.md", "exec"), module.__dict__)  # noqa: S102 - that is the test
    with bench.worker(module.etl), Client(bench.db.dsn) as client:
        client.define(module.etl)
        run = client.trigger("etl", {"rows": 10})
        assert client.wait(run, timeout=60).outputs == {"total": 285}


def test_the_sql_of_the_readme_runs(db: Database) -> None:
    (code,) = blocks("README.md", "sql")
    with db.connect() as conn:
        conn.execute(code.encode())
        row = conn.execute("select state::text from flowforge.run where run_id = 1").fetchone()
        assert row == ("running",), "it was cancelled, then retried"


def test_the_sql_of_the_worker_protocol_runs(db: Database) -> None:
    claim, finish, transaction = blocks("docs/worker-protocol.md", "sql")
    tasks = [{"name": f"t{n}"} for n in range(10)]
    with db.connect() as conn:
        conn.execute("create table invoice (amount int)")
        conn.execute("select flowforge.define_workflow(%s)", [json.dumps({"name": "etl", "tasks": tasks})])
        conn.execute("select flowforge.trigger('etl'), flowforge.dispatch_ready()")
        dispatch = "4be0643f-1d98-573b-97cd-ca98a65347dd"
        conn.execute("update flowforge.task_run set dispatch_id = %s where task_run_id in (7, 8)", [dispatch])
        assert [row[1] for row in conn.execute(claim.encode())] == ["claimed"]
        answers = [conn.execute(each.encode()).fetchall() for each in finish.split(";") if each.strip()]
        assert answers == [[("accepted",)], [("repeated",)]]
        conn.execute(claim.replace("(7,", "(8,").encode())
        conn.execute(transaction.encode())
        assert conn.execute("select amount from invoice").fetchall() == [(10,)]
        row = conn.execute("select state::text from flowforge.task_run where task_run_id = 8").fetchone()
        assert row == ("succeeded",)
