"""Calls that can meet, under every order of their inner statements.

How much is run of each scenario is logged: add `-o log_cli=true --log-cli-level=INFO`. At the crossing, whose
pairs are many, the orders of one preemption are run: every statement of the one waits for the whole of the
other. FLOWFORGE_TEST_EXAMPLES=1000 has them run so many orders each at least, and any number of preemptions.
"""

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator

import psycopg
import pytest
from pytest_postgresql.executors import NoopExecutor

from tests.services.postgres import PostgresServer
from tests.sql import races_batches, races_delivery, races_dispatch, races_run, races_three, races_worker
from tests.sql.explore import MEETINGS, Exploration, explore, scenarios
from tests.sql.instrument import FUNCTIONS, functions, instrument
from tests.sql.pairs import SAME, changing, crossings, met, never, pairs
from tests.sql.programs import define_workflows
from tests.sql.stepping import Laboratory

SCENARIOS = scenarios(races_worker, races_run, races_dispatch, races_delivery, races_batches, races_three)
CROSSINGS = crossings(MEETINGS[name] for name in SCENARIOS)
_LOG = logging.getLogger(__name__)


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


def test_every_pair_meets_or_cannot(pg_server: PostgresServer, template: NoopExecutor) -> None:
    """Any two functions that change something, each with itself too, meet in a scenario, or it is said why
    they cannot. A new function is asked for."""
    with psycopg.connect(pg_server.dsn(template.template_dbname)) as connection:
        rows = connection.execute(
            "select proname, coalesce(nullif(prosrc, ''), pg_get_functiondef(oid)) from pg_proc"
            " where pronamespace = 'flowforge'::regnamespace"
        ).fetchall()
    bodies: dict[str, str] = dict(rows)
    for name, same in SAME.items():
        assert re.search(rf"flowforge\._?{same}\(", bodies[name])
    every = pairs(changing(bodies))
    meetings = [*(MEETINGS[name] for name in SCENARIOS), *(each.meeting for each in CROSSINGS.values())]
    meeting = met(meetings)
    named = Counter(never())
    assert [pair for pair, times in named.items() if times > 1] == []
    # A third one may bring together whom two could not.
    assert sorted(met(each for each in meetings if len(each) == 2) & named.keys()) == []
    assert sorted(every - meeting - named.keys()) == []
    assert sorted((meeting | named.keys()) - every) == []


@pytest.mark.parametrize("name", SCENARIOS)
def test_interleavings(laboratory: Laboratory, name: str) -> None:
    """Whoever is stopped where while the other goes on: the outcome is one of those told in the scenario,
    the invariants hold at once, and the run ends."""
    _have_met(name, explore(laboratory, SCENARIOS[name]), MEETINGS[name])


@pytest.mark.parametrize("name", CROSSINGS)
def test_crossings(laboratory: Laboratory, name: str) -> None:
    """The same of pairs with no scenario of their own: the outcome is one of those without a race."""
    longer = os.environ.get("FLOWFORGE_TEST_EXAMPLES")
    enough, preemptions = (int(longer), None) if longer else (0, 1)
    crossing = CROSSINGS[name]
    done = explore(laboratory, crossing, enough=enough, sample=enough // 4, preemptions=preemptions)
    _have_met(name, done, crossing.meeting)


def _have_met(name: str, done: Exploration, meeting: tuple[frozenset[str], ...]) -> None:
    _LOG.info("%s: %s", name, done)
    assert done.met > 0
    assert tuple(done.called) == meeting
