"""The account of a run: figures, printed, as JSON and as a page."""

import json
import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from tests.chaos.evidence import Evidence
from tests.chaos.faults import KINDS
from tests.chaos.judge import CLAIMS, Verdict
from tests.chaos.recovery import BOUNDS, recoveries


@dataclass(frozen=True)
class Circumstances:
    """What the figures are of."""

    command: str
    seconds: float
    postgresql: str
    rabbitmq: str
    extras: dict[str, str]
    """What else was drawn for this seed."""


def account(
    evidence: Evidence, verdict: Verdict, around: Circumstances, load: dict[str, int]
) -> dict[str, Any]:
    """Everything, as it is written to a file."""
    last = max((len(evidence.executions) - len({(e.task_run, e.attempt) for e in evidence.executions})), 0)
    done = [fault for fault in evidence.faults if fault.done]
    return {
        "seed": evidence.seed,
        "command": around.command,
        "holds": verdict.holds,
        "seconds": round(around.seconds),
        "versions": {
            "flowforge": version("flowforge"),
            "postgresql": around.postgresql,
            "rabbitmq": around.rabbitmq,
            "python": platform.python_version(),
        },
        "drawn": around.extras,
        "load": {"triggered": len(evidence.triggered), **load},
        "runs": dict(Counter(run.state for run in evidence.runs)),
        "task_runs": {"all": len(evidence.task_runs), **Counter(row.state for row in evidence.task_runs)},
        "executions": len(evidence.executions),
        "repeated_executions": last,
        "extra": {f"{end} by {kind}": n for (end, kind), n in sorted(verdict.extra.items())},
        "failures_by_faults": dict(sorted(verdict.failures.items())),
        "as_the_load_has_it": dict(verdict.planned),
        "accepted": len(evidence.accepted),
        "fenced": evidence.fenced,
        "effects": len(evidence.effects),
        "deadlocks": evidence.deadlocks,
        "ended_by_themselves": evidence.deaths,
        "against": {claim: len(found) for claim, found in verdict.against.items()},
        "recoveries": {name: times.figures() for name, times in recoveries(evidence).items()},
        "faults": {
            "done": len(done),
            "not_done": len(evidence.faults) - len(done),
            "by_kind": {name: n for name in KINDS if (n := sum(f.kind == name for f in done))},
            "list": [
                {
                    **fault.plan(),
                    "began": None if fault.began is None else round(fault.began - evidence.began, 2),
                    "ended": None if fault.ended is None else round(fault.ended - evidence.began, 2),
                    "result": fault.result,
                }
                for fault in evidence.faults
            ],
        },
    }


def page(found: dict[str, Any]) -> str:
    """The account for readers."""
    held = "Every claim held." if found["holds"] else "**Not every claim held.**"
    words = "what the words mean is in [chaos.md](../chaos.md)."
    lines = [
        f"# Seed {found['seed']}",
        "",
        f"{held} `{found['command']}`, {found['seconds']} seconds under load; {words}",
        "",
        *_table("what", "", [
            ("versions", ", ".join(f"{name} {value}" for name, value in found["versions"].items())),
            *((f"drawn: {name}", value) for name, value in found["drawn"].items()),
            ("runs triggered", f"{found['load']['triggered']:,}"),
            *((f"runs {state}", f"{count:,}") for state, count in sorted(found["runs"].items())),
            *((f"task runs, {state}", f"{count:,}") for state, count in found["task_runs"].items()),
            ("executions of handlers", f"{found['executions']:,}"),
            ("executions beyond the first of an attempt", f"{found['repeated_executions']:,}"),
            ("accepted answers", f"{found['accepted']:,}"),
            ("results refused, the lease being lost", f"{found['fenced']:,}"),
            ("side effects by `ctx.transaction()`", f"{found['effects']:,}"),
            ("deadlocks, resolved by the server", found["deadlocks"]),
            ("daemons that ended by themselves", "; ".join(found["ended_by_themselves"]) or 0),
            *((f"client: {name}", f"{n:,}") for name, n in found["load"].items() if name != "triggered"),
            ("faults done", found["faults"]["done"]),
            ("faults not done", found["faults"]["not_done"]),
        ]),
        "", "## Claims", "",
        *_table("claim", "found against it", [
            (CLAIMS[claim], count) for claim, count in found["against"].items()
        ]),
        "", "## Executions that were not the accepted one, and what explains them", "",
        *_table("how it ended, and the fault", "", found["extra"].items()),
        "", "## Attempts that failed for a fault", "",
        *_table("fault", "", found["failures_by_faults"].items()),
        "", "## Recoveries", "",
        "In seconds: first of those in whose time no other fault fell that can hold them up, then of the",
        "others.",
        "",
        "| what | bound | times | median | worst | others | median | worst |",
        "|---|---|---|---|---|---|---|---|",
        *(_recovery(name, each) for name, each in found["recoveries"].items()),
        "", "Alone, and beyond the bound:", "",
        *(_beyond(found["recoveries"]) or ["None."]),
        "", "## Faults", "",
        *_table("kind", "done", found["faults"]["by_kind"].items()),
        "",
        "| at | kind | target | lasts | detail | result |", "|---|---|---|---|---|---|",
        *(
            f"| {each['at']} | {each['kind']} | {each['target']} | {each['lasts'] or ''} "
            f"| {', '.join(f'{k} {v}' for k, v in each['detail'].items())} | {each['result']} |"
            for each in found["faults"]["list"]
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _beyond(recoveries: dict[str, Any]) -> list[str]:
    return [f"- {name}: {each}" for name, times in recoveries.items() for each in times["beyond"]]


def _recovery(name: str, figures: dict[str, Any]) -> str:
    columns = [f"{kind}{which}" for which in ("", "_with_others") for kind in ("count", "median", "worst")]
    return f"| {name} | {BOUNDS[name]:g} | {' | '.join(str(figures.get(each, '–')) for each in columns)} |"


def _table(first: str, second: str, rows: Any) -> list[str]:
    rows = list(rows)
    if not rows:
        return ["None."]
    return [f"| {first} | {second} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def summary(found: dict[str, Any], verdict: Verdict) -> str:
    """What is printed at the end."""
    lines = [
        f"runs: {json.dumps(found['runs'])} of {found['load']['triggered']} triggered",
        f"task runs: {json.dumps(found['task_runs'])}",
        f"executions: {found['executions']}, of attempts executed before: {found['repeated_executions']}",
        f"not accepted, explained: {json.dumps(found['extra'])}",
        f"failed for faults: {json.dumps(found['failures_by_faults'])}",
        f"as the load has it: {json.dumps(found['as_the_load_has_it'])}",
        f"fenced: {found['fenced']}, effects: {found['effects']}, deadlocks: {found['deadlocks']}",
        f"ended by themselves: {json.dumps(found['ended_by_themselves'])}",
        f"client: {json.dumps(found['load'])}",
        f"faults: {found['faults']['done']} done, {found['faults']['not_done']} not done",
        *(f"recovery: {name}: {json.dumps(each)}" for name, each in found["recoveries"].items()),
    ]
    for claim, against in verdict.against.items():
        lines.append(f"{'ok ' if not against else 'NOT'} {CLAIMS[claim]}: {len(against)} found")
        lines += [f"      {each}" for each in against[:10]]
        if len(against) > 10:
            lines.append(f"      … and {len(against) - 10} more")
    return "\n".join(lines)
