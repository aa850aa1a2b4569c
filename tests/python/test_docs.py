"""What the documents show works: their code runs, their commands and files exist."""

import inspect
import json
import re
import types
from pathlib import Path

import click
import pytest
import yaml

from flowforge import Client, Context, Workflow
from flowforge.cli import cli
from flowforge.config import Config
from tests.python import commands, settings
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


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if page.is_relative_to(ROOT / "docs")]
    series = ("adr", "chaos")  # named as a whole
    left_out = [str(page) for page in pages if f"({page})" not in index and page.parent.name not in series]
    assert left_out == ["README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_anchors_exist(page: Path) -> None:
    """As GitHub makes them of headings."""
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", page.read_text()):
        headings = re.findall(
            r"^#+ (.*)", (page.parent / target if target else page).read_text(), re.MULTILINE
        )
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    for command in re.findall(r"`(?:\$ )?flowforge ([a-z]+)", page.read_text()):
        assert command in cli.list_commands(click.Context(cli)), command


def module_of(page: str, *codes: str) -> types.ModuleType:
    """A module of the page's code."""
    module = types.ModuleType(Path(page).stem)
    for code in codes:
        exec(compile(code, page, "exec"), module.__dict__)  # noqa: S102 - that is the test
    return module


def test_the_python_of_the_readme_runs(bench: Bench) -> None:
    module = module_of("README.md", *blocks("README.md", "python"))
    with bench.worker(module.etl), Client(bench.db.dsn) as client:
        client.define(module.etl)
        run = client.trigger("etl", {"rows": 10})
        assert client.wait(run, timeout=60).outputs == {"total": 285}
        assert client.wait(client.trigger("etl"), timeout=60).outputs == {"total": 5}


def test_the_sql_of_the_readme_runs(db: Database) -> None:
    """In a database where there are other runs already: it is its own run that it cancels and retries."""
    etl = module_of("README.md", *blocks("README.md", "python")).etl
    with Client(db.dsn) as client:
        client.define(etl)
        other = client.trigger("etl")
    code = "\n".join(blocks("README.md", "sql"))  # the second one once the run has ended; here nothing runs
    run, answers = None, []
    with db.connect() as conn:
        for statement in re.split(r";$| \\gset$", code, flags=re.MULTILINE):
            if statement.strip():
                answers += conn.execute(statement.replace(":run", str(run)).encode()).fetchall()
                if "as run" in statement:
                    [run] = answers[-1]
        assert run != other
        defined, triggered, *tasks, cancelled, reset = answers
        assert (defined, triggered) == (("etl", 1, False), (run,))
        assert [row[:2] for row in tasks] == [(task, "pending") for task in etl.tasks]
        assert (cancelled, reset) == ((True,), (3,)), "cancelled, then retried: three tasks"
        versions = conn.execute("select versions from flowforge.workflow_status").fetchall()
        assert versions == [(1,)], "it is the same workflow in both languages"


def test_the_guide_to_python_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its code in the order of the page; the grants for the handlers' table before that."""
    shop, unit_test, load, client_code = blocks("docs/python.md", "python")
    logins, table = blocks("docs/python.md", "sql")
    with bench.db.connect() as conn:
        with conn.transaction(force_rollback=True):  # roles are the server's: they must not stay
            conn.execute(logins.encode())
            conn.execute(table.encode())
            created = re.findall(r"^create role (\w+) +login in role ([\w, ]+);", logins, re.MULTILINE)
            for role, group in ((role, group) for role, groups in created for group in groups.split(", ")):
                row = conn.execute("select pg_has_role(%s, %s, 'usage')", [role, group]).fetchone()
                assert row == (True,)
            row = conn.execute("select has_table_privilege('shop_worker', 'booking', 'insert')").fetchone()
            assert row == (True,)
        conn.execute(table.partition(";")[0].encode())
    guide = module_of("docs/python.md", shop, unit_test, load)
    queues = sorted(guide.bills.queues | guide.load.queues)
    assert queues == ["billing", "default"]
    monkeypatch.setenv("FLOWFORGE_DATABASE_URL", bench.db.dsn)
    with bench.worker(guide.bills, guide.load, queues=queues), Client() as client:
        exec(compile(client_code, "docs/python.md", "exec"), guide.__dict__)  # noqa: S102 - that is the test
        assert guide.result.outputs == {"total": 60}
        client.define(guide.load)
        loaded = client.wait(client.trigger("load", {"rows": ["a", "b"]}), timeout=60)
        assert loaded.outputs == {"notify": "2 rows", "book": {"booked": True}}
        empty = client.wait(client.trigger("load", {"rows": []}), timeout=60)
        assert "there are no rows" in empty.errors["copy"]
        assert bench.all("select rows from booking") == [(2,)]


def test_the_json_of_the_definition_is_the_workflow_of_the_guide(db: Database) -> None:
    guide = module_of("docs/python.md", blocks("docs/python.md", "python")[0])
    (definition,) = blocks("docs/definition.md", "json")
    with Client(db.dsn) as client:
        assert client.define(json.loads(definition)).created
        assert not client.define(guide.bills).created


def test_the_limits_of_the_page_are_those_of_the_database(db: Database) -> None:
    with db.connect() as conn:
        limits = conn.execute(
            "select name, value, minimum, maximum, meaning from flowforge.limits order by name"
        ).fetchall()
    rows = [
        f"| `{name}` | {value:,} | {low:,} | {high:,} | {meaning} |"
        for name, value, low, high, meaning in limits
    ]
    section = (ROOT / "docs/definition.md").read_text().partition("## Limits\n")[2].partition("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| `")] == rows


def test_the_guide_to_python_names_all_there_is() -> None:
    """Every option of a task and every public name of a context."""
    text = (ROOT / "docs/python.md").read_text()
    for option in inspect.signature(Workflow.task).parameters.values():
        assert option.kind is not option.KEYWORD_ONLY or f"`{option.name}`" in text, option
    for name in vars(Context):
        assert name.startswith("_") or re.search(rf"`ctx\.{name}\b", text), name


def test_the_alerts_are_about_metrics_that_there_are() -> None:
    """Those of the tables, which test_metrics compares with what is exported, and their labels."""
    rows = re.findall(
        r"^\| `(flowforge_\w+)` \| (.*) \|$", (ROOT / "docs/operating.md").read_text(), re.MULTILINE
    )
    listed = {"up": "job: flowforge"} | dict(rows)
    [text] = blocks("docs/operating.md", "yaml")
    [group] = yaml.safe_load(text)["groups"]
    asked: set[str] = set()
    for rule in group["rules"]:
        assert rule.keys() <= {"alert", "expr", "for"}
        selected = re.findall(r"\b(up|flowforge_\w+)(?:\{(\w+)=\"(\w+)\"\})?", rule["expr"])
        assert selected, rule
        for name, label, value in selected:
            assert name in listed, rule
            assert not label or (label in listed[name] and value in listed[name]), rule
            asked.add(name)
    assert {"up", "flowforge_database_readable", "flowforge_reaper_seconds"} <= asked


def test_the_page_of_commands_is_current() -> None:
    """After changing a command: ./dev run python -m tests.python.commands"""
    assert commands.PAGE.read_text() == commands.page()


def test_the_page_of_settings_is_current() -> None:
    """After changing a setting: ./dev run python -m tests.python.settings"""
    assert settings.PAGE.read_text() == settings.page()


def test_the_settings_file_of_the_page_is_one(tmp_path: Path) -> None:
    path = tmp_path / "flowforge.toml"
    path.write_text(*blocks("docs/settings.md", "toml"))
    config = Config.from_environment({"FLOWFORGE_CONFIG": str(path)})
    assert (config.concurrency, config.queues) == (16, ("default", "reports"))


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
