"""The faults: what each does, to whom, for how long, and what it can explain.

The whole schedule is drawn from the seed before the run (`drawn`). What a fault may explain is what the
checker takes as the reason of an execution that was not the one accepted: faults of a worker explain those of
this worker, faults of the database those of all workers, and all others nothing, since they must not make
anything run twice. A lost lease is explained by a death, or by what lasted longer than a renewal takes.
"""

import random
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.cluster import GRACE, LEASE, ROLES
from tests.chaos.steps import AT

ANY = frozenset({"lease_expired", "crashed", "timed_out", "failed", "released"})
_ALL = tuple(role.name for role in ROLES)
_WITH_BROKER = tuple(role.name for role in ROLES if role.broker and role.kind != "scheduler")
_WORKERS = tuple(role.name for role in ROLES if role.kind == "worker")


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `occupies`: seconds after its end in which its target is left in peace."""

    name: str
    weight: float
    targets: tuple[str, ...]
    shortest: float = 0.0
    longest: float = 0.0
    occupies: float = 2.0
    explains: frozenset[str] = frozenset()
    """Ends of executions: of those of the target if that is a worker, of all if it is the database."""


_DB, _MQ = ("database",), ("broker",)
DEATHS = ("killed", "killed at a step", "told to stop")
_NOTICED = 0.1  # seconds in which the supervisor sees that a process has ended
_RENEWED_EVERY = LEASE / 3
"""What lasts no longer makes nobody lose a lease but who dies of it: there are two more renewals."""

KINDS = {
    kind.name: kind
    for kind in (
        Kind("killed", 14, _ALL, explains=ANY - {"released"}),
        Kind("killed at a step", 28, _ALL, occupies=4, explains=ANY - {"released"}),
        Kind("told to stop", 6, _ALL, occupies=GRACE + 2, explains=ANY),
        Kind("stopped past its lease", 4, _ALL, LEASE + 1, LEASE + 4, explains=ANY),
        Kind("stopped for a moment", 4, _ALL, 0.3, 2.5, explains=ANY - {"crashed", "released"}),
        Kind("child killed", 5, ("worker-3",), occupies=0.5, explains=frozenset({"crashed"})),
        Kind("clock shifted", 3, ("scheduler-2", "worker-2"), 2, 6, occupies=0.5),
        Kind("database link cut", 4, (*_ALL, "client"), 0, 1.5, explains=ANY),
        Kind("database link slow", 3, _ALL, 2, 5, explains=ANY),
        Kind("database link half-open", 4, (*_ALL, "client"), 2, LEASE + 3, explains=ANY),
        Kind("broker link cut", 3, _WITH_BROKER, 0, 1.5),
        Kind("broker link slow", 2, _WITH_BROKER, 2, 5),
        Kind("broker link half-open", 3, _WITH_BROKER, 2, LEASE + 3),
        Kind("server process killed", 1, _DB, occupies=3, explains=ANY),
        Kind("server killed", 2, _DB, 0.2, 2, occupies=4, explains=ANY),
        Kind("server restarted", 1.5, _DB, 0.2, 1, occupies=4, explains=ANY),
        Kind("server stopped for a moment", 1.5, _DB, 0.5, 4, occupies=3, explains=ANY),
        Kind("failover", 2, _DB, 0.3, 2, occupies=10, explains=ANY),
        Kind("standby killed", 1, _DB, occupies=4, explains=ANY),
        Kind("sessions terminated", 4, _DB, 0.5, 1.5, explains=ANY),
        Kind("no connection slots", 1.5, _DB, 1, 3, explains=ANY),
        Kind("statement_timeout", 2, _DB, 1.5, 4, explains=ANY),
        Kind("idle_in_transaction_session_timeout", 2, _DB, 1.5, 4, explains=ANY),
        Kind("read-only", 1.5, _DB, 0.5, 3, explains=ANY),
        Kind("files limited", 1, _DB, 1, 2.5, explains=ANY),
        Kind("NOTIFY off", 1.5, _DB, 2, 5, occupies=0.5),
        Kind("broker killed", 2, _MQ, 0.2, 1.5, occupies=8),
        Kind("broker restarted", 1, _MQ, 0.2, 1, occupies=8),
        Kind("broker stopped for a moment", 1.5, _MQ, 1, 5),
        Kind("broker reset", 1, _MQ, occupies=6),
        Kind("memory alarm", 2, _MQ, 1, 5),
        Kind("disk alarm", 1, _MQ, 1, 5),
        Kind("queue purged", 2.5, _MQ, 0.5, 3, occupies=1),
        Kind("queue deleted", 2.5, _MQ, occupies=2),
        Kind("queue declared otherwise", 1, _MQ, 1, 3, occupies=3),
        Kind("broker closes connections", 2, _MQ, occupies=2),
    )
}


@dataclass
class Fault:
    """One fault of a run. `at` and `lasts` are in seconds, `at` from the load's start; `began` and `ended`,
    by time.monotonic(), are set when it is done. `result` tells what it did."""

    number: int
    at: float
    kind: str
    target: str
    lasts: float
    detail: dict[str, Any] = field(default_factory=dict)
    began: float | None = None
    ended: float | None = None
    returned: float | None = None
    """When the server it had taken away answered again."""
    pid: int | None = None
    """Of the process it killed."""
    result: str = ""

    @property
    def done(self) -> bool:
        return self.began is not None and not self.result.startswith("not done")

    def explains(self, worker: str, end: str, begun: float, over: float, aftermath: float) -> bool:
        """Whether this can be why an execution by a worker, from `begun` to `over`, came to such an end."""
        if not self.done or self.target not in (worker, "database"):
            return False
        assert self.began is not None
        last = self.ended if self.ended is not None else float("inf")
        if end == "lease_expired" and self.kind not in DEATHS and last - self.began < _RENEWED_EVERY:
            return False
        # The process after the one that died is another.
        slack = _NOTICED if self.kind in DEATHS else aftermath
        return end in KINDS[self.kind].explains and self.began <= over and begun <= last + slack

    def plan(self) -> dict[str, Any]:
        """What was drawn."""
        names = ("number", "at", "kind", "target", "lasts", "detail")
        return {name: value for name, value in asdict(self).items() if name in names}


def drawn(seed: int, seconds: float, count: int, kinds: list[str] | None = None) -> list[Fault]:
    """The schedule: each kind once, in a random order, then by weight, so many in all or as many as fit. No
    target has two at a time."""
    draw = random.Random(f"faults/{seed}")
    allowed = [kind for kind in KINDS.values() if kinds is None or kind.name in kinds]
    first, steps = draw.sample(allowed, len(allowed)), _Steps(draw)
    gap, now, faults = seconds / (count + 1), 0.0, list[Fault]()
    free: dict[str, float] = {}
    while len(faults) < count and now < seconds:
        # Bursts and calm: what the gaps are on average is what makes the number.
        now += min(draw.expovariate(1 / gap), 3 * gap) if len(first) == 0 else gap
        candidates = first or draw.choices(allowed, [kind.weight for kind in allowed], k=20)
        for kind in candidates:
            targets = [target for target in kind.targets if free.get(target, 0.0) <= now]
            if targets:
                break
        else:
            continue
        if kind in first:
            first.remove(kind)
        target, lasts = draw.choice(targets), draw.uniform(kind.shortest, kind.longest)
        if now + lasts > seconds:
            continue
        detail = {"step": steps.next(target)} if kind.name == "killed at a step" else _detail(draw, kind)
        faults.append(Fault(len(faults) + 1, round(now, 2), kind.name, target, round(lasts, 2), detail))
        free[target] = now + lasts + kind.occupies
    return faults


class _Steps:
    """The steps at which daemons are killed: each of a kind of daemon comes before any comes again."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._decks: dict[str, list[str]] = {}

    def next(self, target: str) -> str:
        role = next(role for role in ROLES if role.name == target)
        kind = role.kind if role.broker else f"{role.kind} by PostgreSQL"
        deck = self._decks.setdefault(kind, [])
        if not deck:
            deck += self._draw.sample(AT[kind], len(AT[kind]))
        # Transactions of handlers in processes of their own are not the daemon's.
        fit = [step for step in deck if role.isolation == "threads" or "transaction" not in step]
        step = fit[0] if fit else self._draw.choice(AT[kind][:-2])
        if fit:
            deck.remove(step)
        return step


def _detail(draw: random.Random, kind: Kind) -> dict[str, Any]:
    """What else is drawn for a kind."""
    if "half-open" in kind.name:
        return {"then": draw.choice(("cut", "resumed"))}
    if "slow" in kind.name:
        return {"delay": round(draw.uniform(0.03, 0.3), 3)}
    if kind.name == "clock shifted":
        return {"by": draw.choice(("+10m", "-10m", "+1h", "-40s"))}
    if kind.name == "sessions terminated":
        return {"times": draw.randrange(1, 6)}
    if kind.name in ("statement_timeout", "idle_in_transaction_session_timeout"):
        return {"milliseconds": draw.choice((20, 60, 150))}
    if kind.name.startswith("queue"):
        return {"queue": draw.choice(("default", "wide"))}
    if kind.name == "server process killed":
        return {"which": draw.randrange(100)}
    return {}
