"""finish_task_run and finish_task_runs: accepted once, under the token, or nothing."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.sql.helpers import Claim, Engine, task

RETRIED = {"max_attempts": 3, "delay": 1, "jitter": 0}


def finish_batch(engine: Engine, *rows: tuple[Any, ...]) -> list[str]:
    """Rows of task run id, token, outcome, output, error, retryable; answers by position."""
    answers = engine.table("finish_task_runs", *(list(column) for column in zip(*rows, strict=True)))
    assert [each.position for each in answers] == list(range(1, len(rows) + 1))
    assert [each.task_run_id for each in answers] == [row[0] for row in rows]
    return [each.answer for each in answers]


def attempts(engine: Engine) -> list[Any]:
    return engine.rows("select * from flowforge.attempt order by fencing_token")


@pytest.mark.parametrize("output", [None, 0, "text", [1], {"a": {}}])
def test_success_stores_the_output(engine: Engine, output: Any) -> None:
    run_id = engine.start(task("a"))
    assert engine.finish(engine.claim_one(), output=Jsonb(output), error="ignored") == "accepted"
    row = engine.task_run(run_id, "a")
    assert (row.state, row.stage, row.output, row.error) == ("succeeded", "unsettled", output, None)
    assert (row.claim_id, row.lease_owner, row.lease_expires_at, row.deadline) == (None,) * 4
    assert (row.attempt, row.last_owner) == (1, "worker")
    assert not attempts(engine)
    assert engine.call("task_output", run_id, "a") == output


def test_the_output_of_an_unknown_run_is_refused(engine: Engine) -> None:
    with engine.refuses("WF002"):
        engine.call("task_output", 0, "a")


def test_success_without_an_output_is_json_null(engine: Engine) -> None:
    engine.start(task("a"))
    assert engine.finish(engine.claim_one()) == "accepted"
    assert engine.value("select output::text from flowforge.task_run") == "null"


def test_failure_starts_the_next_attempt_while_the_budget_lasts(engine: Engine) -> None:
    run_id = engine.start(task("a", retry=RETRIED))
    dispatch_ids = set()
    for attempt, delay in [(1, 1), (2, 2)]:
        claim = engine.claim_one()
        dispatch_ids.add(claim.dispatch_id)
        before = engine.task_run(run_id, "a").started_at
        assert engine.finish(claim, "failed", error=f"error {attempt}", output=Jsonb("ignored")) == "accepted"
        row = engine.task_run(run_id, "a")
        assert (row.state, row.stage, row.attempt, row.dispatch_id) == (
            "pending",
            "delayed",
            attempt + 1,
            None,
        )
        assert (row.error, row.output, row.finished_at) == (f"error {attempt}", None, None)
        assert (row.available_at - before).total_seconds() == delay
        engine.advance(f"{delay} s")
        engine.schedule()
    claim = engine.claim_one()
    assert (claim.attempt, claim.fencing_token, claim.dispatch_id in dispatch_ids) == (3, 3, False)
    assert engine.finish(claim, "failed", error="error 3") == "accepted"
    row = engine.task_run(run_id, "a")
    assert (row.state, row.stage, row.attempt, row.error) == ("failed", "unsettled", 3, "error 3")
    recorded = [(each.attempt, each.fencing_token, each.outcome, each.error) for each in attempts(engine)]
    assert recorded == [(n, n, "failed", f"error {n}") for n in (1, 2, 3)]
    assert {each.answered for each in attempts(engine)} == {True}


def test_failure_that_is_not_retryable_is_final(engine: Engine) -> None:
    run_id = engine.start(task("a", retry=RETRIED))
    assert (
        engine.finish(engine.claim_one(), "failed", error="cannot be stored", retryable=False) == "accepted"
    )
    assert engine.task_run(run_id, "a").state == "failed"


@pytest.mark.parametrize("outcome", ["failed", "cancelled", "succeeded"])
def test_in_a_cancelled_run_only_a_success_still_counts(engine: Engine, outcome: str) -> None:
    run_id = engine.start(task("a", retry=RETRIED))
    claim = engine.claim_one()
    engine.call("cancel_run", run_id)
    assert engine.finish(claim, outcome, error="stopped") == "accepted"
    assert engine.task_run(run_id, "a").state == ("succeeded" if outcome == "succeeded" else "cancelled")
    engine.schedule()
    assert engine.run_state(run_id) == ("succeeded" if outcome == "succeeded" else "cancelled")


def test_cancelled_is_refused_in_any_other_run_and_nothing_of_the_batch_is_done(engine: Engine) -> None:
    engine.start(task("a"), task("b"))
    a, b = engine.claim_next()
    with engine.refuses("WF007", f"task run {b.task_run_id}"):
        finish_batch(
            engine,
            (a.task_run_id, a.fencing_token, "succeeded", None, None, True),
            (b.task_run_id, b.fencing_token, "cancelled", None, None, True),
        )


# Repeats and stale callers


def retried_since(engine: Engine, claim: Claim) -> None:
    engine.schedule()
    engine.call("retry_run", claim.run_id, "a")


def next_attempt_claimed_since(engine: Engine, claim: Claim) -> None:
    engine.advance("1 min")
    engine.schedule()
    engine.claim_next()


def nothing_since(engine: Engine, claim: Claim) -> None:
    pass


@pytest.mark.parametrize(
    ("outcome", "since"),
    [
        ("succeeded", nothing_since),
        ("succeeded", retried_since),
        ("failed", nothing_since),
        ("failed", next_attempt_claimed_since),
    ],
)
def test_a_repeated_finish_is_told_so_and_changes_nothing(engine: Engine, outcome: str, since: Any) -> None:
    engine.start(task("a", retry=RETRIED))
    claim = engine.claim_one()
    assert engine.finish(claim, outcome, error="boom") == "accepted"
    since(engine, claim)
    with engine.changes_nothing():
        for again in (outcome, "succeeded", "failed"):
            assert engine.finish(claim, again, output=Jsonb("other"), error="other") == "repeated"


def reaped(engine: Engine, claim: Claim) -> None:
    engine.advance("31 s")
    assert engine.reap() == 1


def reaped_and_claimed(engine: Engine, claim: Claim) -> None:
    reaped(engine, claim)
    engine.claim_next()


def timed_out(engine: Engine, claim: Claim) -> None:
    engine.advance("101 s")
    assert engine.reap() == 1


def released(engine: Engine, claim: Claim) -> None:
    engine.call("release_task_run", claim.task_run_id, claim.fencing_token, "shutdown")


@pytest.mark.parametrize("event", [reaped, reaped_and_claimed, timed_out, released])
@pytest.mark.parametrize("outcome", ["succeeded", "failed", "cancelled"])
def test_a_token_that_holds_nothing_is_fenced_and_changes_nothing(
    engine: Engine, event: Any, outcome: str
) -> None:
    engine.start(task("a", retry=RETRIED, time_limit=100))
    claim = engine.claim_one()
    event(engine, claim)
    with engine.changes_nothing():
        assert engine.finish(claim, outcome, output=Jsonb(1), error="late") == "fenced"


@pytest.mark.parametrize("token", [0, 2, -1, 2**63 - 1])
def test_a_token_never_handed_out_is_fenced(engine: Engine, token: int) -> None:
    engine.start(task("a"))
    claim = engine.claim_one()
    with engine.changes_nothing():
        assert engine.call("finish_task_run", claim.task_run_id, token, "succeeded") == "fenced"
        assert engine.call("finish_task_run", claim.task_run_id + 1, 1, "succeeded") == "fenced"


def test_after_the_leases_end_but_before_the_reaper_it_is_accepted(engine: Engine) -> None:
    engine.start(task("a", time_limit=40))
    claim = engine.claim_one()
    engine.advance("1 hour")
    assert engine.finish(claim) == "accepted"
    assert engine.reap() == 0


def test_a_join_counts_each_upstream_once(engine: Engine) -> None:
    """HD-03."""
    run_id = engine.start(task("a"), task("b"), task("c"), task("join", "a", "b", "c"))
    old = engine.claim_one()
    released(engine, old)
    a, b, c = engine.claim_next()
    for claim, unmet in [(a, 2), (b, 1)]:
        assert engine.finish(claim) == "accepted"
        engine.schedule()
        with engine.changes_nothing():
            assert (engine.finish(claim), engine.finish(old)) == ("repeated", "fenced")
            assert engine.call("settle_finished") == 0
        assert (engine.task_run(run_id, "join").state, engine.task_run(run_id, "join").unmet) == (
            "pending",
            unmet,
        )
    engine.finish(c)
    engine.schedule()
    assert engine.task_run(run_id, "join").state == "ready"


# Batches


def test_a_batch_of_every_kind(engine: Engine) -> None:
    names = [*("succeeds", "fails", "retries", "stale", "done", "twice")]
    run_id = engine.start(*(task(name, retry=RETRIED if name == "retries" else {}) for name in names))
    claims = {claim.task: claim for claim in engine.claim_next()}
    ids = {name: (claims[name].task_run_id, claims[name].fencing_token) for name in names}
    engine.finish(claims["done"], output=Jsonb("first"))
    answers = finish_batch(
        engine,
        (*ids["twice"], "succeeded", Jsonb("one"), None, True),
        (*ids["retries"], "failed", None, "again", True),
        (ids["stale"][0], 0, "succeeded", Jsonb("no"), None, True),
        (*ids["twice"], "failed", None, "two", True),
        (*ids["succeeds"], "succeeded", Jsonb({"x": 1}), None, True),
        (-1, 1, "failed", None, None, False),
        (*ids["done"], "failed", None, "second", True),
        (*ids["fails"], "failed", None, "boom", True),
    )
    accepted, repeated, fenced = "accepted", "repeated", "fenced"
    assert answers == [accepted, accepted, fenced, repeated, accepted, fenced, repeated, accepted]
    found = {name: engine.task_run(run_id, name) for name in names}
    assert {name: (row.state, row.output, row.error) for name, row in found.items()} == {
        "succeeds": ("succeeded", {"x": 1}, None),
        "fails": ("failed", None, "boom"),
        "retries": ("pending", None, "again"),
        "stale": ("running", None, None),
        "done": ("succeeded", "first", None),
        "twice": ("succeeded", "one", None),
    }


def test_an_empty_batch(engine: Engine) -> None:
    assert engine.table("finish_task_runs", [], [], [], [], [], []) == []


# How the back-off spreads and grows: HD-30


def test_five_hundred_failures_do_not_come_back_together(engine: Engine) -> None:
    engine.define(task("a", retry={"max_attempts": 2, "delay": 40}))
    engine.call("configure_queue", "default", window_size=500)
    engine.call("trigger_many", "w", [Jsonb({})] * 500)
    engine.schedule()
    assert set(engine.finish_all(engine.claim_next(), "failed")) == {"accepted"}
    delays = [
        row.delay.total_seconds()
        for row in engine.rows("select available_at - flowforge._clock() as delay from flowforge.task_run")
    ]
    assert len(delays) == 500
    assert min(delays) >= 40
    assert max(delays) <= 50
    assert max(delays) - min(delays) >= 0.2 * 40


@pytest.mark.parametrize(
    ("failures", "retry", "delay"),
    [
        (0, {"delay": 3}, 3),
        (1, {"delay": 3}, 6),
        (3, {"delay": 3, "backoff": 1.5}, 10.125),
        (4, {"delay": 3, "backoff": 1}, 3),
        (5, {"delay": 3, "max_delay": 50}, 50),
        (0, {"delay": 3, "max_delay": 2}, 2),
        (0, {"delay": 0}, 0),
        # Far beyond what the power of a double can hold.
        (199, {"delay": 3}, 3600),
        (199, {"delay": 31536000, "backoff": 100, "max_delay": 31536000}, 31536000),
        (999_997, {"delay": 1, "backoff": 100}, 3600),
    ],
)
def test_the_back_off_grows_and_is_capped(
    engine: Engine, failures: int, retry: dict[str, Any], delay: float
) -> None:
    run_id = engine.start(task("a", retry={"max_attempts": 1_000_000, "jitter": 0, **retry}))
    engine.rows("update flowforge.task_run set failures = %s, attempt = %s", failures, failures + 1)
    engine.finish(engine.claim_one(), "failed")
    row = engine.task_run(run_id, "a")
    waits = engine.value("select available_at - flowforge._clock() from flowforge.task_run")
    assert (row.state, row.attempt, waits.total_seconds()) == ("pending", failures + 2, delay)


# What is refused


def test_a_long_error_is_cut(engine: Engine) -> None:
    engine.call("set_limit", "max_error_chars", 100)
    run_id = engine.start(task("a"))
    engine.finish(engine.claim_one(), "failed", error="ä" * 101)
    assert engine.task_run(run_id, "a").error == "ä" * 100 + " [cut off]"


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"task_run_id": None}, "WF001"),
        ({"fencing_token": None}, "WF001"),
        ({"outcome": None}, "WF001"),
        ({"outcome": "skipped"}, "WF001"),
        ({"outcome": "Succeeded"}, "WF001"),
        ({"retryable": None}, "WF001"),
        ({"output": Jsonb("x" * 2000)}, "WF005"),
    ],
)
def test_wrong_arguments_are_refused(engine: Engine, wrong: dict[str, Any], code: str) -> None:
    engine.start(task("a"))
    claim = engine.claim_one()
    engine.call("set_limit", "max_payload_bytes", 1024)
    good = {"task_run_id": claim.task_run_id, "fencing_token": claim.fencing_token, "outcome": "succeeded"}
    with engine.refuses(code):
        engine.call("finish_task_run", **{**good, **wrong})


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize("wrong", [None, [], [1, 2]])
def test_arrays_that_do_not_belong_together_are_refused(engine: Engine, position: int, wrong: Any) -> None:
    engine.start(task("a"))
    claim = engine.claim_one()
    arrays: list[Any] = [[claim.task_run_id], [claim.fencing_token], ["succeeded"], [None], [None], [True]]
    values = {1: [1, 2], 2: ["failed"] * 2, 3: [Jsonb(1)] * 2, 4: ["x"] * 2, 5: [True] * 2}
    arrays[position] = values.get(position, wrong) if wrong == [1, 2] else wrong
    with engine.refuses("WF001"):
        engine.table("finish_task_runs", *arrays)


def test_one_bad_element_fails_the_batch_whole(engine: Engine) -> None:
    """So that its caller repeats it one by one, and only the bad one fails."""
    engine.start(task("a"), task("b"))
    a, b = engine.claim_next()
    good = (a.task_run_id, a.fencing_token, "succeeded", Jsonb(1), None, True)
    with engine.refuses("WF001"):
        finish_batch(engine, good, (b.task_run_id, b.fencing_token, "done", None, None, True))
    assert finish_batch(engine, good) == ["accepted"]
