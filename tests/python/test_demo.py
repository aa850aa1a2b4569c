"""The demo: its figures by hand on a small tree, its report, and the command from end to end."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from flowforge import PermanentError, exits
from flowforge.cli import cli
from flowforge.demo import census, report
from flowforge.demo import run as demo_run
from flowforge.demo.workflow import census as workflow
from flowforge.errors import FlowForgeError
from tests.services.process import descendants, wait_for_end

MODULE = """\
import os, os.path
import json as j
from collections.abc import Mapping
from . import sibling
from .other import thing


class Outer:
    class Inner:
        async def deep(self):
            if self:
                pass
            elif not self:
                for each in ():
                    with each:
                        x = 1
            else:
                y = 2


def long_one(a):
    try:
        import os
    except ValueError:
        raise
    finally:
        pass
    match a:
        case 1:
            return lambda: 3
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small library, with all that a large one has: packages, odd files, and what is not to be counted."""
    root = tmp_path / "lib"
    for name, content in {
        "top.py": b"import sys\nx = 1",
        "empty.py": b"",
        "pkg/__init__.py": b"",
        "pkg/mod.py": MODULE.encode(),
        "pkg/sub/deep.py": b"if 1:\n    import sys\nelse:\n    if 2:\n        y = 1\n",
        "bad/syntax.py": b"def (:\n",
        "bad/coding.py": b"# -*- coding: nonexistent -*-\nx = 1\n",
        "bad/bytes.py": b"x = '\xff'\n",
        "bad/nul.py": b"x = 1\0\n",
        "bad/old_escape.py": b"x = '\\d'\n",
        "bad/latin.py": "# coding: latin-1\nx = 'ä'\n".encode("latin-1"),
        "__pycache__/cached.py": b"x = 1\n",
        "site-packages/other/mod.py": b"x = 1\n",
        "pkg/dist-packages/mod.py": b"x = 1\n",
        "data/readme.txt": b"def no(): pass\n",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "pkg" / "dangling.py").symlink_to(root / "nowhere.py")
    return root


def test_packages_are_listed_largest_first(tree: Path) -> None:
    assert census.list_packages(tree) == [
        {"package": "pkg", "path": "pkg"},
        {"package": "bad", "path": "bad"},
        {"package": "pkg.sub", "path": "pkg/sub"},
        {"package": "(top level)", "path": "."},
    ]


def test_figures_of_a_package(tree: Path) -> None:
    figures = census.census_package(tree, {"package": "pkg", "path": "pkg"})
    assert figures == {
        "package": "pkg",
        "modules": 2,
        "lines": 30,
        "functions": 2,
        "classes": 2,
        "unparsable": [],
        # class, class, def, the elif beside its if, for, with
        "deepest": {"depth": 6, "module": "pkg.mod", "line": 16},
        "longest": {"lines": 10, "module": "pkg.mod", "line": 21, "function": "long_one"},
        "imports": {"collections": 1, "json": 1, "os": 1},
    }


def test_an_if_within_an_else_lies_deeper_than_an_elif(tree: Path) -> None:
    figures = census.census_package(tree, {"package": "pkg.sub", "path": "pkg/sub"})
    assert figures["deepest"] == {"depth": 2, "module": "pkg.sub.deep", "line": 5}


def test_modules_that_cannot_be_parsed_are_counted_as_such(tree: Path) -> None:
    """And old code that Python warns about is counted as it is, though here warnings are errors."""
    figures = census.census_package(tree, {"package": "bad", "path": "bad"})
    assert figures["unparsable"] == ["bad.bytes", "bad.coding", "bad.nul", "bad.syntax"]
    assert figures["modules"] == 6
    assert figures["lines"] == 8


def test_totals_add_up_and_have_one_order(tree: Path) -> None:
    packages = [census.census_package(tree, package) for package in census.list_packages(tree)]
    figures = census.total(packages)
    assert figures == census.total(packages[::-1]) == census.straight_count(tree)
    assert {name: figures[name] for name in ("packages", "modules", "lines", "functions", "classes")} == {
        "packages": 4,
        "modules": 11,
        "lines": 45,
        "functions": 2,
        "classes": 2,
    }
    assert figures["imported"] == [
        {"module": "sys", "by": 2},
        {"module": "collections", "by": 1},
        {"module": "json", "by": 1},
        {"module": "os", "by": 1},
    ]
    assert [each["package"] for each in figures["largest"]] == ["pkg", "bad", "pkg.sub", "(top level)"]
    assert [each["module"] for each in figures["deepest"]] == ["pkg.mod", "pkg.sub.deep"]
    assert len(figures["unparsable"]) == 4


class Checker(HTMLParser):
    """Balanced tags, nothing fetched from elsewhere, and the text."""

    VOID = ("meta", "line", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.bars = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("link", "script", "img", "iframe")
        assert not [name for name, _ in attrs if name in ("src", "href")]
        self.bars += tag == "rect"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.bars += tag == "rect"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_report_shows_the_figures(tree: Path) -> None:
    figures = census.straight_count(tree)
    text = report.text("A library", figures)
    assert re.search(r"^4 packages +11 modules +45 lines +2 functions +2 classes$", text, re.MULTILINE)
    assert re.search(r"^  pkg +30  █+$", text, re.MULTILINE)
    assert re.search(r"^      6  pkg\.mod, line 16$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    page = Checker()
    page.feed(report.html("A <library> & more", figures))
    page.close()
    assert page.open == []
    assert page.bars == 4 + 4
    assert "A <library> & more" in page.text
    assert {"11", "45", "bad.syntax"} <= set(page.text)
    assert "http" not in report.html("A library", figures)


def test_report_of_nothing(tmp_path: Path) -> None:
    figures = census.straight_count(tmp_path)
    assert "0 packages" in report.text("Nothing", figures)
    assert "none" in report.html("Nothing", figures)


def test_workflow_is_the_documented_one() -> None:
    assert [(task["name"], task.get("map"), task.get("after")) for task in workflow.spec()["tasks"]] == [
        ("list_packages", None, None),
        ("census_package", "list_packages", None),
        ("totals", None, ["census_package"]),
        ("report", None, ["totals"]),
    ]


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flowforge", "demo", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_demo_counts_a_part_of_the_standard_library(tmp_path: Path) -> None:
    """The command from end to end: servers up, run through, page written, figures checked."""
    source = Path(sysconfig.get_path("stdlib")) / "email"
    done = demo("--source", source, "--output", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert "report: succeeded" in done.stdout
    assert "Checked: every figure equals that of a straight count in one process." in done.stdout
    figures = census.straight_count(source)
    assert f"{figures['lines']:,} lines" in done.stdout
    page = (tmp_path / "new" / "flowforge-census.html").read_text(encoding="utf-8")
    assert page == report.html(str(source), figures)


def test_demo_as_json(tree: Path, tmp_path: Path) -> None:
    done = demo("--source", tree, "--output", tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["equal"] is True
    assert document["state"] == "succeeded"
    assert document["totals"] == census.straight_count(tree)
    assert Path(document["page"]).is_file()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_told_to_end_it_ends_with_all_it_started(how: signal.Signals, tmp_path: Path) -> None:
    """Sent to the whole group, as a terminal does, while the census goes on; and to a demo that a script has
    started in the background, where its shell has SIGINT ignored."""
    # More than any machine counts before the signal comes.
    module = shutil.copy(Path(sysconfig.get_path("stdlib")) / "argparse.py", tmp_path)
    for number in range(2000):
        package = tmp_path / "source" / f"package{number}"
        package.mkdir(parents=True)
        (package / "module.py").hardlink_to(module)
    with tempfile.TemporaryDirectory(prefix="ff-") as place:
        Path(place).chmod(0o711)  # the server's user must pass through it
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "flowforge", "demo"),
                    *("--source", str(tmp_path / "source"), "--output", f"{place}/new"),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=os.environ | {"TMPDIR": place},
            )
        finally:
            signal.signal(signal.SIGINT, before)
        with process:
            assert process.stdout is not None
            while not process.stdout.readline().startswith("census_package: "):
                assert process.poll() is None
            below = descendants(process.pid)
            os.killpg(process.pid, how)
            _, err = process.communicate()
        assert process.returncode == exits.EXIT_INTERRUPTED
        assert "Traceback" not in err
        assert len(below) >= 2
        wait_for_end(below)
        assert [each.name for each in Path(place).rglob("*")] == ["new"]


def test_page_that_cannot_be_written_is_told_before_the_work(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "run", lambda *_: pytest.fail("it began"))
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "flowforge-census.html").mkdir(parents=True)
    for place in ("file", "file/below", "taken"):
        told = CliRunner().invoke(cli, ["demo", "--source", str(tree), "--output", str(tmp_path / place)])
        assert told.exit_code == exits.EXIT_USAGE
        assert f"cannot write {tmp_path / place}" in told.stderr


def test_demo_fails_when_the_figures_differ(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The straight count is made to see one module more than the workflow did."""

    def counted(root: Path, *_: object) -> demo_run.Outcome:
        figures = census.straight_count(root)
        return demo_run.Outcome(1, "succeeded", 1.0, figures, figures | {"modules": 12}, "text", "html")

    monkeypatch.setattr(demo_run, "run", counted)
    result = CliRunner().invoke(cli, ["demo", "--source", str(tree), "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "differ" in result.stderr
    assert "Checked" not in result.stdout


def test_demo_that_cannot_start_says_why(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWFORGE_PG_BIN", str(tmp_path))
    done = demo("--source", tree, "--output", tmp_path)
    assert done.returncode == exits.EXIT_DATABASE
    assert done.stderr.startswith(f"error: {tmp_path} holds no initdb")
    assert done.stderr.count("\n") == 1


def test_demo_keeps_its_database_where_it_is_told_to(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named from where the command was called, though what it starts may be elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").touch()
    arguments = ["demo", "--source", str(tree), "--data-dir", "kept"]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == exits.EXIT_DATABASE, result.output
    assert f"{tmp_path}/kept" in result.stderr


def test_demo_tells_when_its_run_fails(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise PermanentError("the tree is on fire")

    monkeypatch.setattr(census, "census_package", broken)
    with pytest.raises(FlowForgeError, match=r"run 1 failed: census_package: .*4 of 4 elements"):
        demo_run.run(tree, "title", None, lambda *_: None)
