"""Maps: expanded whole, joined in order, and expanded again by a retry."""

from typing import Any

import pytest
from psycopg.types.json import Jsonb

from tests.sql.helpers import Behaviour, Claim, Engine, Failure, task


def over(array: Any, element: Behaviour = lambda claim: claim.item) -> Behaviour:
    """Handlers: task a answers the array, elements of m what `element` says, others what they see."""

    def behave(claim: Claim) -> Any:
        if claim.task == "a":
            return array
        return element(claim) if claim.task == "m" else claim.upstream_outputs

    return behave


def elements(engine: Engine, run_id: int) -> list[Any]:
    return engine.rows(
        """select * from flowforge.task_run where run_id = %s and map_index is not null
        order by generation, map_index""",
        run_id,
    )


def expanded(engine: Engine, array: list[Any], **settings: Any) -> int:
    """A run whose map m over task a is expanded and dispatched; b follows it."""
    run_id = engine.start(task("a"), task("m", map="a", **settings), task("b", "m", when="all_done"))
    engine.work(over(array))
    engine.schedule()
    return run_id


def test_the_results_come_joined_in_the_order_of_the_items(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("m", map="a"), task("b", "m"))
    engine.schedule()
    engine.work(over([3, 1, 2]))
    engine.schedule()
    own = engine.task_run(run_id, "m")
    assert (own.state, own.stage, own.unmet, own.map_count) == ("pending", "blocked", 3, 3)
    claims = {claim.map_index: claim for claim in engine.claim_next()}
    for index in (2, 0, 1):
        assert engine.task_run(run_id, "m").state == "pending"
        engine.finish(claims[index], output=Jsonb(claims[index].item * 10))
        engine.schedule()
    assert (engine.task_run(run_id, "m").state, engine.call("task_output", run_id, "m")) == (
        "succeeded",
        [30, 10, 20],
    )
    assert engine.claim_one().upstream_outputs == {"m": [30, 10, 20]}


def test_an_element_sees_its_item_and_the_other_upstreams_but_not_the_array(engine: Engine) -> None:
    engine.start(task("a"), task("x"), task("m", "x", map="a", queue="q", priority=3))
    engine.work(lambda claim: ["one", None] if claim.task == "a" else "seen")
    engine.schedule()
    claims = engine.claim_next(queues=("q",))
    assert [(claim.item, claim.map_index, claim.task) for claim in claims] == [
        ("one", 0, "m"),
        (None, 1, "m"),
    ]
    for claim in claims:
        assert (claim.upstream_outputs, claim.upstream_states) == ({"x": "seen"}, {"x": "succeeded"})
        assert claim.handler == "w.m"


def test_items_that_are_null_are_items(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("m", map="a"))
    engine.drive(over([None, [], {}, "x"]))
    assert engine.call("task_output", run_id, "m") == [None, [], {}, "x"]


def test_one_map_a_call_and_whole(engine: Engine) -> None:
    engine.define(task("a"), task("m", map="a"), task("n", map="a"))
    run_id = engine.trigger()
    engine.call("dispatch_ready")
    engine.work(over([1, 2]))
    engine.call("settle_finished")
    for width in (2, 4):
        assert engine.call("expand_map") == 1
        assert len(elements(engine, run_id)) == width
        assert not engine.rows("select * from flowforge.violations()")
    with engine.changes_nothing():
        assert engine.call("expand_map") == 0


# Maps that do not expand


@pytest.mark.parametrize(
    ("output", "settings", "state", "error"),
    [
        ([], {}, "succeeded", None),
        (None, {}, "failed", "its output is null, not an array"),
        ({"0": 1}, {}, "failed", "its output is object, not an array"),
        ("[1]", {}, "failed", "its output is string, not an array"),
        (
            [1, 2, 3, 4],
            {},
            "failed",
            "its output has 4 elements; at most 3 are allowed (limit max_map_width)",
        ),
        ("fail", {"when": "all_done"}, "failed", "it is failed and has no output"),
        ("fail", {}, "skipped", None),
    ],
)
def test_a_map_that_cannot_be_expanded_says_why(
    engine: Engine, output: Any, settings: dict[str, str], state: str, error: str | None
) -> None:
    def behave(claim: Claim) -> Any:
        if claim.task == "a" and output == "fail":
            raise Failure("a failed")
        return output

    engine.call("set_limit", "max_map_width", 3)
    run_id = engine.start(task("a"), task("m", map="a", **settings), task("b", "m", when="all_done"))
    engine.drive(behave)
    own = engine.task_run(run_id, "m")
    assert (own.state, own.output) == (state, [] if state == "succeeded" else None)
    assert (error in own.error) if error else own.error is None
    assert not elements(engine, run_id)
    assert engine.states(run_id)["b"] == "succeeded"


def test_after_the_limit_is_raised_a_retry_expands_it(engine: Engine) -> None:
    engine.call("set_limit", "max_map_width", 3)
    run_id = engine.start(task("a"), task("m", map="a"))
    engine.drive(over([1, 2, 3, 4]))
    engine.call("set_limit", "max_map_width", 4)
    assert engine.call("retry_run", run_id) == 1
    engine.drive(over([]))
    assert engine.call("task_output", run_id, "m") == [1, 2, 3, 4]


@pytest.mark.parametrize("item", ["x" * 600, " " * 100_000], ids=["as it is", "stored compressed"])
def test_joined_results_have_a_limit(engine: Engine, item: str) -> None:
    engine.call("set_limit", "max_map_output_bytes", len(item) * 2)
    run_id = engine.start(task("a"), task("m", map="a"))
    engine.drive(over([1, 2, 3], lambda claim: item))
    own = engine.task_run(run_id, "m")
    assert (own.state, own.output) == ("failed", None)
    assert "limit max_map_output_bytes" in own.error
    engine.call("set_limit", "max_map_output_bytes", 10_000_000)
    assert engine.call("retry_run", run_id) == 1
    assert engine.run_state(run_id) == "succeeded"
    assert len(engine.call("task_output", run_id, "m")) == 3


# Failing elements


def test_a_map_fails_when_an_element_does_and_waits_for_the_others(engine: Engine) -> None:
    run_id = expanded(engine, [1, 2, 3])
    claims = engine.claim_next()
    engine.finish(claims[0], "failed", error="boom")
    engine.schedule()
    assert engine.task_run(run_id, "m").state == "pending"
    engine.finish_all(claims[1:])
    engine.schedule()
    own = engine.task_run(run_id, "m")
    assert (own.state, own.output, own.error) == (
        "failed",
        None,
        "1 of 3 elements did not succeed (1 failed); element 0: boom",
    )
    assert engine.task_run(run_id, "b").state == "ready"


def test_an_element_has_its_own_attempts(engine: Engine) -> None:
    run_id = expanded(engine, [1, 2], retry={"max_attempts": 2, "delay": 0})

    def second_time(claim: Claim) -> Any:
        if claim.item == 1 and claim.attempt == 1:
            raise Failure("not yet")
        return claim.attempt

    engine.drive(over(None, second_time))
    assert engine.call("task_output", run_id, "m") == [2, 1]


def test_a_retry_of_the_failed_part_resets_the_failed_elements_only(engine: Engine) -> None:
    run_id = expanded(engine, ["good", "bad", "good"])

    def picky(claim: Claim) -> Any:
        if claim.item == "bad":
            raise Failure("bad item")
        return claim.item

    engine.drive(over(None, picky))
    kept = [row for row in elements(engine, run_id) if row.state == "succeeded"]
    assert engine.call("retry_run", run_id) == 2  # the element and the map; b ran under all_done and stays
    own = engine.task_run(run_id, "m")
    assert (own.state, own.unmet, own.generation) == ("pending", 1, 0)
    engine.schedule()
    (claim,) = engine.claim_next()
    assert (claim.map_index, claim.item, claim.attempt) == (1, "bad", 2)
    engine.finish(claim, output=Jsonb("mended"))
    engine.drive()
    assert engine.call("task_output", run_id, "m") == ["good", "mended", "good"]
    assert [row for row in elements(engine, run_id) if row.map_index != 1] == kept


# Generations


@pytest.mark.parametrize("named", ["a", "m"])
def test_a_retry_from_a_named_task_expands_anew(engine: Engine, named: str) -> None:
    run_id = expanded(engine, [1, 2, 3])
    engine.drive(over(None))
    assert engine.call("retry_run", run_id, named) == (3 if named == "a" else 2)
    own = engine.task_run(run_id, "m")
    assert (own.generation, own.map_count, own.output) == (1, None, None)
    old = elements(engine, run_id)
    engine.drive(over([7], lambda claim: claim.item * 2))
    new = [2, 4, 6] if named == "m" else [14]
    assert engine.call("task_output", run_id, "m") == new
    assert engine.call("task_output", run_id, "b") == {"m": new}
    assert elements(engine, run_id)[:3] == old
    assert [row.generation for row in elements(engine, run_id)] == [0] * 3 + [1] * len(new)
    assert engine.run_state(run_id) == "succeeded"


def test_the_error_of_a_failed_map_shows_one_of_its_elements_in_short(engine: Engine) -> None:
    run_id = expanded(engine, [1, 2, 3])
    claims = engine.claim_next()
    engine.finish(claims[0])
    engine.finish(claims[1], "failed", error="x" * 1000 + "\nand a traceback")
    engine.finish(claims[2], "failed", error="another")
    engine.schedule()
    start = "2 of 3 elements did not succeed (2 failed); element 1: "
    assert engine.task_run(run_id, "m").error == start + "x" * 200


def test_successes_of_an_earlier_expansion_make_up_for_no_failure(engine: Engine) -> None:
    run_id = expanded(engine, [1, 2, 3])
    engine.drive(over(None))
    engine.call("retry_run", run_id, "m")
    engine.schedule()
    failed, *others = engine.claim_next()
    engine.finish(failed, "failed")
    engine.finish_all(others)
    engine.schedule()
    own = engine.task_run(run_id, "m")
    assert (own.state, own.error) == ("failed", "1 of 3 elements did not succeed (1 failed)")
    engine.drive(over(None))
    # Nor does its failure count in the next one.
    engine.call("retry_run", run_id, "m")
    engine.drive(over(None))
    assert engine.task_run(run_id, "m").state == "succeeded"


def test_a_retry_of_a_failed_upstream_expands_anew(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("x"), task("m", "x", map="a", when="any_succeeded"))

    def behave(claim: Claim) -> Any:
        if claim.task == "x" and claim.attempt == 1:
            raise Failure("x")
        if claim.task == "m" and not claim.upstream_outputs:
            raise Failure("no x")
        return [1] if claim.task == "a" else claim.upstream_outputs

    engine.drive(behave)
    assert engine.states(run_id) == {"a": "succeeded", "x": "failed", "m": "failed"}
    assert engine.call("retry_run", run_id) == 2
    engine.drive(behave)
    assert (engine.task_run(run_id, "m").generation, engine.run_state(run_id)) == (1, "succeeded")


@pytest.mark.parametrize("named", ["a", "m", None])
def test_a_map_under_way_is_not_retried(engine: Engine, named: str | None) -> None:
    run_id = expanded(engine, [1, 2])
    engine.finish(engine.claim_one(), "failed")
    engine.schedule()
    if named is None:
        assert engine.call("retry_run", run_id) == 0  # nothing has failed for good yet
    else:
        with engine.refuses("WF007", "'m'", "under way as a map"):
            engine.call("retry_run", run_id, named)


# Maps among others


def test_a_map_over_a_map(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("m", map="a"), task("n", "m", map="m"), task("b", "n", "m"))

    def behave(claim: Claim) -> Any:
        if claim.task == "a":
            return [1, 2, 3]
        return claim.item + 1 if claim.task in "mn" else claim.upstream_outputs

    engine.drive(behave)
    assert engine.call("task_output", run_id, "b") == {"m": [2, 3, 4], "n": [3, 4, 5]}
    assert engine.run_state(run_id) == "succeeded"


def test_cancel_takes_the_map_and_its_waiting_elements(engine: Engine) -> None:
    run_id = expanded(engine, [1, 2, 3])
    running = engine.claim_one()
    assert engine.call("cancel_run", run_id) is True
    assert [row.state for row in elements(engine, run_id)] == ["running", "cancelled", "cancelled"]
    assert engine.task_run(run_id, "m").state == "cancelled"
    assert engine.run_state(run_id) == "running"
    engine.finish(running)
    engine.schedule()
    assert engine.run_state(run_id) == "cancelled"
    # A retry takes up where it was left: what succeeded stays.
    assert engine.call("retry_run", run_id) == 4
    engine.drive(over(None))
    assert engine.call("task_output", run_id, "m") == [None, 2, 3]
    assert engine.run_state(run_id) == "succeeded"


def test_a_map_cancelled_before_it_expanded_is_retried(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("m", map="a"))
    engine.work(over([1, 2]))
    engine.call("settle_finished")
    assert engine.task_run(run_id, "m").stage == "expand"
    engine.call("cancel_run", run_id)
    assert engine.run_state(run_id) == "cancelled"
    assert engine.call("retry_run", run_id) == 1
    engine.drive(over(None))
    assert engine.call("task_output", run_id, "m") == [1, 2]
