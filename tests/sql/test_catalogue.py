"""What holds for every function, table and column, read from the catalogue and from the files."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.rows import namedtuple_row
from pytest_postgresql.executors import NoopExecutor

from tests.services.database import Database
from tests.services.postgres import PostgresServer

Query = Callable[[str], list[Any]]

FUNCTIONS = Path(__file__).resolve().parents[2] / "sql" / "functions"
FILES = {path.name: path.read_text(encoding="utf-8") for path in FUNCTIONS.glob("*.sql")}
CREATE = re.compile(
    r"^create or replace function flowforge\.(?P<name>\w+)(?P<head>.*?)^(?:as \$\$|begin atomic|return )",
    re.MULTILINE | re.DOTALL,
)
HEADS = {match["name"]: match["head"] for text in FILES.values() for match in CREATE.finditer(text)}

# Constants and predicates over their arguments alone: pinning would stop them from being inlined.
UNPINNED = {
    "_bytes",
    "_clock",
    "_position",
    "_rule_met",
    "_unclaimed_delay",
    "schema_version",
}
# Public, but reads nothing.
INVOKER = {"schema_version"}
# Sizes of arrays, which cannot exceed an int4.
SIZES = {"_check_batch", "_position"}

FUNCTION = """
    select p.proname as name, p.oid::regprocedure::text as signature, p.prosecdef as definer,
        obj_description(p.oid, 'pg_proc') as comment,
        coalesce(array_to_string(p.proconfig, ' '), '') as config,
        has_function_privilege('public', p.oid, 'execute') as executable_by_all,
        coalesce(p.proargnames, '{}') as arguments,
        array(select t.typname::text from pg_type t
              where t.oid = any (coalesce(p.proallargtypes, p.proargtypes::oid[]) || p.prorettype)) as types,
        exists (
            select from pg_class c where c.reltype = p.prorettype and c.relkind <> 'c') as answers_table_rows
    from pg_proc p where p.pronamespace = 'flowforge'::regnamespace order by 1
"""


@pytest.fixture(scope="module")
def catalogue(pg_server: PostgresServer, template: NoopExecutor) -> Iterator[Query]:
    """Answers a statement in a database where nothing has been replaced."""
    if not pg_server.is_running():
        pg_server.start()
    database = Database(pg_server, template.template_dbname)
    with database.connect(row_factory=namedtuple_row) as connection:
        yield lambda statement: connection.execute(statement.encode()).fetchall()
    database.drop()


@pytest.fixture(scope="module")
def functions(catalogue: Query) -> list[Any]:
    found = catalogue(FUNCTION)
    assert {each.name for each in found} == set(HEADS)
    return found


def test_no_overloads(functions: list[Any]) -> None:
    names = [each.name for each in functions]
    assert sorted(names) == sorted(set(names))


def test_every_function_is_commented(functions: list[Any]) -> None:
    assert [each.name for each in functions if not each.comment] == []


def test_every_function_pins_its_search_path(functions: list[Any]) -> None:
    pinned = {each.name for each in functions if "search_path=pg_catalog, pg_temp" in each.config}
    assert {each.name for each in functions} - pinned == UNPINNED
    assert all("search_path" not in each.config for each in functions if each.name in UNPINNED)


def test_every_function_states_its_volatility() -> None:
    """create or replace resets what is not stated again."""
    stated = {name for name, head in HEADS.items() if re.search(r"\b(volatile|stable|immutable)\b", head)}
    assert set(HEADS) - stated == set()


def test_public_functions_and_only_those_run_with_the_owners_rights(functions: list[Any]) -> None:
    definers = {each.name for each in functions if each.definer}
    assert definers == {each.name for each in functions if not each.name.startswith("_")} - INVOKER


def test_nothing_is_executable_by_everybody(functions: list[Any]) -> None:
    assert [each.name for each in functions if each.executable_by_all] == []


def test_arguments_of_public_functions_are_plain_words_and_of_private_ones_prefixed(
    functions: list[Any],
) -> None:
    for each in functions:
        if each.name.startswith("_"):
            assert all(re.match("[pv]_", name) for name in each.arguments), each.signature
        else:
            assert not any(re.match("[pv]_", name) for name in each.arguments), each.signature


def test_no_function_answers_rows_of_a_table(functions: list[Any]) -> None:
    assert [each.name for each in functions if each.answers_table_rows] == []


def test_no_function_composes_statements() -> None:
    """HD-38: names never become part of one; the exception grants privileges, by signature."""
    composing = {
        name
        for name, text in FILES.items()
        if re.search(r"^\s*execute\b|\bexecute format", text, re.MULTILINE)
    }
    assert composing == {"zz_privileges.sql"}


def test_integers_that_can_grow_are_bigint(catalogue: Query, functions: list[Any]) -> None:
    """HD-27; and HD-47: no time without its zone."""
    narrow = {"int2", "int4", "_int2", "_int4", "float4", "numeric", "timestamp", "time", "date", "money"}
    for each in functions:
        if each.name in SIZES or each.name in ("_definition_number", "_topological_order"):
            continue
        assert not narrow & set(each.types), each.signature
    columns = catalogue(
        """
        select c.relname, a.attname, t.typname
        from pg_attribute a join pg_class c on c.oid = a.attrelid join pg_type t on t.oid = a.atttypid
        where c.relnamespace = 'flowforge'::regnamespace and c.relkind in ('r', 'v', 'c')
            and a.attnum > 0 and not a.attisdropped and c.relname !~ 'yoyo'
        """,
    )
    assert len(columns) > 200
    assert [each for each in columns if each.typname in narrow] == []
    sequences = catalogue(
        "select s.seqrelid::regclass::text from pg_sequence s join pg_class c on c.oid = s.seqrelid"
        " where c.relnamespace = 'flowforge'::regnamespace and s.seqtypid <> 'int8'::regtype",
    )
    assert sequences == []


def test_everything_else_is_commented_too(catalogue: Query) -> None:
    """Tables, views, columns, types and indexes: psql is the reference manual."""
    relations = catalogue(
        """
        select c.relname as name, obj_description(c.oid, 'pg_class') as comment from pg_class c
        where c.relnamespace = 'flowforge'::regnamespace and c.relname !~ 'yoyo'
            and (c.relkind in ('r', 'v') or c.relkind = 'i' and not exists (
                select from pg_constraint k where k.conindid = c.oid))
        union all
        select t.typname, obj_description(t.oid, 'pg_type')
        from pg_type t left join pg_class c on c.oid = t.typrelid
        where t.typnamespace = 'flowforge'::regnamespace and (t.typtype = 'e' or c.relkind = 'c')
        union all
        select c.relname || '.' || a.attname, col_description(c.oid, a.attnum)
        from pg_attribute a join pg_class c on c.oid = a.attrelid
        where c.relnamespace = 'flowforge'::regnamespace and c.relname !~ 'yoyo'
            and c.relkind in ('r', 'v', 'c') and a.attnum > 0 and not a.attisdropped
        """,
    )
    assert len(relations) > 250
    assert [each.name for each in relations if not each.comment] == []


def test_only_documented_errors_are_raised() -> None:
    """40001 asks for the call to be repeated, as PostgreSQL's own does."""
    raised = {code for text in FILES.values() for code in re.findall(r"errcode = '(\w+)'", text)}
    assert raised == {*(f"WF00{number}" for number in range(1, 9)), "40001"}
    raises = [line for text in FILES.values() for line in re.findall(r"raise exception.*", text)]
    assert [line for line in raises if "using errcode" not in line] == []


@pytest.mark.parametrize("name", sorted(set(FILES) - {"zz_privileges.sql", "views.sql"}))
def test_a_file_opens_with_what_it_is(name: str) -> None:
    """What it does, and for callers the errors that it raises."""
    header = re.match(r"(?:--.*\n)+", FILES[name])
    assert header
    text = header[0].replace("\n--", "")
    assert name == "_common.sql" or re.search(r"\b(Raise|Raises) WF00|Lock nothing", text)


def test_no_wrong_row_is_locked_harder_than_needed() -> None:
    """Plain FOR UPDATE on a run blocks inserts that refer to it; only who deletes rows may take it."""
    harder = {
        name
        for name, text in FILES.items()
        if re.search(r"(?<!key )(?<!no key )for update(?! skip locked)", re.sub(r"--.*", "", text))
    }
    assert harder == set()
