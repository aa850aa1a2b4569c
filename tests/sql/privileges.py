"""The matrix of roles and functions, from the catalogue, in the words of docs/privileges.md.

    ./dev run python -m tests.sql.privileges

writes that file anew.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "privileges.md"
ROLES = ("client", "worker", "scheduler", "publisher", "operator", "reader")

INTRODUCTION = """# Privileges

Who may call what. Everything belongs to `flowforge_owner`. Tables and sequences are granted to nobody:
whoever needs them calls a function, which runs with the owner's rights, or reads a view. A function that is
not in this list, and one made without a grant, can be executed by its owner only. Give a login its rights by
membership: `grant flowforge_worker to "my-worker"`.

This file is generated from the catalogue; a test compares the two. After changing
`sql/functions/zz_privileges.sql`, write it anew: `./dev run python -m tests.sql.privileges`.
"""


def granted(connection: psycopg.Connection[Any]) -> dict[str, dict[str, set[str]]]:
    """By kind (functions, views, tables) and name: the group roles that hold the privilege."""
    statements = {
        "functions": """
            select p.oid::regprocedure::text, r.role from pg_proc p cross join unnest(%s::text[]) r (role)
            where p.pronamespace = 'flowforge'::regnamespace
                and has_function_privilege('flowforge_' || r.role, p.oid, 'execute')""",
        "views": """
            select c.oid::regclass::text, r.role from pg_class c cross join unnest(%s::text[]) r (role)
            where c.relnamespace = 'flowforge'::regnamespace and c.relkind = 'v'
                and has_table_privilege('flowforge_' || r.role, c.oid, 'select')""",
        "tables": """
            select c.oid::regclass::text, r.role from pg_class c cross join unnest(%s::text[]) r (role)
            where c.relnamespace = 'flowforge'::regnamespace and case c.relkind
                when 'S' then has_sequence_privilege('flowforge_' || r.role, c.oid, 'usage, select, update')
                else has_any_column_privilege('flowforge_' || r.role, c.oid, 'insert, update')
                    or has_table_privilege('flowforge_' || r.role, c.oid, 'delete, truncate, trigger')
                    or c.relkind = 'r' and has_any_column_privilege('flowforge_' || r.role, c.oid, 'select')
                end and c.relkind in ('r', 'v', 'S')""",
    }
    found: dict[str, dict[str, set[str]]] = {}
    for kind, statement in statements.items():
        found[kind] = {}
        for name, role in connection.execute(statement.encode(), (list(ROLES),)).fetchall():
            found[kind].setdefault(name.removeprefix("flowforge."), set()).add(role)
    return found


def _matrix(title: str, rows: dict[str, set[str]]) -> str:
    lines = [f"| {title} | {' | '.join(ROLES)} |", f"|---{'|---' * len(ROLES)}|"]
    for name in sorted(rows):
        cells = ["yes" if role in rows[name] else "" for role in ROLES]
        lines += [f"| `{name}` | {' | '.join(cells)} |"]
    return "\n".join(lines) + "\n"


def document(connection: psycopg.Connection[Any]) -> str:
    found = granted(connection)
    functions, views = _matrix("function", found["functions"]), _matrix("view", found["views"])
    return "\n".join([INTRODUCTION, "## Functions\n", functions, "## Views\n", views])


def write(page: Path, document: Callable[[psycopg.Connection[Any]], str]) -> None:
    """Write a page that is made from the catalogue anew."""
    from flowforge.migrate import migrate
    from tests.services.postgres import PostgresServer, binaries

    with PostgresServer(*binaries("18")) as server:
        migrate(server.dsn())
        with server.connect() as connection:
            page.write_text(document(connection), encoding="utf-8")


if __name__ == "__main__":
    write(DOCUMENT, document)
