"""Trigger rules: each, against every combination of what its upstreams can come to."""

import itertools
from typing import Any

import pytest

from tests.sql.helpers import Engine, failing, task

STATES = ("succeeded", "failed", "cancelled", "skipped")


def expected(rule: str, states: tuple[str, ...]) -> bool:
    """What the documentation of the rules says; cancelled counts as failed, skipped as neither."""
    failed = any(state in ("failed", "cancelled") for state in states)
    return {
        "all_succeeded": all(state == "succeeded" for state in states),
        "all_done": True,
        "any_failed": failed,
        "any_succeeded": "succeeded" in states,
        "none_failed": not failed,
    }[rule]


@pytest.mark.parametrize("rule", ["all_succeeded", "all_done", "any_failed", "any_succeeded", "none_failed"])
def test_a_rule_against_every_combination(engine: Engine, rule: str) -> None:
    """84 combinations of one to three upstreams, all of them in one run."""
    combinations = [each for size in (1, 2, 3) for each in itertools.product(STATES, repeat=size)]
    tasks = [task("ok")]
    upstream = {"succeeded": "ok", "failed": "bad", "skipped": "never", "cancelled": "gone"}
    # Several upstreams in one state are several tasks.
    for state, name in upstream.items():
        rules = {"when": "any_failed"} if state == "skipped" else {}
        tasks += [task(f"{name}{place}", "ok", **rules) for place in range(3)]
    judged = {f"j{number}": states for number, states in enumerate(combinations)}
    for name, states in judged.items():
        above = [f"{upstream[state]}{place}" for place, state in enumerate(states)]
        tasks.append(task(name, *above, when=rule))
    run_id = engine.start(*tasks)
    engine.work()
    engine.schedule()
    # Only a cancel makes an upstream cancelled, and takes the whole run: so the run is marked for a moment.
    for claim in engine.claim_next():
        if claim.task.startswith("gone"):
            engine.rows("update flowforge.run set cancel_requested_at = now()")
            engine.finish(claim, "cancelled")
            engine.rows("update flowforge.run set cancel_requested_at = null")
        else:
            engine.finish(claim, "failed" if claim.task.startswith("bad") else "succeeded")
    engine.drive()
    found = engine.states(run_id)
    assert {found[f"{name}0"] for name in upstream.values()} == set(STATES)
    got = {combination: found[name] for name, combination in judged.items()}
    assert got == {
        combination: "succeeded" if expected(rule, combination) else "skipped" for combination in combinations
    }


def test_a_rule_is_judged_only_when_every_upstream_is_settled(engine: Engine) -> None:
    run_id = engine.start(task("a"), task("b"), task("c", "a", "b", when="any_failed"))
    claims = engine.claim_next()
    engine.finish(claims[0], "failed")
    engine.schedule()
    assert engine.task_run(run_id, "c").state == "pending"
    engine.finish(claims[1])
    engine.schedule()
    assert engine.task_run(run_id, "c").state == "ready"


@pytest.mark.parametrize(
    ("tasks", "states"),
    [
        # A skip spreads by the rules of what is below it, not by itself.
        ([task("b", "a"), task("c", "b"), task("d", "c")], {"b": "skipped", "c": "skipped", "d": "skipped"}),
        ([task("b", "a"), task("c", "b", when="none_failed")], {"b": "skipped", "c": "succeeded"}),
        ([task("b", "a"), task("c", "b", when="all_done")], {"b": "skipped", "c": "succeeded"}),
        ([task("b", "a"), task("c", "b", when="any_failed")], {"b": "skipped", "c": "skipped"}),
        ([task("b", "a", when="any_failed"), task("c", "b")], {"b": "succeeded", "c": "succeeded"}),
        ([task("b", "a"), task("c", "a", "b", when="any_failed")], {"b": "skipped", "c": "succeeded"}),
    ],
)
def test_below_a_failed_task(engine: Engine, tasks: list[Any], states: dict[str, str]) -> None:
    run_id = engine.start(task("a"), *tasks)
    engine.drive(failing("a"))
    assert engine.states(run_id) == {"a": "failed", **states}
    assert engine.run_state(run_id) == "failed"
