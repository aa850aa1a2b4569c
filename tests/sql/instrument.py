"""The functions of FlowForge with a pause before each inner statement, generated from their files.

A function call is one statement to its client, so two sessions cannot be interleaved inside their calls from
outside. `instrument` puts a call of `flowforge_test.pause` before every statement of a plpgsql function that
reads or writes a table that changes while runs are under way. Under READ COMMITTED a statement takes its own
snapshot, so a pause, a statement of its own before it, moves that snapshot and changes nothing else.

Not paused inside: functions in SQL and plpgsql functions that are not volatile, whose statements read with
the snapshot of the statement that calls them (that one is paused before instead); checks of arguments,
wake-up calls, and what keeps or reads settings of a queue and its pace, which decide nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pglast import parse_plpgsql

FUNCTIONS = Path(__file__).resolve().parents[2] / "sql" / "functions"

# What changes while runs are under way; the definitions do not, once they stand.
_TABLE = re.compile(
    r"\bflowforge\.(?:run|task_run|outbox|attempt|queue|scheduler|run_retry|worker|progress|workflow)\b(?!\()"
)
_WRITE = re.compile(r"\b(?:insert into|update|delete from) flowforge\.|pg_advisory")
_CALL = re.compile(r"\bflowforge\.(\w+)\(")
_UNPAUSED = re.compile(r"_wake_|_check_|_require_|_window|_redispatch_delay|_sample_pace|_known_workers")

_FUNCTION = re.compile(
    r"^create or replace function flowforge\.(?P<name>\w+)\((?:(?!^create ).)*?"
    r"(?:^as \$\$\n(?P<plpgsql>.*?)^\$\$;$|^begin atomic\n(?P<sql>.*?)^end;$|^return (?P<expression>.*?);$)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Function:
    """One function as its file states it. `text` is the whole statement, `body` what is between the $$."""

    name: str
    text: str
    body: str
    is_plpgsql: bool

    @property
    def is_volatile(self) -> bool:
        return bool(re.search(r"^language plpgsql volatile", self.text, re.MULTILINE))


def functions(text: str) -> Iterator[Function]:
    """The functions that the text of a file makes."""
    for match in _FUNCTION.finditer(text):
        body = match["plpgsql"] or match["sql"] or match["expression"]
        yield Function(match["name"], match[0] + "\n", body, match["plpgsql"] is not None)


def _transparent() -> set[str]:
    """Functions that read tables with their caller's snapshot, directly or through one another."""
    readers: dict[str, str] = {
        function.name: function.body
        for path in FUNCTIONS.glob("*.sql")
        for function in functions(path.read_text())
        if not function.is_plpgsql or not function.is_volatile
    }
    found: set[str] = set()
    while True:
        more = {
            name
            for name, body in readers.items()
            if name not in found and (_TABLE.search(body) or found & set(_CALL.findall(body)))
        }
        if not more:
            return {name for name in found if not _UNPAUSED.match(name)}
        found |= more


_TRANSPARENT = _transparent()


def _is_step(sql: str) -> bool:
    return bool(_TABLE.search(sql) or _WRITE.search(sql) or _TRANSPARENT & set(_CALL.findall(sql)))


def _statements(node: Any) -> Iterator[tuple[int, str]]:
    """Line, counted from the body's start, and SQL text of every statement below a node of the parse tree."""
    if isinstance(node, list):
        for each in node:
            yield from _statements(each)
    elif isinstance(node, dict):
        for kind, value in node.items():
            if kind.startswith("PLpgSQL_stmt_") and "lineno" in value:
                expressions = (each.get("PLpgSQL_expr") for each in value.values() if isinstance(each, dict))
                yield value["lineno"], " ".join(each["query"] for each in expressions if each)
            yield from _statements(value)


def steps(function: Function) -> list[int]:
    """Lines of the body, from 0, before which the function pauses."""
    if not function.is_plpgsql or not function.is_volatile or _UNPAUSED.match(function.name):
        return []
    # The parser knows no types but PostgreSQL's own.
    text = re.sub(r"\bflowforge\.\w+(?=;$|\n)", "record", function.text, flags=re.MULTILINE)
    tree = parse_plpgsql(text)
    # The parser counts the rest of the line of the $$ as line 1.
    return sorted({line - 2 for line, sql in _statements(tree) if _is_step(sql)})


def instrument(function: Function) -> str:
    """The text of the function with its pauses."""
    lines = function.body.splitlines(keepends=True)
    for number, line in reversed(list(enumerate(steps(function), 1))):
        lines.insert(line, f"perform flowforge_test.pause('{function.name} {number}');\n")
    return function.text.replace(function.body, "".join(lines))
