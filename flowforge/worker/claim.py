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


class Answer(NamedTuple):
    """The answer to one position of a claim: `claim` is set exactly when `outcome` is claimed."""

    position: int
    outcome: str
    claim: Claim | None


_COLUMNS = """
    select c."position", c.outcome, c.task_run_id, c.dispatch_id, c.fencing_token, c.attempt, c.run_id,
           c.workflow, c.task, c.handler, c.input::text, c.upstream_outputs::text, c.upstream_states::text,
           c.item::text, c.map_index,
           extract(epoch from c.lease)::float8, extract(epoch from c.time_limit)::float8,
           extract(epoch from c.lease_expires_at - clock_timestamp())::float8
"""

CLAIM_TASK_RUNS = f"""{_COLUMNS}
    from flowforge.claim_task_runs(
        %s::bigint[], %s::uuid[], %s::text, %s::uuid, make_interval(secs => %s)) as c
    order by c."position"
"""

HOLD_TASK_RUNS = """
    select c.task_run_id
    from flowforge.claim_task_runs(
        %s::bigint[], %s::uuid[], %s::text, %s::uuid, make_interval(secs => %s)) as c
"""
"""The same call, for the leases of what the claim holds already."""

_NEXT = """
    from flowforge.claim_next(%s::text[], %s::text, %s::uuid, make_interval(secs => %s), %s::bigint) as c
    order by c."position"
"""

CLAIM_NEXT = _COLUMNS + _NEXT

WHAT_CLAIM_NEXT_HOLDS = "select c.task_run_id, c.dispatch_id" + _NEXT
"""The same call, of whose answer only the names are taken."""

TRACEPARENTS = """
    select t.traceparent from flowforge.traceparents(%s::bigint[], %s::bigint[]) as t order by t."position"
"""


def answers(rows: list[tuple[Any, ...]]) -> list[Answer]:
    """The rows of a claim."""
    return [
        Answer(row[0], row[1], Claim(*row[2:]) if row[1] == "claimed" else None)
        for row in rows
    ]  # fmt: skip
