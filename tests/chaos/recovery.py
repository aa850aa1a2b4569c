"""How long it took, by kind of fault, until what it had taken away went on elsewhere or again."""

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.cluster import LEASE, ROLES
from tests.chaos.evidence import End, Evidence
from tests.chaos.faults import Fault

PAUSE_WITHIN = 4.0
"""Seconds after the death of a scheduler or publisher in which the longest pause is looked for."""

BOUNDS = {
    "worker killed: task run taken over": LEASE + 1,
    "handler's process killed: task run given back": 1.0,
    "scheduler killed: longest pause in dispatch": 1.0,
    "publisher killed: longest pause in publishing": 1.0,
    "broker back: first task run started by it": 5.0,
    "PostgreSQL back: first task run finished": 5.0,
    "failover done: first task run finished": 5.0,
}
"""Seconds that each may take where nothing else was broken."""


@dataclass
class Times:
    """Seconds, of those alone and of those in whose time another fault fell that can hold it up."""

    bound: float
    alone: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    beyond: list[str] = field(default_factory=list)
    """Which of those alone took longer than the bound."""

    def figures(self) -> dict[str, Any]:
        """Median and worst of each, and what was beyond the bound."""
        found: dict[str, Any] = {"beyond": self.beyond}
        for name, values in (("", self.alone), ("_with_others", self.others)):
            found[f"count{name}"] = len(values)
            if values:
                found[f"median{name}"] = round(statistics.median(values), 3)
                found[f"worst{name}"] = round(max(values), 3)
        return found


# The client among them: without it there is nothing to do.
_SERVICES = frozenset(
    [
        "database",
        "broker",
        "client",
        *(role.name for role in ROLES if role.kind in ("scheduler", "publisher")),
    ]
)
# Other workers take over what a worker held, or start what a broker brings again.
_BY_WORKERS = ("worker killed: task run taken over", "broker back: first task run started by it")
_EVERYBODY = _SERVICES | {each.name for each in ROLES}
_HARMLESS = ("NOTIFY off", "clock shifted")


def recoveries(evidence: Evidence) -> dict[str, Times]:
    """Of each kind in BOUNDS."""
    found: dict[str, Times] = {name: Times(bound) for name, bound in BOUNDS.items()}

    def add(name: str, fault: Fault, until: float, since: float) -> None:
        times, took = found[name], until - since
        among = _EVERYBODY if name in _BY_WORKERS else _SERVICES
        if _disturbed(evidence.faults, fault, since, until, among):
            times.others.append(took)
            return
        times.alone.append(took)
        if took > times.bound:
            times.beyond.append(f"{took:.3f} s after {fault.kind} ({fault.target}) at {fault.at}")

    handed = defaultdict[int, list[float]](list)
    for each in evidence.handed:
        handed[each.task_run].append(each.at)
    finished = sorted(each.at for each in evidence.accepted)
    delivered = sorted(each.begun for each in evidence.executions if each.worker in _with_broker())
    for fault in evidence.faults:
        if not fault.done or fault.began is None:
            continue
        began = fault.began
        role = fault.target.partition("-")[0]
        if fault.kind in ("killed", "killed at a step") and role == "worker":
            for end in _left_by(evidence.ends, fault):
                if (again := _first(handed[end.task_run], end.at)) is not None:
                    add("worker killed: task run taken over", fault, again, began)
        elif fault.kind == "child killed":
            tokens = {
                (each.task_run, each.token)
                for each in evidence.executions
                if each.pid == fault.pid and each.begun <= began
            }
            for end in evidence.ends:
                if (end.task_run, end.token) in tokens and end.outcome == "crashed" and end.at >= began:
                    add("handler's process killed: task run given back", fault, end.at, began)
        elif fault.kind in ("killed", "killed at a step") and role in ("scheduler", "publisher"):
            if role == "scheduler":
                pause = _longest_pause(evidence.dispatched, began)
            else:
                pause = _longest_pause(evidence.marked, began, evidence.dispatched)
            if pause is not None:
                what = "dispatch" if role == "scheduler" else "publishing"
                add(f"{role} killed: longest pause in {what}", fault, began + pause, began)
        elif fault.returned is not None:
            if fault.target == "broker":
                name, moments = "broker back: first task run started by it", delivered
            elif fault.kind == "failover":
                name, moments = "failover done: first task run finished", finished
            else:
                name, moments = "PostgreSQL back: first task run finished", finished
            if (first := _first(moments, fault.returned)) is not None:
                add(name, fault, first, fault.returned)
    return found


def _with_broker() -> frozenset[str]:
    return frozenset(role.name for role in ROLES if role.kind == "worker" and role.broker)


def _left_by(ends: Iterable[End], fault: Fault) -> list[End]:
    """What the killed process held, and the reaper took back: of that offered at once, since the first reap
    of an attempt is followed by no delay."""
    seen = set[tuple[int, int]]()
    found = []
    for end in ends:
        if end.outcome in ("lease_expired", "crashed"):
            key = end.task_run, end.attempt
            pid = end.owner.split(":")[-2] if end.owner.count(":") >= 2 else ""
            if end.outcome == "lease_expired" and pid == str(fault.pid) and key not in seen:
                found.append(end)
            seen.add(key)
    return found


def _first(moments: list[float], after: float) -> float | None:
    index = bisect.bisect_left(moments, after)
    return moments[index] if index < len(moments) else None


def _longest_pause(moments: list[float], began: float, wanted: list[float] | None = None) -> float | None:
    """Between two that followed each other, of those around and after the fault; if it is told when there was
    something to do anew, from then."""
    first = bisect.bisect_left(moments, began)
    last = bisect.bisect_right(moments, began + PAUSE_WITHIN)
    if first == 0 or last >= len(moments):
        return None
    around = [began, *moments[first:last], moments[last]]

    def wait(earlier: float, later: float) -> float:
        begun = earlier if wanted is None else _first(wanted, earlier)
        return later - min(later, later if begun is None else begun)

    return max(wait(earlier, later) for earlier, later in itertools.pairwise(around))


def _disturbed(
    faults: Iterable[Fault], own: Fault, since: float, until: float, among: frozenset[str]
) -> bool:
    """Whether another fault of those fell in that time."""
    return any(
        fault is not own and fault.done and fault.kind not in _HARMLESS and fault.target in among
        and fault.began is not None and fault.began <= until and (fault.ended or fault.began) + 1 >= since
        for fault in faults
    )  # fmt: skip
