"""The mistakes that ./dev mutants puts into the daemons can be put in, and their page names them all."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import CAUGHT, MISTAKES, PAGE, ROOT, Mistake, judge, run_tests, with_tables


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.name)
def test_each_can_be_put_in(mistake: Mistake) -> None:
    text = (ROOT / "flowforge" / mistake.file).read_text()
    wrong = mistake.apply(text)
    assert wrong != text
    compile(wrong, mistake.file, "exec")
    assert mistake.delivery in ("RabbitMQ", "PostgreSQL", "either")


def test_the_tests_that_catch_them_exist() -> None:
    """With their parameters, which only pytest knows: it answers 0 when it has found every one."""
    tests = sorted({each.test for each in MISTAKES})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *tests]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_page_names_exactly_these() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "write it anew with ./dev mutants, all or some with -k NAME"
    assert all(page.count(f"| {each.mistake} |") for each in MISTAKES)


@pytest.mark.parametrize(
    ("failure", "written", "verdict"),
    [
        ("assert 1 == 2", "E   assert 1 == 2", CAUGHT),
        ("AssertionError: two\nassert 1 == 2", "", CAUGHT),
        ("TimeoutError: waited 60 s in vain: the marks", "", CAUGHT),
        ("Failed: DID NOT RAISE <class 'ValueError'>", "", CAUGHT),
        ("", "", "NOT CAUGHT"),
        ("assert 1 == 2", "NameError: name 'x'", "THE PROGRAM BREAKS: NameError: name 'x'"),
        ("error: assert 1 == 2", "", "NO EXPECTATION FAILED: error: assert 1 == 2"),
        ("Failed: Timeout (>180.0s)", "", "NO EXPECTATION FAILED: Failed: Timeout (>180.0s)"),
    ],
)  # fmt: skip
def test_only_an_expectation_that_fails_catches_a_mistake(failure: str, written: str, verdict: str) -> None:
    assert judge(failure, written) == verdict


def test_what_failed_is_read_from_a_run(tmp_path: Path) -> None:
    """A condition that does not hold, though its fixture fails afterwards too; and a fixture that fails."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        """
import pytest

@pytest.fixture
def late():
    yield
    assert False, "late"

@pytest.fixture
def early():
    assert False, "early"

@pytest.mark.parametrize("number", [1, 2])
def test_number(number): assert number == 1

def test_late(late): assert 1 == 2

def test_early(early): pass
"""
    )
    ran, written = run_tests(["tests/test_it.py"], tmp_path)
    assert {test.partition("::")[2]: failure.partition("\n")[0] for test, (failure, _) in ran.items()} == {
        "test_number[1]": "",
        "test_number[2]": "assert 2 == 1",
        "test_late": "assert 1 == 2",
        "test_early": 'error: failed on setup with "AssertionError: early',
    }
    assert all(test.startswith("tests/test_it.py::") for test in ran)
    assert "1 passed, 2 failed" in written or "2 failed, 1 passed" in written
