"""Each mistake that the functions must not have, put into them, is caught; see docs/seeded-mistakes.md."""

from collections.abc import Iterator

import psycopg
import pytest
from pytest_postgresql.executors import NoopExecutor

from tests.services.postgres import PostgresServer
from tests.sql import (
    races_batches,
    races_delivery,
    races_dispatch,
    races_run,
    races_three,
    races_worker,
    sequences,
)
from tests.sql.explore import explore, scenarios
from tests.sql.instrument import FUNCTIONS, functions
from tests.sql.mutants import MUTANTS, Mutant
from tests.sql.programs import define_workflows
from tests.sql.stepping import Laboratory, SqlError

SEQUENCES = scenarios(sequences)
SCENARIOS = (
    scenarios(races_worker, races_run, races_dispatch, races_delivery, races_batches, races_three) | SEQUENCES
)


@pytest.fixture(scope="module")
def laboratory(pg_server: PostgresServer, template: NoopExecutor) -> Iterator[Laboratory]:
    """Without the triggers that reject forbidden transitions: what catches a mistake is its outcome."""
    with Laboratory(pg_server, template.template_dbname) as laboratory:
        for table in ("run", "task_run"):
            for trigger in ("check_inserted", "check_updated"):
                laboratory.control.execute(f"drop trigger {trigger} on flowforge.{table}".encode())
        # A mistake may leave a loop without an end.
        laboratory.control.execute("set statement_timeout = '20 s'")
        define_workflows(laboratory)
        yield laboratory


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(laboratory: Laboratory, name: str) -> None:
    """The scenarios that need no race, without a mistake."""
    assert explore(laboratory, SEQUENCES[name]).complete


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants(laboratory: Laboratory, mutant: Mutant) -> None:
    """Where the mistake needs a race, the orders without one, which are run first, are right all the same."""
    text = (FUNCTIONS / mutant.file).read_text()
    right = {function.name: function.text for function in functions(text)}
    wrong = {function.name: function.text for function in functions(mutant.apply(text))}
    changed = [name for name in right if right[name] != wrong[name]]
    laboratory.install("\n".join(wrong[name] for name in changed))
    try:
        with pytest.raises((AssertionError, SqlError, psycopg.Error)) as caught:
            explore(laboratory, SCENARIOS[mutant.scenario])
    finally:
        laboratory.install("\n".join(right[name] for name in changed))
    # It runs, and only then goes wrong; that a busy machine was too slow is no proof of anything.
    sqlstate = getattr(caught.value, "sqlstate", None) or ""
    assert not sqlstate.startswith("42"), caught.value
    assert sqlstate != "57014", caught.value
    assert laboratory.met or not mutant.race, caught.value
