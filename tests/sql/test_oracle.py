"""Thousands of random graphs against the edges: `ready_tasks()`, a recount and a plain evaluation in Python.

Many runs go forward at once by bounded calls, so that each is seen half settled, half expanded, half
dispatched. FLOWFORGE_TEST_GRAPHS=20000 makes a longer run.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from tests.services.database import Clock, Database
from tests.sql.model_run import TERMINAL, Task, rule_met

BATCH = 100
LANES = -(-int(os.environ.get("FLOWFORGE_TEST_GRAPHS", "2000")) // BATCH)
MAX_WIDTH = 4
RULES = ["all_succeeded"] * 3 + ["all_done", "any_failed", "any_succeeded", "none_failed"]
OUTPUTS = [None, 7, [], ["x"], ["x", 2], [None, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]]

# What the stages say may be dispatched, and what tells whether anything that this depends on has changed.
LOOK = """
    select tr.run_id, coalesce(array_agg(tr.task_run_id order by tr.task_run_id) filter (
            where tr.stage in ('eligible', 'delayed') and tr.available_at <= c.now), '{}') as eligible,
        array[max(tr.xmin::text::bigint), count(*) filter (where tr.available_at <= c.now)] as version
    from flowforge.task_run tr cross join (select flowforge._clock() as now) c
    where tr.run_id = any (%s) group by tr.run_id
"""
# Whose counter is not the number of unsettled task runs that it waits for.
MISCOUNTED = """
    select tr.task_run_id, tr.unmet from flowforge.task_run tr
    where tr.run_id = any (%s) and tr.state = 'pending' and tr.unmet <> case
        when tr.map_index is not null then 0
        when tr.map_count is not null then (
            select count(*) from flowforge.task_run e where e.run_id = tr.run_id and e.task_id = tr.task_id
                and e.map_index is not null and e.generation = tr.generation and e.stage <> 'settled')
        else (
            select count(*) from flowforge.task_dependency d
            join flowforge.task_run u on u.run_id = tr.run_id and u.task_id = d.upstream_task_id
            where d.task_id = tr.task_id and u.map_index is null and u.stage <> 'settled')
    end
"""
READY = """
    select r.run_id, array(select t.task_run_id from flowforge.ready_tasks(r.run_id) t order by 1) as ready
    from unnest(%s::bigint[]) r (run_id)
"""
ROWS = """
    select t.name as task, tr.map_index, tr.state::text, tr.attempt, tr.failures, tr.map_count, tr.output,
        tr.dispatch_id is not null as dispatched
    from flowforge.task_run tr join flowforge.task t using (task_id)
    where tr.run_id = %s and tr.generation = (
        select own.generation from flowforge.task_run own
        where own.run_id = tr.run_id and own.task_id = tr.task_id and own.map_index is null)
    order by tr.task_run_id
"""


ENDED = """
    select run_id, state::text from flowforge.run where run_id = any (%s) and finished_at is not null
"""


@dataclass(frozen=True, eq=False)
class Graph:
    name: str
    tasks: list[Task]
    odds_to_fail: float

    def below(self, names: set[str]) -> set[str]:
        found = set(names)
        for task in self.tasks:
            if found & set(task.after):
                found.add(task.name)
        return found


def random_graph(seed: str) -> Graph:
    chance = random.Random(seed)
    tasks: list[Task] = []
    for number in range(chance.randint(1, chance.randint(6, 30))):
        after = chance.sample([t.name for t in tasks[-8:]], min(number, chance.choice([0, 1, 1, 2, 2, 3, 5])))
        mapped = chance.choice(after) if after and chance.random() < 0.25 else None
        rule = chance.choice(RULES) if after else RULES[0]
        task = Task(f"t{number}", tuple(after), mapped, rule, max_attempts=chance.randint(1, 3))
        tasks.append(replace(task, delay=chance.choice([0, 5]), jitter=0))
    return Graph(seed, tasks, chance.choice([0.1, 0.3, 0.5]))


@functools.cache
def fate(graph: Graph, task: str, index: int | None, attempt: int) -> tuple[str, Any]:
    """How an attempt ends, decided by its name alone: succeeded (and the output), failed, or for good."""
    chance = random.Random(f"{graph.name}/{task}/{index}/{attempt}")
    roll = chance.random()
    if roll >= graph.odds_to_fail:
        return "succeeded", chance.choice(OUTPUTS)
    return "for good" if roll < graph.odds_to_fail / 6 else "failed", None


@dataclass(frozen=True)
class State:
    """A task run at one moment, as far as its future depends on it."""

    state: str = "pending"
    attempt: int = 1
    failures: int = 0
    width: int | None = None
    output: Any = None
    dispatched: bool = False

    def reset(self, *, expand_again: bool) -> State:
        return State(attempt=self.attempt + self.dispatched, width=None if expand_again else self.width)


States = dict[tuple[str, int | None], State]


def executed(graph: Graph, task: Task, index: int | None, now: State, cancelling: bool) -> State:
    """The end of a task run that is dispatched until it ends."""
    for failures in itertools.count(now.failures + 1):
        attempt = now.attempt + failures - now.failures - 1
        outcome, output = fate(graph, task.name, index, attempt)
        if outcome == "succeeded":
            return replace(now, state="succeeded", output=output)
        if cancelling:
            return replace(now, state="cancelled")
        if outcome == "for good" or failures >= task.max_attempts:
            return replace(now, state="failed")
    raise AssertionError


def evaluate(graph: Graph, now: States, cancelling: bool) -> States:
    """The final state of every task, from a moment at which everything finished is settled."""
    end: States = {}
    for task in graph.tasks:  # in topological order
        own = now[task.name, None]
        upstream = [end[name, None].state for name in task.after]
        if own.state in TERMINAL:
            end[task.name, None] = own
        elif (
            own.state == "pending" and own.width is None and task.after and not rule_met(task.rule, upstream)
        ):
            end[task.name, None] = replace(own, state="skipped")
        elif task.map is None:
            end[task.name, None] = executed(graph, task, None, own, cancelling)
        else:
            items = end[task.map, None].output if end[task.map, None].state == "succeeded" else None
            width = own.width
            if width is None and isinstance(items, list) and len(items) <= MAX_WIDTH:
                width = len(items)
            fresh = own.width is None
            elements = [State() if fresh else now[task.name, i] for i in range(width or 0)]
            ends = [
                e if e.state in TERMINAL else executed(graph, task, i, e, cancelling)
                for i, e in enumerate(elements)
            ]
            succeeds = width is not None and all(e.state == "succeeded" for e in ends)
            output = [e.output for e in ends] if succeeds else None
            end[task.name, None] = replace(own, state="succeeded" if succeeds else "failed", output=output)
    return end


def run_state(end: States) -> str:
    states = {state.state for state in end.values()}
    cancelled = "cancelled" in states
    return "cancelled" if cancelled else "failed" if "failed" in states else "succeeded"


def settled(graph: Graph, now: States) -> States:
    """A moment as it is once everything finished has been counted."""
    now = dict(now)
    for task in graph.tasks:
        own = now[task.name, None]
        upstream = [now[name, None].state for name in task.after]
        if own.state == "pending" and own.width is not None:
            states = {now[task.name, i].state for i in range(own.width)}
            if states <= TERMINAL:
                end = "succeeded" if states <= {"succeeded"} else "failed"
                now[task.name, None] = replace(
                    own, state=end, output=[now[task.name, i].output for i in range(own.width)]
                )
        elif own.state == "pending" and set(upstream) <= TERMINAL and not rule_met(task.rule, upstream):
            now[task.name, None] = replace(own, state="skipped")
    return now


def cancelled(now: States) -> States:
    return {
        key: replace(row, state="cancelled") if row.state in ("pending", "ready") else row
        for key, row in now.items()
    }


def retried(graph: Graph, now: States, from_task: str | None) -> States | None:
    """What an operator's retry makes of a moment; None when it is to be refused."""
    part = graph.below({from_task}) if from_task else set()
    for task in graph.tasks if from_task is None else []:
        state = now[task.name, None].state
        if state in ("failed", "cancelled") or (state == "skipped" and part & set(task.after)):
            part.add(task.name)
    for name in graph.below(part):
        own = now[name, None]
        if own.state in ("ready", "running") or (own.state == "pending" and own.width is not None):
            return None
    tasks = {task.name: task for task in graph.tasks}
    again = {n for n in part if tasks[n].map and (from_task or part & set(tasks[n].after))}
    after: States = {}
    for (name, index), row in now.items():
        if name not in part or row.state not in TERMINAL:
            after[name, index] = row
        elif index is None:
            after[name, None] = row.reset(expand_again=name in again)
        elif name not in again:
            reset = row.state in ("failed", "cancelled")
            after[name, index] = row.reset(expand_again=False) if reset else row
    return after


class Run:
    def __init__(self, run_id: int, graph: Graph, chance: random.Random) -> None:
        self.id = run_id
        self.graph = graph
        self.cancelling = False
        self.expected = evaluate(graph, {(task.name, None): State() for task in graph.tasks}, False)
        self.version: list[int] = []
        # What operators and clients do to it, and in which round; the last things, when it has ended.
        self.plan: dict[int, list[str]] = {}
        for kind, odds in [("cancel", 0.2), ("retry", 0.4)]:
            if chance.random() < odds:
                self.plan.setdefault(chance.randint(1, 12), []).append(kind)
        self.at_end = ["retry"] * chance.choice([0, 0, 1, 3])


class Lane:
    """A number of runs that go forward together."""

    def __init__(self, connection: psycopg.Connection[Any], clock: Clock, number: int) -> None:
        self.connection = connection
        self.clock = clock
        self.chance = random.Random(number)
        graphs = [random_graph(f"g{number}.{i}") for i in range(BATCH)]
        specs = [Jsonb({"name": g.name, "tasks": [t.spec() for t in reversed(g.tasks)]}) for g in graphs]
        self.rows("select flowforge.define_workflow(s) from unnest(%s::jsonb[]) s", specs)
        query = "select name, flowforge.trigger(name) as run_id from unnest(%s::text[]) name"
        ids = {row.name: row.run_id for row in self.rows(query, [g.name for g in graphs])}
        self.runs = {ids[g.name]: Run(ids[g.name], g, self.chance) for g in graphs}
        self.by_name = {g.name: g for g in graphs}
        self.claims: list[Any] = []
        self.looks = 0

    def rows(self, query: str, *params: Any) -> list[Any]:
        with self.connection.cursor(row_factory=namedtuple_row) as cursor:
            return list(cursor.execute(query.encode(), params))

    def call(self, function: str, *params: Any) -> Any:
        [row] = self.rows(f"select flowforge.{function} as answer", *params)
        return row.answer

    def look(self) -> None:
        """Compare the counters with the edges, in every run that is not as it was at the last look."""
        changed = []
        eligible = {}
        for found in self.rows(LOOK, list(self.runs)):
            run = self.runs[found.run_id]
            if run.version != found.version:
                run.version = found.version
                changed.append(run.id)
                eligible[run.id] = found.eligible
        assert {row.run_id: row.ready for row in self.rows(READY, changed)} == eligible
        assert not self.rows(MISCOUNTED, changed)
        self.looks += len(changed)

    def states(self, run: Run) -> States:
        return {
            (row.task, row.map_index): State(
                row.state, row.attempt, row.failures, row.map_count, row.output, row.dispatched
            )
            for row in self.rows(ROWS, run.id)
        }

    def steps(self) -> Iterator[None]:
        """One round: each call bounded at random."""
        chance = self.chance
        self.call("settle_finished(%s)", chance.choice([20, 10_000]))
        yield
        for _ in range(chance.choice([2, 10, BATCH])):
            if not self.call("expand_map()"):
                break
        yield
        self.call("dispatch_ready(%s)", chance.choice([50, 1000]))
        yield
        self.claims += self.rows(
            "select * from flowforge.claim_next(array['default'], 'worker', gen_random_uuid(), '7 days', %s)",
            chance.choice([50, 1000]),
        )
        self.finish(chance.choice([0.5, 1]))
        yield
        self.clock.advance(timedelta(seconds=chance.choice([0, 1, 5])))
        yield

    def finish(self, share: float) -> None:
        self.chance.shuffle(self.claims)
        number = int(len(self.claims) * share + 0.5)
        done, self.claims = self.claims[:number], self.claims[number:]
        fates = [fate(self.by_name[c.workflow], c.task, c.map_index, c.attempt) for c in done]
        answers = self.rows(
            "select * from flowforge.finish_task_runs(%s::bigint[], %s::bigint[], %s::text[], %s::jsonb[], "
            "%s::text[], %s::boolean[])",
            [c.task_run_id for c in done],
            [c.fencing_token for c in done],
            ["succeeded" if outcome == "succeeded" else "failed" for outcome, _ in fates],
            [Jsonb(output) for _, output in fates],
            ["it failed"] * number,
            [outcome != "for good" for outcome, _ in fates],
        )
        assert {row.answer for row in answers} <= {"accepted"}

    def act(self, run: Run, kind: str) -> None:
        """What a client or an operator does, and what is to come of it."""
        now = settled(run.graph, self.states(run))
        over = all(row.state in TERMINAL for row in now.values())
        if kind == "cancel":
            began = self.call("cancel_run(%s)", run.id)
            assert began == (not over)
            if began:
                run.cancelling = True
                run.expected = evaluate(run.graph, cancelled(now), True)
            return
        from_task = self.chance.choice([None, None, self.chance.choice(run.graph.tasks).name])
        after = retried(run.graph, now, from_task)
        if after is None or (run.cancelling and not over):
            with pytest.raises(psycopg.DatabaseError) as caught:
                self.call("retry_run(%s, %s)", run.id, from_task)
            assert caught.value.sqlstate == "WF007"
            return
        reset = self.call("retry_run(%s, %s)", run.id, from_task)
        run.cancelling = run.cancelling and not reset
        run.expected = evaluate(run.graph, after, run.cancelling)

    def go(self) -> None:
        for number in itertools.count():
            assert number < 500, f"these do not end: {list(self.runs)}"
            for _ in self.steps():
                self.look()
            for run in list(self.runs.values()):
                for kind in run.plan.pop(number, []):
                    self.act(run, kind)
            self.look()
            for ended in self.rows(ENDED, list(self.runs)):
                run = self.runs[ended.run_id]
                self.compare(run, ended.state)
                if run.at_end:
                    self.act(run, run.at_end.pop())
                else:
                    del self.runs[run.id]
            if not self.runs:
                return

    def compare(self, run: Run, state: str) -> None:
        found = {name: row.state for (name, index), row in self.states(run).items() if index is None}
        assert found == {name: row.state for (name, _), row in run.expected.items()}, run.graph
        assert state == run_state(run.expected)


@pytest.mark.timeout(3600)
def test_counters_agree_with_the_edges_on_random_graphs(
    db: Database, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every step what the counters offer is what the edges allow, and runs end as the graph says."""
    looks = 0
    with closing(db.connect()) as connection:
        connection.execute("select flowforge.set_limit('max_map_width', %s)", (MAX_WIDTH,))
        for number in range(LANES):
            lane = Lane(connection, clock, number)
            lane.go()
            looks += lane.looks
        assert not connection.execute("select * from flowforge.violations()").fetchall()
    with capsys.disabled():
        sys.stdout.write(f" [{LANES * BATCH} graphs, {looks} comparisons]")
