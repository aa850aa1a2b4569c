"""Queues, workers and limits: what operators and workers set."""

from typing import Any

import pytest

from tests.sql.helpers import Engine, task


@pytest.fixture
def queue(engine: Engine) -> Engine:
    engine.define(task("a"))
    return engine


def test_pause_and_resume_tell_whether_they_changed_anything(queue: Engine) -> None:
    assert queue.call("pause_queue", "default") is True
    queue.advance("1 min")
    with queue.changes_nothing():  # paused since the first time
        assert queue.call("pause_queue", "default") is False
    assert queue.call("resume_queue", "default") is True
    with queue.changes_nothing():
        assert queue.call("resume_queue", "default") is False


def test_configure(queue: Engine) -> None:
    settings = "select window_size, redispatch_delay::text from flowforge.queue"
    assert queue.call("configure_queue", "default", 7, "1 min") is True
    assert queue.row(settings) == (7, "00:01:00")
    assert queue.call("configure_queue", "default", redispatch_delay="0.1 s") is True
    assert queue.row(settings) == (7, "00:00:00.1")
    assert queue.call("configure_queue", "default", window_size=0) is True
    assert queue.row(settings) == (None, "00:00:00.1")
    with queue.changes_nothing():
        assert queue.call("configure_queue", "default") is False
        assert queue.call("configure_queue", "default", 0, "0.1 s") is False


@pytest.mark.parametrize(
    ("function", "arguments", "code"),
    [
        *((name, (queue,), "WF002") for name in ("pause_queue", "resume_queue") for queue in (None, "", "x")),
        ("configure_queue", (None, 1), "WF002"),
        ("configure_queue", ("x", 1), "WF002"),
        ("configure_queue", ("default", -1), "WF001"),
        ("configure_queue", ("default", 1_000_001), "WF001"),
        ("configure_queue", ("default", 1, "0 s"), "WF001"),
        ("configure_queue", ("default", 1, "-1 s"), "WF001"),
        ("configure_queue", ("default", 1, "2 days"), "WF001"),
        ("announce_worker", (None, ["q"], 1), "WF001"),
        ("announce_worker", ("", ["q"], 1), "WF001"),
        ("announce_worker", ("w" * 201, ["q"], 1), "WF005"),
        ("announce_worker", ("w", None, 1), "WF001"),
        ("announce_worker", ("w", [None], 1), "WF001"),
        ("announce_worker", ("w", [""], 1), "WF001"),
        ("announce_worker", ("w", ["q" * 201], 1), "WF005"),
        ("announce_worker", ("w", ["q"] * 1001, 1), "WF001"),
        ("announce_worker", ("w", ["q"], None), "WF001"),
        ("announce_worker", ("w", ["q"], -1), "WF001"),
        ("announce_worker", ("w", ["q"], 100_001), "WF001"),
        ("set_limit", (None, 1), "WF002"),
        ("set_limit", ("max_nothing", 1), "WF002"),
        ("set_limit", ("max_tasks", None), "WF001"),
        ("set_limit", ("max_tasks", 0), "WF001"),
        ("set_limit", ("max_tasks", 100_001), "WF001"),
    ],
)
def test_wrong_arguments_are_refused(
    queue: Engine, function: str, arguments: tuple[Any, ...], code: str
) -> None:
    with queue.refuses(code):
        queue.call(function, *arguments)


def test_presence_of_workers(engine: Engine) -> None:
    engine.call("announce_worker", "w1", ["q"], 2)
    first = engine.row("select * from flowforge.worker_status")
    engine.advance("1 min")
    engine.call("announce_worker", "w1", ["q", "r"], 4)
    again = engine.row("select * from flowforge.worker_status")
    assert (again.started_at, again.queues, again.capacity) == (first.started_at, ["q", "r"], 4)
    assert again.seen_at > first.seen_at
    engine.call("announce_worker", "w2", [], 1)
    engine.call("announce_worker", "w2", [], 0)
    assert [row.worker for row in engine.rows("select worker from flowforge.worker_status")] == ["w1"]
    engine.advance("2 minutes")
    assert engine.value("select alive from flowforge.worker_status") is False
    engine.advance("1 hour")
    engine.call("announce_worker", "w3", [], 1)  # forgets who has been silent for an hour
    assert [row.worker for row in engine.rows("select worker from flowforge.worker_status")] == ["w3"]


def test_a_limit_is_set_within_its_bounds(engine: Engine) -> None:
    assert engine.call("set_limit", "max_batch", 5000) is True
    assert engine.value("select value from flowforge.limits where name = 'max_batch'") == 5000
    with engine.changes_nothing():
        assert engine.call("set_limit", "max_batch", 5000) is False
