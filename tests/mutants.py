"""`./dev mutants`: the mistakes of docs/seeded-mistakes.md, put in one at a time, each caught by its test.

Those of the SQL functions are put in by tests/sql/test_mutants.py, in a database. Those of the daemons, in
tests/python/mistakes/*.toml, are replacements of text in a copy of the checkout, where the one test that is
named runs and must fail. A test proves something only if it passes there without the mistake, and if what it
says with it is that an expectation was not met: a program that breaks down catches nothing.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.sql import mutants as sql
from tests.sql.mutants import replaced

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "seeded-mistakes.md"
CAUGHT = "caught"
# How a test says that an expectation was not met; wait_until among them.
_UNMET = re.compile(r"assert\b|AssertionError|TimeoutError: waited|Failed: (?!Timeout)")
# What says that the replacement made no program.
_BROKEN = re.compile(
    r"\b(SyntaxError|IndentationError|NameError|UnboundLocalError|ImportError|AttributeError|TypeError): .*"
)

_ENVIRONMENT = {
    # Compiled files are told from stale ones by whole seconds, and mistakes come faster.
    "PYTHONDONTWRITEBYTECODE": "1",
    # With a mistake most conditions that a test waits for never hold.
    "FLOWFORGE_TEST_PATIENCE": "20",
}


@dataclass(frozen=True)
class Mistake:
    """One mistake of the daemons. `file` is below flowforge/; `delivery` the one with which it can be made:
    RabbitMQ, PostgreSQL or either; `test` the id of the one that catches it."""

    name: str
    mistake: str
    how: str
    delivery: str
    file: str
    test: str
    changes: list[list[str]]

    @property
    def row(self) -> str:
        """Its line of the table in docs/seeded-mistakes.md."""
        where = f"{self.delivery} | `{self.file}`: {self.how}"
        return f"| {self.mistake} | {where} | `{self.name}`, by `{self.test}` |"

    def apply(self, text: str) -> str:
        """The text of the file with the mistake in it; what is to be replaced must be there exactly once."""
        return replaced(text, self.changes, f"{self.name}: flowforge/{self.file}")


MISTAKES = [
    Mistake(name, **fields)
    for path in sorted((ROOT / "tests" / "python" / "mistakes").glob("*.toml"))
    for name, fields in tomllib.loads(path.read_text()).items()
]
_IN_FUNCTIONS = "| mistake | how it is put in | the case of `test_mutants` that catches it |\n|---|---|---|\n"
_IN_DAEMONS = "| mistake | delivery | how it is put in | test that catches it |\n|---|---|---|---|\n"


def with_tables(page: str) -> str:
    """The page with its tables as they follow from the definitions."""
    tables = {_IN_FUNCTIONS: [each.row for each in sql.MUTANTS], _IN_DAEMONS: [each.row for each in MISTAKES]}
    for head, rows in tables.items():
        before, _, after = page.partition(head)
        page = before + head + "".join(f"{row}\n" for row in rows) + re.sub(r"\A(\|.*\n)*", "", after)
    return page


@dataclass(frozen=True)
class Verdict:
    """What came of one mistake: `caught`, or what is wrong; `said` is how the test failed."""

    name: str
    mistake: str
    test: str
    verdict: str
    seconds: float
    said: str = ""


def run_tests(tests: Sequence[str], checkout: Path) -> tuple[dict[str, tuple[str, float]], str]:
    """Run tests in `checkout`: for each that ran what failed, empty when nothing did, and the seconds it
    took; and all that pytest wrote."""
    with tempfile.TemporaryDirectory() as directory:
        report, log = Path(directory, "report.xml"), Path(directory, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"),
                    *("-p", "no:randomly", "--timeout=180", f"--junitxml={report}", *tests),
                ],
                cwd=checkout,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": str(checkout)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is passed on once
            )
            try:
                process.wait()
            except BaseException:
                process.send_signal(signal.SIGINT)
                process.wait()  # it ends its servers
                raise
        written = log.read_text(errors="replace")
        ran: dict[str, tuple[str, float]] = {}
        for case in _cases(report):
            # What fails in its fixtures' end as well is there a second time.
            if not ran.get(_id(case), ("", 0))[0]:
                ran[_id(case)] = _failure(case), float(case.get("time", 0))
        return ran, written


def _cases(report: Path) -> list[ET.Element]:
    """None of a report that pytest, having been killed, has not written to its end."""
    try:
        return list(ET.parse(report).iter("testcase"))  # noqa: S314 -- pytest's
    except (OSError, ET.ParseError):
        return []


def _id(case: ET.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def _failure(case: ET.Element) -> str:
    for kind in ("error", "failure"):
        if (found := case.find(kind)) is not None:
            # An error is one of a fixture, which expects nothing of the program.
            return ("error: " if kind == "error" else "") + found.get("message", "")
    return "skipped" if case.find("skipped") is not None else ""


def judge(failure: str, written: str) -> str:
    """The verdict of a test's failure with the mistake put in."""
    if not failure:
        return "NOT CAUGHT"
    if broken := _BROKEN.search(written):
        return f"THE PROGRAM BREAKS: {broken[0]}"
    return CAUGHT if _UNMET.match(failure) else f"NO EXPECTATION FAILED: {failure.splitlines()[0]}"


def put_into_functions(mutants: Sequence[sql.Mutant]) -> Iterator[Verdict]:
    """Where test_mutants passes, its mistake was caught."""
    file = "tests/sql/test_mutants.py"
    cases, written = run_tests([f"{file}::test_mutants[{each.name}]" for each in mutants], ROOT)
    for each in mutants:
        failure, seconds = cases.get(f"{file}::test_mutants[{each.name}]", (f"did not run: {written}", 0))
        verdict = f"NOT CAUGHT: {failure}" if failure else CAUGHT
        yield Verdict(each.name, each.mistake, f"test_mutants, {each.scenario}", verdict, seconds)


def put_into_daemons(mistakes: Sequence[Mistake]) -> Iterator[Verdict]:
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "flowforge"
        left_by_tools = shutil.ignore_patterns(".*", "__pycache__")
        shutil.copytree(ROOT, copy, ignore=left_by_tools)
        tell(f"{len({each.test for each in mistakes})} tests of daemons without a mistake")
        cases, written = run_tests(sorted({each.test for each in mistakes}), copy)
        for each in mistakes:
            failure, _ = cases.get(each.test, (f"did not run: {written}", 0))
            if failure:
                verdict = f"THE TEST FAILS WITHOUT IT: {failure}"
                yield Verdict(each.name, each.mistake, each.test, verdict, 0)
                continue
            tell(each.name)
            path, started = copy / "flowforge" / each.file, time.monotonic()
            right = path.read_text()
            path.write_text(each.apply(right))
            try:
                with_it, told = run_tests([each.test], copy)
            finally:
                path.write_text(right)
            failure, _ = with_it.get(each.test, (f"no test ran: {told}", 0))
            seconds = time.monotonic() - started
            said = failure.partition("\n")[0]
            yield Verdict(each.name, each.mistake, each.test, judge(failure, told), seconds, said)


def tell(what: str) -> None:
    """On a terminal, what is under way."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{what} …\r")
        sys.stderr.flush()


def show(each: Verdict, *, as_json: bool) -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
    line = f"{each.verdict:10} {each.seconds:6.1f} s  {each.name:32} {each.mistake}; {each.test}"
    sys.stdout.write((json.dumps(asdict(each)) if as_json else line) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./dev mutants",
        description="Put each mistake of docs/seeded-mistakes.md into the functions and daemons, one at a "
        "time, and see its test fail. Exit code 0: all that were tried are caught; the tables of that page "
        "are then written anew from the definitions.",
    )
    parser.add_argument(
        "-k",
        metavar="NAME",
        action="append",
        default=[],
        help="only mistakes whose name contains NAME; may be given several times",
    )
    parser.add_argument("--list", action="store_true", help="name the mistakes and their tests, try none")
    parser.add_argument("--json", action="store_true", help="one JSON object for each mistake")
    options = parser.parse_args(arguments)

    def wanted(name: str) -> bool:
        return not options.k or any(each in name for each in options.k)

    in_functions = [each for each in sql.MUTANTS if wanted(each.name)]
    in_daemons = [each for each in MISTAKES if wanted(each.name)]
    if not in_functions and not in_daemons:
        parser.error("no mistake has such a name; see ./dev mutants --list")
    if options.list:
        tests = {each.name: f"test_mutants, {each.scenario}" for each in in_functions}
        tests |= {each.name: each.test for each in in_daemons}
        for name, test in tests.items():
            sys.stdout.write(
                (json.dumps({"name": name, "test": test}) if options.json else f"{name:32} {test}") + "\n"
            )
        return 0
    verdicts = []
    for verdict in all_verdicts(in_functions, in_daemons):
        show(verdict, as_json=options.json)
        verdicts.append(verdict)
    survived = [each.name for each in verdicts if each.verdict != CAUGHT]
    if not survived:
        PAGE.write_text(with_tables(PAGE.read_text()))
    if not options.json:
        end = f"; not caught: {', '.join(survived)}" if survived else ""
        sys.stdout.write(f"{len(verdicts) - len(survived)} of {len(verdicts)} mistakes caught{end}\n")
    return 1 if survived else 0


def all_verdicts(in_functions: Sequence[sql.Mutant], in_daemons: Sequence[Mistake]) -> Iterator[Verdict]:
    if in_functions:
        tell(f"{len(in_functions)} mistakes of the SQL functions")
        yield from put_into_functions(in_functions)
    if in_daemons:
        yield from put_into_daemons(in_daemons)


def _ended(signum: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _ended)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
