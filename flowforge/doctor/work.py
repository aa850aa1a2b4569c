"""The checks of the engine: whether its daemons live and keep up, and what is stuck."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from flowforge.doctor.setup import Check, Setup, Verdict, length, ok, problem, some, warning

_SILENT_SCHEDULER = 30.0  # seconds; the longest pace of reaping that can be set is 10
_LAG = 15.0  # seconds
_MANY = 1000  # beyond which nothing is counted exactly
_LATELY = 120.0  # seconds; as long as a worker is taken for alive without a word

# Queues in which work waits and that no worker has announced, and whether some worker is at it all the same.
_UNSERVED = """
    select q.queue,
        q.drain_rate > 0 and q.drained_at > now() - make_interval(secs => %s)
        or exists (
            select from flowforge.task_run_status s
            where s.lease_expires_at is not null and s.queue = q.queue)
    from flowforge.queue_status q
    where q.capacity = 0 and (q.dispatched > 0 or q.eligible > 0 and q.paused_at is null)
    order by q.queue
"""


def _scheduler_is_silent(setup: Setup) -> bool:
    age = setup.figure("reaper_seconds")
    return age is None or age > _SILENT_SCHEDULER


def _scheduler(setup: Setup) -> Verdict:
    age, active = setup.figure("reaper_seconds"), setup.count("active_runs")
    start = f"start one: {setup.by('scheduler', 'scheduler')}"
    if _scheduler_is_silent(setup):
        what = "none has ever run here" if age is None else f"none has been at work for {length(age)}"
        if active:
            return problem(f"{what}, and {active} {'run waits' if active == 1 else 'runs wait'}", start)
        return warning(what, start)
    ((lag,),) = setup.rows(
        "select extract(epoch from max(oldest_eligible_age))::float8 from flowforge.queue_status "
        "where paused_at is null and dispatched < window_size"
    )
    if lag is not None and lag > _LAG:
        return warning(
            f"what can be dispatched has waited for {length(lag)}",
            "look at the log and the health file of the scheduler; start a second one if it is busy",
        )
    return ok(f"at work {length(age or 0)} ago")


def _orders(setup: Setup) -> Verdict:
    parked, refused = setup.count("parked"), setup.count("refused")
    if parked:
        return problem(
            f"{parked} can never be published",
            f"a scheduler fails their task runs ({setup.by('scheduler', 'scheduler')}), and the reasons are "
            f"then in {setup.command('runs --state failed')}",
        )
    if refused:
        return warning(
            f"{refused} refused by the broker at least once; they are tried again",
            "look at the findings about the broker, and at the log of the publisher",
        )
    return ok("none is parked or refused")


def _paused(setup: Setup) -> Verdict:
    found = setup.rows(
        "select queue, eligible from flowforge.queue_status where paused_at is not null "
        "order by eligible desc, queue"
    )
    if not found:
        return ok("none")
    shown = some(f"{queue} ({waiting} waiting)" for queue, waiting in found)
    return warning(shown, _commands(setup, "resume", (queue for queue, _ in found)))


def _commands(setup: Setup, command: str, names: Iterable[str]) -> str:
    return "; ".join(setup.by("operator", f"{command} {shlex.quote(name)}") for name in names)


def _workers(setup: Setup) -> Verdict:
    found = setup.rows(_UNSERVED, _LATELY)
    alive = setup.count("workers")
    served = [queue for queue, at_work in found if at_work]
    if alone := [queue for queue, at_work in found if not at_work]:
        options = " ".join(f"--queue {shlex.quote(queue)}" for queue in alone)
        return problem(
            f"work waits in {some(alone)}, which no live worker has announced that it serves",
            f"start one that has the handlers: {setup.by('worker', f'worker MODULE {options}')}",
        )
    if setup.count("unknown_handler"):
        unknown = setup.rows(
            "select handler, queue, task_runs, extract(epoch from age)::float8 "
            "from flowforge.unknown_handlers order by age desc"
        )
        shown = some(f"{name} ({count} in {queue}, for {length(age)})" for name, queue, count, age in unknown)
        return warning(
            f"no worker knows {shown}; what nobody has known for 15 minutes fails",
            "start workers that have these handlers; applications that share a queue need one each",
        )
    if served:
        return warning(
            f"work of {some(served)} is claimed, by workers that have not announced that they serve it",
            "let them call announce_worker every 30 s, or the window of the queue stays small",
        )
    return ok(f"{alive} alive" if alive else "none is alive, and nothing waits for one")


def _leases(setup: Setup) -> Verdict:
    expired = setup.count("expired_leases")
    silent = setup.rows(
        "select worker, running from flowforge.worker_status where not alive and running > 0 order by worker"
    )
    if expired and _scheduler_is_silent(setup):
        return problem(
            f"{expired} have run out, and there is no scheduler to take the work back",
            f"start one: {setup.by('scheduler', 'scheduler')}",
        )
    if silent:
        return warning(
            f"held by silent workers: {some(f'{running} by {name}' for name, running in silent)}",
            "see whether they live; what they hold is offered again when the leases run out",
        )
    if expired:
        return warning(f"{expired} have run out", "wait a moment: the scheduler takes the work back")
    return ok(f"{setup.count('running')} held, none by a lost worker")


def _dead_letters(setup: Setup) -> Verdict:
    ((count,),) = setup.rows("select count(*) from (select from flowforge.dead_letters limit %s) d", _MANY)
    if not count:
        return ok("no task run has failed for good")
    number = f"{count} or more" if count == _MANY else count
    return warning(
        f"task runs that failed for good: {number}",
        f"look at their runs ({setup.command('runs --state failed')}), then retry or prune those",
    )


def _invariants(setup: Setup) -> Verdict:
    found = setup.rows("select rule, run_id, detail from flowforge.violations() limit %s", _MANY)
    if not found:
        return ok("none is broken")
    # A cancel lets go of what waits, and a retry counts anew; what is merely to be delivered needs neither.
    damaged = sorted({run for rule, run, _ in found if not rule.startswith("G4")})
    remedies = [
        setup.command(f"{what} {run}") for run in damaged[:3] for what in ("cancel", "watch", "retry")
    ]
    if any(rule.startswith("G4") for rule, _, _ in found):
        waiting = setup.rows("select queue from flowforge.queue_status where dispatched > 0 order by queue")
        remedies.append(_commands(setup, "redispatch", (queue for (queue,) in waiting)))
    shown = some(f"{rule} in run {run}: {detail}" for rule, run, detail in found)
    return problem(shown, f"{'; '.join(remedies)}; and report how it came to this")


CHECKS: tuple[Check, ...] = (
    ("scheduler", ("database", "views"), _scheduler),
    ("orders", ("database", "views"), _orders),
    ("paused queues", ("database", "views"), _paused),
    ("workers", ("database", "views"), _workers),
    ("leases", ("database", "views"), _leases),
    ("dead letters", ("database", "views"), _dead_letters),
    ("invariants", ("database", "operator"), _invariants),
)
