"""What sessions do in the scenarios, and the workflows that they do it to."""

import uuid
from typing import Any

from psycopg.types.json import Jsonb

from tests.sql.stepping import COMMIT, Laboratory, Program, SqlError, call, table

WORKFLOWS: dict[str, list[dict[str, Any]]] = {
    "one": [{"name": "a"}],
    "two": [{"name": "a"}, {"name": "b"}],
    "three": [{"name": "a"}, {"name": "b"}, {"name": "c"}],
    "chain": [{"name": "a"}, {"name": "b", "after": ["a"]}],
    "join": [{"name": "b"}, {"name": "c"}, {"name": "d", "after": ["b", "c"]}],
    "again": [{"name": "a", "retry": {"max_attempts": 2, "delay": 0}}, {"name": "b", "after": ["a"]}],
    "map": [{"name": "a"}, {"name": "m", "map": "a", "after": ["a"]}, {"name": "z", "after": ["m"]}],
    "maps": [
        {"name": "a"},
        {"name": "b"},
        {"name": "m", "map": "a", "after": ["a"]},
        {"name": "z", "after": ["b", "m"]},
    ],
    "rules": [
        {"name": "b"},
        {"name": "c"},
        {"name": "bad", "after": ["b", "c"], "when": "any_failed"},
        {"name": "good", "after": ["b", "c"]},
        {"name": "end", "after": ["bad", "good"], "when": "none_failed"},
    ],
    "limited": [{"name": "a", "time_limit": 60}],
    "prompt": [{"name": "a", "start_within": 60}],
    "late": [{"name": "a"}, {"name": "b"}, {"name": "c", "start_within": 60}],
    "early": [{"name": "a", "start_within": 60}, {"name": "b"}, {"name": "c"}],
    "soon": [{"name": "a", "start_within": 60}, {"name": "b", "start_within": 60}],
    # One of every state; see crossing.py.
    "crossing": [
        {"name": "a", "start_within": 30},
        *({"name": each} for each in ("b", "p", "q", "c", "d", "u")),
        {"name": "e", "after": ["d"], "when": "all_done"},
        {"name": "m", "map": "u", "after": ["u"]},
        {"name": "x", "after": ["u"]},
    ],
    "fragile": [{"name": "a", "max_reaps": 0}, {"name": "b", "after": ["a"], "when": "all_done"}],
}


def define_workflows(laboratory: Laboratory) -> None:
    for name, tasks in WORKFLOWS.items():
        laboratory.define(name, *tasks)


def refusable(program: Program, *sqlstates: str) -> Program:
    """A program that may be refused for these reasons; then its result is the SQLSTATE."""
    try:
        return (yield from program)
    except SqlError as error:
        if error.sqlstate not in sqlstates:
            raise
        return error.sqlstate


def claim(row: Any, worker: str = "w1", claim_id: uuid.UUID | None = None, *, lease: str = "30 s") -> Program:
    """Claim a task run by its message."""
    claim_id = claim_id or uuid.uuid4()
    return (yield from call("claim_task_run", row.task_run_id, row.dispatch_id, worker, claim_id, lease))


def batch_claim(rows: list[Any], worker: str = "w1", claim_id: uuid.UUID | None = None) -> Program:
    """Claim task runs by their messages in one call, in this order; the outcomes."""
    ids, dispatch_ids = [each.task_run_id for each in rows], [each.dispatch_id for each in rows]
    claim_id = claim_id or uuid.uuid4()
    answers = yield from table("claim_task_runs", ids, dispatch_ids, worker, claim_id, "30 s")
    return [each.outcome for each in answers]


def claim_next(count: int = 1, claim_id: uuid.UUID | None = None) -> Program:
    """Claim what is next in line, without a message; the rows."""
    return (yield from table("claim_next", ["default"], "w1", claim_id or uuid.uuid4(), "30 s", count))


def finish(
    claimed: Any, outcome: str = "succeeded", output: Any = None, *, retryable: bool = True
) -> Program:
    return call(
        *("finish_task_run", claimed.task_run_id, claimed.fencing_token, outcome, Jsonb(output), None),
        retryable,
    )


def finish_and_settle(claimed: Any) -> Program:
    """Finish in one transaction, and have a scheduler settle in the next."""
    answer = yield from finish(claimed)
    yield COMMIT
    yield from call("settle_finished")
    return answer


def batch_finish(claims: list[Any]) -> Program:
    """Finish executions in one call, in this order; the answers."""
    count = len(claims)
    answers = yield from table(
        *("finish_task_runs", [each.task_run_id for each in claims], [each.fencing_token for each in claims]),
        *(["succeeded"] * count, [Jsonb(None)] * count, [""] * count, [True] * count),
    )
    return [each.answer for each in answers]


def renew(claimed: Any) -> Program:
    """Renew one lease; held, cancel, busy or lost."""
    renewed = yield from call("renew_leases", [claimed.task_run_id], [claimed.fencing_token], "30 s")
    return renewed.outcome


def release(claimed: Any, reason: str) -> Program:
    return call("release_task_run", claimed.task_run_id, claimed.fencing_token, reason)


def assert_and_finish(claimed: Any) -> Program:
    """A handler's own transaction: its effect in the database, and its finish, under a live lease."""
    yield from call("assert_lease", claimed.task_run_id, claimed.fencing_token)
    yield f"insert into flowforge_test.effect values ({claimed.task_run_id})"
    return (yield from finish(claimed))


def publish() -> Program:
    """A publisher's transaction: fetch, have the broker confirm, mark; the ids of the orders."""
    orders = yield from table("fetch_outbox", 100)
    ids = [each.outbox_id for each in orders]
    if ids:
        yield from call("mark_published", ids)
    return ids
