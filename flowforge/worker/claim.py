"""What a claim gives a worker, and the calls that claim.

Values of jsonb travel as text and are decoded only where a handler asks for them: a payload that Python
refuses (a number of 5,000 digits, nesting beyond its stack) must fail its own task, not the statement that
claimed a hundred others.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID


class Claim(NamedTuple):
    """A claimed task run. `lease`, `time_limit` and `lease_left` are in seconds; `time_limit` counts from the
    claim, None means none; `lease_left` counts from the answer, and is never more than what is left of the
    time limit.

    `input`, `upstream_outputs`, `upstream_states` and `item` are JSON text, or None where the database has
    null.
    """

    task_run_id: int
    dispatch_id: UUID
    fencing_token: int
    attempt: int
    run_id: int
    workflow: str
    task: str
    handler: str
    input: str | None
    upstream_outputs: str | None
    upstream_states: str | None
    item: str | None
    map_index: int | None
    lease: float
    time_limit: float | None
    lease_left: float
    traceparent: str | None = None
    """Of whoever triggered the run, where it is asked for: by the statement TRACEPARENTS, apart."""

    def named(self) -> dict[str, object]:
        """The keys of a log line about it."""
        return {
            "run": self.run_id,
            "task_run": self.task_run_id,
            "workflow": self.workflow,
            "task": self.task,
            "handler": self.handler,
            "attempt": self.attempt,
            "token": self.fencing_token,
        }


class Answer(NamedTuple):
    """The answer to one position of a claim: `claim` is set exactly when `outcome` is claimed."""

    position: int
    outcome: str
    claim: Claim | None


_NAMES = """
    select c."position", c.outcome, c.task_run_id, c.dispatch_id, c.fencing_token, c.attempt, c.run_id,
           c.workflow, c.task, c.handler, """
_PAYLOAD = "c.input::text, c.upstream_outputs::text, c.upstream_states::text, c.item::text"
_TIMES = """, c.map_index,
           extract(epoch from c.lease)::float8, extract(epoch from c.time_limit)::float8,
           extract(epoch from c.lease_expires_at - clock_timestamp())::float8
"""
_WHOLE, _BARE = _NAMES + _PAYLOAD + _TIMES, _NAMES + "null, null, null, null" + _TIMES

_TASK_RUNS = """
    from flowforge.claim_task_runs(
        %s::bigint[], %s::uuid[], %s::text, %s::uuid, make_interval(secs => %s)) as c
    order by c."position"
"""
_NEXT = """
    from flowforge.claim_next(%s::text[], %s::text, %s::uuid, make_interval(secs => %s), %s::bigint) as c
    order by c."position"
"""

CLAIM_TASK_RUNS, CLAIM_NEXT = _WHOLE + _TASK_RUNS, _WHOLE + _NEXT

BARE_CLAIM_TASK_RUNS, BARE_CLAIM_NEXT = _BARE + _TASK_RUNS, _BARE + _NEXT
"""The same calls, of whose answers everything is taken but what handlers get, which may be much."""

TRACEPARENTS = """
    select t.traceparent from flowforge.traceparents(%s::bigint[], %s::bigint[]) as t order by t."position"
"""


def answers(rows: list[tuple[Any, ...]]) -> list[Answer]:
    """The rows of a claim."""
    return [
        Answer(row[0], row[1], Claim(*row[2:]) if row[1] == "claimed" else None)
        for row in rows
    ]  # fmt: skip
