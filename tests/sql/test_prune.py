"""prune: history goes, whole runs at a time, and nothing that is under way."""

from typing import Any

import pytest

from tests.sql.helpers import TABLES, Engine, failing, task

HISTORY = ("run", "task_run", "attempt", "outbox", "progress", "run_retry")


def test_everything_of_an_ended_run_goes(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("m", map="a"), task("b", "a"))
    claim = engine.claim_one()
    engine.call("report_progress", claim.task_run_id, claim.fencing_token, 0.5)
    engine.finish(claim, "failed")
    engine.drive()
    engine.call("retry_run", run_id)
    engine.drive(lambda claim: [1, 2])
    engine.advance("1 s")
    assert engine.call("prune", "1 s") == 0
    engine.advance("0.001 s")
    assert engine.call("prune", "1 s") == 1
    engine.call("sweep_outbox")
    content = engine.content()
    assert {name: content[name] for name in HISTORY} == {name: [] for name in HISTORY}
    assert all(content[name] for name in TABLES if name not in (*HISTORY, "worker"))


def test_by_the_time_of_the_end_oldest_first_and_no_more_than_asked(engine: Engine) -> None:
    """HD-48: never by the time of creation, never what is under way."""
    engine.define(task("a"))
    late, first, second, active = (engine.trigger() for _ in range(4))
    for run_id in (first, second, late):
        engine.call("cancel_run", run_id)
        engine.advance("1 hour")
    remaining = "select run_id from flowforge.run order by 1"
    assert engine.call("prune", "30 min", 1) == 1
    assert [row.run_id for row in engine.rows(remaining)] == [late, second, active]
    assert engine.call("prune", "90 min") == 1
    assert [row.run_id for row in engine.rows(remaining)] == [late, active]
    assert engine.call("prune", "0") == 1
    with engine.changes_nothing():
        assert engine.call("prune", "0") == 0
    assert engine.states(active) == {"a": "pending"}


def test_a_late_worker_of_a_pruned_run_is_told(engine: Engine) -> None:
    engine.start(task("a"))
    (message,) = engine.messages()
    claim = engine.claim(message)
    engine.finish(claim)
    engine.drive(failing())
    engine.advance("1 s")
    engine.call("prune", "0")
    assert engine.finish(claim) == "fenced"
    assert engine.claim(message).outcome == "unknown"
    assert engine.call("sweep_outbox") == 1


@pytest.mark.parametrize("arguments", [(None,), ("-1 s",), ("101 years",), ("1 day", None), ("1 day", 0)])
def test_wrong_arguments_are_refused(engine: Engine, arguments: tuple[Any, ...]) -> None:
    with engine.refuses("WF001"):
        engine.call("prune", *arguments)


def test_one_call_deletes_no_more_than_so_many_task_runs(engine: Engine) -> None:
    """Runs may be large: what one transaction deletes must not grow with them."""
    engine.define(*(task(f"t{i}") for i in range(9000)))
    for _ in range(7):
        engine.call("cancel_run", engine.trigger())
    engine.advance("1 s")
    assert [engine.call("prune", "0 s") for _ in range(3)] == [5, 2, 0]
    engine.call("set_limit", "max_tasks", 60_000)
    engine.define(*(task(f"t{i}") for i in range(50_001)), name="huge")
    engine.call("cancel_run", engine.trigger("huge"))
    engine.advance("1 s")
    assert [engine.call("prune", "0 s") for _ in range(2)] == [1, 0]
