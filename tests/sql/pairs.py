"""Which pairs of functions can meet, and where each does.

`NEVER` names the others, with the reason. A pair that is in neither fails test_pairs.py, and so does every
function that is not named here or in a scenario: whoever makes one says whom it can meet.
"""

import itertools
import re
from collections.abc import Iterable
from typing import Any

from tests.sql.crossing import ACTORS, Crossing

Pair = tuple[str, str]

# Each does its work by the other one, or by the same function of the engine.
SAME = {
    "claim_task_run": "claim_task_runs",
    "finish_task_run": "finish_task_runs",
    "trigger_many": "trigger",
}

_VERSIONS = "activate_version define_workflow"
_QUEUE = "pause_queue resume_queue"
_PUBLISHER = "fetch_outbox mark_published mark_refused mark_unpublishable"
_CLAIMS = "claim_next claim_task_runs"
_HOLDS = "assert_lease renew_leases"
_READY = "configure_queue fail_undeliverable redispatch redispatch_lost"
_RUN = "cancel_leftovers cancel_run expand_map retry_run settle_finished"
_ENGINE = (
    f"{_PUBLISHER} {_CLAIMS} {_HOLDS} {_READY} {_RUN} {_QUEUE} dispatch_ready finish_task_runs"
    " reap_expired_leases release_task_run sweep_outbox"
)

# Two lists of functions, of which none of the first can meet any of the second, and why.
NEVER = [
    (_VERSIONS, f"{_ENGINE} prune", "nobody sees a version before it is committed, and a run keeps its own"),
    ("trigger", _ENGINE, "nobody sees a run before it is committed, and trigger changes no other"),
    (
        "set_limit",
        f"{_ENGINE} {_VERSIONS} announce_worker declare_scheduler prune report_progress trigger",
        "a limit is one value, and whoever asks for it takes it as it is at that moment",
    ),
    (
        "announce_worker",
        (
            f"{_PUBLISHER} {_CLAIMS} {_HOLDS} {_RUN} {_QUEUE} {_VERSIONS} configure_queue declare_scheduler"
            " fail_undeliverable finish_task_runs prune reap_expired_leases redispatch release_task_run"
            " report_progress sweep_outbox trigger"
        ),
        "only dispatch and the search for what is lost ask who is there",
    ),
    (
        "declare_scheduler",
        (
            f"{_PUBLISHER} {_CLAIMS} {_HOLDS} {_READY} {_RUN} {_QUEUE} {_VERSIONS} dispatch_ready"
            " finish_task_runs prune release_task_run report_progress sweep_outbox trigger"
        ),
        "a flag that decides only whether to wake somebody who looks by himself too",
    ),
    (
        "advance_frontiers",
        (
            f"{_ENGINE} {_VERSIONS} advance_frontiers announce_worker declare_scheduler prune report_progress"
            " set_limit trigger"
        ),
        "it locks its own row, which the others only read: a frontier that is behind hides nothing",
    ),
    (
        "report_progress",
        f"{_ENGINE} {_VERSIONS} trigger",
        "its row decides nothing, and its lock stops only who deletes the task run",
    ),
    (
        "prune",
        (
            f"{_PUBLISHER} {_CLAIMS} {_HOLDS} {_READY} {_QUEUE} cancel_leftovers dispatch_ready expand_map"
            " finish_task_runs reap_expired_leases release_task_run settle_finished"
        ),
        "prune takes only runs that have ended, and there the other finds nothing to do and locks nothing",
    ),
    (
        _QUEUE,
        (
            f"{_PUBLISHER} {_CLAIMS} {_HOLDS} {_RUN} fail_undeliverable finish_task_runs reap_expired_leases"
            " redispatch release_task_run sweep_outbox"
        ),
        "a pause is in the queue's row alone, and the other does not ask for it, nor lock that row",
    ),
    (
        _HOLDS,
        f"{_PUBLISHER} {_READY} claim_next dispatch_ready expand_map settle_finished sweep_outbox",
        "what runs under this token stays so, and the other touches nothing that runs",
    ),
    (
        "retry_run",
        f"{_HOLDS} {_PUBLISHER} configure_queue redispatch redispatch_lost sweep_outbox",
        "retry locks nothing that is ready or running, and makes nothing so",
    ),
    (
        "finish_task_runs",
        f"{_PUBLISHER} {_READY} claim_next sweep_outbox",
        "a finish touches only what runs, and makes nothing ready",
    ),
    (
        "expand_map settle_finished",
        f"{_PUBLISHER} configure_queue redispatch redispatch_lost sweep_outbox",
        "what waits or has ended here is nothing to be published, and nothing becomes ready",
    ),
    (
        "expand_map",
        "claim_task_runs fail_undeliverable reap_expired_leases release_task_run",
        "an expansion changes only the map's own row, which waits, and nobody sees its elements before",
    ),
    (
        "dispatch_ready",
        "mark_refused mark_unpublishable claim_task_runs fail_undeliverable redispatch sweep_outbox",
        "what dispatch makes ready nobody sees before, and then with its order",
    ),
    (
        "configure_queue",
        f"{_PUBLISHER} reap_expired_leases release_task_run sweep_outbox",
        "it moves the time of what is ready, which the other takes as it is or does not ask for",
    ),
    ("set_limit", "set_limit", "one row, which the second waits for, and then reads anew"),
    (
        "cancel_leftovers",
        "mark_published mark_refused mark_unpublishable",
        "a mark changes an order that its publisher holds; what is left over is found without orders",
    ),
    ("cancel_leftovers", _HOLDS, "what runs is left alone, and who renews reads one mark of the run"),
]

_WRITES = re.compile(r"\b(insert into|update|delete from) flowforge\.|\bfor (no key )?update\b")
_CALLS = re.compile(r"\bflowforge\.(\w+)\(")


def changing(bodies: dict[str, str]) -> set[str]:
    """Of functions by their bodies: the public ones that lock or change rows, directly or not."""
    found = {name for name, body in bodies.items() if _WRITES.search(body)}
    while True:
        more = {name for name, body in bodies.items() if found & set(_CALLS.findall(body))} - found
        if not more:
            return {name for name in found if not name.startswith("_")}
        found |= more


def _sorted(first: str, second: str) -> Pair:
    first, second = sorted((SAME.get(first, first), SAME.get(second, second)))
    return first, second


def pairs(names: Iterable[str]) -> set[Pair]:
    """Of functions, each with each, and with itself."""
    return {_sorted(*each) for each in itertools.combinations_with_replacement(sorted(names), 2)}


def met(meetings: Iterable[tuple[frozenset[str], ...]]) -> set[Pair]:
    """The pairs that meet where sessions call these functions."""
    return {
        _sorted(*pair)
        for meeting in meetings
        for one, other in itertools.combinations(meeting, 2)
        for pair in itertools.product(one, other)
    }


def never() -> list[Pair]:
    """The pairs that cannot meet, in the order in which they are named, as often as they are."""
    return [
        _sorted(*pair)
        for ones, others, _ in NEVER
        for pair in dict.fromkeys(_sorted(*each) for each in itertools.product(ones.split(), others.split()))
    ]


def crossings(meetings: Iterable[tuple[frozenset[str], ...]]) -> dict[str, Any]:
    """The meetings of two actors at the crossing that are needed beside the scenarios with these meetings."""
    done = met(meetings) | set(never())
    needed = {}
    for actors in itertools.combinations_with_replacement(sorted(ACTORS), 2):
        crossing = Crossing(*actors)
        if missing := met([crossing.meeting]) - done:
            needed[crossing.__name__] = crossing
            done |= missing
    return needed
