"""The command graph: what is drawn is the definition, whatever its names are."""

import html
import itertools
import re
from typing import Any

import pytest

from flowforge import Client, Context, Workflow, exits
from tests.python.shell import Shell
from tests.services.database import Database

NODE = re.compile(r"    (t\d+)(\[\[?)\"([^\"]*)\"(\]\]?)")
EDGE = re.compile(r"    (t\d+) -->(\|map\|)? (t\d+)")
# All that a label may hold: a character's number, a rule's line break, and what means nothing to Mermaid.
LABEL = re.compile(r"(?:#\d+;|<br/>|[A-Za-z0-9 ._-]|[^\x00-\x7f\u2028\u2029])*")

etl = Workflow("etl")


@etl.task
def extract(_: Context) -> list[int]:
    return [1]


@etl.task(map=extract)
def square(ctx: Context) -> int:
    return int(ctx.item)


@etl.task(after=[extract, square], when="all_done")
def total(_: Context) -> None: ...


@pytest.fixture
def shell(db: Database) -> Shell:
    """Commands of a login that may only read."""
    return Shell(db.create_login("flowforge_reader"))


def define(db: Database, workflow: Workflow | dict[str, Any]) -> None:
    with Client(db.dsn) as client:
        client.define(workflow)


def read(drawn: str) -> tuple[dict[str, str], set[tuple[str, str]]]:
    """Nodes (id: label as it is shown) and edges; every line is one of the two."""
    heading, *lines = drawn.splitlines()
    assert heading == "flowchart TD"
    nodes, edges = {}, set()
    for line in lines:
        if found := NODE.fullmatch(line):
            assert found[2] == found[4].replace("]", "[")
            assert LABEL.fullmatch(found[3]), found[3]
            nodes[found[1]] = html.unescape(found[3].replace("#", "&#"))
        else:
            found = EDGE.fullmatch(line)
            assert found, line
            edges.add((found[1], found[3]))
    return nodes, edges


def test_the_graph_is_the_definition(shell: Shell, db: Database) -> None:
    define(db, etl)
    assert shell("graph", "etl").stdout == (
        "flowchart TD\n"
        '    t0["extract"]\n'
        '    t1[["square"]]\n'
        '    t2["total<br/>all_done"]\n'
        "    t0 -->|map| t1\n"
        "    t0 --> t2\n"
        "    t1 --> t2\n"
    )


def test_a_task_stands_below_what_it_waits_for(shell: Shell, db: Database) -> None:
    """Whatever their names are."""
    names = [*"xcafb"]
    tasks = [{"name": name, "after": names[:number]} for number, name in enumerate(names)]
    define(db, {"name": "w", "tasks": tasks})
    nodes, _ = read(shell("graph", "w").stdout)
    assert list(nodes.items()) == [(f"t{number}", name) for number, name in enumerate(names)]


def test_a_version_can_be_named_and_read_as_json(shell: Shell, db: Database) -> None:
    define(db, {"name": "etl", "tasks": [{"name": "old"}]})
    define(db, etl)
    current, old = shell.document("graph", "etl"), shell.document("graph", "etl", "--version", 1)
    assert set(current) == {"workflow", "version", "definition", "mermaid"}
    assert (current["version"], old["version"]) == (2, 1)
    assert old["mermaid"] == 'flowchart TD\n    t0["old"]\n'
    assert [task["name"] for task in current["definition"]["tasks"]] == ["extract", "square", "total"]
    assert current["mermaid"] == shell("graph", "etl").stdout


HOSTILE = [
    *(
        "end",
        "graph",
        "subgraph",
        "default",
        "click",
        "t0",
        "1. first",
        "- item",
        "__init__",
        "a-->b",
        "o--x",
    ),
    *(
        '"',
        "'",
        "a]b",
        "[[x]]",
        "(x)",
        "{x}",
        "|map|",
        "#quot;",
        "#",
        "#35;",
        "&amp;",
        "a;b",
        "%% no comment",
    ),
    *("`code`", "**bold**", "_x_", "<b>x</b>", "<script>alert(1)</script>", "\\n", "a\\", "a@{ shape: x }"),
    *(
        "😀",
        "👩‍💻",
        "größe",
        "日本",
        "a  b",
        "line\u2028separator",
        "rtl\u202eoverride",
        "x" * 200,
        '"' * 200,
        ":::c",
    ),
]


def test_names_cannot_break_the_drawing(shell: Shell, db: Database) -> None:
    """All of them in one workflow, each after the one before it."""
    tasks = [
        {"name": name, "after": [before] if before else []}
        for before, name in zip(["", *HOSTILE], HOSTILE, strict=False)
    ]
    define(db, {"name": '"hostile" [w]', "tasks": tasks})
    nodes, edges = read(shell("graph", '"hostile" [w]').stdout)
    assert sorted(nodes) == sorted(f"t{number}" for number in range(len(HOSTILE)))
    assert sorted(nodes.values()) == sorted(HOSTILE)
    ids = {name: node for node, name in nodes.items()}
    assert edges == {(ids[before], ids[name]) for before, name in itertools.pairwise(HOSTILE)}


def test_common_names_stay_readable(shell: Shell, db: Database) -> None:
    define(db, {"name": "w", "tasks": [{"name": "load_orders-v1.2 größe"}]})
    assert '["load_orders-v1.2 größe"]' in shell("graph", "w").stdout


def test_what_is_not_there_is_named(shell: Shell, db: Database) -> None:
    assert "there is no workflow 'etl'; see which there are: flowforge workflows" in (
        shell("graph", "etl", code=exits.EXIT_USAGE).stderr
    )
    define(db, etl)
    assert "workflow 'etl' has no version 2; its versions are 1 to 1" in (
        shell("graph", "etl", "--version", 2, code=exits.EXIT_USAGE).stderr
    )
    shell("graph", "etl", "--version", 0, code=exits.EXIT_USAGE)
    client = Shell(db.create_login("flowforge_client"))
    assert "flowforge_reader" in client("graph", "etl", code=exits.EXIT_PRIVILEGE).stderr
