"""Commands that find, load and register workflows."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowforge import exits
from flowforge.loading import load_workflows
from tests.python.daemons import CHECKOUT
from tests.python.shell import Shell
from tests.services.database import Database

# -- registering workflows


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The present directory, where modules can be written; what was imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path.remove(str(tmp_path))


JOBS = """
from flowforge import Workflow
{0} = Workflow({0!r})
{0}.task(name="hello")(print)
{0}.task(name="bye", after="hello")(print)
"""


@pytest.mark.parametrize(
    ("put", "told"),
    [
        ("sys.stdin = io.StringIO(DEFINITION)", "third v1: new\n"),
        ("sys.stdin.detach()", "error: standard input is not JSON: underlying buffer has been detached\n"),
        ("del sys.stdin", "error: cannot read standard input: it is closed\n"),
    ],
    ids=["replaced", "detached", "deleted"],
)
def test_whatever_a_module_does_to_standard_input_is_told(
    db: Database, tmp_path: Path, put: str, told: str
) -> None:
    given = """DEFINITION = '{"name": "third", "tasks": [{"name": "only"}]}'\n"""
    (tmp_path / "odd.py").write_text(f"import io, sys\n{given}{put}\n" + JOBS.format("first"))
    done = subprocess.run(
        [sys.executable, "-m", "flowforge", "define", "odd", "-", "--database-url", db.dsn],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told in (done.stdout + done.stderr)
    assert "Traceback" not in done.stderr


def test_define_registers_modules_and_files(db: Database, modules: Path) -> None:
    """With no more than the client's role; the same again is known, other content a new version."""
    (modules / "jobs_a.py").write_text(JOBS.format("first") + JOBS.format("second"))
    (modules / "third.json").write_text('{"name": "third", "tasks": [{"name": "only"}]}')
    client, admin = Shell(db.create_login("flowforge_client")), Shell(db.dsn)
    assert "flowforge define MODULE" in admin("workflows", code=exits.EXIT_FAILED).stderr
    told = client("define", "jobs_a", "third.json").stdout
    assert told == "first v1: new\nsecond v1: new\nthird v1: new\n"
    assert client("define", "jobs_a:second").stdout == "second v1: known already\n"
    changed = '{"name": "third", "tasks": [{"name": "only"}, {"name": "more"}]}'
    assert json.loads(client("define", "-", "--json", stdin=changed).stdout) == {
        "workflow": "third",
        "version": 2,
        "created": True,
    }
    listed = admin.documents("workflows")
    kept = [(each["workflow"], each["version"], each["tasks"], each["versions"]) for each in listed]
    assert kept == [("first", 1, 2, 1), ("second", 1, 2, 1), ("third", 2, 2, 2)]
    heading, *rows = admin("workflows").stdout.splitlines()
    assert heading.split() == ["workflow", "version", "tasks", "registered", "versions"]
    assert re.fullmatch(r"third +2 +2 +\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +2", rows[-1])


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("jobs_missing", exits.EXIT_USAGE, "no module 'jobs_missing'"),
        ("missing.json", exits.EXIT_USAGE, "cannot read missing.json: No such file"),
        ("bad.json", exits.EXIT_USAGE, "bad.json is not JSON: "),
        ("nan.json", exits.EXIT_USAGE, "nan.json is not JSON: NaN"),
        ("list.json", exits.EXIT_USAGE, "list.json: .*must be an object"),
        ("empty.json", exits.EXIT_USAGE, "empty.json: .*tasks"),
        ("jobs_circle", exits.EXIT_USAGE, "the tasks of workflow 'circle' form a cycle: a → b → a"),
        ("jobs_empty", exits.EXIT_USAGE, "workflow 'empty' has no task"),
    ],
)
def test_define_refuses_what_will_not_do(
    db: Database, modules: Path, source: str, code: int, says: str
) -> None:
    """In one line that names the file or workflow, and before anything is registered."""
    (modules / "jobs_good.py").write_text(JOBS.format("good"))
    (modules / "jobs_circle.py").write_text(
        JOBS.format("circle") + "circle.task(name='a', after='b')(id)\ncircle.task(name='b', after='a')(id)"
    )
    (modules / "jobs_empty.py").write_text("from flowforge import Workflow\nempty = Workflow('empty')")
    for name, text in {"bad": "{", "nan": '{"name": NaN}', "list": "[]", "empty": '{"name": "x"}'}.items():
        (modules / f"{name}.json").write_text(text)
    shell = Shell(db.dsn)
    told = shell("define", *([] if source.endswith(".json") else ["jobs_good"]), source, code=code)
    assert told.stdout == ""
    assert re.fullmatch(rf"error: {says}.*\n", told.stderr), told.stderr
    assert shell.documents("workflows", code=exits.EXIT_FAILED) == []


def test_define_registers_all_or_nothing(db: Database, modules: Path) -> None:
    """What the database refuses, it names by its file, wherever it stands among the others."""
    (modules / "jobs_good.py").write_text(JOBS.format("good"))
    for name, spec in {
        "a": {"name": "a", "tasks": [{"name": "t"}]},
        "b": {"name": "b", "tasks": [{"name": "t", "after": ["gone"]}]},
        "c": {"name": "c", "tasks": [{"name": "t"}]},
        "z": {"name": "z", "tasks": [{"name": "t"}, {"name": "u"}, {"name": "v"}]},
    }.items():
        (modules / f"{name}.json").write_text(json.dumps(spec))
    shell = Shell(db.dsn)
    for files in (["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]):
        told = shell("define", "jobs_good", *(f"{each}.json" for each in files), code=exits.EXIT_USAGE)
        assert told.stdout == ""
        assert re.match(r"error: b\.json: .*gone", told.stderr), told.stderr
    with db.connect() as conn:
        conn.execute("select flowforge.set_limit('max_tasks', 2)")
    told = shell("define", "jobs_good", "a.json", "z.json", "c.json", code=exits.EXIT_USAGE)
    assert re.match(r"error: z\.json: .*at most 2", told.stderr), told.stderr
    assert shell.documents("workflows", code=exits.EXIT_FAILED) == []
    assert shell("define", "c.json", "a.json").stdout == "c v1: new\na v1: new\n"


@pytest.mark.parametrize(
    ("source", "code", "says"),
    [
        ("sys.stdout.close(); sys.stderr.close()", exits.EXIT_DATABASE, "is PostgreSQL running"),
        ("sys.stdout.detach(); sys.stderr.detach()", exits.EXIT_DATABASE, "is PostgreSQL running"),
        ("del sys.stdout, sys.stderr", exits.EXIT_DATABASE, "is PostgreSQL running"),
        ("sys.stderr.close(); 1 / 0", exits.EXIT_USAGE, "ZeroDivisionError"),
    ],
)
def test_a_module_that_closes_its_streams_leaves_the_command_its_own(
    tmp_path: Path, source: str, code: int, says: str
) -> None:
    (tmp_path / "closing.py").write_text(f"import sys\n{JOBS.format('w')}\n{source}\n")
    done = subprocess.run(
        [sys.executable, "-m", "flowforge", "define", "closing", "--database-url", "host=/nowhere"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert says in done.stderr
    assert done.returncode == code


def test_a_refusal_of_the_database_names_the_workflow_once(db: Database, modules: Path) -> None:
    (modules / "jobs_long.py").write_text(JOBS.format("long") + "long.task(name='b', lease=9e9)(id)")
    told = Shell(db.dsn)("define", "jobs_long", code=exits.EXIT_USAGE).stderr
    assert told.startswith("error: task 'b' of workflow 'long': lease")
    assert told.count("workflow 'long'") == 1


# -- loading workflows


def test_workflows_are_found_in_modules(modules: Path) -> None:
    two = JOBS.format("one") + JOBS.format("two") + "alias = one\n"
    (modules / "jobs_two.py").write_text(two)
    (modules / "jobs_again.py").write_text("from jobs_two import one\n")
    (modules / "jobs_two").touch()  # a file of that name is no module
    assert [each.name for each in load_workflows(["jobs_two"])] == ["one", "two"]
    assert [each.name for each in load_workflows(["jobs_two:two"])] == ["two"]
    assert [each.name for each in load_workflows(["jobs_two", "jobs_again"])] == ["one", "two"]


@pytest.mark.parametrize(
    ("source", "place", "says"),
    [
        ("", "jobs_bad", "holds no Workflow"),
        ("", "jobs_missing", "no module 'jobs_missing'"),
        ("", "jobs_bad.py", "without .py: jobs_bad$"),
        ("", "./jobs_bad.py", "without .py: jobs_bad$"),
        ("", "/nowhere/jobs.py", "without .py$"),
        ("", "", "without .py$"),
        ("x = 1", "jobs_bad:x", "has no Workflow 'x'; it has: none"),
        ("import nonexistent_module", "jobs_bad", r"jobs_bad\.py:1: ModuleNotFoundError"),
        ("\n1/0", "jobs_bad", r"jobs_bad\.py:2: ZeroDivisionError"),
        ("import os\nos.environ['NONE']", "jobs_bad", r"jobs_bad\.py:2: KeyError: 'NONE'"),
        ("import json\njson.loads('{')", "jobs_bad", r"jobs_bad\.py:2: JSONDecodeError"),
        ("import click\nclick.Option([])", "jobs_bad", r"jobs_bad\.py:2: TypeError"),
        ("import os\n\ndef f(:", "jobs_bad", r"imported: \S*/jobs_bad\.py:3: SyntaxError: invalid syntax$"),
        ("raise SystemExit(3)", "jobs_bad", "SystemExit: 3"),
        (
            "from flowforge import Workflow\na = Workflow('same')\nb = Workflow('same')",
            "jobs_bad",
            "two different workflows are called 'same'",
        ),
        ("from flowforge import Workflow\na = Workflow('')", "jobs_bad", r"jobs_bad\.py:2: .*name"),
    ],
)
def test_modules_that_will_not_do(modules: Path, source: str, place: str, says: str) -> None:
    (modules / "jobs_bad.py").write_text(source)
    result = Shell("postgresql://127.0.0.1:1/x")("worker", place, code=exits.EXIT_USAGE)
    assert re.search(says, result.stderr.rstrip()), result.stderr
    assert result.stderr.count("\n") == 1
