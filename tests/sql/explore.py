"""Runs a scenario under many schedules: each an order in which its sessions go from stop to stop.

A scenario brings a run into a state and yields one program for each session. `explore` runs it again and
again: wherever more than one session could go on, each of them is the next once.

The number of schedules grows exponentially with their length, so they are taken by the number of preemptions
(switches away from a session that could have gone on): first none, then one, then two, as in M. Musuvathi and
S. Qadeer, "Iterative context bounding for systematic testing of multithreaded programs" (PLDI 2007), who
found that races show at few of them. All are taken while there are not too many; beyond that, all with up to
two preemptions (of three sessions: one) and a random sample of the rest.

After each schedule its outcome is judged, then everything is brought to its end; but equal states, after
equal answers, are brought there once.
"""

import functools
import heapq
import itertools
import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.sql.stepping import Laboratory, Program

# Yields the programs and is sent their results, to judge. It may yield once more: then it is sent how often
# only the clock could go on until all had ended, which must be never otherwise.
Body = Generator[list[Program] | None, Any, None]
Scenario = Callable[[Laboratory], Body]


def scenarios(*modules: ModuleType) -> dict[str, Scenario]:
    """The scenarios of these modules, by name: their public functions that return a Body."""
    return {
        name: function
        for module in modules
        for name, function in vars(module).items()
        if not name.startswith("_") and getattr(function, "__annotations__", {}).get("return") is Body
    }


@dataclass
class Exploration:
    """How much was run: schedules, those of them in which the sessions met inside their functions, those
    chosen at random, and whether there are no others."""

    sessions: int = 0
    schedules: int = 0
    met: int = 0
    sampled: int = 0
    complete: bool = False
    called: list[set[str]] = field(default_factory=list, repr=False)
    outcomes: set[Any] = field(default_factory=set, repr=False)


# Says which of the sessions that can goes on.
Guide = Callable[[Laboratory, list[int]], int]
_GUIDES: dict[str, Guide] = {}


def guided(guide: Guide) -> Callable[[Scenario], Scenario]:
    """Has a scenario be run under this schedule too, which the search would not come to."""

    def mark(scenario: Scenario) -> Scenario:
        _GUIDES[scenario.__name__] = guide
        return scenario

    return mark


# Of each scenario: the functions that each of its sessions calls.
MEETINGS: dict[str, tuple[frozenset[str], ...]] = {}


def meets(*sessions: str) -> Callable[[Scenario], Scenario]:
    """Declares what each session of a scenario calls; a call that is not declared, and a declared one that
    is never made, fail it."""

    def mark(scenario: Scenario) -> Scenario:
        MEETINGS[scenario.__name__] = tuple(frozenset(each.split()) for each in sessions)
        return scenario

    return mark


def explore(
    laboratory: Laboratory,
    scenario: Scenario,
    *,
    enough: int = 80,
    sample: int = 10,
    preemptions: int | None = None,
) -> Exploration:
    """Run a scenario under every schedule with up to two `preemptions` (one, if it has three sessions), under
    further ones until there are `enough`, and under a random `sample` of the rest.

    Raises what fails, with the schedule as a note."""
    done = Exploration()
    dice = random.Random(0)
    order = itertools.count()
    # Preemptions so far, order of discovery, and how a schedule begins.
    waiting: list[tuple[int, int, list[int]]] = [(0, next(order), [])]
    while waiting:
        most = 4 - done.sessions if preemptions is None else preemptions
        if waiting[0][0] > most and done.schedules >= enough:
            break
        so_far, _, beginning = heapq.heappop(waiting)
        schedule = _Schedule(beginning)
        _run(laboratory, scenario, schedule, done)
        for cost, other in schedule.alternatives():
            heapq.heappush(waiting, (so_far + cost, next(order), other))
    done.complete = not waiting
    if guide := _GUIDES.get(scenario.__name__):
        _run(laboratory, scenario, functools.partial(guide, laboratory), done)
    for _, _, beginning in dice.sample(waiting, min(sample, len(waiting))):
        _run(laboratory, scenario, _Schedule(beginning, dice), done)
        done.sampled += 1
    return done


class _Schedule:
    """Decides who goes on: as the beginning says, then whoever went on before, or as the dice say."""

    def __init__(self, beginning: list[int], dice: random.Random | None = None) -> None:
        self._beginning = beginning
        self._dice = dice
        self._taken: list[int] = []
        self._enabled: list[list[int]] = []

    def __call__(self, enabled: list[int]) -> int:
        at = len(self._taken)
        if at < len(self._beginning):
            chosen = self._beginning[at]
            assert chosen in enabled, "a schedule cannot be repeated: the sessions are not deterministic"
        elif self._dice:
            chosen = self._dice.choice(enabled)
        else:
            chosen = self._taken[-1] if at and self._taken[-1] in enabled else enabled[0]
        self._taken.append(chosen)
        self._enabled.append(enabled)
        return chosen

    def alternatives(self) -> Iterator[tuple[int, list[int]]]:
        """The beginnings of the schedules that part from this one where it decided for itself, each with the
        preemptions (0 or 1) that this adds."""
        for at in range(len(self._beginning), len(self._taken)):
            for other in self._enabled[at]:
                if other != self._taken[at]:
                    current = self._taken[at - 1] if at else None
                    yield int(current in self._enabled[at]), [*self._taken[:at], other]


def _run(
    laboratory: Laboratory, scenario: Scenario, schedule: Callable[[list[int]], int], done: Exploration
) -> None:
    try:
        laboratory.reset()
        body = scenario(laboratory)
        programs = next(body)
        assert programs is not None
        done.sessions = len(programs)
        results = laboratory.interleave(programs, schedule)
        done.called = done.called or [set() for _ in programs]
        for number, called in enumerate(done.called, 1):
            called |= laboratory.sessions[number].called
        _conclude(laboratory, body, results, done.outcomes)
    except BaseException as error:
        laboratory.abandon()
        error.add_note(f"schedule {done.schedules + 1}:\n" + "\n".join(laboratory.trace))
        raise
    done.schedules += 1
    done.met += laboratory.met


def _conclude(laboratory: Laboratory, body: Body, results: list[Any], seen: set[Any]) -> None:
    """Have the scenario judge the results, then everything else be right, now and when all has ended."""
    only_now = _ends(body, results)
    laboratory.check(ended=False)
    outcome = (
        *(laboratory.value("select flowforge_test.fingerprint()"), _comparable(results)),
        len(laboratory.messages),
    )
    if outcome in seen:
        return
    waits = laboratory.drive()
    assert waits is not None, "a run never ends"
    if only_now:
        assert waits == 0, "a run ended only because the clock went on"
    else:
        assert _ends(body, waits)
    laboratory.check(ended=True)
    seen.add(outcome)


def _comparable(result: Any) -> Any:
    """A result without the identities in it."""
    if isinstance(result, SimpleNamespace):
        return getattr(result, "outcome", None), getattr(result, "fencing_token", None)
    if isinstance(result, list):
        return len(result) if result and isinstance(result[0], int) else tuple(map(_comparable, result))
    return result


def _ends(body: Body, value: Any) -> bool:
    try:
        body.send(value)
    except StopIteration:
        return True
    return False
