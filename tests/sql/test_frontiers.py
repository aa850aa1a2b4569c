"""Looks for work begin at the frontiers, and nothing that they are to find lies before.

The clock stands still but for what a test moves it by.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Clock, Database
from tests.services.process import wait_until
from tests.sql.helpers import Engine, task
from tests.sql.machine import HIDDEN

# By frontier: how something comes to lie there, its key, and the look that finds it when it is due.
WAITING: dict[str, tuple[Callable[[Engine], object], str, str]] = {}


def waiting(frontier: str, key: str, look: str) -> Callable[[Callable[[Engine], object]], None]:
    def register(function: Callable[[Engine], object]) -> None:
        WAITING[f"{frontier}: {function.__name__}"] = function, key, look

    return register


@waiting("eligible", "select available_at from flowforge.task_run", "dispatch_ready()")
def triggered(engine: Engine) -> None:
    engine.define(task("a"))
    engine.trigger()


@waiting(
    "eligible", "select available_at from flowforge.task_run where stage = 'eligible'", "dispatch_ready()"
)
def was_blocked(engine: Engine) -> None:
    engine.start(task("a"), task("b", "a"))
    pass_time(engine)
    engine.work()
    pass_time(engine)
    engine.call("settle_finished")


@waiting(
    "eligible", "select available_at from flowforge.task_run where stage = 'eligible'", "dispatch_ready()"
)
def was_delayed(engine: Engine) -> None:
    engine.define(task("a", queue="full"))
    engine.call("configure_queue", "full", 1)
    engine.trigger(delay="2 hours")
    engine.trigger(delay="2 hours", priority=1)
    for _ in range(3):
        pass_time(engine)
    assert engine.call("dispatch_ready") == 3  # both into line, and one further
    engine.claim_next(1, ("full",))


@waiting(
    "eligible",
    "select min(available_at) from flowforge.task_run where stage = 'eligible'",
    "dispatch_ready()",
)
def was_mapped(engine: Engine) -> None:
    engine.start(task("a"), task("m", map="a"))
    pass_time(engine)
    (claim,) = engine.claim_next()
    engine.finish(claim, output=Jsonb([1, 2]))
    pass_time(engine)
    engine.call("settle_finished")
    pass_time(engine)
    engine.call("expand_map")


@waiting(
    "eligible", "select available_at from flowforge.task_run where stage = 'eligible'", "dispatch_ready()"
)
def was_retried(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    engine.finish(engine.claim_one(), "failed", retryable=False)
    pass_time(engine)
    engine.call("settle_finished")
    pass_time(engine)
    engine.call("retry_run", run_id)


@waiting(
    "eligible", "select available_at from flowforge.task_run where stage = 'eligible'", "dispatch_ready()"
)
def was_retried_in_a_map(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("m", map="a"))
    engine.finish(engine.claim_one(), output=Jsonb([1]))
    engine.schedule()
    engine.finish(engine.claim_one(), "failed", retryable=False)
    pass_time(engine)
    engine.schedule()
    pass_time(engine)
    engine.call("retry_run", run_id)


@waiting("eligible", "select available_at from flowforge.task_run", "dispatch_ready()")
def is_to_be_repeated_at_once(engine: Engine) -> None:
    engine.start(task("a", retry={"max_attempts": 2, "delay": 0}))
    pass_time(engine)
    engine.finish(engine.claim_one(), "failed")


@waiting("delayed", "select available_at from flowforge.task_run", "dispatch_ready()")
def is_delayed(engine: Engine) -> None:
    engine.define(task("a"))
    engine.trigger(delay="30 minutes")


@waiting("delayed", "select available_at from flowforge.task_run", "dispatch_ready()")
def waits_to_be_repeated(engine: Engine) -> None:
    engine.start(task("a", retry={"max_attempts": 2, "delay": 10}))
    pass_time(engine)
    engine.finish(engine.claim_one(), "failed")
    engine.call("settle_finished")


@waiting("delayed", "select available_at from flowforge.task_run", "dispatch_ready()")
def is_offered_again_later(engine: Engine) -> None:
    engine.start(task("a"))
    pass_time(engine)
    claim = engine.claim_one()
    assert (
        engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
        == "released"
    )


@waiting("dispatched", "select redispatch_at from flowforge.task_run", "redispatch_lost()")
def is_dispatched(engine: Engine) -> None:
    engine.start(task("a"))
    engine.rows("update flowforge.outbox set published_at = flowforge._clock()")


@waiting("dispatched", "select redispatch_at from flowforge.task_run", "fail_undeliverable()")
def is_not_started(engine: Engine) -> None:
    engine.start(task("a", start_within=5))


@waiting(
    "dispatched",
    "select redispatch_at from flowforge.task_run",
    "claim_next(array['default'], 'w', gen_random_uuid(), '9 s')",
)
def was_given_back(engine: Engine) -> None:
    engine.start(task("a"))
    pass_time(engine)
    claim = engine.claim_one()
    pass_time(engine)
    assert engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "shutdown") == "released"


@waiting(
    "dispatched",
    "select redispatch_at from flowforge.task_run",
    "claim_next(array['default'], 'w', gen_random_uuid(), '9 s')",
)
def was_moved_into_the_window(engine: Engine) -> None:
    engine.start(task("a"))
    claim = engine.claim_one()
    engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
    pass_time(engine)
    engine.call("dispatch_ready")


@waiting("leased", "select lease_expires_at from flowforge.task_run", "reap_expired_leases()")
def is_held(engine: Engine) -> None:
    engine.start(task("a"))
    engine.claim_one()


@waiting("unsettled", "select finished_at from flowforge.task_run", "settle_finished()")
def has_finished(engine: Engine) -> None:
    engine.start(task("a"))
    pass_time(engine)
    engine.finish(engine.claim_one())


@waiting("unpublished", "select next_attempt_at from flowforge.outbox", "fetch_outbox(9)")
def is_to_be_published(engine: Engine) -> None:
    engine.start(task("a"))


@waiting("unpublished", "select next_attempt_at from flowforge.outbox", "fetch_outbox(9)")
def was_refused(engine: Engine) -> None:
    engine.start(task("a"))
    pass_time(engine)
    engine.call("mark_refused", [engine.messages()[0].outbox_id], ["nack"])


@waiting("outbox", "select min(outbox_id) from flowforge.outbox", "sweep_outbox()")
def is_to_be_swept(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b"))
    engine.call("cancel_run", run_id)


def pass_time(engine: Engine) -> None:
    """An hour, in which all is as it should be: the reaper and the frontiers go on."""
    engine.advance("1 hour")
    engine.rows("update flowforge.scheduler set reaper_ticked_at = flowforge._clock()")
    engine.call("advance_frontiers")
    assert engine.rows(HIDDEN) == []


def frontiers(engine: Engine) -> dict[str, Any]:
    return dict(engine.row("select * from flowforge.frontier")._asdict())


@pytest.mark.parametrize("name", WAITING)
def test_what_waits_is_found_however_long_it_waits(engine: Engine, name: str) -> None:
    prepare, key, look = WAITING[name]
    prepare(engine)
    assert engine.rows(HIDDEN) == []
    oldest = engine.value(key)
    frontier = name.partition(":")[0]
    for _ in range(2):
        pass_time(engine)
    assert frontiers(engine)[frontier] == oldest
    pass_time(engine)
    assert frontiers(engine)[frontier] == oldest
    found = engine.rows(f"select * from flowforge.{look}")
    assert found
    assert found[0][0] != 0


@pytest.mark.parametrize("name", WAITING)
def test_one_that_is_too_far_ahead_goes_back(engine: Engine, name: str) -> None:
    """Whatever has put it there."""
    prepare, _, look = WAITING[name]
    prepare(engine)
    pass_time(engine)
    ahead = "flowforge._clock() + interval '1 year'"
    names = ("eligible", "delayed", "dispatched", "leased", "unsettled", "unpublished")
    times = ", ".join(f"{each} = {ahead}" for each in names)
    engine.rows(f"update flowforge.frontier set outbox = 1000000, {times}")
    assert engine.rows(HIDDEN) != []
    found = engine.rows(f"select * from flowforge.{look}")
    assert not found or found[0][0] == 0
    engine.advance("5 s")
    engine.call("advance_frontiers")
    assert engine.rows(HIDDEN) == []
    assert engine.rows(f"select * from flowforge.{look}")[0][0] != 0


def test_with_nothing_to_find_they_are_a_minute_behind(engine: Engine) -> None:
    engine.start(task("a"))
    engine.drive()
    engine.rows("delete from flowforge.outbox")
    for _ in range(2):
        pass_time(engine)
    found = frontiers(engine)
    last = engine.value("select last_value from flowforge.outbox_outbox_id_seq")
    assert (found.pop("outbox"), found.pop("one_row")) == (last, True)
    now = engine.value("select flowforge._clock()")
    assert found.pop("advanced_at") == now
    for each in ("took", "looked_at_all", "is_late", "noted_at", "next_xid", "last_outbox_id"):
        found.pop(each)
    minute_ago = engine.value("select flowforge._clock() - interval '1 minute'")
    assert found == dict.fromkeys(
        ("eligible", "delayed", "dispatched", "leased", "unsettled", "unpublished"), minute_ago
    )


def test_not_again_within_four_seconds(engine: Engine) -> None:
    pass_time(engine)
    before = frontiers(engine)
    engine.advance("3.9 s")
    with engine.changes_nothing():
        engine.call("advance_frontiers")
    engine.advance("0.2 s")
    engine.call("advance_frontiers")
    assert frontiers(engine)["advanced_at"] > before["advanced_at"]


@pytest.mark.parametrize(
    ("late", "took", "seconds"),
    [(True, "1 s", 50), (True, "1 day", 60), (False, "1 s", 500), (False, "1 day", 600)],
)
def test_a_look_at_everything_takes_its_share_of_the_time(
    committing: Engine, late: bool, took: str, seconds: int
) -> None:
    committing.define(task("a"))
    committing.trigger()
    pass_time(committing)
    hour = "flowforge._clock() + interval '1 hour'"
    committing.rows(f"update flowforge.frontier set took = %s, is_late = %s, eligible = {hour}", took, late)
    for waited in range(5, seconds, 5):
        committing.advance("5 s")
        committing.call("advance_frontiers")
        assert committing.rows(HIDDEN), waited
        assert committing.call("dispatch_ready") == 0
    committing.advance("5 s")
    committing.call("advance_frontiers")
    assert committing.rows(HIDDEN) == []
    assert committing.call("dispatch_ready") == 1


def test_how_long_a_look_at_everything_takes_is_kept(committing: Engine) -> None:
    """By a clock that is a second further each time that it is read."""
    committing.rows("create sequence flowforge_test.reading")
    committing.rows("grant usage on sequence flowforge_test.reading to public")
    committing.rows(
        """
        create or replace function flowforge._clock() returns timestamptz language sql volatile as $$
        select c.reading + nextval('flowforge_test.reading') * interval '1 s' from flowforge_test.clock c $$
        """
    )
    committing.call("advance_frontiers")
    assert frontiers(committing)["took"].total_seconds() == 1


def test_who_only_reads_is_never_late(db: Database, clock: Clock, committing: Engine) -> None:
    """So that an old snapshot costs no looks at everything."""

    def is_late_after(*pauses: str) -> bool:
        for pause in pauses:
            clock.advance(pause)
            committing.call("advance_frontiers")
        return bool(frontiers(committing)["is_late"])

    def is_ever_not(*pauses: str) -> bool:
        # Whoever else is writing on the server, in any database, is taken for one who may be late.
        for _ in range(10):
            if not is_late_after(*pauses):
                return True
            time.sleep(0.2)
        return False

    with db.connect(autocommit=False) as reader:
        reader.execute("set transaction isolation level repeatable read")
        reader.execute("select count(*) from flowforge.run")
        assert is_ever_not("5 s", "5 s")
        assert is_ever_not("35 s", "35 s")
        with db.connect(autocommit=False) as writer:
            writer.execute("create table public.t ()")
            assert is_late_after("35 s", "35 s") is True
            assert is_late_after("5 s") is True
            writer.rollback()
        assert is_ever_not("5 s")
        assert is_late_after("2 minutes") is True  # nobody knows
        assert is_ever_not("5 s")


def test_who_had_written_before_the_note_is_late_though_no_id_came_after(
    db: Database, clock: Clock, committing: Engine
) -> None:
    """A snapshot does not tell of an id that runs while none after it has ended."""
    committing.call("advance_frontiers")
    clock.advance("35 s")
    with db.connect(autocommit=False) as writer:
        writer.execute("create table public.t ()")
        committing.call("advance_frontiers")
        clock.advance("5 s")
        committing.call("advance_frontiers")
        assert frontiers(committing)["is_late"]
        writer.rollback()


@pytest.mark.parametrize("took", ["0 s", "0.05 s"])
@pytest.mark.parametrize("open_for", [55, 65, 200])
def test_what_is_committed_late_is_found(
    db: Database, clock: Clock, committing: Engine, open_for: int, took: str
) -> None:
    """After a minute or less at once, and else with the next step that looks at everything."""
    committing.define(task("a"))
    pass_time(committing)
    with db.connect(autocommit=False) as late:
        late.execute("select flowforge.trigger('w')")
        for _ in range(0, open_for, 5):
            clock.advance("5 s")
            committing.rows("update flowforge.frontier set took = %s", took)
            committing.call("advance_frontiers")
        late.commit()
    assert bool(committing.rows(HIDDEN)) == (open_for > 60)
    assert committing.call("dispatch_ready") == (open_for < 60)
    clock.advance("5 s")
    committing.call("advance_frontiers")
    assert committing.rows(HIDDEN) == []
    assert committing.call("dispatch_ready") == (open_for > 60)


def test_what_is_committed_late_is_found_though_nobody_moved_them_meanwhile(
    db: Database, clock: Clock, committing: Engine
) -> None:
    committing.define(task("a"))
    pass_time(committing)
    committing.rows("update flowforge.frontier set took = '1 s'")
    with db.connect(autocommit=False) as late:
        late.execute("select flowforge.trigger('w')")
        clock.advance("4 minutes")
        committing.call("advance_frontiers")
        late.commit()
    assert committing.rows(HIDDEN) != []
    for _ in range(12):
        clock.advance("5 s")
        committing.call("advance_frontiers")
    assert committing.rows(HIDDEN) == []


def test_orders_of_a_short_transaction_never_lie_before(
    db: Database, clock: Clock, committing: Engine
) -> None:
    committing.define(task("a"))
    committing.trigger()
    committing.trigger()
    for _ in range(2):
        pass_time(committing)
    committing.rows("update flowforge.frontier set took = '1 day'")
    with db.connect(autocommit=False) as late:
        late.execute("select flowforge.dispatch_ready()")
        clock.advance("5 s")
        committing.call("advance_frontiers")
        late.commit()
    assert committing.rows(HIDDEN) == []
    assert len(committing.messages()) == 2


def test_orders_committed_late_are_swept_with_the_next_step(
    db: Database, clock: Clock, committing: Engine
) -> None:
    run_id = committing.start(task("a"))
    with db.connect(autocommit=False) as late:
        late.execute("select flowforge.redispatch('default')")
        clock.advance("1 hour")
        committing.call("advance_frontiers")
        late.commit()
    committing.call("cancel_run", run_id)
    clock.advance("5 s")
    committing.call("advance_frontiers")
    assert committing.call("sweep_outbox") >= 1
    assert committing.messages() == []


def test_a_clock_put_back_hides_nothing(engine: Engine) -> None:
    engine.define(task("a"))
    pass_time(engine)
    engine.rows("update flowforge.frontier set took = '1 day'")
    engine.advance("-2 hours")
    engine.trigger()
    assert engine.call("dispatch_ready") == 1
    engine.trigger()
    engine.advance("5 minutes")
    engine.call("advance_frontiers")
    assert engine.rows(HIDDEN) == []
    assert engine.call("dispatch_ready") == 1


@pytest.mark.parametrize("more", [0, 1], ids=["alone", "beside another"])
def test_a_clock_that_was_ahead_holds_up_nothing(engine: Engine, more: int) -> None:
    """What it put in line is dispatched when it is back, and takes nobody's place until then."""
    engine.start(task("a"), task("b", "a"))
    engine.call("configure_queue", "default", 1 + more)
    engine.work()
    engine.advance("1 hour")
    engine.call("settle_finished")
    engine.advance("-1 hour")
    for _ in range(more):
        engine.trigger()
    assert engine.call("dispatch_ready") == 1 + more
    assert len(engine.table("fetch_outbox", 9)) == 1 + more


def test_where_nobody_moves_them_everything_is_found(db: Database, clock: Clock, committing: Engine) -> None:
    """As with a scheduler of the release before, which does not."""
    committing.define(task("a"))
    with db.connect(autocommit=False) as late:
        late.execute("select flowforge.trigger('w')")
        pass_time(committing)
        late.commit()
    assert committing.call("dispatch_ready") == 0
    clock.advance("4 minutes")
    assert committing.call("dispatch_ready") == 0
    clock.advance("2 minutes")
    assert committing.call("dispatch_ready") == 1


@pytest.mark.parametrize("name", WAITING)
def test_without_the_row_everything_is_found(engine: Engine, name: str) -> None:
    prepare, _, look = WAITING[name]
    prepare(engine)
    pass_time(engine)
    engine.rows("delete from flowforge.frontier")
    assert engine.rows(f"select * from flowforge.{look}")[0][0] != 0


def test_nobody_waits_for_whoever_moves_them(db: Database, clock: Clock, committing: Engine) -> None:
    with db.connect(autocommit=False) as other:
        other.execute("select flowforge.advance_frontiers()")
        with db.connect() as second, committing.changes_nothing():
            second.execute("set lock_timeout = '1 ms'")
            second.execute("select flowforge.advance_frontiers()")
        other.rollback()


def test_it_needs_read_committed(db: Database) -> None:
    with db.connect(autocommit=False) as connection:
        connection.execute("set transaction isolation level repeatable read")
        with pytest.raises(psycopg.Error, match="READ COMMITTED") as caught:
            connection.execute("select flowforge.advance_frontiers()")
        assert caught.value.sqlstate == "WF008"


@contextmanager
def noting(db: Database, committing: Engine) -> Iterator[None]:
    """In the block a call that makes a new note has an id, and has come no further."""
    committing.rows(
        """
        create or replace function flowforge._clock() returns timestamptz language plpgsql volatile as $$
        begin
            if current_setting('test.held', true) = 'yes' and pg_current_xact_id_if_assigned() > '0' then
                perform pg_advisory_xact_lock_shared(7);
            end if;
            return (select c.reading from flowforge_test.clock c);
        end $$
        """
    )
    committing.call("advance_frontiers")
    committing.advance("35 s")
    with db.connect() as holder, db.connect(application_name="held") as held:
        holder.execute("select pg_advisory_lock(7)")
        held.execute("set test.held = 'yes'")
        thread = threading.Thread(target=held.execute, args=("select flowforge.advance_frontiers()",))
        thread.start()
        waiting = """select count(*) from pg_stat_activity where application_name = 'held'
            and wait_event_type = 'Lock' and datname = current_database()"""
        wait_until(lambda: committing.value(waiting) == 1, "the call to be held")
        try:
            yield
        finally:
            holder.execute("select pg_advisory_unlock(7)")
            thread.join()


def test_numbers_drawn_by_ids_after_the_note_are_not_noted(db: Database, committing: Engine) -> None:
    committing.define(task("a"))
    for _ in range(3):
        committing.trigger()
    with db.connect(autocommit=False) as writer:
        with noting(db, committing):
            writer.execute("select flowforge.dispatch_ready()")
        committing.advance("5 s")
        committing.call("advance_frontiers")
        assert not frontiers(committing)["is_late"]
        writer.commit()
    assert committing.rows(HIDDEN) == []


def test_what_is_written_while_the_note_is_held_up_is_told_of_as_late(
    db: Database, committing: Engine
) -> None:
    """Its id is greater than that of who makes the note, and its key older than the end of that."""
    committing.define(task("a"))
    with db.connect(autocommit=False) as writer:
        with noting(db, committing):
            writer.execute("select flowforge.trigger('w')")
            committing.advance("40 s")
        committing.advance("35 s")
        committing.call("advance_frontiers")
        assert frontiers(committing)["is_late"]
        writer.commit()
    committing.advance("1 minute")
    committing.call("advance_frontiers")
    assert committing.rows(HIDDEN) == []


def test_what_is_armed_after_waiting_is_due_from_then_on(db: Database, committing: Engine) -> None:
    """Looks for orders begin a minute ago."""
    committing.start(task("a"))
    committing.rows("select flowforge.mark_published(array(select outbox_id from flowforge.fetch_outbox(9)))")
    with db.connect(application_name="waits") as second, db.connect(autocommit=False) as holder:
        holder.execute("lock table flowforge.queue in access exclusive mode")
        thread = threading.Thread(target=second.execute, args=("select flowforge.redispatch('default')",))
        thread.start()
        waiting = """select count(*) from pg_stat_activity where application_name = 'waits'
            and wait_event_type = 'Lock' and datname = current_database()"""
        wait_until(lambda: committing.value(waiting) == 1, "the call to wait")
        committing.advance("1 hour")
        holder.rollback()
        thread.join()
    assert committing.value("select max(next_attempt_at) = flowforge._clock() from flowforge.outbox")
