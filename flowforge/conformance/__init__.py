"""Whether a worker, in whatever language, does what docs/worker-protocol.md asks of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flowforge.config import Config
from flowforge.conformance.clauses import CLAUSES, Clause
from flowforge.conformance.engine import Engine, Violated

__all__ = ["CLAUSES", "Clause", "Verdict", "examine"]


@dataclass(frozen=True)
class Verdict:
    """Whether a clause holds; if not, `seen` tells what was seen."""

    clause: str
    sentence: str
    holds: bool
    seen: str
    seconds: float


def examine(
    config: Config,
    worker_url: str,
    command: Sequence[str],
    clauses: Sequence[Clause],
    patience: float,
) -> Iterator[Verdict]:
    """Try clauses on the worker that `command` starts, one after the other; see Engine.

    Raises FlowForgeError, and OSError when the system refuses what is needed besides the worker."""
    with Engine(config, worker_url, command, patience) as engine:
        for clause in clauses:
            begun, seen = time.monotonic(), ""
            engine.start_worker()
            try:
                clause.check(engine)
            except Violated as violated:
                seen = str(violated)
                engine.clear()  # for the next one to find a worker that is well
            yield Verdict(clause.name, clause.sentence, not seen, seen, time.monotonic() - begun)
