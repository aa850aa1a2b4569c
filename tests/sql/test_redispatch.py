"""redispatch_lost and redispatch: what the broker forgot is published again, under the same dispatch id."""

import pytest

from tests.sql.helpers import Engine, task


def publish(engine: Engine) -> int:
    query = """select flowforge.mark_published(coalesce(array_agg(f.outbox_id), '{}'))
        from flowforge.fetch_outbox(1000) f"""
    marked: int = engine.value(query)
    return marked


def test_a_message_unclaimed_for_too_long_is_published_again(engine: Engine) -> None:
    """HD-15: with the same dispatch id, and no attempt is used up."""
    run_id = engine.start(task("a"))
    publish(engine)
    engine.advance("29 s")
    assert engine.call("redispatch_lost") == 0
    engine.advance("1 s")
    assert engine.call("redispatch_lost") == 1
    first, second = engine.messages()
    assert (second.dispatch_id, second.published_at) == (first.dispatch_id, None)
    row = engine.task_run(run_id, "a")
    assert (row.attempt, row.redispatches, row.fencing_token) == (1, 1, 0)
    assert [engine.claim(order).outcome for order in (second, first)] == ["claimed", "running"]


def test_what_is_offered_again_late_has_its_time_from_then(engine: Engine) -> None:
    """After a time without a scheduler: its message cannot be lost already."""
    engine.start(task("a"))
    publish(engine)
    claim = engine.claim_one()
    engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
    engine.advance("1000 s")
    engine.schedule()
    publish(engine)
    assert engine.rows("select * from flowforge.violations()") == []
    engine.advance("29 s")
    assert engine.call("redispatch_lost") == 0
    engine.advance("1 s")
    assert engine.call("redispatch_lost") == 1


def test_what_is_offered_again_late_may_be_begun_for_as_long(engine: Engine) -> None:
    """Nobody could claim it without a broker before a scheduler came."""
    engine.start(task("a", start_within=60))
    for _ in range(2):
        claim = engine.claim_one()
        engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "crashed")
    engine.advance("120 s")
    engine.schedule()
    assert engine.call("fail_undeliverable") == 0
    engine.advance("59 s")
    assert engine.call("fail_undeliverable") == 0
    engine.advance("1 s")
    assert engine.call("fail_undeliverable") == 1


def gaps(engine: Engine, times: int, *, served: bool = False, paceless: bool = False) -> list[int]:
    """Seconds between the times that a message is published again."""
    found = []
    for _ in range(times):
        publish(engine)
        gap = 0
        if served:
            engine.call("announce_worker", "worker", ["default"], 1)
        while not engine.call("redispatch_lost"):
            engine.advance("30 s")
            gap += 30
            if paceless:
                engine.rows("update flowforge.queue set drain_rate = null")
            if served:
                engine.call("announce_worker", "worker", ["default"], 1)
        found.append(gap)
    return found


def test_the_delay_doubles_up_to_a_cap(engine: Engine) -> None:
    engine.start(task("a"))
    assert gaps(engine, 8, served=True) == [30, 60, 120, 240, 480, 960, 960, 960]


def test_without_any_worker_it_goes_on_doubling(engine: Engine) -> None:
    """Nobody takes the messages away: what is published stays at the broker, and must not pile up there."""
    engine.start(task("a"))
    assert gaps(engine, 8) == [30, 60, 120, 240, 480, 960, 1920, 3840]
    # A worker comes, whose messages are lost, and finds them published again as soon as is looked.
    engine.advance("20 minutes")
    engine.call("announce_worker", "worker", ["default"], 1)
    publish(engine)
    assert engine.call("redispatch_lost") == 0
    assert gaps(engine, 1, served=True)[0] <= 960


def test_messages_of_a_queue_without_workers_stay_few(engine: Engine) -> None:
    engine.define(*(task(f"t{i}") for i in range(20)))
    engine.trigger()
    engine.schedule()
    for _ in range(24 * 12):
        publish(engine)
        engine.advance("5 minutes")
        engine.call("redispatch_lost")
    assert len(engine.messages()) <= 20 * 12


def test_what_is_still_to_be_published_is_not_lost(engine: Engine) -> None:
    """A broker that is away for an hour must not find the same order many times."""
    engine.start(task("a"), task("b"))
    engine.call("mark_refused", [engine.messages()[0].outbox_id], ["nacked"])
    for _ in range(10):
        engine.advance("1 hour")
        assert engine.call("redispatch_lost") == 0
    assert len(engine.messages()) == 2


def test_one_order_that_is_still_to_be_published_is_enough(engine: Engine) -> None:
    engine.start(task("a"))
    publish(engine)
    engine.advance("30 s")
    assert engine.call("redispatch_lost") == 1
    engine.advance("1 hour")
    assert engine.call("redispatch_lost") == 0


def test_what_was_published_only_lately_is_not_lost(engine: Engine) -> None:
    engine.start(task("a"))
    engine.advance("1 hour")  # the broker was away
    publish(engine)
    assert engine.call("redispatch_lost") == 0
    engine.advance("29 s")
    assert engine.call("redispatch_lost") == 0
    engine.advance("1 s")
    assert engine.call("redispatch_lost") == 1


def test_ready_without_any_order_is_armed(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    engine.rows("delete from flowforge.outbox")
    engine.advance("30 s")
    assert engine.call("redispatch_lost") == 1
    assert engine.messages()[0].dispatch_id == engine.task_run(run_id, "a").dispatch_id


def work_slowly(engine: Engine, seconds: int, claims: int) -> list[int]:
    """One worker takes `seconds` for each task, and a scheduler looks five times; how much was armed again in
    the time of each."""
    armed = []
    for _ in range(claims):
        claim = engine.claim_one()
        lost = 0
        for _ in range(5):
            engine.advance(f"{seconds / 5} s")
            lost += engine.call("redispatch_lost")
            publish(engine)
        armed.append(lost)
        assert engine.finish(claim) == "accepted"
        engine.schedule()
        publish(engine)
    return armed


@pytest.mark.parametrize("seconds", [5, 20, 65, 300])
def test_a_full_window_that_drains_slowly_is_given_time(engine: Engine, seconds: int) -> None:
    """Else slow workers mean needless messages. Once nobody claims or runs anything, it is lost."""
    engine.define(*(task(f"t{i}", lease=3600) for i in range(200)))
    engine.trigger()
    engine.schedule()
    publish(engine)
    assert sum(work_slowly(engine, seconds, 80)) == 0
    engine.rows("update flowforge.task_run set redispatch_at = flowforge._clock() where state = 'ready'")
    engine.rows("update flowforge.outbox set published_at = published_at - interval '1 minute'")
    engine.advance("31 s")
    assert engine.call("redispatch_lost") == 100


def test_workers_that_became_slow_are_given_time_too(engine: Engine) -> None:
    engine.define(*(task(f"t{i}", lease=3600) for i in range(2000)))
    engine.trigger()
    engine.schedule()
    publish(engine)
    for _ in range(20):  # 50 claims a second
        for claim in engine.claim_next(50):
            engine.finish(claim)
        engine.advance("1 s")
        engine.schedule()
        publish(engine)
    assert engine.value("select drain_rate > 40 from flowforge.queue_status") is True
    assert sum(work_slowly(engine, 60, 30)) == 0


@pytest.mark.parametrize("window", [1, 100])
def test_while_no_worker_has_room_nothing_is_lost(engine: Engine, window: int) -> None:
    """However long its tasks take, and though no pace was ever measured; for an hour."""
    engine.define(*(task(f"t{i}", lease=3600) for i in range(3)))
    engine.call("configure_queue", "default", window_size=window)
    engine.trigger()
    lost = 0
    for _ in range(3):
        engine.schedule()
        publish(engine)
        claim = engine.claim_one()
        for _ in range(40):
            engine.call("announce_worker", "worker", ["default"], 1)
            engine.advance("30 s")
            lost += engine.call("redispatch_lost")
            publish(engine)
        engine.finish(claim)
    assert lost == 0


def test_a_message_is_not_given_up_because_workers_are_busy(engine: Engine) -> None:
    """Lost, it waits for an hour at least, and for a day at most."""
    engine.start(task("long", lease=36_000), task("lost"))
    publish(engine)
    engine.claim_next(1)
    minutes = 0
    while engine.call("announce_worker", "worker", ["default"], 1) or not engine.call("redispatch_lost"):
        engine.advance("10 minutes")
        minutes += 10
        assert minutes <= 25 * 60
    assert minutes >= 60


def test_a_worker_that_has_room_and_claims_nothing_tells_of_lost_messages(engine: Engine) -> None:
    """Though another one is busy for long."""
    engine.define(*(task(f"t{i}", lease=3600) for i in range(50)))
    engine.call("announce_worker", "worker", ["default"], 2)
    engine.trigger()
    engine.schedule()
    publish(engine)
    engine.claim_next(1)
    lost = 0
    for _ in range(13):
        engine.call("announce_worker", "worker", ["default"], 2)
        engine.advance("5 s")
        lost += engine.call("redispatch_lost")
    assert lost == 49


def test_a_large_window_of_what_is_not_lost_hides_no_other_queue(engine: Engine) -> None:
    """As much as one call looks at is not all that is due; and nothing of it is overdue."""
    engine.define(*(task(f"t{i}", lease=36_000) for i in range(30)))
    engine.call("configure_queue", "default", window_size=30)
    engine.trigger()
    engine.schedule()
    engine.claim_next(1)
    engine.define(task("lost", queue="other"), name="other")
    engine.trigger("other")
    engine.schedule()
    publish(engine)
    # Due first of all, though the last that was made.
    engine.rows(
        """update flowforge.task_run set redispatch_at = redispatch_at - interval '1 s'
            where queue_id = (select queue_id from flowforge.queue where name = 'other')"""
    )
    armed = "select array_agg(queue) from flowforge.outbox where published_at is null"
    for _ in range(10):
        engine.call("announce_worker", "worker", ["default"], 1)
        engine.call("announce_worker", "idle", ["other"], 1)
        engine.advance("10 s")
        engine.call("redispatch_lost", 3)
        due = engine.value(
            "select flowforge._clock() >= min(ready_at) + interval '30 s' from flowforge.task_run"
        )
        assert engine.value(armed) == (["other"] if due else None)
        while engine.call("redispatch_lost", 3):  # as a scheduler does
            pass
        assert engine.rows("select * from flowforge.violations()") == []


def test_a_shorter_delay_holds_for_what_is_dispatched_already(engine: Engine) -> None:
    engine.define(task("a"))
    engine.call("configure_queue", "default", redispatch_delay="1 day")
    engine.trigger()
    engine.schedule()
    publish(engine)
    assert engine.call("configure_queue", "default", redispatch_delay="30 s") is True
    engine.advance("31 s")
    assert engine.call("redispatch_lost") == 1


def test_who_has_not_been_seen_for_minutes_serves_no_queue(engine: Engine) -> None:
    """The delay of a dead worker's queue goes on doubling."""
    engine.start(task("a"))
    engine.call("announce_worker", "worker", ["default"], 1)
    assert gaps(engine, 8) == [30, 60, 120, 240, 480, 960, 1920, 3840]


def test_who_runs_something_of_a_queue_serves_it_unannounced(engine: Engine) -> None:
    """Announcing is optional: what is lost in a queue that is served is not waited for up to a day."""
    engine.start(task("long", lease=86_400), task("a"))
    engine.claim_next(1)
    found = []
    for _ in range(8):
        engine.rows("update flowforge.queue set drain_rate = null")  # the pace is another matter
        found += gaps(engine, 1, paceless=True)
    assert found[-4:] == [480, 960, 960, 960]


def test_an_operator_arms_a_whole_queue_at_once(engine: Engine) -> None:
    engine.start(task("a", queue="q"), task("b", queue="q"), task("c"))
    publish(engine)
    assert engine.call("redispatch", "q") == 2
    old, new = engine.messages()[:3], engine.messages()[3:]
    assert {order.dispatch_id for order in new} == {order.dispatch_id for order in old if order.queue == "q"}
    assert engine.call("redispatch", "q") == 2  # armed already: an unpublished order serves
    assert len(engine.messages()) == 5


def test_redispatch_leaves_what_runs_or_waits(engine: Engine) -> None:
    engine.start(task("a"), task("b", "a"))
    engine.claim_one()
    with engine.changes_nothing():
        assert engine.call("redispatch", "default") == 0
        assert engine.call("redispatch_lost") == 0


def test_no_more_than_asked(engine: Engine) -> None:
    engine.start(*(task(f"t{i}") for i in range(5)))
    publish(engine)
    engine.advance("30 s")
    assert [engine.call("redispatch_lost", 2) for _ in range(4)] == [2, 2, 1, 0]


def test_the_queues_looked_at_longest_ago_come_first(engine: Engine) -> None:
    """As many as one call looks at are not all; the next one sees to the rest, though none drains."""
    engine.define(*(task(f"t{i}", queue=f"q{i:03}") for i in range(210)))
    engine.trigger()
    engine.schedule()
    engine.advance("31 s")
    engine.rows("update flowforge.queue set sampled_at = sampled_at - interval '1 s' where name > 'q009'")
    left = "select array_agg(name order by name) from flowforge.queue where name like 'q%%' and not stalled"
    engine.call("redispatch_lost")
    assert engine.value(left) == [f"q{i:03}" for i in range(10)]
    engine.call("redispatch_lost")
    assert engine.value(left) is None


@pytest.mark.parametrize("queue", [None, "", "nowhere"])
def test_an_unknown_queue_is_refused(engine: Engine, queue: str | None) -> None:
    with engine.refuses("WF002"):
        engine.call("redispatch", queue)
