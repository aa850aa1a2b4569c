"""Calls that can meet on one run, under every order of their inner statements.

How much is run of each scenario is logged: add `-o log_cli=true --log-cli-level=INFO`.
"""

import logging
from collections.abc import Iterator

import pytest
from pytest_postgresql.executors import NoopExecutor

from tests.services.postgres import PostgresServer
from tests.sql import races_delivery, races_dispatch, races_run, races_worker
from tests.sql.explore import explore, scenarios
from tests.sql.programs import define_workflows
from tests.sql.stepping import Laboratory

SCENARIOS = scenarios(races_worker, races_run, races_dispatch, races_delivery)


@pytest.fixture(scope="module")
def laboratory(pg_server: PostgresServer, template: NoopExecutor) -> Iterator[Laboratory]:
    with Laboratory(pg_server, template.template_dbname) as laboratory:
        define_workflows(laboratory)
        yield laboratory


@pytest.mark.parametrize("name", SCENARIOS)
def test_interleavings(laboratory: Laboratory, name: str) -> None:
    """Whoever is stopped where while the other goes on: the outcome is one of those told in the scenario,
    the invariants hold at once, and the run ends."""
    done = explore(laboratory, SCENARIOS[name])
    logging.getLogger(__name__).info("%s: %s", name, done)
    assert done.met > 0
