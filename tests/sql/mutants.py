"""Mistakes, put into the function files one at a time: those of docs/seeded-mistakes.md, and for every other
scenario with races one that it catches.

`python -m tests.sql.mutants [NAME…]` puts each mistake (those named) into a copy of the checkout, runs all
SQL tests there, and tells which of them fail. It takes as long as those tests do, for each mistake.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.sql.instrument import FUNCTIONS


def replaced(text: str, changes: list[list[str]], what: str) -> str:
    """`text` with each change made: old text, which must be there exactly once however it is broken into
    lines, and new. `what` says where, if it is not."""
    for old, new in changes:
        pattern = r"\s+".join(map(re.escape, old.split()))
        found = re.findall(pattern, text)
        assert len(found) == 1, f"{what}: {len(found)} times: {old}"
        text = text.replace(found[0], new)
    return text


def copy_of_checkout(directory: Path) -> Path:
    """A copy below `directory` to put mistakes into, without what tools have left."""
    copy = directory / "flowforge"
    shutil.copytree(FUNCTIONS.parents[1], copy, ignore=shutil.ignore_patterns(".*", "__pycache__"))
    return copy


@dataclass(frozen=True)
class Mutant:
    """One way to make a mistake; `scenario` is the quickest that catches it. With `race`, the orders in which
    one session waits for the end of the other do not show it."""

    name: str
    mistake: str
    how: str
    file: str
    scenario: str
    changes: list[list[str]]
    race: bool = False

    @property
    def row(self) -> str:
        """Its line of the table in docs/seeded-mistakes.md."""
        return f"| {self.mistake} | `{self.file}`: {self.how} | `{self.name}`, by `{self.scenario}` |"

    def apply(self, text: str) -> str:
        """The text of the file with the mistake in it; what is to be replaced must be there exactly once."""
        return replaced(text, self.changes, f"{self.name}: {self.file}")


MUTANTS = [
    Mutant(name, **fields)
    for path in sorted(Path(__file__).with_name("mistakes").glob("*.toml"))
    for name, fields in tomllib.loads(path.read_text()).items()
]


def _failures(mutant: Mutant) -> list[str]:
    """The SQL tests that fail with the mistake."""
    with tempfile.TemporaryDirectory() as directory:
        copy = copy_of_checkout(Path(directory))
        path = copy / "sql" / "functions" / mutant.file
        path.write_text(mutant.apply(path.read_text()))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "--quiet", "--tb=no", "--disable-warnings"),
                *("tests/sql", "--ignore=tests/sql/test_mutants.py"),
            ],
            cwd=copy,
            capture_output=True,
            text=True,
            check=False,
        )
    return [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]


def main(names: list[str]) -> int:
    survived = 0
    for mutant in MUTANTS:
        if not names or mutant.name in names:
            failures = _failures(mutant)
            survived += not failures
            sys.stdout.write(
                f"{mutant.name}: {len(failures)} failures\n" + "".join(f"  {each}\n" for each in failures)
            )
            sys.stdout.flush()
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
