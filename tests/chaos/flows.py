"""The workflows of the load, and the outside witness inside their handlers.

What each attempt does is drawn from the seed, the run's key, the task and the attempt's number, and from
nothing else: so the checker knows it too. Every execution tells the witness, a file of lines outside of the
engine; what it returns or raises names its token, so that whatever is accepted tells whose it is.
"""

import os
import random
import time
from dataclasses import dataclass
from typing import Any

from flowforge import Context, Retry, Workflow

TIME_LIMIT = 5.0
"""Of a task whose handler works 0.2 s, or overruns: a machine that has no time for it is no fault."""
MOST_REAPS = 1_000_000  # none of these is ever given up for the deaths of its workers
MANY = Retry(max_attempts=100, delay=0.05, max_delay=0.5)
"""For what a fault of the database can make fail: a handler's own transaction, or one with a time limit."""


@dataclass(frozen=True)
class Plan:
    """What one attempt does: `how` is ok, fail, effect, overrun or die; `seconds` it works before that, and
    `inside` its own transaction."""

    how: str
    seconds: float = 0.0
    inside: float = 0.0
    width: int = 0


_WORK = (0.0, 0.0, 0.005, 0.02, 0.1, 0.3, 0.8)


def planned(seed: int, key: str, workflow: str, task: str, index: int | None, attempt: int) -> Plan:
    """What this attempt does."""
    draw = random.Random(f"{seed}/{key}/{task}/{index}/{attempt}")
    seconds, chance = draw.choice(_WORK), draw.random()
    if task.startswith("effect"):
        return Plan("effect", *((0.0, seconds) if chance < 0.5 else (seconds, 0.0)))
    if task.startswith("fails"):
        return Plan("fail", seconds)
    if task == "dies":
        return Plan("die", seconds)
    if task == "flaky" or (workflow == "wide" and task == "element"):
        return Plan("fail" if chance < (0.5 if task == "flaky" else 0.08) else "ok", seconds)
    if task == "limited":
        return Plan("overrun") if chance < 0.3 else Plan("ok", draw.choice((0.05, 0.2)))
    if task == "long":
        # Some outlast their lease.
        return Plan("ok", draw.choice((1.0, 2.0, 5.0, 5.0, 12.0)))
    return Plan("ok", seconds, width=draw.randrange(0, 30) if task == "split" else 0)


def _tell(ctx: Context, event: str) -> None:
    """One write of less than a page to a file opened for appending: lines of several processes do not mix."""
    index = "" if ctx.map_index is None else ctx.map_index
    line = (
        f"{event} {ctx.task_run_id} {ctx.attempt} {ctx.fencing_token} {os.environ['CHAOS_DAEMON']} "
        f"{os.getpid()} {time.monotonic():.6f} {index}\n"
    )
    witness = os.open(os.environ["CHAOS_WITNESS"], os.O_WRONLY | os.O_APPEND)
    try:
        os.write(witness, line.encode())
    finally:
        os.close(witness)


def act(ctx: Context) -> Any:
    """What every handler does."""
    _tell(ctx, "start")
    plan = planned(ctx.input["seed"], ctx.input["key"], ctx.workflow, ctx.task, ctx.map_index, ctx.attempt)
    until = time.monotonic() + plan.seconds
    while (left := until - time.monotonic()) > 0 or plan.how == "overrun":
        ctx.check_cancelled()
        time.sleep(min(0.05, left) if plan.how != "overrun" else 0.05)
    if plan.how == "die":
        os._exit(9)
    if plan.how == "fail":
        _tell(ctx, "end")
        raise RuntimeError(f"planned, token {ctx.fencing_token}")
    answer: Any = list(range(plan.width)) if ctx.task == "split" else {"token": ctx.fencing_token}
    if plan.how == "effect":
        with ctx.transaction() as tx:
            tx.execute(
                "insert into public.effect values (%s, %s, %s)",
                [ctx.task_run_id, ctx.attempt, ctx.fencing_token],
            )
            time.sleep(plan.inside)
            tx.finish(answer)
    _tell(ctx, "end")
    return answer if plan.how != "effect" else None


def _define(name: str, **tasks: dict[str, Any]) -> Workflow:
    workflow = Workflow(name)
    for task, options in tasks.items():
        workflow.task(name=task, **{"max_reaps": MOST_REAPS, **options})(act)
    return workflow


chain = _define("chain", a={}, b={"after": ["a"]}, c={"after": ["b"]}, d={"after": ["c"]}, e={"after": ["d"]})
diamond = _define(
    "diamond",
    a={},
    b={"after": ["a"]},
    effect={"after": ["a"], "retry": MANY},
    d={"after": ["b", "effect"], "priority": 5},
)
wide = _define(
    "wide",
    split={},
    element={"map": "split", "queue": "wide", "retry": Retry(max_attempts=2, delay=0.1)},
    join={"after": ["element"]},
    alarm={"after": ["element"], "when": "any_failed"},
)
fan = _define(
    "fan",
    a={},
    **{f"b{number}": {"after": ["a"], "queue": "wide"} for number in range(12)},
    end={"after": [f"b{number}" for number in range(12)]},
)
flaky = _define(
    "flaky",
    flaky={"retry": Retry(max_attempts=3, delay=0.05)},
    effect={"after": ["flaky"], "retry": MANY},
    rescue={"after": ["flaky"], "when": "any_failed"},
    end={"after": ["effect", "rescue"], "when": "any_succeeded"},
)
broken = _define(
    "broken",
    a={},
    fails={"after": ["a"], "retry": Retry(max_attempts=2, delay=0.05)},
    rescue={"after": ["fails"], "when": "any_failed"},
    skipped={"after": ["fails"]},
    unharmed={"after": ["skipped", "a"], "when": "none_failed"},
    end={"after": ["rescue", "skipped", "unharmed"], "when": "all_done"},
)
limited = _define(
    "limited",
    limited={"time_limit": TIME_LIMIT, "retry": MANY},
    end={"after": ["limited"], "when": "all_done"},
)
slow = _define("slow", long={}, effect={"after": ["long"], "retry": MANY})
deadly = _define(
    "deadly",
    dies={"isolation": "processes", "max_reaps": 1},
    rescue={"after": ["dies"], "when": "any_failed"},
)

WORKFLOWS = (chain, diamond, wide, fan, flaky, broken, limited, slow, deadly)
SHARES = (4, 4, 3, 3, 4, 3, 1, 2, 0.15)
"""How often each is triggered."""
