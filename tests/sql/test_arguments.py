"""Every argument of every public function, given nulls and extremes: an answer or a documented error."""

from typing import Any

import psycopg

from tests.sql.helpers import Engine, task

UUID = "00000000-0000-0000-0000-000000000001"
# By type: an ordinary value, then those to try in its place.
VALUES: dict[str, tuple[Any, ...]] = {
    "bigint": (1, None, 0, -1, 2**31, 2**63 - 1, -(2**63)),
    "text": ("w", None, "", " ", "x" * 100_000, "%s'\"\\$1", "\u202e"),
    "boolean": (True, None, False),
    "uuid": (UUID, None),
    "interval": ("30 s", None, "0", "-1 s", "178000000 years", "-178000000 years", "1 month"),
    "double precision": (0.5, None, float("nan"), float("inf"), -1e308, 5e-324),
    "jsonb": ("{}", None, "null", "[]", "0", '"x"', '{"": {}}', "[" * 500 + "]" * 500),
    "bigint[]": ("{1}", None, "{}", "{NULL}", "{1,1}", f"{{{2**63 - 1}}}"),
    "uuid[]": (f"{{{UUID}}}", None, "{}", "{NULL}"),
    "text[]": ("{w}", None, "{}", "{NULL}", '{""}', "{succeeded}", "{failed,failed}"),
    "jsonb[]": ('{"{}"}', None, "{}", "{NULL}", '{"null"}'),
    "boolean[]": ("{t}", None, "{}", "{NULL}"),
}


def functions(engine: Engine) -> list[Any]:
    return engine.rows(
        """
        select p.proname as name, coalesce(p.proargnames[1:p.pronargs], '{}') as arguments,
            p.proargtypes::regtype[]::text[] as types
        from pg_proc p where p.pronamespace = 'flowforge'::regnamespace and p.proname !~ '^_' order by 1
        """
    )


def sqlstate(engine: Engine, statement: str, arguments: list[Any]) -> str | None:
    try:
        with engine.connection.transaction(force_rollback=True):
            engine.rows(statement, *arguments)
    except psycopg.Error as error:
        return error.sqlstate
    return None


def test_one_argument_at_a_time(engine: Engine) -> None:
    engine.start(task("w"), task("b", "w"))
    answers: dict[str | None, list[str]] = {}
    for function in functions(engine):
        places = ", ".join(f"%s::{each}" for each in function.types)
        statement = f"select * from flowforge.{function.name}({places})"
        ordinary = [VALUES[each][0] for each in function.types]
        for position, kind in enumerate(function.types):
            for value in VALUES[kind]:
                arguments = [*ordinary[:position], value, *ordinary[position + 1 :]]
                code = sqlstate(engine, statement, arguments)
                call = f"{function.name}({function.arguments[position]} => {str(value)[:40]})"
                answers.setdefault(code, []).append(call)
    assert sum(map(len, answers.values())) > 500
    assert {code: calls for code, calls in answers.items() if code and not code.startswith("WF")} == {}


def test_nothing_but_nulls(engine: Engine) -> None:
    engine.start(task("w"))
    for function in functions(engine):
        places = ", ".join(f"%s::{each}" for each in function.types)
        code = sqlstate(
            engine, f"select * from flowforge.{function.name}({places})", [None] * len(function.types)
        )
        assert code is None or code.startswith("WF"), function.name
