"""Looking at a run that is under way, again and again, through outages of the database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowforge import streams
from flowforge.cli.common import ANSWER_LIMIT, command, select
from flowforge.errors import DatabaseUnavailable, FlowForgeError, NotFound, WaitTimeout

if TYPE_CHECKING:
    from flowforge import db

_POLL = 0.2
_LONGEST_PAUSE = 5.0  # while the database is away
_LAST_LOOK = 2.0  # seconds that a look may take beyond the end of the waiting
ATTEMPTS_TOLD = 5
"""Failed attempts at the elements of one map that are told one by one."""

_RUN = """
    select run_id, workflow, version, state, duration, task_runs, succeeded, failed, cancelled, skipped
    from flowforge.run_status where run_id = %s
"""
ELEMENTS = """
    select m.task, count(*) filter (where m.finished_at is not null) as done,
        count(*) filter (where m.state = 'failed') as failed,
        count(*) filter (where m.state = 'running') as running,
        min(m.waits) filter (where m.state in ('pending', 'ready')) as next_waits,
        min(m.available_at) filter (where m.state in ('pending', 'ready')) as next_at,
        sum(m.attempt - 1 + m.reaps)::bigint as repeated
    from flowforge.task_run_status m
    where m.run_id = %s and m.map_index is not null and not m.superseded group by m.task
"""
"""How far the maps of a run are."""
_TASKS = f"""
    select s.task_run_id, s.task, s.state, s.waits, s.attempt, s.max_attempts, s.duration, s.worker,
        s.progress, s.progress_message, s.map_count, s.unmet, s.available_at, s.fencing_token, s.error,
        e.done, e.failed, e.running, e.next_waits, e.next_at, e.repeated
    from flowforge.task_run_status s
    left join ({ELEMENTS}) e on e.task = s.task
    where s.run_id = %s and s.map_index is null order by s.task_run_id
"""  # noqa: S608 - a constant
# The last ones, at each task and at the elements of each map, of those attempts that another one follows.
_ATTEMPTS = f"""
    select f.* from (
        select a.task_run_id, a.task, a.map_index, a.attempt, a.fencing_token, a.outcome, a.error, a.ended_at,
            l.waiting,
            case when l.waiting then s.available_at - flowforge._reading() end as again_in,
            row_number() over (partition by a.task, a.map_index is null order by a.ended_at desc) as place
        from flowforge.attempt_status a
        join flowforge.task_run_status s on s.task_run_id = a.task_run_id
        cross join lateral (
            select s.state in ('pending', 'ready') and a.fencing_token = s.fencing_token as waiting) l
        where a.run_id = %s and s.run_id = %s and (l.waiting or a.fencing_token < s.fencing_token)
            and a.outcome in ('failed', 'timed_out', 'lease_expired', 'crashed', 'released')) f
    where f.place <= {ATTEMPTS_TOLD} order by f.ended_at
"""  # noqa: S608 - a constant


@dataclass
class Snapshot:
    """A run and its tasks (maps as one row each) at one moment."""

    run: dict[str, Any]
    tasks: list[dict[str, Any]]
    attempts: list[dict[str, Any]] = field(default_factory=list)  # that failed, and that another one follows

    @property
    def ended(self) -> bool:
        return self.run["state"] in ("succeeded", "failed", "cancelled")


def snapshot(connection: db.Connection, run_id: int) -> Snapshot:
    """The run as it stands. Raises NotFound."""
    runs = select(connection, _RUN, [run_id])
    if not runs:
        raise NotFound(f"there is no run {run_id}; see which there are: {command('runs')}")
    return Snapshot(runs[0], select(connection, _TASKS, [run_id, run_id]))


def snapshots(connection: db.Connection, run_id: int, timeout: float | None = None) -> Iterator[Snapshot]:
    """The run as it stands, again and again; the last one has ended. Raises NotFound, WaitTimeout, and
    OSError once nobody reads standard output any more."""
    from flowforge.cutoff import answered_within

    deadline = None if timeout is None else time.monotonic() + timeout
    executions: object = None
    while True:
        left = ANSWER_LIMIT if deadline is None else max(0.0, deadline - time.monotonic()) + _LAST_LOOK
        # Of one moment, or an attempt may show whose upstreams do not.
        with answered_within(connection, min(ANSWER_LIMIT, left)), connection.transaction():
            connection.execute("set transaction isolation level repeatable read, read only")
            present = snapshot(connection, run_id)
            before = executions
            executions = [
                (each["attempt"], each["fencing_token"], each["repeated"]) for each in present.tasks
            ]
            if executions != before:
                present.attempts = select(connection, _ATTEMPTS, [run_id, run_id])
        yield present
        if present.ended:
            return
        if deadline is not None and time.monotonic() >= deadline:
            raise WaitTimeout
        streams.sleep_while_read(_POLL)


def lasting_snapshots(
    connect: Callable[[float | None], AbstractContextManager[db.Connection]],
    run_id: int,
    timeout: float | None,
    tell: Callable[[str], object],
    found: bool = False,
) -> Iterator[Snapshot]:
    """The same on connections of `connect`, which is told how many seconds are left: once the run was found,
    or with `found`, a database that is away is waited for, and `tell` is told so, and when it is back. Raises
    WaitTimeout, FlowForgeError."""
    from flowforge.db import Backoff

    deadline = None if timeout is None else time.monotonic() + timeout
    backoff = Backoff(cap=_LONGEST_PAUSE)
    away = False
    while True:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            with connect(left) as connection:
                for present in snapshots(connection, run_id, left):
                    if away:
                        tell("The database is back.")
                    found, away = True, False
                    backoff.reset()
                    yield present
            return
        except DatabaseUnavailable as error:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if left == 0:
                raise WaitTimeout from error
            if not found:
                raise
            if not away:
                away = True
                tell(f"Waiting for the database to come back: {error}")
            pause = backoff.next()
            streams.sleep_while_read(pause if left is None else min(pause, left))
        except WaitTimeout:
            raise
        except FlowForgeError as error:
            if found:
                error.add_note(goes_on(run_id))
            raise


def goes_on(run_id: int, may_watch: bool = True) -> str:
    """What to tell whoever no longer waits for a run, and perhaps may not watch it."""
    watching = f"{command(f'watch {run_id}')}{'' if may_watch else ' (takes flowforge_reader)'}"
    return f"Run {run_id} goes on: {watching}, or {command(f'cancel {run_id}')}"
