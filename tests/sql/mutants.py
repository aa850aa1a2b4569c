"""Mistakes, put into the function files one at a time: those of docs/seeded-mistakes.md, and for every other
scenario with races one that it catches."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


def replaced(text: str, changes: list[list[str]], what: str) -> str:
    """`text` with each change made: old text, which must be there exactly once however it is broken into
    lines, and new. `what` says where, if it is not."""
    for old, new in changes:
        pattern = r"\s+".join(map(re.escape, old.split()))
        found = re.findall(pattern, text)
        assert len(found) == 1, f"{what}: {len(found)} times: {old}"
        text = text.replace(found[0], new)
    return text


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
