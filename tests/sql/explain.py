"""The plans that the statements inside the functions really ran with, as auto_explain tells them."""

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from psycopg.errors import Diagnostic

from tests.services.postgres import Connection

Plan = dict[str, Any]


@contextmanager
def recorded(connection: Connection) -> Iterator[list[Plan]]:
    """Collect the plan of every statement that the session runs in this block.

    The statements inside functions are among them, and the checks of foreign keys.
    """
    plans: list[Plan] = []

    def note(notice: Diagnostic) -> None:
        _, found, explained = (notice.message_primary or "").partition("plan:\n")
        if found:
            plans.append(json.loads(explained)["Plan"])

    connection.execute("load 'auto_explain'")
    for name, value in (
        ("log_format", "json"),
        ("log_level", "notice"),
        ("log_nested_statements", "on"),
        ("log_min_duration", "0"),
    ):
        connection.execute(f"set auto_explain.{name} = {value}")
    connection.add_notice_handler(note)
    try:
        yield plans
    finally:
        connection.remove_notice_handler(note)
        connection.execute("set auto_explain.log_min_duration = -1")


def access_paths(plans: list[Plan], tables: Iterable[str]) -> set[str]:
    """How the statements reach rows of the tables: `index(columns of its condition)`, without blanks.

    What an INSERT, UPDATE or DELETE reads has its name and a colon before. A sequential scan, and a join that
    reads a side whole, are told as such; so are two indexes put together.
    """
    prefixes = tuple(f"{table}_" for table in tables)
    paths = set()
    waiting = [(plan, "") for plan in plans]
    while waiting:
        node, command = waiting.pop()
        kind, index = node["Node Type"], node.get("Index Name", "")
        if kind == "ModifyTable":
            command = node["Operation"].lower() + ":"
        elif kind in ("Hash Join", "Merge Join", "BitmapAnd", "BitmapOr"):
            paths.add(command + kind.replace(" ", "-"))
        elif kind == "Seq Scan" and node["Relation Name"] in tables:
            paths.add(f"{command}Seq-Scan({node['Relation Name']})")
        elif index.startswith(prefixes):
            columns = re.findall(r"\((\w+) (?:=|<|>|IS)", node.get("Index Cond", ""))
            paths.add(f"{command}{index}({','.join(columns)})")
        waiting += [(below, command) for below in node.get("Plans", [])]
    return paths
