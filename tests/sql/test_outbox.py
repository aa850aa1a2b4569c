"""fetch_outbox, the marks and the sweep: an order to publish is neither lost nor in the others' way."""

from typing import Any

import pytest

from tests.services.database import Database
from tests.services.process import wait_until
from tests.sql.helpers import Engine, task


def fetch(engine: Engine, max_rows: int = 100) -> list[Any]:
    return engine.table("fetch_outbox", max_rows)


def ids(orders: list[Any]) -> list[int]:
    return [order.outbox_id for order in orders]


def delay(engine: Engine, order: Any) -> float:
    query = "select next_attempt_at - flowforge._clock() from flowforge.outbox where outbox_id = %s"
    return float(engine.value(query, order.outbox_id).total_seconds())


# Fetching


def test_what_is_fetched(engine: Engine) -> None:
    run_id = engine.start(task("a", queue="q", handler="h"))
    (order,) = fetch(engine)
    row = engine.task_run(run_id, "a")
    assert (order.task_run_id, order.dispatch_id, order.attempt) == (row.task_run_id, row.dispatch_id, 1)
    assert (order.queue, order.handler, order.traceparent, order.tries) == ("q", "h", None, 0)
    assert engine.value("select count(*) from flowforge.queue_names() as name where name = 'q'") == 1


def test_oldest_first_and_no_more_than_asked(engine: Engine) -> None:
    engine.start(*(task(f"t{i}") for i in range(5)))
    assert ids(fetch(engine, 3)) == ids(engine.messages())[:3]


def test_what_has_been_claimed_already_is_not_published(engine: Engine) -> None:
    """Its message went out, and the mark was lost."""
    engine.start(task("a"))
    (order,) = fetch(engine)
    engine.claim(order)
    assert fetch(engine) == []


def test_two_publishers_share_the_work(db: Database, committing: Engine) -> None:
    committing.start(*(task(f"t{i}") for i in range(6)))
    fetching = "select outbox_id from flowforge.fetch_outbox(4)"
    with db.connect(autocommit=False) as one, db.connect(autocommit=False) as two:
        got = [[row[0] for row in each.execute(fetching)] for each in (one, two, one)]
    assert [len(each) for each in got] == [4, 2, 4]  # one sees its own again
    assert sorted(got[0] + got[1]) == ids(committing.messages())


def test_a_lost_publisher_marks_nothing_and_its_orders_are_fetched_again(
    db: Database, committing: Engine
) -> None:
    """HD-12: published twice, then, and recognised by the dispatch id."""
    committing.start(task("a"))
    with db.connect(autocommit=False) as lost:
        lost.execute("select flowforge.mark_published(array_agg(outbox_id)) from flowforge.fetch_outbox(9)")
        assert fetch(committing) == []
        lost.close()
    wait_until(lambda: bool(fetch(committing)), "the server to notice")
    (order,) = committing.messages()
    assert committing.claim(order).outcome == "claimed"
    assert committing.claim(order).outcome == "running"


def test_a_smaller_id_that_commits_later_is_found(db: Database, committing: Engine) -> None:
    """HD-14: work is found by its state."""
    committing.define(task("a"))
    committing.define(task("a", queue="other"), name="other")
    with db.connect(autocommit=False) as early:
        early.execute("select flowforge.trigger('other')")
        early.execute("select flowforge.dispatch_ready()")
        committing.trigger()
        committing.schedule()
        (late,) = fetch(committing)
        committing.rows("select flowforge.mark_published(array[%s])", late.outbox_id)
        assert fetch(committing) == []
        early.commit()
    (order,) = fetch(committing)
    assert order.outbox_id < late.outbox_id


# Marks


def test_published_once(engine: Engine) -> None:
    engine.start(task("a"), task("b"))
    a, b = fetch(engine)
    assert engine.call("mark_published", [a.outbox_id, -1, None]) == 1
    with engine.changes_nothing():
        assert engine.call("mark_published", [a.outbox_id]) == 0
        assert engine.call("mark_published", []) == 0
    assert fetch(engine) == [b]


def test_the_refused_wait_longer_each_time_and_hold_up_nobody(engine: Engine) -> None:
    """HD-05 and HD-13: kept for as long as it takes, with the error and a growing, capped delay."""
    engine.start(*(task(f"t{i}") for i in range(3)))
    bad, *good = fetch(engine)
    for tries, shortest in enumerate([1, 2, 4, 8, 16, 32, 60, 60, 60]):
        assert engine.call("mark_refused", [bad.outbox_id, bad.outbox_id], ["nacked", "again"]) == 1
        assert shortest <= delay(engine, bad) <= shortest * 1.25
        assert ids(fetch(engine)) == ids(good)
        engine.advance("75 s")
        (again,) = [order for order in fetch(engine) if order.outbox_id == bad.outbox_id]
        assert again.tries == tries + 1
    assert engine.messages()[0].last_error in ("nacked", "again")
    assert engine.call("redispatch_lost") == 0
    assert engine.call("mark_published", [bad.outbox_id]) == 1
    with engine.changes_nothing():
        assert engine.call("mark_refused", [bad.outbox_id], ["late"]) == 0


def test_the_unpublishable_is_parked_and_its_task_run_fails_by_name(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b"), task("c", "a", when="any_failed"))
    bad, good = fetch(engine)
    assert engine.call("mark_unpublishable", bad.outbox_id, "frame too large") is True
    with engine.changes_nothing():
        assert engine.call("mark_unpublishable", bad.outbox_id, "again") is False
        assert engine.call("mark_unpublishable", -1, "unknown") is False
    assert fetch(engine) == [good]
    assert engine.call("sweep_outbox") == 0  # the scheduler has not judged it yet
    assert engine.call("fail_undeliverable") == 1
    row = engine.task_run(run_id, "a")
    assert (row.state, row.error) == ("failed", "the message cannot be published: frame too large")
    assert engine.claim(bad).outcome == "finished"
    with engine.changes_nothing():
        assert engine.call("fail_undeliverable") == 0
    assert engine.call("sweep_outbox") == 1
    engine.drive()
    assert engine.states(run_id) == {"a": "failed", "b": "succeeded", "c": "succeeded"}


@pytest.mark.parametrize("other", ["unpublished", "published"])
def test_a_parked_order_fails_nothing_while_another_stands_for_it(engine: Engine, other: str) -> None:
    engine.start(task("a"))
    (bad,) = fetch(engine)
    engine.call("mark_unpublishable", bad.outbox_id, "no")
    engine.call("redispatch", "default")
    (new,) = fetch(engine)
    if other == "published":
        engine.call("mark_published", [new.outbox_id])
    with engine.changes_nothing():
        assert engine.call("fail_undeliverable") == 0
    assert engine.call("sweep_outbox") == 1
    assert ids(engine.messages()) == [new.outbox_id]


@pytest.mark.parametrize("since", ["lost", "given back", "lost, with an older order that had been refused"])
def test_an_earlier_published_order_does_not_stand_for_a_parked_one(engine: Engine, since: str) -> None:
    """Its message is gone: nothing would ever come of waiting for it."""
    run_id = engine.start(task("a"))
    if "refused" in since:
        (refused,) = fetch(engine)
        engine.call("mark_refused", [refused.outbox_id], ["nacked"])
        engine.call("redispatch", "default")
    (first,) = fetch(engine)
    engine.call("mark_published", [first.outbox_id])
    if since == "lost":
        engine.advance("30 s")
        assert engine.call("redispatch_lost") == 1
    elif since == "given back":
        claim = engine.claim(first)
        assert engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "shutdown")
    else:
        engine.advance("2 s")
        engine.call("redispatch", "default")  # relies on the one that was refused
    (second,) = fetch(engine)
    engine.call("mark_unpublishable", second.outbox_id, "too large by now")
    with engine.changes_nothing():
        assert engine.call("sweep_outbox") == 0
    assert engine.call("fail_undeliverable") == 1
    row = engine.task_run(run_id, "a")
    assert (row.state, row.error) == ("failed", "the message cannot be published: too large by now")


def test_what_another_publisher_marks_late_does_not_stand_for_a_parked_one(
    db: Database, committing: Engine
) -> None:
    """Its message had been claimed and given back before the mark came through."""
    run_id = committing.start(task("a"))
    (first,) = committing.messages()
    with db.connect(autocommit=False) as late:
        late.execute("select from flowforge.fetch_outbox(1)")
        claim = committing.claim(first)
        committing.call("release_task_run", claim.task_run_id, claim.fencing_token, "shutdown")
        (second,) = fetch(committing)
        committing.call("mark_unpublishable", second.outbox_id, "too large by now")
        with committing.changes_nothing():
            assert committing.call("fail_undeliverable") == 0
            assert committing.call("sweep_outbox") == 0
        late.execute("select flowforge.mark_published(%s)", [[first.outbox_id]])
        late.commit()
    assert committing.call("sweep_outbox") == 0
    assert committing.call("fail_undeliverable") == 1
    assert committing.task_run(run_id, "a").state == "failed"


def test_the_newest_parked_order_tells_why(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    for error in ("the first", None, "the last"):
        (order,) = fetch(engine)
        if error:
            engine.call("mark_unpublishable", order.outbox_id, error)
        else:
            engine.call("mark_published", [order.outbox_id])
        engine.call("redispatch", "default")
    order = fetch(engine)[0]
    with engine.changes_nothing():
        assert engine.call("fail_undeliverable") == 0
    engine.call("mark_unpublishable", order.outbox_id, "the very last")
    assert engine.call("fail_undeliverable") == 1
    assert engine.task_run(run_id, "a").error == "the message cannot be published: the very last"


def test_a_claimed_task_run_is_not_failed_for_its_parked_order(engine: Engine) -> None:
    engine.start(task("a"))
    (order,) = fetch(engine)
    engine.claim(order)
    engine.call("mark_unpublishable", order.outbox_id, "late")
    assert engine.call("fail_undeliverable") == 0
    assert engine.call("sweep_outbox") == 1


# Not started in time


@pytest.mark.parametrize("published", [True, False])
def test_what_is_not_started_in_time_fails(engine: Engine, published: bool) -> None:
    run_id = engine.start(task("a", start_within=10), task("b"))
    order, _ = fetch(engine)
    if published:
        engine.call("mark_published", [order.outbox_id])
    engine.advance("9.999 s")
    assert engine.call("fail_undeliverable") == 0
    engine.advance("0.001 s")
    assert engine.call("fail_undeliverable", 1) == 1
    row = engine.task_run(run_id, "a")
    assert (row.state, row.error) == ("failed", "not started within 10 s")
    assert engine.claim(order).outcome == "finished"
    assert engine.task_run(run_id, "b").state == "ready"


def test_the_time_to_start_counts_from_each_offer(engine: Engine) -> None:
    run_id = engine.start(task("a", start_within=10))
    engine.advance("9 s")
    engine.claim_one()
    engine.advance("31 s")
    assert engine.call("fail_undeliverable") == 0  # running
    assert engine.reap() == 1
    engine.advance("9 s")
    assert engine.call("fail_undeliverable") == 0
    engine.advance("1 s")
    assert engine.call("fail_undeliverable") == 1
    assert engine.task_run(run_id, "a").error == "not started within 10 s"


def test_late_and_parked_is_one(engine: Engine) -> None:
    engine.start(task("a", start_within=10))
    (order,) = fetch(engine)
    engine.call("mark_unpublishable", order.outbox_id, "no")
    engine.advance("10 s")
    assert engine.call("fail_undeliverable") == 1


# The sweep


def test_the_sweep_takes_only_what_no_ready_task_run_stands_behind(engine: Engine) -> None:
    engine.start(*(task(name, retry={"max_attempts": 2, "delay": 0}) for name in ("ready", "run", "next")))
    first = engine.messages()
    engine.call("mark_published", ids(first[:2]))
    claims = [engine.claim(order) for order in first[1:]]
    engine.finish(claims[1], "failed")
    engine.schedule()  # its next attempt has an order of its own
    assert [engine.call("sweep_outbox", 1) for _ in range(3)] == [1, 1, 0]
    ready, following = engine.messages()
    assert (ready.outbox_id, following.task_run_id) == (first[0].outbox_id, first[2].task_run_id)


def test_the_sweep_leaves_what_a_publisher_holds(db: Database, committing: Engine) -> None:
    committing.start(task("a"))
    (order,) = committing.messages()
    with db.connect(autocommit=False) as publisher:
        publisher.execute("select from flowforge.fetch_outbox(1)")
        assert committing.claim(order).outcome == "claimed"
        assert committing.call("sweep_outbox") == 0
    assert committing.call("sweep_outbox") == 1


# What is refused


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("mark_published", (None,)),
        ("mark_refused", (None, ["x"])),
        ("mark_refused", ([1], None)),
        ("mark_refused", ([1], ["x", "y"])),
        ("mark_unpublishable", (None, "x")),
        ("mark_unpublishable", (1, None)),
    ],
)
def test_wrong_arguments_are_refused(engine: Engine, function: str, arguments: tuple[Any, ...]) -> None:
    with engine.refuses("WF001"):
        engine.call(function, *arguments)


def test_long_errors_are_cut(engine: Engine) -> None:
    engine.call("set_limit", "max_error_chars", 100)
    engine.start(task("a"), task("b"))
    a, b = fetch(engine)
    engine.call("mark_refused", [a.outbox_id], ["x" * 200])
    engine.call("mark_unpublishable", b.outbox_id, "x" * 200)
    assert {order.last_error for order in engine.messages()} == {"x" * 100 + " [cut off]"}
