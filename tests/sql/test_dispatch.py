"""dispatch_ready and its neighbours: what is dispatched, when, and how many at once."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Database
from tests.sql.helpers import Engine, failing, task


def ready(engine: Engine) -> list[int]:
    rows = engine.rows("select task_run_id from flowforge.task_run where state = 'ready' order by 1")
    return [row.task_run_id for row in rows]


def test_state_and_order_to_publish_come_together(engine: Engine) -> None:
    engine.define(task("a", queue="q", handler="h"), task("b", "a"))
    run_id = engine.trigger(
        labels=Jsonb({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    )
    assert engine.call("dispatch_ready") == 1
    a = engine.task_run(run_id, "a")
    (order,) = engine.messages()
    assert (a.state, a.stage) == ("ready", "dispatched")
    assert (order.task_run_id, order.dispatch_id) == (a.task_run_id, a.dispatch_id)
    assert (order.queue, order.handler, order.attempt) == ("q", "h", 1)
    assert (order.traceparent, order.published_at, order.tries) == (
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        None,
        0,
    )
    with engine.changes_nothing():
        assert engine.call("dispatch_ready") == 0


def test_only_a_new_attempt_gets_a_new_dispatch_id(engine: Engine) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 2, "delay": 0}))
    first = engine.task_run(run_id, "a").dispatch_id
    claim = engine.claim_one()
    engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "shutdown")
    assert engine.task_run(run_id, "a").dispatch_id == first
    engine.work(failing("a"))
    assert engine.task_run(run_id, "a").dispatch_id is None
    engine.schedule()
    assert engine.task_run(run_id, "a").dispatch_id != first


# The window


def test_the_window_is_never_overfilled(engine: Engine) -> None:
    engine.define(*(task(f"t{i}") for i in range(8)))
    engine.call("configure_queue", "default", window_size=3)
    engine.trigger()
    assert [engine.call("dispatch_ready") for _ in range(2)] == [3, 0]
    claims = engine.claim_next(2)
    assert engine.call("dispatch_ready") == 2
    assert len(ready(engine)) == 3
    # What is offered again later does not fill it.
    for claim in claims[:1]:
        engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
    assert engine.call("dispatch_ready") == 0
    assert len(engine.claim_next(10)) == 3
    assert engine.call("dispatch_ready") == 3


def test_announced_workers_enlarge_the_window(engine: Engine) -> None:
    engine.define(*(task(f"t{i}") for i in range(200)))
    engine.trigger()
    assert engine.call("dispatch_ready") == 100
    engine.rows("select flowforge.announce_worker('a', '{default}', 30)")
    engine.rows("select flowforge.announce_worker('b', '{other,default}', 5)")
    engine.rows("select flowforge.announce_worker('c', '{other}', 100)")
    assert engine.call("dispatch_ready") == 40
    engine.advance("2 minutes")  # by then they are forgotten
    assert engine.call("dispatch_ready") == 0


def test_one_call_moves_no_more_than_it_is_told(engine: Engine) -> None:
    engine.define(*(task(f"t{i}", queue=f"q{i % 2}") for i in range(8)))
    engine.trigger()
    assert engine.call("dispatch_ready", 3) == 3
    assert engine.call("dispatch_ready", 8) == 5


def test_priority_of_run_and_task_together_orders_a_queue(engine: Engine) -> None:
    engine.define(task("low"), task("high", priority=5))
    runs = {name: engine.trigger(priority=priority) for name, priority in [("x", 0), ("y", 5), ("z", 6)]}
    engine.call("configure_queue", "default", window_size=1)
    order = []
    while engine.call("dispatch_ready"):
        claim = engine.claim_one()
        order.append((claim.run_id, claim.task))
    assert order == [
        (runs["z"], "high"),
        (runs["y"], "high"),
        (runs["z"], "low"),
        # Equal ones in the order of their identities.
        (runs["x"], "high"),
        (runs["y"], "low"),
        (runs["x"], "low"),
    ]


def test_a_paused_queue_keeps_its_backlog_and_holds_up_no_other(engine: Engine) -> None:
    engine.define(task("a", queue="paused"), task("b", queue="open"))
    engine.call("pause_queue", "paused")
    run_id = engine.trigger()
    engine.schedule()
    assert (engine.task_run(run_id, "a").state, engine.task_run(run_id, "b").state) == ("pending", "ready")
    engine.call("resume_queue", "paused")
    engine.schedule()
    assert engine.task_run(run_id, "a").state == "ready"


def test_a_queue_with_a_large_backlog_does_not_take_every_turn(engine: Engine) -> None:
    """Each call is used up by whichever queue comes first: the one that was served longest ago."""
    engine.define(task("a", queue="busy"), name="busy")
    engine.define(task("b", queue="quiet"), name="quiet")
    for _ in range(60):
        engine.trigger("busy")
    for _ in range(3):
        assert engine.call("dispatch_ready", 1) == 1
        engine.advance("1 s")
    quiet = engine.trigger("quiet")
    for _ in range(2):
        assert engine.call("dispatch_ready", 1) == 1
        engine.advance("1 s")
    assert engine.task_run(quiet, "b").state == "ready"


# Time


def test_what_waits_for_its_time_is_not_in_line(engine: Engine) -> None:
    engine.define(task("a"))
    assert engine.call("next_due") is None
    late = engine.trigger(delay="20 s")
    soon = engine.trigger(delay="10 s")
    engine.call("configure_queue", "default", window_size=1)
    assert engine.call("next_due").total_seconds() == 10
    assert engine.call("dispatch_ready") == 0
    engine.advance("15 s")
    assert engine.call("next_due").total_seconds() == -5
    assert engine.call("dispatch_ready") == 2  # moved into line, then dispatched
    assert (engine.task_run(soon, "a").state, engine.task_run(late, "a").stage) == ("ready", "delayed")
    engine.advance("5 s")
    engine.call("dispatch_ready")
    assert engine.task_run(late, "a").stage == "eligible"
    assert engine.call("next_due") is None


def test_nothing_of_a_run_being_cancelled_is_dispatched(engine: Engine) -> None:
    """A failed finish may put a task run in line that cancel did not see."""
    engine.define(task("a"))
    run_id = engine.trigger()
    engine.rows("update flowforge.run set cancel_requested_at = now(), cancel_sweep_at = flowforge._clock()")
    assert engine.call("dispatch_ready") == 0
    assert not engine.messages()
    assert engine.call("cancel_leftovers") == 1
    assert engine.run_state(run_id) == "cancelled"


def bounce(engine: Engine, known: str) -> int:
    """A worker that knows one handler works for a second; how many of its tasks it ran."""
    ran = 0
    engine.call("dispatch_ready", 10_000)
    for claim in engine.claim_next(10_000):
        if claim.handler == known:
            engine.finish(claim)
            ran += 1
        else:
            engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
    engine.schedule()
    engine.advance("1 s")
    return ran


@pytest.mark.parametrize(("runs", "tasks"), [(1, 300), (300, 1)])
def test_handlers_that_nobody_knows_do_not_hold_up_their_queue(engine: Engine, runs: int, tasks: int) -> None:
    """A mistaken or early deploy: what others can run is run, in its turn."""
    engine.define(*(task(f"t{i}", handler="new") for i in range(tasks)), name="early")
    for _ in range(runs):
        engine.trigger("early")
    engine.define(task("a", handler="old"))
    engine.trigger()
    seconds = 0
    while not bounce(engine, "old"):
        seconds += 1
        assert seconds < 120


def test_a_handler_that_becomes_known_is_run(engine: Engine) -> None:
    engine.define(*(task("t", handler="new"), task("a")))
    for _ in range(40):
        engine.trigger()
    for _ in range(90):
        assert bounce(engine, "w.a") in (0, 40)
    waiting = "select count(*) from flowforge.task_run where state in ('pending', 'ready')"
    for _ in range(70):
        bounce(engine, "new")
    assert engine.value(waiting) == 0


# Arguments


@pytest.mark.parametrize(
    "function",
    [
        *(
            "dispatch_ready",
            "settle_finished",
            "reap_expired_leases",
            "redispatch_lost",
            "fail_undeliverable",
        ),
        *("cancel_leftovers", "sweep_outbox", "fetch_outbox"),
    ],
)
@pytest.mark.parametrize("count", [None, 0, -1, 100_001, 2**63 - 1])
def test_every_bounded_step_refuses_a_wrong_bound(engine: Engine, function: str, count: Any) -> None:
    with engine.refuses("WF001"):
        engine.call(function, count)


# Waking


def notifications(db: Database, engine: Engine, *calls: tuple[Any, ...]) -> list[str]:
    """The channels on which each of these calls notified."""
    heard = []
    with db.connect() as listener:
        listener.execute("listen flowforge_scheduler; listen flowforge_outbox")
        for call in calls:
            engine.call(*call)
            engine.rows("notify flowforge_scheduler, 'end'")
            for notification in listener.notifies():
                if notification.payload == "end":
                    break
                assert notification.payload == ""
                heard.append(f"{call[0]}: {notification.channel}")
    return heard


def test_the_scheduler_is_woken_only_when_it_is_asleep(db: Database, committing: Engine) -> None:
    committing.define(task("a"))
    calls = [("declare_scheduler", False), ("trigger", "w"), ("dispatch_ready",), ("dispatch_ready",)]
    assert notifications(db, committing, *calls) == ["dispatch_ready: flowforge_outbox"]
    calls = [
        ("declare_scheduler", True),
        ("trigger", "w"),
        ("pause_queue", "default"),
        ("resume_queue", "default"),
    ]
    assert notifications(db, committing, *calls) == [
        "trigger: flowforge_scheduler",
        "resume_queue: flowforge_scheduler",
    ]
    calls = [("set_limit", "notify", 0), ("trigger", "w"), ("dispatch_ready",)]
    assert notifications(db, committing, *calls) == []


def test_declaring_null_is_refused(engine: Engine) -> None:
    with engine.refuses("WF001"):
        engine.call("declare_scheduler", None)


def test_what_nobody_can_run_at_present_does_not_take_the_backlog_out_of_line(engine: Engine) -> None:
    """What is to be offered again later leaves the window, but no more of it than the window holds."""
    engine.define(*(task(f"t{i}") for i in range(50)))
    engine.call("configure_queue", "default", window_size=10)
    engine.trigger()
    for _ in range(10):
        engine.schedule()
        for claim in engine.claim_next():
            engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
    count = "select count(*) from flowforge.task_run where stage = %s"
    assert engine.value(count, "reoffered") == 20
    assert engine.value(count, "eligible") == 30
    assert engine.claim_next() == []
    assert engine.value("select flowforge.next_due() between '0 s' and '60 s'") is True
    engine.advance("1 min")
    engine.schedule()
    assert len(engine.claim_next()) == 20


def test_what_is_to_be_offered_again_later_leaves_its_place_to_others(engine: Engine) -> None:
    """However much of it there is: here workers have died of two windows of task runs, twice each."""
    engine.define(*(task(f"t{i}", lease=1) for i in range(40)))
    engine.call("configure_queue", "default", window_size=10)
    engine.trigger()
    for _ in range(8):
        engine.schedule()
        engine.claim_next()
        engine.advance("2 s")
        engine.reap()
    assert engine.value("select reoffered from flowforge.queue_status") > 20
    engine.define(task("urgent", priority=1000), name="urgent")
    engine.trigger("urgent")
    claimed: list[str] = []
    for _ in range(3):  # by chance so many are due at this moment that they fill the window once more
        engine.schedule()
        claimed += [claim.task for claim in engine.claim_next()]
    assert "urgent" in claimed


@pytest.mark.parametrize("stage", ["eligible", "dispatched"])
def test_what_a_cancelled_run_has_left_takes_nobodys_place(engine: Engine, stage: str) -> None:
    """It is cancelled soon; until then the next one goes."""
    engine.define(task("a"))
    engine.call("configure_queue", "default", window_size=1 if stage == "eligible" else 2)
    first, second = engine.trigger(priority=5), engine.trigger()
    if stage == "dispatched":
        engine.call("dispatch_ready")
    later = "cancel_sweep_at = flowforge._clock() + interval '1 minute'"
    engine.rows(
        f"update flowforge.run set cancel_requested_at = flowforge._clock(), {later} where run_id = %s", first
    )
    engine.call("dispatch_ready")
    assert [claim.run_id for claim in engine.claim_next(1)] == [second]
