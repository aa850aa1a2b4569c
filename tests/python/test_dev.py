"""The development script and the script for CI tell success from failure, and say what they left out."""

import re
import subprocess
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dev() -> ModuleType:
    """The script as a module; it has no suffix that import would know."""
    spec = spec_from_loader("dev", SourceFileLoader("dev", str(CHECKOUT / "dev")))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def prepared(dev: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script where the environment stands, every linter is content and every test passes."""
    monkeypatch.setattr(dev, "setup", lambda: None)
    monkeypatch.setattr(dev, "fetch_services", lambda versions: None)
    monkeypatch.setattr(dev, "lint", list)
    monkeypatch.setattr(dev, "run_tests", lambda versions, arguments: dict.fromkeys(versions, 0))
    return dev


@pytest.mark.parametrize("command", ["setup", "test", "chaos", "mutants", "run"])
def test_each_command_has_help(command: str) -> None:
    done = subprocess.run([CHECKOUT / "dev", command, "--help"], capture_output=True, text=True, check=True)
    assert f"./dev {command}" in done.stdout


def test_ctrl_c_works_in_what_a_script_starts_in_the_background() -> None:
    """A shell without job control has SIGINT ignored there, which every process below would inherit."""
    asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    script = 'trap "" INT; "$1" run python -c "$2"'
    done = subprocess.run(
        ["sh", "-c", script, "sh", CHECKOUT / "dev", asks], capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_an_unknown_command_is_answered_with_those_there_are() -> None:
    done = subprocess.run([CHECKOUT / "dev", "tets"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "setup, test, demo, chaos, mutants, run" in done.stderr


def test_all_of_it_is_the_default(prepared: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepared.main(["test"]) == 0
    out = capsys.readouterr().out
    assert "left out" not in out
    assert out.endswith("== all of it passed\n")


def test_what_arguments_leave_out_is_said(
    prepared: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments are passed to pytest, on both versions; that no linter runs then is said."""
    asked: list[tuple[list[str], list[str]]] = []

    def run_tests(versions: list[str], arguments: list[str]) -> dict[str, int]:
        asked.append((versions, arguments))
        return {}

    monkeypatch.setattr(prepared, "lint", lambda: pytest.fail("linted"))
    monkeypatch.setattr(prepared, "run_tests", run_tests)
    assert prepared.main(["test", "-k", "claim", "--pg", "15", "-x"]) == 0
    assert prepared.main(["test", "tests/sql"]) == 0
    assert asked == [(["15"], ["-k", "claim", "-x"]), (["18", "15"], ["tests/sql"])]
    out = capsys.readouterr().out
    assert out.count("ruff and mypy were left out") == 2
    assert out.count("== all that was run passed") == 2
    assert "all of it" not in out


@pytest.mark.parametrize(
    ("found", "codes", "named"),
    [
        (["mypy"], {"PostgreSQL 18": 0, "PostgreSQL 15": 0}, "mypy"),
        ([], {"PostgreSQL 18": 1, "PostgreSQL 15": 0}, "pytest on PostgreSQL 18"),
        ([], {"PostgreSQL 18": 0, "PostgreSQL 15": 5}, "pytest on PostgreSQL 15: no test matches"),
        ([], {"PostgreSQL 18": 0, "whatever PostgreSQL": 1}, "pytest on whatever PostgreSQL"),
    ],
)
def test_any_failure_fails_the_whole(
    prepared: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: list[str],
    codes: dict[str, int],
    named: str,
) -> None:
    monkeypatch.setattr(prepared, "lint", lambda: found)
    monkeypatch.setattr(prepared, "run_tests", lambda versions, arguments: codes)
    assert prepared.main(["test"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == f"== FAILED: {named}"


def test_both_runs_are_shown_whole_and_their_codes_kept(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stand_in(version: str, arguments: list[str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
        script = f"echo begin {version}; echo '{version} passed'; exit {int(version) - 15}"
        return subprocess.Popen(["sh", "-c", script], stdout=output)

    monkeypatch.setattr(dev, "pytest_on", stand_in)
    assert dev.run_tests(["18", "15"], ["-x"]) == {"PostgreSQL 18": 3, "PostgreSQL 15": 0}
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "begin" in line or "passed" in line] == [
        *("begin 18", "18 passed"),
        *("begin 15", "15 passed"),
    ]


@pytest.mark.parametrize(("test", "demo", "code"), [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_ci_runs_the_tests_and_the_demonstration(tmp_path: Path, test: int, demo: int, code: int) -> None:
    """CI fails if either does, and runs both either way."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/run").write_text((CHECKOUT / ".ci/run").read_text())
    (tmp_path / "dev").write_text(
        f'#!/bin/sh\necho "$*"\ncase $1 in test) exit {test};; demo) exit {demo};; esac\n'
    )
    (tmp_path / "dev").chmod(0o755)
    done = subprocess.run(["bash", tmp_path / ".ci/run"], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["test", "demo"]
    assert done.returncode == code


def test_what_needs_no_particular_postgresql_runs_once_and_the_rest_on_each_version(
    dev: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, set[str]]] = []

    def start(version: str, arguments: list[str], output: IO[bytes] | None) -> subprocess.Popen[bytes]:
        started.append((version, set(arguments[2:])))
        return subprocess.Popen(["true"])

    monkeypatch.setattr(dev, "pytest_on", start)
    codes = dev.run_tests(["18", "15"], [])
    assert codes == {"PostgreSQL 18": 0, "PostgreSQL 15": 0, "whatever PostgreSQL": 0}
    (_, on_18), (_, on_15), (_, whatever) = started
    assert [version for version, _ in started] == ["18", "15", "18"]
    assert whatever == {f"tests/{name}.py" for name in dev.ONCE}
    left_out = {f"--ignore={module}" for module in whatever}
    assert on_18 == left_out | {f"--ignore=tests/{name}.py" for name in dev.ONCE_ON["15"]}
    assert on_15 == left_out | {f"--ignore=tests/{name}.py" for name in dev.ONCE_ON["18"]}
    for arguments in (on_18, on_15, whatever):
        for argument in arguments:
            assert (CHECKOUT / argument.removeprefix("--ignore=")).exists(), argument
    for module in (f"tests/{name}.py" for name in dev.WITHOUT_POSTGRESQL):
        text = (CHECKOUT / module).read_text()
        named = re.search(r'binaries\("\d+"\)', text)
        assert named or not re.search(r"\b(Database|PostgresServer|Bench|Cluster)\b", text), module
    for versions, given in ((["15"], []), (["18", "15"], ["-k", "claim"])):
        started.clear()
        dev.run_tests(versions, given)
        assert started == [(version, set(given)) for version in versions]
