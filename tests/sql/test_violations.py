"""violations and ready_tasks: silent on a healthy system, and blind to no kind of damage."""

from typing import Any

import pytest

from tests.sql.helpers import Engine, failing, task


def busy(engine: Engine) -> int:
    """A run in the middle of everything; its task runs by name in `states`."""
    engine.define(
        *(task("done"), task("failed"), task("skipped", "failed"), task("running"), task("ready")),
        *(task("waits", "running", "ready"), task("later", retry={"max_attempts": 2})),
        *(task("paused", queue="paused"), task("array"), task("map", map="array")),
    )
    engine.call("pause_queue", "paused")
    run_id = engine.trigger()
    engine.schedule()
    for claim in engine.claim_next():
        if claim.task == "ready":
            engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "unknown_handler")
        elif claim.task in ("failed", "later"):
            engine.finish(claim, "failed")
        elif claim.task != "running":
            engine.rows(
                "select flowforge.finish_task_run(%s, %s, 'succeeded', '[1, 2]')",
                *(claim.task_run_id, claim.fencing_token),
            )
    engine.schedule()
    return run_id


def break_it(engine: Engine, statement: str) -> list[str]:
    """The rules that this damage violates; the tests' own triggers are off meanwhile."""
    engine.sound = False
    engine.rows("set local session_replication_role = replica")
    engine.rows(statement)
    return [row.rule for row in engine.rows("select rule from flowforge.violations()")]


def test_a_busy_system_has_none(engine: Engine) -> None:
    """Backlog, pauses, back-offs, delays, refused orders and runs being cancelled included."""
    cancelled, kept = busy(engine), busy(engine)
    engine.trigger(delay="1 day")
    engine.call("cancel_run", cancelled)
    engine.rows(
        "select flowforge.mark_refused(array_agg(outbox_id), array_agg('x'::text)) from flowforge.outbox"
    )
    assert engine.states(kept)["waits"] == "pending"
    for interval in ("1 s", "29 s", "1 hour"):
        engine.advance(interval)
        engine.reap()
        engine.schedule()
        assert engine.rows("select * from flowforge.violations()") == []


RUN = "update flowforge.run set"
TASK_RUN = "update flowforge.task_run tr set"
NAMED = "from flowforge.task t where t.task_id = tr.task_id and t.name ="


@pytest.mark.parametrize(
    ("damage", "rules"),
    [
        (f"{TASK_RUN} unmet = 1 {NAMED} 'waits'", {"G1 counter"}),
        (f"{TASK_RUN} unmet = 1 {NAMED} 'map' and map_index is null", {"G1 counter"}),
        (f"{TASK_RUN} unmet = 0 {NAMED} 'waits'", {"G1 counter", "G1 judgement"}),
        (f"{TASK_RUN} stage = 'blocked' {NAMED} 'paused'", {"G1 judgement"}),
        (
            # Put in line against its rule.
            f"{TASK_RUN} state = 'pending', stage = 'eligible', finished_at = null {NAMED} 'skipped'",
            {"G1 judgement", "G2 unsettled"},
        ),
        (f"{RUN} unsettled = unsettled + 1", {"G2 unsettled"}),
        (f"{RUN} unsettled = 0, state = 'succeeded', finished_at = now()", {"G2 ended run"}),
        (f"{TASK_RUN} fencing_token = 0 where state = 'running'", {"G3 lease"}),
        ("delete from flowforge.outbox", set()),  # it is armed again in time
        (
            f"""with gone as (delete from flowforge.outbox)
            {TASK_RUN} redispatch_at = flowforge._clock() - interval '10 s' where state = 'ready'""",
            {"G4 delivery"},
        ),
        (f"{TASK_RUN} redispatch_at = null where state = 'ready'", set()),  # an order stands
    ],
)
def test_damage_is_seen(engine: Engine, damage: str, rules: set[str]) -> None:
    busy(engine)
    assert engine.rows("select * from flowforge.violations()") == []
    assert set(break_it(engine, damage)) == rules


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        *(("pending", stage) for stage in ("eligible", "delayed", "expand", "blocked")),
        *(("ready", "dispatched"), ("succeeded", "unsettled")),
    ],
)
def test_anything_active_in_an_ended_run_is_seen(engine: Engine, state: str, stage: str) -> None:
    engine.start(task("a"))
    engine.drive()
    finished = "finished_at" if state == "succeeded" else "null"
    dispatch = "null" if state == "pending" else "dispatch_id"
    damage = (
        f"update flowforge.task_run set state = '{state}', stage = '{stage}', finished_at = {finished},"
        f" dispatch_id = {dispatch}, redispatch_at = now() + interval '1 h'"
    )
    assert break_it(engine, damage) == ["G2 ended run"]


def test_an_order_that_cannot_be_published_is_seen_until_it_is_failed(engine: Engine) -> None:
    """Parked orders are for the scheduler, which fails their task runs; one that does not is told of."""
    run_id = engine.start(task("a"))
    (order,) = engine.messages()
    engine.call("mark_unpublishable", order.outbox_id, "too large")
    assert engine.rows("select * from flowforge.violations()") == []
    engine.advance("1 hour")
    assert [(row.rule, row.run_id) for row in engine.rows("select * from flowforge.violations()")] == [
        ("G4 delivery", run_id)
    ]
    engine.call("fail_undeliverable")
    engine.schedule()
    assert engine.rows("select * from flowforge.violations()") == []


def test_a_violation_names_its_run_and_task_run(engine: Engine) -> None:
    run_id = busy(engine)
    break_it(engine, f"{TASK_RUN} unmet = 1 {NAMED} 'waits'")
    (row,) = engine.rows("select * from flowforge.violations()")
    waits = engine.task_run(run_id, "waits")
    assert (row.run_id, row.task_run_id) == (run_id, waits.task_run_id)
    assert row.detail == "unmet is 1, counted are 2"


# The oracle


def ready_tasks(engine: Engine, run_id: int) -> set[Any]:
    return {(row.task, row.map_index) for row in engine.table("ready_tasks", run_id)}


def test_what_may_be_dispatched_answered_from_the_edges(engine: Engine) -> None:
    run_id = busy(engine)
    assert ready_tasks(engine, run_id) == set()
    engine.call("resume_queue", "paused")
    assert ready_tasks(engine, run_id) == {("paused", None)}
    engine.advance("1 day")
    assert ready_tasks(engine, run_id) == {("paused", None), ("later", None)}
    engine.rows("update flowforge.run set cancel_requested_at = now()")
    assert ready_tasks(engine, run_id) == set()


def test_the_oracle_and_the_counters_agree_all_the_way(engine: Engine) -> None:
    engine.define(
        *(task("a"), task("b", "a"), task("c", "a"), task("d", "b", "c", when="any_failed")),
        *(task("m", "c", map="b"), task("e", "m", "d", when="none_failed")),
    )
    run_id = engine.trigger()
    dispatched: list[Any] = []
    for _ in range(20):
        engine.call("settle_finished")
        engine.call("expand_map")
        expected = ready_tasks(engine, run_id)
        engine.call("dispatch_ready")
        claims = engine.claim_next()
        assert {(claim.task, claim.map_index) for claim in claims} == expected
        dispatched += sorted(expected, key=str)
        engine.finish_all([claim for claim in claims if claim.task != "b"])
        for claim in claims:
            if claim.task == "b":
                engine.rows(
                    "select flowforge.finish_task_run(%s, 1, 'succeeded', '[7, 8]')", claim.task_run_id
                )
    assert dispatched == [("a", None), ("b", None), ("c", None), ("m", 0), ("m", 1), ("e", None)]
    assert engine.run_state(run_id) == "succeeded"


@pytest.mark.parametrize("run_id", [None, -1])
def test_the_oracle_knows_nothing_of_other_runs(engine: Engine, run_id: int | None) -> None:
    engine.start(task("a"))
    engine.drive(failing())
    assert engine.table("ready_tasks", run_id) == []
