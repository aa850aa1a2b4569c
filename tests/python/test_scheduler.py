"""The scheduler: every function gets its turn, whatever fails, sleeps or runs beside it."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NoReturn

import pytest

from flowforge import db as database
from flowforge.config import Config
from flowforge.scheduler import Scheduler
from tests.python.daemons import TIMEOUT, Flow, Running, process
from tests.services.database import Database
from tests.services.process import wait_until

DIAMOND = [
    {"name": "a"},
    {"name": "b", "after": ["a"]},
    {"name": "c", "after": ["a"]},
    {"name": "d", "after": ["b", "c"]},
]


@pytest.fixture
def config(db: Database) -> Config:
    return Config(database_url=db.create_login("flowforge_scheduler"))


@pytest.fixture
def flow(db: Database) -> Iterator[Callable[..., Flow]]:
    with ExitStack() as stack:

        def make(*tasks: dict[str, Any]) -> Flow:
            made = Flow(db, *tasks)
            stack.callback(made.close)
            return made

        yield make


def lazy(config: Config) -> Scheduler:
    """A scheduler that nothing but a notification or a time that is due can wake within a test."""
    scheduler = Scheduler(config.replace(poll_interval=3600))
    for duty in scheduler._duties:
        duty.every = 3600 if duty.every else 0
    return scheduler


def asleep(flow: Flow) -> bool:
    return bool(flow.value("select asleep from flowforge.scheduler"))


def test_a_run_goes_from_task_to_task_by_notifications_alone(
    config: Config, flow: Callable[..., Flow]
) -> None:
    diamond = flow(*DIAMOND)
    with Running(lazy(config), config) as running:
        running.until("ok")
        wait_until(lambda: asleep(diamond), "the declaration of sleep")
        run = diamond.trigger()
        diamond.work_until(run)
        assert diamond.run_state(run) == "succeeded"
    diamond.healthy()


def test_after_the_declaration_of_sleep_it_looks_once_more_before_it_sleeps(
    config: Config, flow: Callable[..., Flow]
) -> None:
    one, scheduler = flow(), lazy(config)
    one.conn.execute("select flowforge.set_limit('notify', 0)")
    with database.connect(config.database_url, application_name="test") as conn:
        scheduler.on_connect()
        assert scheduler.tick(conn) == 0
        # What is committed from here to the declaration wakes nobody, so the first wait is but a moment.
        assert scheduler.pause(conn) < 1
        assert asleep(one)
        run = one.trigger()
        assert scheduler.tick(conn) > 0
        assert one.states(run) == ["ready"]
        assert scheduler.tick(conn) == 0
        assert scheduler.pause(conn) > 1000


def test_a_scheduler_with_much_to_do_is_not_notified(config: Config, flow: Callable[..., Flow]) -> None:
    many = flow()
    scheduler = Scheduler(config.replace(settle_batch=1, dispatch_batch=1))
    declare, said = scheduler._declare, list[bool]()

    def noted(conn: database.Connection, **declaration: bool) -> None:
        declare(conn, **declaration)
        said.append(asleep(many))

    scheduler._declare = noted  # type: ignore[method-assign]
    with Running(scheduler, config):
        wait_until(lambda: asleep(many), "the declaration of sleep")
        many.conn.execute(
            "select flowforge.trigger_many(%s, array_fill('{}'::jsonb, array[200]))", [many.name]
        )
        # Which holds for a moment only, on a fast machine.
        wait_until(lambda: False in said, "the declaration of being awake")
        wait_until(lambda: asleep(many), "sleep again")


def test_a_sleeper_declares_itself_again_where_another_said_otherwise(
    config: Config, flow: Callable[..., Flow]
) -> None:
    one = flow()
    with Running(Scheduler(config.replace(poll_interval=0.1)), config):
        wait_until(lambda: asleep(one), "the declaration of sleep")
        # As another scheduler, which then dies.
        one.conn.execute("select flowforge.declare_scheduler(false)")
        wait_until(lambda: asleep(one), "the declaration to be renewed")


def test_sleep_ends_when_a_delayed_task_is_due(config: Config, flow: Callable[..., Flow]) -> None:
    one = flow()
    with Running(lazy(config), config):
        wait_until(lambda: asleep(one), "the declaration of sleep")
        run = one.trigger(delay="300 milliseconds")
        one.work_until(run)


def test_it_reads_what_is_due_in_any_style_of_intervals(config: Config, flow: Callable[..., Flow]) -> None:
    """Behind a pooler, whose server's settings may be others than those that were told of at first."""
    flow().trigger(delay="1 hour")
    scheduler = Scheduler(config)
    with database.connect(config.database_url, application_name="test") as conn:
        while scheduler.tick(conn):
            pass
        conn.execute("set intervalstyle = 'sql_standard'")
        scheduler._asleep = True
        assert 0 < scheduler.pause(conn) <= config.poll_interval


@pytest.mark.parametrize("moved", [0, 1])
def test_told_to_stop_it_goes_no_further_than_the_function_at_hand(
    config: Config, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    """Each of the others may wait for the same lock until its time-out."""
    scheduler, performed = lazy(config), list[str]()
    running = Running(scheduler, config)

    def perform(_: object, duty: Any) -> int:
        performed.append(duty.function)
        running.stop.request()
        return moved

    def nothing_more(*_: object, **__: object) -> NoReturn:
        performed.append("declare_scheduler")
        raise AssertionError

    scheduler._asleep, scheduler._busy = True, 99
    monkeypatch.setattr(scheduler, "on_connect", lambda: None)
    monkeypatch.setattr(scheduler, "_perform", perform)
    monkeypatch.setattr(scheduler, "_declare", nothing_more)
    with running:
        wait_until(lambda: bool(performed), "its first function")
    assert len(performed) == 1


def test_an_expired_lease_is_reaped(config: Config, flow: Callable[..., Flow]) -> None:
    one = flow()
    with Running(Scheduler(config.replace(reap_interval=0.1)), config):
        run = one.trigger()
        claims: list[tuple[int, int]] = []

        def claimed() -> bool:
            claims.extend(one.claim(lease="1 second"))
            return bool(claims)

        wait_until(claimed, "the dispatch")
        wait_until(lambda: one.states(run) == ["ready"], "the reaper")
        one.work_until(run)


def test_what_a_cancel_leaves_behind_is_cancelled(
    config: Config, db: Database, flow: Callable[..., Flow]
) -> None:
    one = flow({"name": "one", "retry": {"max_attempts": 5, "delay": 3600}})
    with Running(Scheduler(config.replace(recover_interval=0.1)), config):
        run = one.trigger()
        claims: list[tuple[int, int]] = []

        def claimed() -> bool:
            claims.extend(one.claim())
            return bool(claims)

        wait_until(claimed, "the dispatch")
        with db.connect() as worker, worker.transaction():
            # Asked for while a failure is being recorded, a cancel sees neither it nor the next attempt.
            worker.execute("select flowforge.finish_task_run(%s, %s, 'failed')", claims[0])
            assert one.value("select flowforge.cancel_run(%s)", run)
        wait_until(lambda: one.run_state(run) == "cancelled", "the cancelled run")


def test_a_broker_that_forgets_and_an_order_that_cannot_be_published_are_found(
    config: Config, flow: Callable[..., Flow]
) -> None:
    one = flow()
    with Running(Scheduler(config.replace(recover_interval=0.1, sweep_interval=0.1)), config):
        run = one.trigger()
        orders = "select count(*) from flowforge.outbox where published_at is null and parked_at is null"
        wait_until(lambda: one.value(orders) == 1, "the order")
        one.conn.execute("delete from flowforge.outbox")
        one.conn.execute("update flowforge.task_run set redispatch_at = now() where run_id = %s", [run])
        wait_until(lambda: one.value(orders) == 1, "the new order")
        one.conn.execute("select flowforge.mark_unpublishable(outbox_id, 'too large') from flowforge.outbox")
        wait_until(lambda: one.run_state(run) == "failed", "the failed run")
        wait_until(lambda: one.value("select count(*) from flowforge.outbox") == 0, "the sweep")


def test_several_schedulers_at_once_dispatch_everything_once(
    config: Config, flow: Callable[..., Flow]
) -> None:
    diamond = flow(*DIAMOND)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(Running(Scheduler(config), config))
        runs = [diamond.trigger() for _ in range(30)]
        diamond.work_until(*runs)
    assert {diamond.run_state(run) for run in runs} == {"succeeded"}
    assert diamond.value("select max(attempt) from flowforge.task_run") == 1
    diamond.healthy()


@pytest.mark.parametrize("function", ["reap_expired_leases", "settle_finished", "sweep_outbox"])
def test_a_function_that_fails_starves_no_other_and_shows(
    config: Config, flow: Callable[..., Flow], function: str
) -> None:
    one = flow()
    name = f"flowforge.{function}"
    source = one.value("select pg_get_functiondef(%s::regproc)", name)
    arguments = one.value("select pg_get_function_arguments(%s::regproc)", name)
    with Running(Scheduler(config.replace(sweep_interval=0.1)), config) as running:
        running.until("ok")
        one.conn.execute(
            f"create or replace function {name}({arguments}) returns bigint language plpgsql "
            "security definer as $$ begin raise exception 'broken for a test'; end $$".encode()
        )
        running.until("error")
        run = one.trigger()
        wait_until(lambda: one.states(run) == ["ready"], "the dispatch, although a function fails")
        claims = one.claim()
        one.finish(claims)
        assert running.health.state == "error"
        one.conn.execute(source.encode())
        wait_until(lambda: one.run_state(run) == "succeeded", "the end of the run")
        running.until("ok")


def test_an_error_that_passes_by_itself_is_no_trouble(config: Config, flow: Callable[..., Flow]) -> None:
    one = flow()
    arguments = one.value("select pg_get_function_arguments('flowforge.settle_finished'::regproc)")
    one.conn.execute(
        f"""
        create sequence calls;
        grant usage on sequence calls to public;
        create or replace function flowforge.settle_finished({arguments}) returns bigint
        language plpgsql security definer as $$
        begin
            if nextval('calls') = 1 then
                raise exception 'lost a race' using errcode = '40P01';
            end if;
            return 0;
        end $$;
        """.encode()
    )
    scheduler = Scheduler(config.replace(poll_interval=0.05))
    seen: set[str] = set()

    def called_again() -> bool:
        seen.add(scheduler.trouble())
        return bool(one.value("select last_value from calls") >= 3)

    with Running(scheduler, config):
        wait_until(called_again, "further calls")
    assert seen == {""}


def test_rows_locked_by_a_stranger_hold_up_only_themselves(
    config: Config, db: Database, flow: Callable[..., Flow]
) -> None:
    one = flow()
    locked = one.trigger()
    with db.connect() as stranger, ExitStack() as daemons:
        with stranger.transaction():
            stranger.execute("select from flowforge.run where run_id = %s for update", [locked])
            stranger.execute("select from flowforge.task_run where run_id = %s for update", [locked])
            daemons.enter_context(Running(Scheduler(config.replace(lock_timeout=0.1)), config))
            free = one.trigger()
            one.work_until(free)
            assert one.states(locked) == ["pending"]
        one.work_until(locked)


@pytest.mark.parametrize("moment", ["before-dispatch_ready", "after-dispatch_ready", "after-settle_finished"])
def test_a_scheduler_killed_at_any_step_is_continued_by_the_next(
    config: Config, flow: Callable[..., Flow], moment: str
) -> None:
    diamond = flow(*DIAMOND)
    run = diamond.trigger()
    victim = process("Scheduler", config, FLOWFORGE_CRASH_AT=f"scheduler:{moment}")
    stop = threading.Event()
    deadline = time.monotonic() + TIMEOUT
    while victim.poll() is None and not stop.wait(0.02) and time.monotonic() < deadline:
        diamond.finish(diamond.claim(10))
    assert victim.communicate(timeout=TIMEOUT) is not None
    assert victim.returncode == -signal.SIGKILL
    with Running(Scheduler(config), config):
        diamond.work_until(run)
    assert diamond.run_state(run) == "succeeded"
    assert diamond.value("select max(attempt) from flowforge.task_run") == 1
    diamond.healthy()


def test_an_idle_scheduler_stops_on_sigterm(config: Config, flow: Callable[..., Flow]) -> None:
    one = flow()
    daemon = process("Scheduler", config)
    wait_until(lambda: asleep(one), "the declaration of sleep")
    daemon.send_signal(signal.SIGTERM)
    _, errors = daemon.communicate(timeout=TIMEOUT)
    assert daemon.returncode == 0
    connected, *rest = [json.loads(line)["event"] for line in errors.splitlines()]
    assert connected.startswith("connected")
    assert rest == ["stopped"]
