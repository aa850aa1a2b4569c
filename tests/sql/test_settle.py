"""settle_finished: counting what has finished, and ending runs, once."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.services.database import Database
from tests.sql.helpers import Engine, Failure, failing, nothing, task


def test_a_finish_touches_nothing_but_its_own_row(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b", "a"))
    engine.work()
    run = engine.row("select * from flowforge.run")
    assert (engine.task_run(run_id, "a").stage, engine.task_run(run_id, "b").unmet) == ("unsettled", 1)
    assert (run.unsettled, run.finished_at) == (2, None)
    assert engine.call("settle_finished") == 1
    assert engine.value("select unsettled from flowforge.run") == 1
    assert (engine.task_run(run_id, "a").stage, engine.task_run(run_id, "b").stage) == ("settled", "eligible")
    with engine.changes_nothing():
        assert engine.call("settle_finished") == 0


def test_a_wide_join_waits_for_the_last_of_its_upstreams(engine: Engine) -> None:
    names = [f"t{i}" for i in range(300)]
    engine.define(*map(task, names), task("join", *names))
    run_id = engine.trigger()
    engine.call("configure_queue", "default", window_size=300)
    engine.schedule()
    claims = engine.claim_next()
    for size in (1, 150, 148):
        engine.finish_all([claims.pop() for _ in range(size)])
        engine.schedule()
        join = engine.task_run(run_id, "join")
        assert (join.state, join.unmet) == ("pending", len(claims))
    engine.finish_all(claims)
    engine.schedule()
    assert engine.task_run(run_id, "join").state == "ready"


def test_a_bounded_call_settles_no_more_than_it_is_told(engine: Engine) -> None:
    """Level by level: what does not fit stays unsettled and comes with the next call."""
    run_id = engine.start(
        task("a"), *(task(f"s{i}", "a") for i in range(4)), task("z", "s0", "s1", "s2", "s3")
    )
    engine.work(failing("a"))
    counts = []
    while count := engine.call("settle_finished", 2):
        counts.append(count)
        assert not engine.rows("select * from flowforge.violations()")
    assert counts == [2, 2, 2]
    assert engine.run_state(run_id) == "failed"


def test_several_runs_at_once(engine: Engine) -> None:
    engine.define(task("a"), task("b", "a"))
    runs = [engine.trigger() for _ in range(20)]
    engine.schedule()
    engine.work()
    assert engine.call("settle_finished", 7) == 7
    assert engine.call("settle_finished") == 13
    engine.drive()
    assert {engine.run_state(run) for run in runs} == {"succeeded"}


@pytest.mark.parametrize(
    ("failed", "state"), [((), "succeeded"), (("b",), "failed"), (("a",), "failed"), (("d",), "failed")]
)
def test_a_run_ends_when_everything_is_settled(engine: Engine, failed: tuple[str, ...], state: str) -> None:
    run_id = engine.start(task("a"), task("b", "a"), task("c", "a"), task("d", "b", "c", when="all_done"))
    while engine.run_state(run_id) == "running":
        assert engine.value("select finished_at from flowforge.run") is None
        engine.work(failing(*failed))
        engine.call("settle_finished")
        engine.call("dispatch_ready")
    assert engine.run_state(run_id) == state
    run = engine.row("select * from flowforge.run")
    assert (run.unsettled, run.finished_at) == (0, engine.value("select flowforge._clock()"))


def test_a_run_is_decided_once(engine: Engine) -> None:
    run_id = engine.start(task("a"))
    engine.drive()
    engine.advance("1 hour")
    with engine.changes_nothing():
        assert engine.call("settle_finished") == 0
        assert engine.call("cancel_run", run_id) is False


def test_the_result_of_a_run(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b", "a"), task("c", "a"), task("d", "c"), task("lone"))
    result = "select * from flowforge.run_result(%s)"
    early = engine.row(result, run_id)
    assert (early.state, early.finished_at, early.outputs, early.errors) == ("running", None, None, None)
    engine.drive(failing("c"))
    done = engine.row(result, run_id)
    assert (done.workflow, done.version, done.state) == ("w", 1, "failed")
    assert (done.outputs, done.errors) == ({"b": "b", "lone": "lone"}, {"c": "c failed"})
    assert [engine.call("task_output", run_id, name) for name in "abcd"] == ["a", "b", None, None]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("run_result", (None,)),
        ("run_result", (-1,)),
        ("task_output", (None, "a")),
        ("task_output", (-1, "a")),
        ("task_output", ("run", None)),
        ("task_output", ("run", "b")),
    ],
)
def test_asking_for_what_is_not_there(engine: Engine, function: str, arguments: tuple[object, ...]) -> None:
    run_id = engine.start(task("a"))
    with engine.refuses("WF002"):
        engine.call(function, *(run_id if each == "run" else each for each in arguments))


# Results that are too much for one answer


def test_outputs_that_are_too_much_together_are_left_out(engine: Engine) -> None:
    """A client has to learn how its run ended, whatever it made."""
    run_id = engine.start(task("a"), task("b"), task("c"))
    engine.call("set_limit", "max_claim_bytes", 1_048_576)

    def behave(claim: Any) -> Any:
        if claim.task == "c":
            raise Failure("no")
        return "x" * 600_000

    engine.drive(behave)
    row = engine.row("select * from flowforge.run_result(%s)", run_id)
    assert (row.state, row.outputs, row.errors) == ("failed", None, {"c": "no"})
    assert len(engine.call("task_output", run_id, "a")) == 600_000
    engine.call("set_limit", "max_claim_bytes", 2_000_000)
    assert engine.row("select * from flowforge.run_result(%s)", run_id).outputs.keys() == {"a", "b"}


def test_errors_that_are_too_much_together_are_cut(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b"))
    engine.call("set_limit", "max_claim_bytes", 1_048_576)
    engine.call("set_limit", "max_error_chars", 1_000_000)
    for claim in engine.claim_next():
        engine.finish(claim, "failed", error="é" * 300_000)
    engine.schedule()
    row = engine.row("select * from flowforge.run_result(%s)", run_id)
    assert (row.state, row.errors) == ("failed", {"a": "é" * 200, "b": "é" * 200})


# Damage in one run


def refuse_all_but(engine: Engine, run_id: int) -> None:
    """From now on the database does nothing for the task runs of other runs."""
    engine.sound = False
    engine.rows(
        """create function public.refuse() returns trigger language plpgsql as
            'begin raise exception ''damaged''; end'"""
    )
    engine.rows(
        f"""create trigger refuse before update or insert on flowforge.task_run for each row
            when (new.run_id <> {run_id}) execute function public.refuse()"""
    )


def test_however_many_maps_cannot_be_expanded_the_next_one_is(engine: Engine) -> None:
    engine.define(task("list"), task("m", map="list"))
    runs = [engine.trigger() for _ in range(102)]
    engine.call("configure_queue", "default", window_size=1000)
    engine.schedule()
    for claim in engine.claim_next():
        query = "select flowforge.finish_task_run(%s, %s, 'succeeded', '[1]')"
        engine.rows(query, claim.task_run_id, claim.fencing_token)
    engine.call("settle_finished")
    refuse_all_but(engine, runs[-1])
    assert any(engine.call("expand_map", one_by_one=True) for _ in range(100))


@pytest.mark.parametrize(
    "function", ["settle_finished", "cancel_leftovers", "expand_map", "reap_expired_leases"]
)
def test_what_cannot_be_moved_holds_up_nothing_else(engine: Engine, function: str) -> None:
    """Asked to take it one by one, the function warns of what raises and does the rest."""
    engine.define(task("a", lease=10), task("b", "a"), task("list"), task("m", map="list"))
    runs = [engine.trigger() for _ in range(3)]
    engine.schedule()
    for claim in engine.claim_next():
        if claim.task == "list":
            query = "select flowforge.finish_task_run(%s, %s, 'succeeded', '[1]')"
            engine.rows(query, claim.task_run_id, claim.fencing_token)
        elif function == "settle_finished":
            engine.finish(claim)
    if function == "expand_map":
        engine.call("settle_finished")
    elif function == "cancel_leftovers":
        asked = "cancel_requested_at = flowforge._clock(), cancel_sweep_at = flowforge._clock()"
        engine.rows(f"update flowforge.run set {asked}")
    engine.advance("11 s")
    engine.rows("update flowforge.scheduler set reaper_ticked_at = flowforge._clock()")
    # Something of the first run that the database will not do.
    engine.sound = False
    engine.rows(
        """create function public.refuse() returns trigger language plpgsql as
            'begin raise exception ''damaged''; end'"""
    )
    engine.rows(
        f"""create trigger refuse before update or insert on flowforge.task_run for each row
            when (new.run_id = {runs[0]}) execute function public.refuse()"""
    )
    with engine.refuses("P0001"):
        engine.call(function)
    assert engine.call(function, one_by_one=True) > 0
    if function == "expand_map":
        expanded = "select run_id from flowforge.task_run where map_index = 0"
        (one,) = engine.rows(expanded)
        assert one.run_id in runs[1:]
    elif function == "settle_finished":
        done = "select distinct run_id from flowforge.task_run where stage = 'settled' order by 1"
        assert [row.run_id for row in engine.rows(done)] == runs[1:]
    elif function == "cancel_leftovers":
        done = "select distinct run_id from flowforge.task_run where state = 'cancelled' order by 1"
        assert [row.run_id for row in engine.rows(done)] == runs[1:]
    else:
        done = "select run_id from flowforge.task_run where reaps = 1 order by 1"
        assert [row.run_id for row in engine.rows(done)] == runs[1:]


@pytest.mark.parametrize(("runs", "tasks", "max_rows"), [(1, 1500, 1000), (10, 15, 100)])
def test_wide_runs_do_not_hold_up_the_hops_of_others(
    engine: Engine, runs: int, tasks: int, max_rows: int
) -> None:
    """Each run has its share of a call, one that is wide and each of many."""
    engine.define(*(task(f"t{i}") for i in range(tasks)), name="wide")
    for _ in range(runs):
        engine.trigger("wide")
    engine.call("configure_queue", "default", window_size=10_000)
    engine.define(task("a"), task("b", "a"))
    narrow = engine.trigger()
    engine.schedule()
    while engine.work():
        pass
    engine.call("settle_finished", max_rows)
    assert engine.task_run(narrow, "b").stage == "eligible"


def test_what_others_leave_of_their_shares_goes_to_a_wide_run(engine: Engine) -> None:
    engine.define(*(task(f"t{i}") for i in range(100)), name="wide")
    engine.trigger("wide")
    engine.define(task("a"))
    for _ in range(9):
        engine.trigger()
    engine.call("configure_queue", "default", window_size=1000)
    engine.schedule()
    engine.work()
    assert [engine.call("settle_finished", 50) for _ in range(3)] == [50, 50, 9]


def test_however_many_leases_cannot_be_taken_back_the_next_one_is(engine: Engine) -> None:
    engine.define(task("a", lease=10))
    runs = [engine.trigger() for _ in range(3)]
    engine.schedule()
    engine.claim_next()
    engine.advance("11 s")
    engine.rows("update flowforge.scheduler set reaper_ticked_at = flowforge._clock()")
    refuse_all_but(engine, runs[-1])
    assert any(engine.call("reap_expired_leases", 1, one_by_one=True) for _ in range(100))


# Isolation: what locks and then reads needs to see what was committed meanwhile.

NEEDS_READ_COMMITTED = {
    *("settle_finished", "expand_map", "cancel_run", "cancel_leftovers", "retry_run"),
    *("fail_undeliverable", "sweep_outbox"),
}


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_only_what_locks_and_then_reads_refuses_another_isolation_level(
    committing: Engine, level: str
) -> None:
    run_id = committing.start(task("a"), task("b"))
    claim = committing.claim_one()
    held = (claim.task_run_id, claim.fencing_token)
    spec = '{"name": "x", "tasks": [{"name": "a"}]}'
    calls = {
        "settle_finished": (),
        "expand_map": (),
        "cancel_run": (run_id,),
        "cancel_leftovers": (),
        "retry_run": (run_id,),
        "define_workflow": (spec,),
        "trigger": ("w",),
        "run_result": (run_id,),
        "task_output": (run_id, "a"),
        "dispatch_ready": (),
        "reap_expired_leases": (),
        "redispatch_lost": (),
        "fail_undeliverable": (),
        "sweep_outbox": (),
        "fetch_outbox": (10,),
        "claim_next": (["default"], "w", "00000000-0000-0000-0000-000000000001", "30 s"),
        "renew_leases": ([held[0]], [held[1]], "30 s"),
        "assert_lease": held,
        "report_progress": (*held, 0.5),
        "finish_task_run": (*held, "succeeded"),
        "release_task_run": (*held, "shutdown"),
        "pause_queue": ("default",),
        "prune": ("0",),
        "violations": (),
    }
    refused = set()
    for function, arguments in calls.items():
        with committing.connection.transaction():
            committing.rows(f"set transaction isolation level {level}")
            if function in NEEDS_READ_COMMITTED:
                with committing.refuses("WF008", function, level):
                    committing.table(function, *arguments)
                refused.add(function)
            else:
                committing.table(function, *arguments)
    assert refused == NEEDS_READ_COMMITTED


def test_nothing_to_do(engine: Engine) -> None:
    with engine.changes_nothing():
        assert engine.call("settle_finished") == 0
        assert engine.call("expand_map") == 0
        assert engine.call("cancel_leftovers") == 0
        assert engine.work(nothing) == 0


def test_a_row_that_somebody_has_locked_holds_up_nothing_else(db: Database, committing: Engine) -> None:
    """A repeated finish in a transaction that stays open keeps the lock of what it has passed over."""
    committing.define(task("a"))
    runs = [committing.trigger() for _ in range(3)]
    committing.schedule()
    claims = committing.claim_next()
    finish = "select flowforge.finish_task_run(%s, %s, 'succeeded')"
    for claim in claims:
        committing.finish(claim)
    with db.connect(autocommit=False) as stranger:
        held = "select from flowforge.task_run where task_run_id = %s for update"
        stranger.execute(held, (claims[0].task_run_id,))
        stranger.execute(finish, (claims[0].task_run_id, claims[0].fencing_token))
        committing.rows("set lock_timeout = '10 s'")
        assert committing.call("settle_finished") == 2
        assert [committing.run_state(run) for run in runs].count("succeeded") == 2
    assert committing.call("settle_finished") == 1


def test_what_would_be_given_too_much_fails_and_says_so(engine: Engine) -> None:
    """No answer of a claim could hold it: it would be chosen and fail for ever."""
    engine.call("set_limit", "max_claim_bytes", 1024 * 1024)
    parts = [task(f"part{i}") for i in range(3)]
    names = [each["name"] for each in parts]
    run_id = engine.start(
        *parts, task("join", *names), task("few", *names[:2]), task("after", "join", when="any_failed")
    )
    engine.drive(lambda claim: "x" * 400_000 if claim.task.startswith("part") else claim.task)
    assert engine.states(run_id) == {
        **dict.fromkeys(names, "succeeded"),
        "join": "failed",
        "few": "succeeded",
        "after": "succeeded",
    }
    assert "at most 1048576 are allowed (limit max_claim_bytes)" in engine.task_run(run_id, "join").error
    engine.call("set_limit", "max_claim_bytes", 2 * 1024 * 1024)
    assert engine.call("retry_run", run_id) == 1
    engine.drive()
    assert engine.states(run_id)["join"] == "succeeded"


def test_the_size_of_what_grows_as_text_is_that_of_the_text(engine: Engine) -> None:
    engine.call("set_limit", "max_payload_bytes", 50_000)
    engine.start(task("a"))
    with engine.refuses("WF005", "at most 50000"):
        engine.finish(engine.claim_one(), output=Jsonb("\x01" * 10_000))
