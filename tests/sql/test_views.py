"""The views: what operators read."""

from psycopg.types.json import Jsonb

from tests.services.database import Database
from tests.sql.helpers import Engine, failing, task


def test_workflow_version_status(engine: Engine) -> None:
    engine.define(task("a"))
    engine.define(task("a"), task("b", "a"))
    engine.call("activate_version", "w", 1)
    first, second = engine.rows("select * from flowforge.workflow_version_status order by version")
    assert (first.workflow, first.version, first.is_current, first.tasks) == ("w", 1, True, 1)
    assert (second.workflow, second.version, second.is_current, second.tasks) == ("w", 2, False, 2)
    assert [each["after"] for each in second.definition["tasks"]] == [[], ["a"]]


def test_run_input(engine: Engine) -> None:
    engine.define(task("a"))
    run_id = engine.trigger(input=Jsonb([1]))
    assert engine.row("select * from flowforge.run_input") == (run_id, [1])


def test_run_status(engine: Engine) -> None:
    engine.define(task("a"), task("b", "a"), task("c"), task("d", "c"))
    run_id = engine.trigger(labels=Jsonb({"x": 1}), idempotency_key="k", priority=2)

    def status() -> tuple[object, ...]:
        row = engine.row("select * from flowforge.run_status")
        counts = (row.pending, row.ready, row.running, row.succeeded, row.failed, row.cancelled, row.skipped)
        return row.state, row.duration.total_seconds(), *counts

    assert status() == ("pending", 0, 4, 0, 0, 0, 0, 0, 0)
    engine.advance("5 s")
    engine.schedule()
    assert status() == ("running", 5, 2, 2, 0, 0, 0, 0, 0)
    a, _ = engine.claim_next()
    engine.finish(a, "failed")
    engine.schedule()
    assert status() == ("running", 5, 1, 0, 1, 0, 1, 0, 1)
    engine.call("cancel_run", run_id, "why")
    assert status() == ("cancelling", 5, 0, 0, 1, 0, 1, 1, 1)
    engine.advance("1 min")
    engine.reap()
    engine.schedule()
    engine.advance("1 hour")
    assert status() == ("cancelled", 65, 0, 0, 0, 0, 1, 2, 1)
    row = engine.row("select * from flowforge.run_status")
    assert (row.run_id, row.workflow, row.version, row.labels) == (run_id, "w", 1, {"x": 1})
    assert (row.idempotency_key, row.priority, row.cancel_reason, row.task_runs) == ("k", 2, "why", 4)


def test_a_run_whose_only_attempt_waits_to_be_repeated_is_no_longer_pending(engine: Engine) -> None:
    engine.start(task("a", retry={"max_attempts": 2}))
    engine.work(failing("a"))
    assert engine.value("select state from flowforge.run_status") == "running"


def test_what_a_task_run_waits_for(engine: Engine) -> None:
    engine.define(
        *(
            task("a"),
            task("b", "a", "c", when="any_failed"),
            task("c"),
            task("later", retry={"max_attempts": 2}),
        ),
        *(task("paused", queue="p"), task("full", queue="f"), task("fuller", queue="f"), task("m", map="c")),
        task("again"),
    )
    engine.call("pause_queue", "p")
    engine.call("configure_queue", "f", window_size=1)
    run_id = engine.trigger()
    assert set(engine.rows("select waits from flowforge.task_run_status where unmet = 0")) == {
        ("for a scheduler: none is running",),
        ("queue p is paused",),
    }
    engine.reap()
    assert set(engine.rows("select waits from flowforge.task_run_status where unmet = 0")) == {
        ("for the scheduler to dispatch it",),  # there is room
        ("queue p is paused",),
    }
    engine.schedule()
    claims = {claim.task: claim for claim in engine.claim_next()}

    def waits() -> dict[str, str | None]:
        rows = engine.rows("select task, waits from flowforge.task_run_status where map_index is null")
        return {row.task: row.waits for row in rows}

    assert waits()["m"] == "1 of 1 upstreams are not done"
    engine.finish(claims["later"], "failed")
    engine.finish(claims["c"], output=Jsonb([1, 2]))
    engine.call("settle_finished")
    assert waits()["m"] == "to be expanded"
    engine.schedule()
    again = claims["again"]
    engine.call("release_task_run", again.task_run_id, again.fencing_token, "unknown_handler")
    found = waits()
    until = engine.task_run(run_id, "later").available_at
    offered = engine.task_run(run_id, "again").available_at
    (unknown,) = engine.rows("select handler, queue, task_runs, age::text from flowforge.unknown_handlers")
    assert unknown == ("w.again", "default", 1, "00:00:00")
    assert found.pop("later") == engine.value("select format('until %%s', %s::timestamptz)", until)
    assert found.pop("again") == engine.value(
        "select format('for a worker that knows handler w.again; to be offered again at %%s',"
        " %s::timestamptz)",
        offered,
    )
    assert found == {
        "a": None,
        "b": "1 of 2 upstreams are not done",
        "c": None,
        "paused": "queue p is paused",
        "full": "for a worker of queue f",
        "fuller": "for room in the window of queue f",
        "m": "2 of 2 elements are not done",
    }
    engine.finish(claims["a"])
    engine.schedule()
    assert waits()["b"] == "rule any_failed was not met"


def test_a_worker_that_does_not_renew_is_told_of_before_its_lease_ends(engine: Engine) -> None:
    engine.start(task("a"), task("short", time_limit=20))
    claims = engine.claim_next()
    tokens = ([each.task_run_id for each in claims], [each.fencing_token for each in claims])

    def silent() -> dict[str, str]:
        return {
            row.task: row.waits for row in engine.rows("select * from flowforge.task_run_status") if row.waits
        }

    engine.advance("11 s")  # a renewal that is somewhat late
    assert silent() == {}
    engine.table("renew_leases", *tokens, "30 s")
    engine.advance("14 s")
    assert silent() == {}
    engine.advance("2 s")
    until = engine.task_run(claims[0].run_id, "a").lease_expires_at
    # Of a lease that the time limit has cut short nobody can tell when it was renewed.
    expected = "select format('its worker is silent: held by worker until %%s', %s::timestamptz)"
    assert silent() == {"a": engine.value(expected, until)}


def test_task_run_status_shows_who_ran_it_and_for_how_long(engine: Engine) -> None:
    engine.start(task("a", retry={"max_attempts": 2}, max_reaps=5, priority=1))
    engine.advance("3 s")
    engine.claim_one()
    engine.advance("7 s")
    row = engine.row("select * from flowforge.task_run_status")
    assert (row.worker, row.duration.total_seconds(), row.attempt, row.max_attempts) == ("worker", 7, 1, 2)
    assert (row.reaps, row.max_reaps, row.fencing_token, row.priority) == (0, 5, 1, 1)
    assert (row.started_at - row.ready_at).total_seconds() == 3


def test_dead_letters_are_the_failed_task_runs_and_of_a_map_its_elements(engine: Engine) -> None:
    engine.start(task("a"), task("m", map="a"), task("x"), task("y", map="x"), task("z", "m"))

    def behave(claim: object) -> object:
        return {"a": [1, 2], "x": "no array"}.get(claim.task) or failing("m")(claim)  # type: ignore[attr-defined]

    engine.drive(behave)
    rows = engine.rows("select * from flowforge.dead_letters")
    assert {(row.task, row.map_index) for row in rows} == {("m", 0), ("m", 1), ("y", None)}
    assert {row.error for row in rows} == {
        "m failed",
        "cannot map over task 'x': its output is string, not an array",
    }


def test_elements_that_a_retry_replaced_count_no_longer(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("m", map="a"), task("z", "m"))
    engine.drive(lambda claim: [1, 2] if claim.task == "a" else failing("m")(claim))
    assert engine.row("select failed, skipped from flowforge.run_status") == (3, 1)
    engine.call("retry_run", run_id, "a")
    engine.drive(lambda claim: [3] if claim.task == "a" else claim.task)
    row = engine.row("select state, task_runs, succeeded, failed from flowforge.run_status")
    assert row == ("succeeded", 4, 4, 0)
    assert engine.rows("select * from flowforge.dead_letters") == []
    rows = engine.rows("select state, superseded from flowforge.task_run_status where map_index is not null")
    assert sorted(rows) == [("failed", True), ("failed", True), ("succeeded", False)]


def test_attempt_status(engine: Engine) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 2, "delay": 0}))
    engine.claim_one()
    engine.advance("31 s")
    engine.reap()
    assert engine.finish(engine.claim_one(), "failed", error="no luck") == "accepted"
    engine.advance("1 s")
    engine.schedule()
    engine.claim_one()
    first, second = engine.rows("select * from flowforge.attempt_status order by fencing_token")
    assert (first.run_id, first.workflow, first.task, first.map_index) == (run_id, "w", "a", None)
    assert (first.attempt, first.fencing_token, first.outcome) == (1, 1, "lease_expired")
    assert (first.worker, first.dispatch_id) == ("worker", second.dispatch_id)
    assert (second.attempt, second.fencing_token, second.outcome, second.error) == (1, 2, "failed", "no luck")


def test_queue_status(engine: Engine) -> None:
    engine.define(task("a", queue="q"), task("b", queue="q"), task("c", queue="q"))
    engine.call("configure_queue", "q", window_size=1)
    engine.call("announce_worker", "w1", ["q"], 3)
    engine.trigger()
    engine.schedule()
    engine.advance("10 s")
    row = engine.row("select * from flowforge.queue_status")
    assert (row.queue, row.window_size, row.dispatched, row.eligible, row.capacity) == ("q", 1, 1, 2, 3)
    assert row.oldest_eligible_age.total_seconds() == row.oldest_dispatched_age.total_seconds() == 10
    engine.call("configure_queue", "q", window_size=0)
    assert engine.value("select window_size from flowforge.queue_status") == 100
    engine.call("announce_worker", "w2", ["q"], 100)
    assert engine.value("select window_size from flowforge.queue_status") == 412
    engine.call("pause_queue", "q")
    assert engine.value("select paused_at = flowforge._clock() from flowforge.queue_status") is True


def test_worker_status(engine: Engine) -> None:
    engine.call("announce_worker", "worker", ["default"], 3)
    engine.start(task("a"), task("b"))
    engine.claim_next()
    row = engine.row("select * from flowforge.worker_status")
    assert (row.worker, row.queues, row.capacity, row.alive, row.running) == (
        "worker",
        ["default"],
        3,
        True,
        2,
    )


def test_health(engine: Engine) -> None:
    def health() -> dict[str, float | None]:
        rows = engine.rows("select name, value from flowforge.health where value is null or value <> 0")
        return {row.name: row.value for row in rows}

    nothing = ("oldest_eligible_seconds", "oldest_unpublished_seconds", "reaper_seconds")
    assert health() == dict.fromkeys(nothing)
    engine.define(*(task(name) for name in "abcdef"))
    engine.call("configure_queue", "default", window_size=5)
    run_id = engine.trigger()
    engine.reap()
    engine.schedule()
    orders = engine.messages()
    engine.call("mark_refused", [orders[0].outbox_id], ["x"])
    engine.call("mark_unpublishable", orders[1].outbox_id, "x")
    engine.call("announce_worker", "worker", ["default"], 3)
    for order in orders[2:4]:
        engine.claim(order, lease="10 s")
    engine.advance("11 s")
    assert engine.finish(engine.claim(orders[4])) == "accepted"
    engine.rows("update flowforge.run set cancel_requested_at = now()")
    assert health() == {
        "active_runs": 1,
        "cancelling_runs": 1,
        "eligible": 1,
        "oldest_eligible_seconds": 11,
        "dispatched": 2,
        "running": 2,
        "expired_leases": 2,
        "unsettled": 1,
        "unpublished": 4,
        "oldest_unpublished_seconds": 11,
        "refused": 1,
        "parked": 1,
        "reaper_seconds": 11,
        "workers": 1,
    }
    assert engine.run_state(run_id) == "running"


def test_limits(engine: Engine) -> None:
    row = engine.row("select * from flowforge.limits where name = 'max_map_width'")
    assert (row.value, row.minimum, row.maximum, row.meaning) == (10_000, 1, 100_000, "elements of one map")


def test_a_backlog_is_not_read_once_for_each_queue(db: Database) -> None:
    """Whatever the statistics say of it."""
    with db.connect() as connection:
        tasks = [{"name": f"t{number}", "queue": f"q{number}"} for number in range(100)]
        for name, what in (("many", tasks), ("one", [{"name": "a", "queue": "q0"}])):
            connection.execute("select flowforge.define_workflow(%s)", [Jsonb({"name": name, "tasks": what})])
        connection.execute("select flowforge.trigger_many('one', array_fill('1'::jsonb, array[5000]))")
        connection.execute("vacuum analyze flowforge.task_run")
        for view in ("queue_status", "health"):
            query = f"explain (analyze, buffers, timing off, format json) select * from flowforge.{view}"
            ((plan,),) = connection.execute(query.encode()).fetchall()
            pages = plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"]
            ((size,),) = connection.execute("select pg_relation_size('flowforge.task_run') / 8192").fetchall()
            assert pages < 5 * size + 200, view
