"""Ends of ranges that are seldom reached: what is computed there is right, and overflows nothing."""

from datetime import timedelta
from typing import Any

import pytest

from tests.sql.helpers import Engine, task

MIB = 1_048_576


def test_however_slow_a_queue_is_nothing_waits_for_more_than_a_day(engine: Engine) -> None:
    engine.start(task("a"))
    engine.rows("update flowforge.queue set drain_rate = 1e-9, sampled_window = 1000")
    assert engine.value("select flowforge._redispatch_delay(queue_id) from flowforge.queue") == timedelta(
        days=1
    )


def test_a_worker_with_room_is_one_that_lives_and_runs_less_than_it_could(engine: Engine) -> None:
    room = "select (v_room -> 'default')::boolean from flowforge._known_workers(flowforge._clock())"
    engine.start(*(task(f"t{i}", lease=3600) for i in range(4)))
    assert engine.value(room) is None
    engine.call("announce_worker", "gone", ["default"], 10)
    engine.advance("3 minutes")
    assert engine.value(room) is None, "who has not been seen for two minutes is none"
    engine.call("announce_worker", "worker", ["default"], 2)
    assert engine.value(room) is True
    engine.claim_next(2)
    assert engine.value(room) is False
    engine.call("announce_worker", "elsewhere", ["other"], 10)
    assert engine.value(room) is False
    engine.call("announce_worker", "second", ["other", "default"], 1)
    assert engine.value(room) is True, "one is enough"


def test_an_order_that_was_refused_very_often_can_be_refused_again(engine: Engine) -> None:
    engine.start(task("a"))
    (order,) = engine.messages()
    engine.rows("update flowforge.outbox set tries = 1000000")
    assert engine.call("mark_refused", [order.outbox_id], ["nacked"]) == 1
    wait = "select next_attempt_at - flowforge._clock() from flowforge.outbox"
    assert engine.value(wait) <= timedelta(minutes=10)


def megabytes(count: int) -> list[str]:
    return ["x" * (MIB // 2)] * (2 * count)


def test_a_mapped_array_does_not_count_as_what_an_element_is_given(engine: Engine) -> None:
    """Each element gets its own item."""
    engine.call("set_limit", "max_claim_bytes", MIB)
    engine.define(task("list"), task("m", map="list"))
    run_id = engine.trigger()
    engine.drive(lambda claim: megabytes(2) if claim.task == "list" else 1)
    assert (engine.run_state(run_id), engine.task_run(run_id, "m").output) == ("succeeded", [1] * 4)


def test_the_joined_results_of_a_map_count_as_what_comes_after_it_is_given(engine: Engine) -> None:
    engine.call("set_limit", "max_claim_bytes", MIB)
    engine.define(task("list"), task("m", map="list"), task("after", "m"))
    run_id = engine.trigger()

    def behave(claim: Any) -> Any:
        return [1, 2, 3] if claim.task == "list" else "x" * (MIB // 2)

    engine.drive(behave)
    assert engine.run_state(run_id) == "failed"
    assert "limit max_claim_bytes" in engine.task_run(run_id, "after").error


@pytest.mark.parametrize(("pause", "taken"), [("7 s", 1), ("20 s", 0)])
def test_a_pause_of_three_ticks_and_ten_seconds_is_a_gap(engine: Engine, pause: str, taken: int) -> None:
    engine.start(task("a", lease=5))
    for _ in range(10):
        engine.call("reap_expired_leases")
        engine.advance("2 s")
    engine.claim_one()
    engine.advance(pause)
    assert engine.call("reap_expired_leases") == taken


def test_a_retry_gives_a_handler_that_was_unknown_its_fifteen_minutes_anew(engine: Engine) -> None:
    run_id = engine.start(task("a", handler="new"))
    claim = engine.claim_one()
    engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
    engine.call("cancel_run", run_id)
    engine.schedule()
    engine.advance("20 minutes")
    assert engine.call("retry_run", run_id) == 1
    engine.schedule()
    claim = engine.claim_one()
    release = engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
    assert release == "released"
