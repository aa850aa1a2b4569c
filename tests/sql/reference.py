"""Writes docs/sql-reference.md from the comments in the catalogue: ./dev run python -m tests.sql.reference"""

import re
from pathlib import Path
from typing import Any

import psycopg

from flowforge import errors
from tests.sql.privileges import ROLES, granted, write

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "sql-reference.md"

_HEAD = """\
# SQL reference

Every function and view that a group role may use, all in the schema `flowforge`; who may do what, as a
matrix, is in [privileges.md](privileges.md). Arguments may be given by name, as in
`flowforge.trigger(workflow => 'etl')`; those with a default may be left out.

This file is generated from the comments in the catalogue, which `\\df+ flowforge.*` and
`\\d+ flowforge.*` show in `psql`; a test compares the two. After changing a comment, write it anew:
`./dev run python -m tests.sql.reference`.

## Errors

What a function raises is told with it. An error undoes the whole call.

| SQLSTATE | in Python | meaning | what to do |
|---|---|---|---|
"""

# SQLSTATE: the meaning, and what to do.
_ERRORS = {
    "WF001": (
        "an argument is null, of the wrong kind or out of bounds",
        "mend the call; the message names the argument and what is allowed",
    ),
    "WF002": ("no such workflow, version, run, task, queue or limit", "mend the name or number"),
    "WF003": ("the definition is invalid", "mend it; the message names the task, and the path of a cycle"),
    "WF004": ("an idempotency key, or a request id, was used before with other input", "use a new key"),
    "WF005": (
        "a named limit is exceeded",
        "send less, or raise it: view [`limits`](#limits), function [`set_limit`](#set_limit)",
    ),
    "WF006": ("the token no longer holds the task run", "stop, and roll back"),
    "WF007": ("refused in the present state", "wait, or cancel first"),
    "WF008": ("needs the isolation level READ COMMITTED", "use that, which is PostgreSQL's default"),
    "40001, 40P01, 55P03": (
        "PostgreSQL's own: the call lost a race, or waited too long for a lock",
        "repeat the call; daemons do, with back-off",
    ),
}

_GROUPS = {
    "client": "Clients: define, trigger, look, cancel",
    "worker": "Workers: claim, run, finish",
    "scheduler": "Schedulers: settle, dispatch, reap",
    "publisher": "Publishers: fetch, publish, mark",
    "operator": "Operators: retry, pause, limit, prune",
}

_NOTES = {
    "worker": "How a worker puts these together is in [worker-protocol.md](worker-protocol.md).",
    "scheduler": "Each answers how much it did, at most what its argument says; "
    "more than 0 means: again at once.",
}


def functions(connection: psycopg.Connection[Any]) -> dict[str, tuple[str, str]]:
    """By name: the signature as a call is written, and the comment."""
    found: dict[str, tuple[str, str]] = {}
    query = """
        select p.proname, array(
                select concat_ws(' ', quote_ident(p.proargnames[n]), format_type(p.proargtypes[n - 1], null),
                    'default ' || pg_get_function_arg_default(p.oid, n::int))
                from generate_series(1, p.pronargs) n order by n),
            pg_get_function_result(p.oid), obj_description(p.oid, 'pg_proc')
        from pg_proc p where p.pronamespace = 'flowforge'::regnamespace and p.proname !~ '^_'
        order by p.proname
    """
    for name, arguments, result, comment in connection.execute(query).fetchall():
        columns = re.fullmatch(r"TABLE\((.*)\)", result)
        answer = f"table ({_listed(columns[1].split(', '))})" if columns else result.replace("SETOF", "setof")
        found[name] = (f"{name}({_listed(arguments)}) returns {_plain(answer)}", comment)
    return found


def _listed(declarations: list[str]) -> str:
    """One by one on lines of their own, if there are several."""
    listed = ",\n    ".join(map(_plain, declarations))
    return f"\n    {listed}\n" if len(declarations) > 1 else listed


def _plain(declaration: str) -> str:
    """Without the casts of defaults, and with types by their short names."""
    text = re.sub(r"(?<=['\w])::[\w.]+(\[\])?", "", declaration).replace("flowforge.", "")
    return text.replace("timestamp with time zone", "timestamptz").replace("NULL", "null")


def _columns(connection: psycopg.Connection[Any], relation: str) -> str:
    rows = connection.execute(
        """
        select a.attname, format_type(a.atttypid, null), col_description(a.attrelid, a.attnum)
        from pg_attribute a where a.attrelid = %s::regclass and a.attnum > 0 and not a.attisdropped
        order by a.attnum
        """,
        [f"flowforge.{relation}"],
    ).fetchall()
    lines = [f"| `{name}` | {_plain(kind)} | {comment} |" for name, kind, comment in rows]
    return "\n".join(["| column | type | meaning |", "|---|---|---|", *lines])


def _views(connection: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    return connection.execute(
        """
        select c.relname, obj_description(c.oid) from pg_class c
        where c.relnamespace = 'flowforge'::regnamespace and c.relkind = 'v' order by c.relname
        """
    ).fetchall()


def _enums(connection: psycopg.Connection[Any]) -> list[tuple[str, str, str]]:
    return connection.execute(
        """
        select t.typname, obj_description(t.oid),
            string_agg(format('`%s`', e.enumlabel), ', ' order by e.enumsortorder)
        from pg_type t join pg_enum e on e.enumtypid = t.oid
        where t.typnamespace = 'flowforge'::regnamespace group by t.oid order by t.typname
        """
    ).fetchall()


def _entry(name: str, signature: str, comment: str, also: set[str]) -> str:
    """What a function does, and apart from it what it raises."""
    text, _, raised = comment.partition(" Raises ")
    lines = [f"### `{name}`", f"```\n{signature}\n```", text]
    if raised:
        lines.append(f"**Errors:** {raised}")
    if also:
        lines.append(f"Also for: {', '.join(sorted(also))}.")
    return "\n\n".join(lines)


def document(connection: psycopg.Connection[Any]) -> str:
    """The page as it should be."""
    kinds = {kind.default_sqlstate: kind.__name__ for kind in errors.DatabaseError.__subclasses__()}
    rows = [
        f"| {code} | `{kinds.get(code, 'DatabaseUnavailable')}` | {meaning} | {remedy} |"
        for code, (meaning, remedy) in _ERRORS.items()
    ]
    parts = [_HEAD + "\n".join(rows)]
    roles, described = granted(connection), functions(connection)
    left = {name.partition("(")[0]: holders for name, holders in roles["functions"].items()}
    common = {name for name in left if left[name] == set(ROLES)}
    for role, title in _GROUPS.items():
        parts += [f"## {title}", f"What members of `flowforge_{role}` call. {_NOTES.get(role, '')}".rstrip()]
        for name in sorted(left.keys() - common):
            if role in left[name] and name in described:
                parts.append(_entry(name, *described.pop(name), left[name] - {role}))
    parts.append("## Everybody")
    for name, (signature, comment) in described.items():
        assert name in common, f"no group role may call {name}"
        parts.append(_entry(name, signature, comment, set()))
    parts.append(
        "## Readers: the views\n\nWhat members of `flowforge_reader` and `flowforge_operator` select from."
    )
    for name, comment in _views(connection):
        parts.append(f"### `{name}`\n\n{comment}\n\n{_columns(connection, name)}")
        if name == "health":
            figures = connection.execute("select name, meaning from flowforge.health").fetchall()
            lines = [f"| `{figure}` | {meaning} |" for figure, meaning in figures]
            parts.append("\n".join(["| figure | meaning |", "|---|---|", *lines]))
    parts.append("## Types")
    parts += [f"### `{name}`\n\n{comment} Values: {values}." for name, comment, values in _enums(connection)]
    row = connection.execute("select obj_description('flowforge.claim_row'::regtype)").fetchone()
    assert row is not None
    parts.append(f"### `claim_row`\n\n{row[0]}\n\n{_columns(connection, 'claim_row')}")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    write(DOCUMENT, document)
