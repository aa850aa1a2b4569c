"""plpgsql_check over every plpgsql function: types, dead code, unused variables, volatility, injection.

Collected where the extension is at hand: on Debian's PostgreSQL.
"""

from tests.services.database import Database

CHECK = r"""
    select p.proname || coalesce(':' || c.lineno, '') || ' ' || c.level || ': ' || c.message
        || coalesce(' (' || c.detail || ')', '') || coalesce(' in ' || c.query, '')
    from pg_proc p
    join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'
    cross join lateral plpgsql_check_function_tb(
        p.oid, fatal_errors => false, other_warnings => true, extra_warnings => true,
        performance_warnings => true, security_warnings => true, compatibility_warnings => true) c
    where p.pronamespace = 'flowforge'::regnamespace
        -- Assigning an int4, such as cardinality answers, to a bigint is meant.
        and c.message <> 'target type is different type than source type'
        -- A row lock in a SELECT is an effect that the checker does not see.
        and (p.proname like '\_lock\_for%'
            and c.message = 'routine is marked as VOLATILE, should be STABLE') is not true
"""


def test_nothing_to_complain_of(db: Database) -> None:
    with db.connect() as connection:
        connection.execute("create extension plpgsql_check")
        found = [row[0] for row in connection.execute(CHECK)]
    assert found == []


def test_mistakes_are_found(db: Database) -> None:
    """The check above can fail: an unused variable, no volatility, a column that is not there."""
    with db.connect() as connection:
        connection.execute("create extension plpgsql_check")
        connection.execute(
            """create function flowforge.wrong() returns bigint language plpgsql as $$
            declare v_unused bigint;
            begin return (select tr.no_such_column from flowforge.task_run tr); end $$"""
        )
        found = [row[0] for row in connection.execute(CHECK)]
    assert len(found) == 3
    assert all(line.startswith("wrong") for line in found)
