"""The claims, each proved or refuted from the evidence."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.evidence import Accepted, End, Evidence, Execution, Run, TaskRun
from tests.chaos.faults import DEATHS, Fault
from tests.chaos.flows import WORKFLOWS, Plan, planned

AFTERMATH = 5.0
"""Seconds after a fault in which what it began can still make an execution end: connections come back one by
one, with pauses that grow."""

CLAIMS = {
    "lost": "every run that was triggered is there, once",
    "stuck": "every run has ended, with all of its task runs",
    "tokens": "tokens grow, attempts do not shrink, no token is executed twice",
    "accepted": "one accepted finish for an attempt at most, under the highest token, by who held it",
    "effects": "what a handler's own transaction wrote is there once for each success, and for nothing else",
    "states": "every state is what the graph demands of the outcomes below it",
    "unexplained": "every execution that was not the accepted one has a fault that explains it",
    "marks": "no order is marked as published without a confirm of its own on the wire",
    "violations": "violations() is empty",
}


@dataclass
class Verdict:
    """What was found against each claim, and what the extra executions are explained by."""

    against: dict[str, list[str]] = field(default_factory=lambda: {claim: [] for claim in CLAIMS})
    extra: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Executions by how they ended and what explains it."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed attempts that were not planned, by what explains them."""
    planned: Counter[str] = field(default_factory=Counter)
    """Executions without an accepted answer as the load has it: time limits, processes that die."""

    @property
    def holds(self) -> bool:
        return not any(self.against.values())


_OPTIONS = {
    workflow.name: {task["name"]: task for task in workflow.spec()["tasks"]} for workflow in WORKFLOWS
}
_RULES: dict[str, Callable[[list[str]], bool]] = {
    "all_succeeded": lambda states: all(state == "succeeded" for state in states),
    "all_done": lambda states: True,
    "any_failed": lambda states: any(state in ("failed", "cancelled") for state in states),
    "any_succeeded": lambda states: "succeeded" in states,
    "none_failed": lambda states: not any(state in ("failed", "cancelled") for state in states),
}
_ENDED = ("succeeded", "failed", "cancelled", "skipped")


def judge(evidence: Evidence) -> Verdict:
    """Every claim."""
    verdict = Verdict()
    for check in (_lost, _stuck, _tokens, _accepted, _effects, _states, _explained):
        check(evidence, verdict)
    verdict.against["marks"] += evidence.unconfirmed
    verdict.against["violations"] += evidence.violations
    return verdict


def _lost(evidence: Evidence, verdict: Verdict) -> None:
    found = defaultdict[str, list[Run]](list)
    for run in evidence.runs:
        found[run.key].append(run)
    for key, triggered in evidence.triggered.items():
        runs = found.pop(key, [])
        if [run.id for run in runs] != [triggered.run]:
            verdict.against["lost"].append(f"{key} was answered run {triggered.run}; there are {runs}")
        verdict.against["lost"] += [
            f"{key} is run {triggered.run}, and was answered run {again} later"
            for again in triggered.again
            if again != triggered.run
        ]
    verdict.against["lost"] += [f"nobody triggered {runs}" for runs in found.values()]


def _stuck(evidence: Evidence, verdict: Verdict) -> None:
    verdict.against["stuck"] += [
        f"run {run.id} is {run.state}" for run in evidence.runs if run.state == "running"
    ]
    verdict.against["stuck"] += [
        f"task run {row.id} ({row.task}) of run {row.run} is {row.state}"
        for row in evidence.task_runs
        if row.state not in _ENDED
    ]


def _tokens(evidence: Evidence, verdict: Verdict) -> None:
    handed = defaultdict[int, list[tuple[int, int]]](list)
    for each in evidence.handed:
        handed[each.task_run].append((each.attempt, each.token))
    for task_run, pairs in handed.items():
        if not all(old[0] <= new[0] and old[1] < new[1] for old, new in itertools.pairwise(pairs)):
            verdict.against["tokens"].append(f"task run {task_run}: attempts and tokens went {pairs}")
    executed = Counter((each.task_run, each.attempt, each.token) for each in evidence.executions)
    for (task_run, attempt, token), times in executed.items():
        if times > 1:
            verdict.against["tokens"].append(
                f"token {token} of task run {task_run} was executed {times} times"
            )
        if (attempt, token) not in handed[task_run]:
            verdict.against["tokens"].append(
                f"task run {task_run} was executed in attempt {attempt} under token {token}, never handed out"
            )


def _accepted(evidence: Evidence, verdict: Verdict) -> None:
    highest: dict[tuple[int, int], int] = {}
    for each in evidence.handed:
        key = each.task_run, each.attempt
        highest[key] = max(highest.get(key, 0), each.token)
    executed = {(each.task_run, each.attempt, each.token) for each in evidence.executions}
    against = verdict.against["accepted"]
    for key, times in Counter((each.task_run, each.attempt) for each in evidence.accepted).items():
        if times > 1:
            against.append(f"task run {key[0]}, attempt {key[1]}: {times} accepted finishes")
    for answer in evidence.accepted:
        where = f"task run {answer.task_run}, attempt {answer.attempt}"
        best = highest.get((answer.task_run, answer.attempt))
        if best != answer.token:
            against.append(f"{where}: accepted under token {answer.token}, the highest is {best}")
        if answer.named not in (None, best):
            against.append(f"{where}: the accepted answer is of token {answer.named}, the highest is {best}")
        if (answer.task_run, answer.attempt, answer.token) not in executed:
            against.append(f"{where}: accepted under token {answer.token}, which nobody has executed")


def _effects(evidence: Evidence, verdict: Verdict) -> None:
    tasks = {row.id: row.task for row in evidence.task_runs}
    due = {
        (each.task_run, each.attempt, each.token)
        for each in evidence.accepted
        if each.outcome == "succeeded" and tasks.get(each.task_run, "").startswith("effect")
    }
    written = Counter(evidence.effects)
    for effect, times in written.items():
        if times > 1:
            verdict.against["effects"].append(f"{effect} was written {times} times")
        if effect not in due:
            verdict.against["effects"].append(f"{effect} was written without a success")
    verdict.against["effects"] += [
        f"{effect} succeeded without its effect" for effect in due - written.keys()
    ]


# -- states


def _states(evidence: Evidence, verdict: Verdict) -> None:
    rows = defaultdict[int, list[TaskRun]](list)
    for row in evidence.task_runs:
        rows[row.run].append(row)
    last = {each.task_run: each for each in evidence.accepted}
    failing = Counter(each.task_run for each in evidence.ends if each.outcome in ("failed", "timed_out"))
    broken = Counter(each.task_run for each in evidence.ends if each.outcome in ("crashed", "lease_expired"))
    for run in evidence.runs:
        if run.state != "running":
            verdict.against["states"] += [
                f"run {run.id} ({run.workflow}, {run.key}): {text}"
                for text in _of_run(evidence.seed, run, rows[run.id], last, failing, broken)
            ]


def _of_run(
    seed: int, run: Run, rows: list[TaskRun], last: dict[int, Accepted], failing: Counter[int],
    broken: Counter[int],
) -> list[str]:  # fmt: skip
    found, options = [], _OPTIONS[run.workflow]
    own = {row.task: row for row in rows if row.index is None}
    if own.keys() != options.keys():
        return [f"has the tasks {sorted(own)}"]
    elements = defaultdict[str, list[TaskRun]](list)
    for row in rows:
        if row.index is not None and row.generation == own[row.task].generation:
            elements[row.task].append(row)
    for task, row in own.items():
        spec = options[task]
        upstream = [*spec.get("after", ()), *([spec["map"]] if "map" in spec else [])]
        states = [own[each].state for each in upstream]
        holds = not upstream or _RULES[spec.get("when", "all_succeeded")](states)
        answer = last.get(row.id)
        # What ran before the last retry was judged by the states of then, and stands unless it was reset.
        earlier = run.retried is not None and (answer is None or answer.at < run.retried)
        if row.state == "cancelled":
            if not run.cancelling:
                found.append(f"{task} is cancelled in a run that was not")
        elif (row.state == "skipped") == holds and not (earlier and row.state != "skipped"):
            found.append(
                f"{task} is {row.state}, its upstreams are {dict(zip(upstream, states, strict=True))}"
            )
        if "map" in spec and row.state in ("succeeded", "failed"):
            found += _of_map(seed, run, row, own[spec["map"]], elements[task])
        else:
            found += _of_outcome(seed, run, row, spec, last, failing, broken)
    for several in elements.values():
        for row in several:
            found += _of_outcome(seed, run, row, options[row.task], last, failing, broken)
    states = [row.state for row in (*own.values(), *itertools.chain(*elements.values()))]
    if run.cancelling and "cancelled" in states:
        expected = "cancelled"
    else:
        expected = "failed" if "failed" in states else "succeeded"
    if run.state != expected:
        found.append(f"is {run.state}, not {expected}: {Counter(states)}")
    return found


def _of_map(seed: int, run: Run, row: TaskRun, split: TaskRun, elements: list[TaskRun]) -> list[str]:
    width = planned(seed, run.key, run.workflow, split.task, None, split.attempt).width
    if sorted(each.index or 0 for each in elements) != list(range(width)):
        return [f"{row.task} has {len(elements)} elements, not {width}"]
    expected = "succeeded" if all(each.state == "succeeded" for each in elements) else "failed"
    return (
        [] if row.state == expected else [f"{row.task} is {row.state}: {Counter(e.state for e in elements)}"]
    )


def _of_outcome(
    seed: int, run: Run, row: TaskRun, spec: dict[str, object], last: dict[int, Accepted],
    failing: Counter[int], broken: Counter[int],
) -> list[str]:  # fmt: skip
    """Whether a task run has the outcome that its handler had."""
    answer, what = last.get(row.id), f"{row.task}[{row.index}] (task run {row.id})"
    plan = planned(seed, run.key, run.workflow, row.task, row.index, row.attempt)
    if row.state == "succeeded":
        if answer is None or (answer.attempt, answer.outcome) != (row.attempt, "succeeded"):
            return [f"{what} succeeded in attempt {row.attempt}, but accepted was {answer}"]
        if plan.how not in ("ok", "effect"):
            return [f"{what} succeeded, though its handler was to {plan.how}"]
    elif row.state == "failed":
        retry = spec.get("retry")
        attempts = int(retry["max_attempts"]) if isinstance(retry, dict) else 1
        given_up = plan.how == "die" and broken[row.id] > int(str(spec["max_reaps"]))
        if failing[row.id] < attempts and not given_up:
            return [f"{what} failed after {failing[row.id]} of {attempts} attempts: {row.error[:200]}"]
    return []


# -- executions


def _explained(evidence: Evidence, verdict: Verdict) -> None:
    accepted = {(each.task_run, each.attempt, each.token): each for each in evidence.accepted}
    ends = {(each.task_run, each.attempt, each.token): each for each in evidence.ends}
    rows = {row.id: row for row in evidence.task_runs}
    runs = {run.id: run for run in evidence.runs}
    for each in evidence.executions:
        row = rows.get(each.task_run)
        if row is None:
            verdict.against["lost"].append(f"task run {each.task_run} was executed and is not there")
            continue
        run = runs[row.run]
        plan = planned(evidence.seed, run.key, run.workflow, row.task, row.index, each.attempt)
        key = each.task_run, each.attempt, each.token
        if key in accepted:
            if accepted[key].outcome == "failed" and plan.how not in ("fail", "overrun"):
                _explain_failure(evidence, verdict, each, row, accepted[key])
        elif key not in ends:
            verdict.against["unexplained"].append(f"{_told(each, row)}: nothing is recorded of its end")
        else:
            _explain(evidence, verdict, each, row, plan, ends[key])


def _explain(
    evidence: Evidence, verdict: Verdict, each: Execution, row: TaskRun, plan: Plan, end: End
) -> None:
    if (plan.how, end.outcome) in (("overrun", "timed_out"), ("die", "crashed")):
        verdict.planned[end.outcome] += 1
        return
    if (kind := _cause(evidence, each, end.outcome, end.at)) is None:
        verdict.against["unexplained"].append(f"{_told(each, row)}: {end.outcome} at {_at(evidence, end.at)}")
    else:
        verdict.extra[end.outcome, kind] += 1


def _explain_failure(
    evidence: Evidence, verdict: Verdict, each: Execution, row: TaskRun, answer: Accepted
) -> None:
    if (kind := _cause(evidence, each, "failed", answer.at)) is None:
        verdict.against["unexplained"].append(f"{_told(each, row)}: failed with {answer.answer[:200]}")
    else:
        verdict.failures[kind] += 1


def _cause(evidence: Evidence, each: Execution, end: str, over: float) -> str | None:
    """The kind of fault that explains it: of those of its worker the last one, else of the database. What
    came after the death of its process does not count."""
    near = [f for f in evidence.faults if f.done and f.target in (each.worker, "database") and f.began]
    dead = min((f.began or 0 for f in near if f.kind in DEATHS[:2] and _strikes(f, each)), default=over)
    found = [
        fault
        for fault in near
        if fault.explains(each.worker, end, each.begun, over, AFTERMATH)
        and (fault.began or 0) <= dead
        # Who is told to stop gives back what runs, unless something else keeps it from that.
        and (end != "lease_expired" or fault.kind != "told to stop" or _hindered(fault, near))
    ]
    found.sort(key=lambda fault: (fault.target == each.worker, fault.began or 0.0))
    return found[-1].kind if found else None


def _strikes(fault: Fault, each: Execution) -> bool:
    return fault.target == each.worker and (fault.began or 0) >= each.begun


def _hindered(stop: Fault, near: list[Fault]) -> bool:
    first, last = stop.began or 0.0, stop.ended or float("inf")
    return any(
        fault is not stop
        and (fault.began or 0.0) <= last
        and (fault.ended or float("inf")) + AFTERMATH >= first
        and fault.kind not in DEATHS
        for fault in near
    )


def _at(evidence: Evidence, moment: float) -> str:
    return f"{moment - evidence.began:.2f} s"


def _told(each: Execution, row: TaskRun) -> str:
    return f"{row.task} (task run {row.id}, attempt {each.attempt}, token {each.token}) on {each.worker}"
