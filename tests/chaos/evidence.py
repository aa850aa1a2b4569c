"""What is known at the end: from the witness, from the tables, from the client, from the wire. All times are
of time.monotonic()."""

import json
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.cluster import Cluster
from tests.chaos.faults import Fault
from tests.chaos.load import Triggered


@dataclass(frozen=True)
class Execution:
    """What a handler told the witness. `ended` is None when it did not come so far."""

    task_run: int
    attempt: int
    token: int
    worker: str
    pid: int
    begun: float
    ended: float | None = None


@dataclass(frozen=True)
class Handed:
    """A token that a claim was given."""

    task_run: int
    attempt: int
    token: int
    at: float


@dataclass(frozen=True)
class Accepted:
    """An answer that was accepted; `token` is what the row says, `answer` what the handler returned or
    raised."""

    task_run: int
    attempt: int
    token: int
    outcome: str
    answer: str
    at: float

    @property
    def named(self) -> int | None:
        """The token that the handler itself has named in its answer."""
        found = re.search(r'token"?:? (\d+)', self.answer)
        return int(found[1]) if found else None


@dataclass(frozen=True)
class End:
    """How an execution ended that did not succeed, as the engine has recorded it."""

    task_run: int
    attempt: int
    token: int
    outcome: str
    owner: str
    at: float


@dataclass(frozen=True)
class TaskRun:
    """A task run as it is at the end."""

    id: int
    run: int
    task: str
    index: int | None
    state: str
    attempt: int
    token: int
    generation: int = 0
    error: str = ""


@dataclass(frozen=True)
class Run:
    """A run as it is at the end."""

    id: int
    key: str
    workflow: str
    state: str
    cancelling: bool = False
    retried: float | None = None
    """When it was retried last."""


@dataclass
class Evidence:
    """All of it."""

    seed: int
    began: float
    triggered: dict[str, Triggered] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    task_runs: list[TaskRun] = field(default_factory=list)
    executions: list[Execution] = field(default_factory=list)
    handed: list[Handed] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    effects: list[tuple[int, int, int]] = field(default_factory=list)
    dispatched: list[float] = field(default_factory=list)
    marked: list[float] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)
    """Marks of orders without a confirm of their own."""
    violations: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    deadlocks: int = 0
    fenced: int = 0
    """Results that workers were told to have been refused, as their logs say."""
    deaths: list[str] = field(default_factory=list)
    """Daemons that ended otherwise than by SIGKILL or in order."""


def executions(witness: Path) -> list[Execution]:
    """From the lines of the witness."""
    begun: dict[tuple[str, ...], tuple[str, ...]] = {}
    ended: dict[tuple[str, ...], float] = {}
    found = list[tuple[str, ...]]()
    for line in witness.read_text().splitlines():
        event, *key, at = line.split(" ")[:7]
        if event == "start":
            found.append((*key, at))
            begun[tuple(key)] = tuple(key)
        else:
            ended[tuple(key)] = float(at)
    return [
        Execution(
            int(task_run), int(attempt), int(token), worker, int(pid), float(at),
            ended.get((task_run, attempt, token, worker, pid)),
        )
        for task_run, attempt, token, worker, pid, at in found
    ]  # fmt: skip


def unconfirmed(
    marks: Iterable[tuple[int, str, float, float]], confirms: Iterable[tuple[str, float]]
) -> list[str]:
    """The marks (order, dispatch, from when its transaction was, when) without a confirm from within that
    transaction: a confirm of another order of the same dispatch, or of an earlier try, proves nothing."""
    left: dict[str, list[float]] = {}
    for dispatch, at in confirms:
        left.setdefault(dispatch, []).append(at)
    missing = []
    for order, dispatch, fetched, marked in marks:
        own = [at for at in left.get(dispatch, []) if fetched <= at <= marked]
        if own:
            left[dispatch].remove(own[0])
        else:
            missing.append(f"order {order} of dispatch {dispatch}")
    return missing


def gather(
    cluster: Cluster, seed: int, began: float, triggered: dict[str, Triggered], faults: list[Fault]
) -> Evidence:
    """After the end of everything."""
    offset = time.time() - time.monotonic()
    evidence = Evidence(seed, began, triggered, faults=faults, executions=executions(cluster.witness))

    def rows(query: str, make: Callable[..., Any] = lambda *row: row) -> list[Any]:
        # The times come as seconds of the wall clock, in columns whose name says so.
        with cluster.pair.connect() as connection:
            cursor = connection.execute(query.encode())
            timed = [column.name == "at" for column in cursor.description or []]
            return [
                make(*(
                    float(value) - offset if is_time and value is not None else value
                    for value, is_time in zip(row, timed, strict=True)
                ))
                for row in cursor
            ]  # fmt: skip

    def at(column: str) -> str:
        return f"extract(epoch from {column})::float8 as at"

    evidence.runs = rows(
        "select r.run_id, coalesce(r.idempotency_key, ''), w.name, r.state::text,"
        " r.cancel_requested_at is not null,"
        f" (select {at('max(t.requested_at)')} from flowforge.run_retry t where t.run_id = r.run_id) as at"
        " from flowforge.run r join flowforge.workflow w using (workflow_id) order by r.run_id",
        Run,
    )
    evidence.task_runs = rows(
        "select tr.task_run_id, tr.run_id, t.name, tr.map_index, tr.state::text, tr.attempt,"
        " tr.fencing_token, tr.generation, coalesce(tr.error, '')"
        " from flowforge.task_run tr join flowforge.task t using (task_id) order by 1",
        TaskRun,
    )
    evidence.handed = rows(
        f"select task_run_id, attempt, token, {at('at')} from public.handed_out order by id", Handed
    )
    evidence.accepted = rows(
        f"select task_run_id, attempt, token, outcome, coalesce(answer, ''), {at('at')}"
        " from public.accepted order by public.accepted.at",
        Accepted,
    )
    evidence.ends = rows(
        "select task_run_id, attempt, fencing_token, outcome, coalesce(owner, ''),"
        f" {at('ended_at')} from flowforge.attempt order by ended_at",
        End,
    )
    evidence.effects = rows("select task_run_id, attempt, token from public.effect")
    dispatched = rows(f"select {at('d.at')} from public.dispatched d order by d.at")
    evidence.dispatched = [row[0] for row in dispatched]
    marks = rows(
        "select outbox_id, dispatch_id::text, extract(epoch from fetched_at)::float8,"
        " extract(epoch from m.at)::float8 from public.marked m order by m.at"
    )
    evidence.marked = [mark[3] - offset for mark in marks]
    evidence.unconfirmed = unconfirmed(
        marks, [(confirm.message_id, confirm.at) for confirm in cluster.wire.confirms]
    )
    evidence.violations = [str(row) for row in rows("select * from flowforge.violations()")]
    evidence.deadlocks = cluster.pair.log().count("deadlock detected")
    evidence.fenced = sum(
        event == "result refused: the lease was lost before"
        for daemon in cluster.daemons.values()
        for event in _events(daemon.log)
    )
    evidence.deaths = [
        f"{daemon.role.name} at {death.at - began:.1f} s with exit code {death.code}"
        for daemon in cluster.daemons.values()
        for death in daemon.deaths
        if death.code not in (0, -signal.SIGKILL)
    ]
    return evidence


def _events(log: Path) -> list[str]:
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            try:
                found.append(str(json.loads(line)["event"]))
            except (ValueError, KeyError):  # killed in the middle of it
                continue
    return found
