"""release_task_run and reap_expired_leases: the same attempt is offered again, but not for ever."""

import uuid
from typing import Any

import pytest

from tests.services.database import Database
from tests.sql.helpers import Claim, Engine, failing, task


def release(engine: Engine, claim: Claim, reason: str) -> str:
    answer: str = engine.call("release_task_run", claim.task_run_id, claim.fencing_token, reason)
    return answer


def expire(engine: Engine, interval: str = "31 s") -> int:
    engine.advance(interval)
    return engine.reap()


def waits(engine: Engine, run_id: int) -> float:
    row = engine.task_run(run_id, "a")
    now = engine.value("select flowforge._clock()")
    return float((row.available_at - now).total_seconds())


def recorded(engine: Engine) -> list[tuple[Any, ...]]:
    rows = engine.rows("select * from flowforge.attempt order by fencing_token")
    return [(row.fencing_token, row.outcome, row.answered) for row in rows]


# Both


@pytest.mark.parametrize("how", ["unstarted", "shutdown", "crashed", "unknown_handler", "reap"])
def test_the_same_attempt_is_offered_again_under_the_same_dispatch_id(engine: Engine, how: str) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 3}))
    (message,) = engine.messages()
    engine.rows("select flowforge.mark_published(array_agg(outbox_id)) from flowforge.outbox")
    claim = engine.claim(message)
    if how == "reap":
        assert expire(engine) == 1
    else:
        assert release(engine, claim, how) == "released"
    row = engine.task_run(run_id, "a")
    assert (row.state, row.stage, row.attempt, row.failures) == (
        "ready",
        "reoffered" if how == "unknown_handler" else "dispatched",
        1,
        0,
    )
    assert (row.dispatch_id, row.fencing_token) == (claim.dispatch_id, 1)
    assert (row.claim_id, row.lease_owner, row.lease_expires_at, row.lease_length) == (None,) * 4
    assert row.reaps == (how in ("crashed", "reap"))
    # A new order to publish; the published one is never changed.
    old, new = engine.messages()
    assert (old, new.published_at) == (engine.messages()[0], None)
    assert (new.dispatch_id, new.attempt) == (message.dispatch_id, 1)
    assert new.next_attempt_at == row.available_at
    assert engine.claim(new).fencing_token == 2


@pytest.mark.parametrize("how", ["unstarted", "shutdown", "crashed", "unknown_handler", "reap"])
def test_in_a_cancelled_run_it_is_cancelled(engine: Engine, how: str) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 3}))
    claim = engine.claim_one()
    engine.call("cancel_run", run_id)
    if how == "reap":
        assert expire(engine) == 1
    else:
        assert release(engine, claim, how) == "cancelled"
    assert engine.task_run(run_id, "a").state == "cancelled"
    engine.schedule()
    assert engine.run_state(run_id) == "cancelled"


def test_an_unpublished_order_serves_again(engine: Engine) -> None:
    engine.start(task("a"))
    (order,) = engine.messages()
    release(engine, engine.claim(order), "shutdown")
    assert engine.messages() == [order]


def test_an_order_of_an_earlier_attempt_does_not_serve(engine: Engine) -> None:
    """It can be unpublished still: its publisher died between the confirm and the mark."""
    engine.start(task("a", retry={"max_attempts": 2, "delay": 0}))
    (early,) = engine.messages()
    engine.finish(engine.claim(early), "failed")
    engine.schedule()
    order = engine.messages()[-1]
    engine.call("mark_published", [order.outbox_id])
    release(engine, engine.claim(order), "shutdown")
    (fetched,) = engine.table("fetch_outbox", 10)
    assert fetched.dispatch_id == order.dispatch_id


# What kills its workers: HD-21


@pytest.mark.parametrize("how", ["reap", "crashed"])
def test_after_max_reaps_it_fails_whatever_attempts_are_left(engine: Engine, how: str) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 9}), task("b", "a", when="any_failed"))
    offered, answer = [], "failed"
    for _ in range(3):
        claim = engine.claim_one()
        if how == "reap":
            assert expire(engine) == 1
        else:
            answer = release(engine, claim, "crashed")
        offered.append(waits(engine, run_id))
        engine.advance("5 s")
    row = engine.task_run(run_id, "a")
    assert (row.state, row.reaps, row.attempt) == ("failed", 3, 1)
    assert offered[:2] == [0, 5]  # at once, then with a growing delay
    assert "given up after 3 executions" in row.error
    assert answer == "failed"
    outcome = "lease_expired" if how == "reap" else "crashed"
    assert recorded(engine) == [(token, outcome, False) for token in (1, 2, 3)]
    engine.drive()
    assert engine.states(run_id)["b"] == "succeeded"


def crashed(engine: Engine, how: str) -> tuple[str, str]:
    """What the last attempt and the task run tell of an execution that broke off so, the first and last."""
    run_id = engine.start(task("a", max_reaps=0))
    assert release(engine, engine.claim_one(), how) == "failed"
    recorded = engine.value("select error from flowforge.attempt order by task_run_id desc limit 1")
    return recorded, engine.task_run(run_id, "a").error


GIVEN_UP = "; given up after 1 executions without an answer"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("crashed", ""),
        ("crashed: ", ": "),
        ("crashed: exit code 3", ": exit code 3"),
        ("crashed: crashed: twice", ": crashed: twice"),
        ("crashed: 100 %s\n\x01\x1b[31m\u202e\U0010ffff", ": 100 %s\n\x01\x1b[31m\u202e\U0010ffff"),
        ("crashed: " + "é" * 10_000, ": " + "é" * 10_000),
        ("crashed: " + "é" * 50_000, ": " + "é" * 10_000 + " [cut off]"),
    ],
    ids=["not said", "empty", "short", "twice", "control characters", "just short enough", "100 kB"],
)
def test_how_an_execution_crashed_is_told(engine: Engine, how: str, told: str) -> None:
    """As an error of a handler is: up to max_error_chars, and as it is."""
    error = f"the execution broke off without an answer{told}"
    assert crashed(engine, how) == (error, error + GIVEN_UP)


def test_max_reaps_zero_gives_no_second_chance(engine: Engine) -> None:
    run_id = engine.start(task("a", max_reaps=0))
    engine.claim_one()
    assert expire(engine) == 1
    assert engine.task_run(run_id, "a").state == "failed"


def test_the_delay_doubles_up_to_five_minutes(engine: Engine) -> None:
    run_id = engine.start(task("a", max_reaps=100))
    delays = []
    for _ in range(10):
        engine.claim_one()
        expire(engine)
        delays.append(waits(engine, run_id))
        engine.advance("5 minutes")
    assert delays == [0, 5, 10, 20, 40, 80, 160, 300, 300, 300]


@pytest.mark.parametrize("answer", ["failed", "timed out"])
def test_an_answer_starts_the_count_anew(engine: Engine, answer: str) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 2, "delay": 0}, time_limit=40))
    for _ in range(2):
        engine.claim_one()
        expire(engine, "35 s")
        engine.advance("5 s")
    claim = engine.claim_one()
    assert engine.task_run(run_id, "a").reaps == 2
    if answer == "failed":
        engine.finish(claim, "failed")
    else:
        expire(engine, "40 s")
    row = engine.task_run(run_id, "a")
    assert (row.state, row.attempt, row.reaps) == ("pending", 2, 0)


@pytest.mark.parametrize("reason", ["unstarted", "shutdown"])
def test_an_orderly_release_is_not_counted(engine: Engine, reason: str) -> None:
    run_id = engine.start(task("a"))
    for token in range(1, 10):
        claim = engine.claim_one()
        assert (claim.fencing_token, release(engine, claim, reason)) == (token, "released")
        assert (engine.task_run(run_id, "a").reaps, waits(engine, run_id)) == (0, 0)
    # What had begun is executed anew, and leaves a trace of it.
    begun = range(1, 10) if reason == "shutdown" else ()
    assert recorded(engine) == [(token, "released", False) for token in begun]


# A handler that no worker knows


def test_an_unknown_handler_is_asked_for_again_and_again_then_fails_by_name(engine: Engine) -> None:
    run_id = engine.start(task("a", handler="new", retry={"max_attempts": 9}, max_reaps=0))
    delays = []
    while release(engine, engine.claim_one(), "unknown_handler") == "released":
        delays.append(waits(engine, run_id))
        engine.advance(f"{delays[-1]} s")
    assert delays[0] == 1
    assert delays == sorted(delays)
    assert delays[-1] == 60
    assert 15 * 60 <= sum(delays) < 16 * 60
    row = engine.task_run(run_id, "a")
    assert (row.state, row.reaps) == ("failed", 0)
    assert row.error == "no worker knew the handler 'new' for 15 minutes"


def test_a_start_that_is_waited_for_goes_on_from_the_dispatch(engine: Engine) -> None:
    """Workers that give it back at once have not started it."""
    run_id = engine.start(task("a", handler="new", start_within=20))
    for _ in range(8):
        release(engine, engine.claim_one(), "unknown_handler")
        engine.advance(f"{waits(engine, run_id)} s")
        engine.schedule()
        engine.call("fail_undeliverable")
        if engine.task_run(run_id, "a").state == "failed":
            break
    row = engine.task_run(run_id, "a")
    assert (row.state, row.error) == ("failed", "not started within 20 s")
    assert (row.finished_at - row.ready_at).total_seconds() < 40


def test_what_had_been_started_in_time_may_wait_for_its_start_again(engine: Engine) -> None:
    """A worker that ends gives it back, and one that does not know it is the next."""
    run_id = engine.start(task("a", start_within=60, lease=3600))
    claim = engine.claim_one()
    engine.advance("10 minutes")
    assert release(engine, claim, "shutdown") == "released"
    engine.advance("1 s")
    assert release(engine, engine.claim_one(), "unknown_handler") == "released"
    engine.advance(f"{waits(engine, run_id)} s")
    engine.schedule()
    assert engine.call("fail_undeliverable") == 0
    engine.claim_one()


def test_what_a_worker_took_with_it_comes_back_apart(engine: Engine) -> None:
    """One of them may have killed it; together again they would all be given up."""
    engine.start(*(task(f"t{i}", lease=30) for i in range(10)), task("alone", lease=3600))
    for due in (1, 10):
        assert len(engine.claim_next()) >= 10
        engine.advance("31 s")
        assert engine.reap() == 10
        engine.call("dispatch_ready")
        assert (
            len({row.available_at for row in engine.rows("select available_at from flowforge.task_run")})
            > due
        )
    spread = "select extract(epoch from max(available_at) - min(available_at)) from flowforge.task_run"
    assert 30 < engine.value(f"{spread} where state = 'ready'") < 300


def test_what_each_worker_took_with_it_alone_comes_back_in_time(engine: Engine) -> None:
    """However many died together, as of an outage: none is suspected of more than its own worker's death."""
    engine.start(*(task(f"t{i}", lease=30) for i in range(20)))
    for _ in range(2):
        for number in range(20):
            engine.table("claim_next", ["default"], f"worker {number}", uuid.uuid4(), "30 s", 1)
        engine.advance("31 s")
        assert engine.reap() == 20
    wait = "select extract(epoch from max(available_at) - flowforge._clock()) from flowforge.task_run"
    assert engine.value(wait) == 5


def test_many_that_died_together_come_back_within_minutes(engine: Engine) -> None:
    engine.start(*(task(f"t{i}", lease=300) for i in range(20)))
    for _ in range(2):
        engine.claim_next()
        engine.advance("301 s")
        assert engine.reap() == 20
    wait = "select extract(epoch from max(available_at) - flowforge._clock()) from flowforge.task_run"
    assert 60 < engine.value(wait) <= 305


def test_time_to_start_goes_on_while_nobody_begins(engine: Engine) -> None:
    run_id = engine.start(task("a", start_within=60))
    for _ in range(7):
        release(engine, engine.claim_one(), "unstarted")
        engine.advance("9 s")
    assert engine.call("fail_undeliverable") == 1
    assert engine.task_run(run_id, "a").error == "not started within 60 s"


def test_once_a_worker_knew_the_handler_the_minutes_start_anew(engine: Engine) -> None:
    engine.start(task("a"))
    release(engine, engine.claim_one(), "unknown_handler")
    engine.advance("1 s")
    known = engine.claim_one()
    engine.rows("select flowforge.renew_leases(array[%s], array[%s], '1 h')", *known[2:5:2])
    engine.advance("20 minutes")
    assert release(engine, known, "shutdown") == "released"
    assert release(engine, engine.claim_one(), "unknown_handler") == "released"


# Time limits


def test_past_the_time_limit_the_attempt_has_timed_out(engine: Engine) -> None:
    run_id = engine.start(task("a", time_limit=40, retry={"max_attempts": 2, "delay": 3, "jitter": 0}))
    first = engine.claim_one()
    assert expire(engine, "40 s") == 1
    row = engine.task_run(run_id, "a")
    assert (row.state, row.attempt, row.failures, row.dispatch_id) == ("pending", 2, 1, None)
    # Not what the worker of a live handler reports: nobody knows whether it overstayed, or died on the way.
    silent = (
        "time limit of 40 s exceeded, and no end was reported by then: the handler does not stop, "
        "or its worker is lost"
    )
    assert (row.error, waits(engine, run_id)) == (silent, 3)
    assert engine.finish(first) == "fenced"
    engine.advance("3 s")
    engine.schedule()
    assert engine.claim_one().dispatch_id != first.dispatch_id
    assert expire(engine, "40 s") == 1
    assert engine.task_run(run_id, "a").state == "failed"
    assert recorded(engine) == [(1, "timed_out", False), (2, "timed_out", False)]


# The reaper


def test_only_expired_leases_are_taken_and_no_more_than_asked(engine: Engine) -> None:
    engine.start(*(task(name) for name in "abcd"))
    claims = engine.claim_next(3)
    engine.advance("30 s")
    engine.rows("select flowforge.renew_leases(array[%s], array[1], '1 min')", claims[0].task_run_id)
    engine.rows("update flowforge.scheduler set reaper_ticked_at = flowforge._clock()")
    assert engine.call("reap_expired_leases", 1) == 1
    assert engine.call("reap_expired_leases", 1) == 1
    with engine.changes_nothing():
        assert engine.call("reap_expired_leases", 1) == 0


def test_a_lease_that_has_not_run_out_is_left_alone(engine: Engine) -> None:
    engine.start(task("a"))
    engine.claim_one()
    assert (expire(engine, "29.999 s"), expire(engine, "0.001 s")) == (0, 1)


def test_expiry_depends_on_the_task_run_alone(engine: Engine) -> None:
    """HD-17: neither the loss of the presence of a worker nor a new one of the same name hides it."""
    engine.start(task("a"))
    engine.rows("select flowforge.announce_worker('worker', '{default}', 1)")
    engine.claim_one()
    engine.rows("select flowforge.announce_worker('worker', '{default}', 0)")
    engine.rows("select flowforge.announce_worker('worker', '{default}', 5)")
    assert expire(engine) == 1


def test_a_task_run_that_has_just_finished_is_not_taken(engine: Engine) -> None:
    """HD-18."""
    run_id = engine.start(task("a"))
    claim = engine.claim_one()
    engine.advance("31 s")
    engine.finish(claim)
    assert engine.reap() == 0
    assert engine.task_run(run_id, "a").state == "succeeded"


def test_a_row_locked_by_its_finish_is_passed_over(db: Database, committing: Engine) -> None:
    """HD-18: the reaper neither waits for the finish nor judges by what it saw before."""
    run_id = committing.start(task("a"))
    claim = committing.claim_one()
    committing.advance("31 s")
    with db.connect(autocommit=False) as worker:
        finish = "select flowforge.finish_task_run(%s, %s, 'succeeded')"
        assert worker.execute(finish, (claim.task_run_id, claim.fencing_token)).fetchone() == ("accepted",)
        assert committing.reap() == 0
        worker.commit()
    assert committing.reap() == 0
    assert committing.task_run(run_id, "a").state == "succeeded"


def test_after_a_gap_every_lease_has_its_own_length_anew_once(engine: Engine) -> None:
    run_id = engine.start(task("a", lease=20), task("b", lease=60), task("c", lease=20, time_limit=25))
    assert engine.call("reap_expired_leases") == 0  # the first tick of all is no gap
    engine.claim_next()
    engine.advance("5 minutes")
    # What ran out during the gap has one full lease, but for a time limit that has passed.
    assert engine.call("reap_expired_leases") == 1
    assert engine.task_run(run_id, "c").state == "failed"
    states = []
    for _ in range(7):
        engine.advance("9 s")
        engine.call("reap_expired_leases")
        states.append((engine.task_run(run_id, "a").state, engine.task_run(run_id, "b").state))
    running, a_taken, both_taken = ("running", "running"), ("ready", "running"), ("ready", "ready")
    assert states == [running] * 2 + [a_taken] * 4 + [both_taken]


def test_ten_seconds_are_no_gap(engine: Engine) -> None:
    engine.start(task("a", lease=5))
    engine.call("reap_expired_leases")
    engine.claim_one()
    engine.advance("10 s")
    assert engine.call("reap_expired_leases") == 1


def test_a_scheduler_that_always_ticks_slowly_still_reaps(engine: Engine) -> None:
    engine.start(task("a", lease=5))
    for _ in range(2):
        engine.call("reap_expired_leases")
        engine.advance("15 s")
    engine.claim_one()
    taken = []
    for _ in range(3):
        engine.advance("15 s")
        taken.append(engine.call("reap_expired_leases"))
    assert sum(taken) == 1


@pytest.mark.parametrize(
    ("lease", "ticks", "pause", "hours"),
    [
        (30, 10, "11 s", 0.1),
        (3600, 60, "50 minutes", 6),
        (3600, 60, "11 s", 5),
        (600, 2, "60 s", 1),
        (86400, 20, "1 hour", 80),
    ],
    ids=["every few seconds", "at each deploy", "stalls", "failovers", "by a timer"],
)
def test_gaps_that_come_again_and_again_spare_nobody_for_ever(
    engine: Engine, lease: int, ticks: int, pause: str, hours: float
) -> None:
    engine.start(task("a", lease=lease))
    for _ in range(3):
        engine.call("reap_expired_leases")
        engine.advance("1 s")
    engine.claim_one()
    begun = engine.value("select flowforge._clock()")
    while not engine.value("select count(*) from flowforge.attempt"):
        for _ in range(ticks):
            engine.advance("1 s")
            engine.call("reap_expired_leases")
        engine.advance(pause)
        engine.call("reap_expired_leases")
        assert engine.value("select extract(epoch from flowforge._clock() - %s) / 3600", begun) < hours


def outage(engine: Engine, seconds: int) -> None:
    """Nobody ticks or renews for a while; before that a scheduler has been ticking."""
    for _ in range(5):
        engine.call("reap_expired_leases")
        engine.advance("1 s")
    engine.advance(f"{seconds} s")


def test_every_outage_spares_whose_lease_was_renewed_after_the_last(engine: Engine) -> None:
    engine.start(task("a", lease=20))
    outage(engine, 0)
    claim = engine.claim_one()
    for seconds in (60, 32, 25, 60):
        outage(engine, seconds)
        assert engine.call("reap_expired_leases") == 0
        renew = "select outcome from flowforge.renew_leases(array[%s], array[%s], '20 s')"
        assert engine.value(renew, claim.task_run_id, claim.fencing_token) == "held"


def test_an_outage_spares_a_lease_whose_row_its_handler_held(db: Database, committing: Engine) -> None:
    """It could not be renewed, since it was locked, and had run out when the server went away."""
    committing.start(task("a", lease=30))
    outage(committing, 0)
    claim = committing.claim_one()
    with db.connect(autocommit=False) as handler:
        handler.execute("select flowforge.assert_lease(%s, %s)", (claim.task_run_id, claim.fencing_token))
        for _ in range(45):
            committing.advance("1 s")
            assert committing.call("reap_expired_leases") == 0
        committing.advance("15 s")
        handler.rollback()
    assert committing.call("reap_expired_leases") == 0


def test_a_clock_that_was_ahead_for_a_moment_spares_nobody(engine: Engine) -> None:
    engine.start(task("a", lease=30))
    outage(engine, 0)
    engine.claim_one()
    engine.advance("1 day")
    assert engine.call("reap_expired_leases") == 0
    engine.advance("-1 day")
    taken = 0
    for _ in range(40):
        taken += engine.call("reap_expired_leases")
        engine.advance("1 s")
    assert taken == 1


def test_two_schedulers_that_are_both_slow_still_reap(engine: Engine) -> None:
    """Each of their pauses looks like an outage; three lengths of the lease will do all the same."""
    engine.start(task("a", lease=30))
    for _ in range(5):
        for pause in ("11 s", "0.1 s"):
            engine.call("reap_expired_leases")
            engine.advance(pause)
    engine.claim_one()
    taken = []
    for _ in range(13):
        for pause in ("11 s", "0.1 s"):
            engine.advance(pause)
            taken.append(engine.call("reap_expired_leases"))
    assert sum(taken) == 1


@pytest.mark.parametrize("uptime", [1, 8])
@pytest.mark.parametrize("lease", [30, 1800])
def test_an_outage_soon_after_another_leaves_the_time_to_renew(
    engine: Engine, lease: int, uptime: int
) -> None:
    """A server that comes, and goes again before the workers have found it: what ran out is spared until
    they had the time; then it is taken."""
    engine.start(task("a", lease=lease))
    outage(engine, 0)
    engine.claim_one()
    engine.advance(f"{lease - 1} s")
    outage(engine, 60)
    for _ in range(uptime):
        assert engine.call("reap_expired_leases") == 0
        engine.advance("1 s")
    engine.advance("20 s")
    # Of the second outage 3 s count.
    for waited in range(lease - uptime - 3):
        assert engine.call("reap_expired_leases") == 0, f"taken {waited} s after the second outage"
        engine.advance("1 s")
    engine.advance("1 s")
    assert engine.call("reap_expired_leases") == 1


def test_an_order_that_waits_out_a_back_off_does_not_serve_what_may_be_offered_now(engine: Engine) -> None:
    """Release tells the next worker at once, whatever the broker refused before."""
    engine.start(task("a"))
    (order,) = engine.messages()
    for _ in range(5):
        engine.call("mark_refused", [order.outbox_id], ["nacked"])
        engine.advance("10 minutes")
    engine.call("mark_refused", [order.outbox_id], ["nacked"])
    claim = engine.claim(order)  # by a message that had arrived after all
    engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unstarted")
    assert engine.value("select count(*) from flowforge.fetch_outbox(10)") == 1


def test_what_is_locked_at_the_first_tick_after_a_gap_has_its_length_too(
    db: Database, committing: Engine
) -> None:
    """A handler's own transaction holds the row at that moment, and rolls back."""
    run_id = committing.start(task("a", lease=20))
    committing.call("reap_expired_leases")
    claim = committing.claim_one()
    committing.advance("5 minutes")
    with db.connect(autocommit=False) as worker:
        worker.execute("select flowforge.assert_lease(%s, %s)", (claim.task_run_id, claim.fencing_token))
        assert committing.call("reap_expired_leases") == 0
        worker.rollback()
    committing.advance("9 s")
    assert committing.call("reap_expired_leases") == 0
    assert committing.task_run(run_id, "a").state == "running"
    committing.advance("9 s")
    committing.call("reap_expired_leases")
    committing.advance("9 s")
    assert committing.call("reap_expired_leases") == 1


# Stale callers and wrong arguments


def test_a_stale_release_changes_nothing(engine: Engine) -> None:
    engine.start(task("a", retry={"max_attempts": 2, "delay": 0}), task("b"))
    claims = engine.claim_next()
    for reason in ("unstarted", "shutdown", "crashed", "unknown_handler"):
        with engine.changes_nothing():
            assert engine.call("release_task_run", claims[0].task_run_id, 2, reason) == "fenced"
            assert engine.call("release_task_run", -1, 1, reason) == "fenced"
    engine.finish(claims[0], "failed")
    release(engine, claims[1], "shutdown")
    with engine.changes_nothing():
        assert [release(engine, claim, "crashed") for claim in claims] == ["fenced", "fenced"]


@pytest.mark.parametrize(
    "arguments",
    [
        *((None, 1, "shutdown"), (1, None, "shutdown"), (1, 1, None), (1, 1, "bored"), (1, 1, "Shutdown")),
        *((1, 1, "crashed:"), (1, 1, "crashed:exit"), (1, 1, "Crashed: exit"), (1, 1, " crashed: exit")),
        *((1, 1, "shutdown: soon"), (1, 1, "unstarted: "), (1, None, "crashed: exit"), (1, 1, "")),
    ],
)
def test_wrong_arguments_are_refused(engine: Engine, arguments: tuple[Any, ...]) -> None:
    engine.start(task("a"))
    engine.work(failing("a"))
    with engine.refuses("WF001"):
        engine.call("release_task_run", *arguments)
