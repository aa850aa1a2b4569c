"""Calls that can meet on one run, under every order of their inner statements.

How much is run of each scenario is logged: add `-o log_cli=true --log-cli-level=INFO`.
"""

import logging
import re
from collections.abc import Iterator

import pytest
from pytest_postgresql.executors import NoopExecutor

from tests.services.postgres import PostgresServer
from tests.sql import races_batches, races_delivery, races_dispatch, races_run, races_worker
from tests.sql.explore import explore, scenarios
from tests.sql.instrument import FUNCTIONS, functions, instrument
from tests.sql.programs import define_workflows
from tests.sql.stepping import Laboratory

SCENARIOS = scenarios(races_worker, races_run, races_dispatch, races_delivery, races_batches)


@pytest.fixture(scope="module")
def laboratory(pg_server: PostgresServer, template: NoopExecutor) -> Iterator[Laboratory]:
    with Laboratory(pg_server, template.template_dbname) as laboratory:
        define_workflows(laboratory)
        yield laboratory


def test_no_function_escapes() -> None:
    """Every function is found in its file, and whatever changes a task run pauses before it does."""
    text = "".join(path.read_text() for path in FUNCTIONS.glob("*.sql"))
    found = {function.name: function for function in functions(text)}
    made = re.findall(r"^create or replace function flowforge\.(\w+)", text, re.MULTILINE)
    assert sorted(found) == sorted(made)
    for function in found.values():
        changes = function.body.count("update flowforge.task_run ")
        assert instrument(function).count(f"flowforge_test.pause('{function.name} ") >= changes


@pytest.mark.parametrize("name", SCENARIOS)
def test_interleavings(laboratory: Laboratory, name: str) -> None:
    """Whoever is stopped where while the other goes on: the outcome is one of those told in the scenario,
    the invariants hold at once, and the run ends."""
    done = explore(laboratory, SCENARIOS[name])
    logging.getLogger(__name__).info("%s: %s", name, done)
    assert done.met > 0
