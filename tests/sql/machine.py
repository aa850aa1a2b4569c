"""Clients and operators as rules of a state machine that drives the real functions.

After every step the database must equal the model and `violations()` be empty.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from tests.services.database import Clock
from tests.sql.model import Model, Order
from tests.sql.model_run import TERMINAL, Run, Task, TaskRun

F = TypeVar("F", bound=Callable[..., None])

START = datetime(2030, 1, 1, tzinfo=UTC)
QUEUES = ["one", "two"]
RULES = ["all_succeeded", "all_done", "any_failed", "any_succeeded", "none_failed"]
MAX_WIDTH = 4

# Every table but the settings; referring rows first.
CLEAN = """
    delete from flowforge.outbox; delete from flowforge.attempt; delete from flowforge.run_retry;
    delete from flowforge.task_run; delete from flowforge.run; delete from flowforge.task_dependency;
    delete from flowforge.task; delete from flowforge.workflow_version; delete from flowforge.workflow;
    delete from flowforge.queue; update flowforge.scheduler set asleep = false, reaper_ticked_at = null,
        reaper_period = '0', gaps = '{}';
    delete from flowforge.frontier; insert into flowforge.frontier default values;
    select setseed(0);
"""
ROWS = """
    select tr.task_run_id as id, tr.run_id, t.name as task, tr.map_index, tr.generation, tr.state::text,
        tr.stage::text, tr.attempt, tr.failures, tr.reaps, tr.fencing_token as token, tr.dispatch_id,
        tr.claim_id, tr.available_at, tr.lease_expires_at, tr.deadline, tr.start_deadline, tr.unmet,
        tr.map_count, tr.output
    from flowforge.task_run tr join flowforge.task t using (task_id) order by tr.task_run_id
"""
RUNS = """
    select r.run_id, r.state::text, r.cancel_requested_at is not null as cancelling, r.unsettled,
        array(select task_run_id from flowforge.ready_tasks(r.run_id)) as ready_tasks
    from flowforge.run r order by r.run_id
"""
ORDERS = """
    select outbox_id as id, task_run_id, dispatch_id, next_attempt_at, published_at,
        case when parked_at is not null then 'parked' when published_at is not null then 'published'
            else 'unpublished' end as state
    from flowforge.outbox order by outbox_id
"""

# What lies before its frontier, so that no look finds it.
HIDDEN = """
    select tr.task_run_id, tr.stage::text from flowforge.task_run tr, flowforge.frontier f
    where case tr.stage
        when 'eligible' then tr.available_at < f.eligible
        when 'delayed' then tr.available_at < f.delayed
        when 'reoffered' then tr.available_at < f.delayed
        when 'dispatched' then tr.redispatch_at < f.dispatched
        when 'leased' then tr.lease_expires_at < f.leased
        when 'unsettled' then tr.finished_at < f.unsettled
    end
    union all select o.task_run_id, 'unpublished' from flowforge.outbox o, flowforge.frontier f
    where o.outbox_id < f.outbox
        or o.published_at is null and o.parked_at is null and o.next_attempt_at < f.unpublished
"""

# Refused whatever the state.
INVALID = [
    ("WF001", "trigger(null)"),
    ("WF001", "trigger('w', null)"),
    ("WF001", "trigger('w', delay => '-1 s')"),
    ("WF002", "trigger('nobody')"),
    ("WF003", """define_workflow('{"name": "w", "tasks": []}')"""),
    ("WF003", """define_workflow('{"name": "w", "tasks": [{"name": "a", "after": ["a"]}]}')"""),
    ("WF003", """define_workflow('{"name": "w", "tasks": [{"name": "a", "after": ["b"]}]}')"""),
    ("WF002", "cancel_run(-1)"),
    ("WF002", "retry_run(null)"),
    ("WF001", "claim_task_run(1, gen_random_uuid(), 'worker', null, '9 s')"),
    ("WF001", "claim_task_run(1, gen_random_uuid(), 'worker', gen_random_uuid(), '0 s')"),
    ("WF001", "claim_next(array['one', null], 'worker', gen_random_uuid(), '9 s')"),
    ("WF001", "finish_task_run(1, 1, 'skipped')"),
    ("WF001", "finish_task_run(1, null, 'succeeded')"),
    ("WF001", "renew_leases(array[1], array[1, 2]::bigint[], '9 s')"),
    ("WF001", "release_task_run(1, 1, 'bored')"),
    ("WF001", "assert_lease(1, null)"),
    ("WF001", "settle_finished(0)"),
    ("WF002", "redispatch('nobody')"),
]

picks = st.integers(0, 30)
names = st.sampled_from(["w", "v"])


@st.composite
def definitions(draw: st.DrawFn) -> list[Task]:
    tasks: list[Task] = []
    for number in range(draw(st.integers(1, 6))):
        after = (
            draw(st.lists(st.sampled_from([t.name for t in tasks]), unique=True, max_size=3)) if tasks else []
        )
        mapped = draw(st.sampled_from([None, *after]))
        tasks.append(
            Task(
                f"t{number}",
                tuple(after),
                mapped,
                draw(st.sampled_from(RULES)) if after else RULES[0],
                draw(st.sampled_from(QUEUES)),
                draw(st.integers(0, 1)),
                draw(st.integers(1, 3)),
                draw(st.sampled_from([0, 1, 8])),
                draw(st.sampled_from([0, 0.5])),
                draw(st.sampled_from([None, 5])),
                draw(st.sampled_from([None, 9])),
                draw(st.sampled_from([None, None, 20])),
                draw(st.integers(0, 2)),
            )
        )
    return tasks


@dataclass(frozen=True)
class Turn:
    """One thing that somebody may do next: how often, when it makes sense, and with what arguments."""

    weight: int
    possible: Callable[[Any], object]
    arguments: dict[str, st.SearchStrategy[Any]]


# By the name of the method.
TURNS: dict[str, Turn] = {}


def turn(
    weight: int, possible: Callable[[Any], object] = lambda _: True, **arguments: st.SearchStrategy[Any]
) -> Callable[[F], F]:
    def register(function: F) -> F:
        TURNS[function.__name__] = Turn(weight, possible, arguments)
        return function

    return register


class DatabaseMachine(RuleBasedStateMachine):
    """A database, the model of it, and who starts runs and interferes with them."""

    connection: psycopg.Connection[Any]
    clock: Clock
    count: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.connection.execute(CLEAN)
        self.clock.set(START)
        self.model = Model(START, MAX_WIDTH)
        self.workflows: dict[str, list[list[Task]]] = {}  # versions
        self.current: dict[str, int] = {}
        self.keys: dict[tuple[str, str], int] = {}
        self.agreed = True
        self.count["examples"] += 1

    @rule(data=st.data())
    def take_turn(self, data: st.DataObject) -> None:
        # One rule for all: rules of their own would be switched off by turns, and few examples get anywhere.
        possible = [name for name, each in TURNS.items() if each.possible(self) for _ in range(each.weight)]
        name = data.draw(st.sampled_from(possible), label="turn")
        arguments = {key: data.draw(value, label=key) for key, value in TURNS[name].arguments.items()}
        getattr(self, name)(**arguments)

    # --- the database ---

    def rows_of(self, query: str, *params: Any) -> list[Any]:
        self.agreed = False
        with self.connection.cursor(row_factory=namedtuple_row) as cursor:
            return list(cursor.execute(query, params))

    def call(self, function: str, *params: Any) -> Any:
        return self.rows_of(f"select flowforge.{function} as answer", *params)[0].answer

    def refused(self, sqlstate: str, function: str, *params: Any) -> None:
        with pytest.raises(psycopg.DatabaseError) as caught:
            self.rows_of(f"select flowforge.{function}", *params)
        assert caught.value.sqlstate == sqlstate, str(caught.value)

    @invariant()
    def agrees(self) -> None:
        """The database is what the model says, and healthy."""
        self.count["steps"] += 1
        model = self.model
        violations, hidden, found_rows, runs, orders = self.look()
        assert not violations
        assert not hidden
        rows = {row.id: row for row in found_rows}
        assert rows.keys() == {row.id for _, row in model.rows()}
        for run, row in model.rows():
            self.agrees_on(run, row, rows[row.id])
        assert [(r.run_id, r.state, r.cancelling) for r in runs] == [
            (r.id, r.state, r.cancelling) for r in model.runs.values()
        ]
        for found in runs:
            run = model.runs[found.run_id]
            assert found.unsettled == sum(not row.settled for row in run.rows)
            assert set(found.ready_tasks) == {row.id for row in run.rows if model.is_eligible(run, row)}
        self.agrees_on_orders({order.id: order for order in orders})
        self.agreed = True

    def look(self) -> list[list[Any]]:
        """All that is compared, in one round trip."""
        self.agreed = False
        with self.connection.pipeline():
            cursors = [
                self.connection.cursor(row_factory=namedtuple_row).execute(query)
                for query in ("select * from flowforge.violations()", HIDDEN, ROWS, RUNS, ORDERS)
            ]
        return [cursor.fetchall() for cursor in cursors]

    def agrees_on(self, run: Run, row: TaskRun, found: Any) -> None:
        assert (row.task.name, row.index, row.generation) == (found.task, found.map_index, found.generation)
        if found.stage == "eligible":
            row.line_up(found.available_at, self.model.now)
        elif row.state in ("pending", "ready"):
            row.adopt(found.available_at, self.model.now)
        stages = {
            "pending": {"expand"} if run.waits_for_expansion(row) else {"eligible", "delayed"},
            "ready": {"reoffered" if row.reoffered else "dispatched"},
            "running": {"leased"},
        }.get(row.state, {"settled" if row.settled else "unsettled"})
        if row.state == "pending" and run.unmet(row):
            stages = {"blocked"}
        assert found.stage in stages, f"stage {found.stage} of {row}"
        assert found.stage != "eligible" or row.available_at <= self.model.now
        assert found.state == row.state
        assert row.state != "pending" or found.unmet == run.unmet(row), f"unmet {found.unmet} of {row}"
        assert (found.attempt, found.token) == (row.attempt, row.token)
        assert row.state in TERMINAL or (found.failures, found.reaps) == (row.failures, row.reaps)
        assert (found.dispatch_id, found.claim_id) == (row.dispatch, row.claim)
        assert (found.lease_expires_at, found.deadline) == (row.lease_end, row.deadline)
        assert row.state != "ready" or found.start_deadline == row.start_by
        assert found.map_count == row.width
        assert found.output == (row.output if row.state == "succeeded" else None)

    def agrees_on_orders(self, orders: dict[int, Any]) -> None:
        new = orders.keys() - self.model.orders.keys()
        made = Counter(orders[i].task_run_id for i in new)
        expected, possible = Counter(self.model.expected_orders), Counter(self.model.possible_orders)
        assert expected <= made <= expected + possible
        self.model.expected_orders.clear()
        self.model.possible_orders.clear()
        for i in sorted(new):
            self.model.orders[i] = Order(
                i,
                orders[i].task_run_id,
                orders[i].dispatch_id,
                self.model.now,
                orders[i].next_attempt_at,
            )
        assert orders.keys() == self.model.orders.keys()
        for i, order in self.model.orders.items():
            assert (order.row, order.dispatch, order.state, order.next_at) == (
                (orders[i].task_run_id, orders[i].dispatch_id, orders[i].state, orders[i].next_attempt_at)
            )

    # --- clients ---

    @turn(1, lambda self: sum(map(len, self.workflows.values())) < 3, name=names, tasks=definitions())
    def define(self, name: str, tasks: list[Task]) -> None:
        versions = self.workflows.setdefault(name, [])
        known = tasks in versions
        if not known:
            versions.append(tasks)
            self.current[name] = len(versions)
        spec = Jsonb({"name": name, "tasks": [task.spec() for task in reversed(tasks)]})
        [answer] = self.rows_of("select * from flowforge.define_workflow(%s)", spec)
        assert tuple(answer) == (name, 1 + versions.index(tasks), not known)

    @initialize(
        tasks=definitions(),
        runs=st.lists(st.sampled_from([0, 0, 5]), min_size=1, max_size=2),
    )
    def begin(self, tasks: list[Task], runs: list[int]) -> None:
        self.define("w", tasks)
        for delay in runs:
            self.trigger(0, None, 0, None, delay, 0)

    @turn(
        5,
        lambda self: self.model.active() < 3,
        pick=picks,
        key=st.sampled_from([None, None, "k1", "k2"]),
        value=st.integers(0, 1),
        version=st.sampled_from([None, 1]),
        delay=st.sampled_from([0, 0, 5]),
        priority=st.sampled_from([0, 0, 7]),
    )
    def trigger(
        self, pick: int, key: str | None, value: int, version: int | None, delay: int, priority: int
    ) -> None:
        name = sorted(self.workflows)[pick % len(self.workflows)]
        function = (
            "trigger(%s, %s, idempotency_key => %s, version => %s, delay => make_interval(secs => %s), "
            "priority => %s)"
        )
        params = (name, Jsonb(value), key, version, delay, priority)
        known = self.model.runs.get(self.keys.get((name, str(key)), 0))
        if known and known.input != value:
            self.refused("WF004", function, *params)
            return
        run_id = self.call(function, *params)
        if known:
            assert run_id == known.id
        else:
            self.created(run_id, name, key, value, version, delay, priority)

    @turn(
        1,
        lambda self: self.model.active() < 2,
        pick=picks,
        keys=st.lists(st.sampled_from([None, "k1", "k3"]), max_size=3),
    )
    def trigger_many(self, pick: int, keys: list[str | None]) -> None:
        name = sorted(self.workflows)[pick % len(self.workflows)]
        known = [self.model.runs.get(self.keys.get((name, str(key)), 0)) for key in keys]
        params = (name, [Jsonb(0)] * len(keys), keys)
        function = "trigger_many(%s, %s::jsonb[], %s::text[])"
        if any(run and run.input != 0 for run in known):
            self.refused("WF004", function, *params)
            return
        run_ids = self.call(function, *params)
        assert len(run_ids) == len(keys)
        for run_id, key in zip(run_ids, keys, strict=True):
            known_id = self.keys.get((name, str(key)))
            if known_id in self.model.runs:
                assert run_id == known_id
            else:
                self.created(run_id, name, key, 0, None, 0, 0)

    def created(
        self,
        run_id: int,
        name: str,
        key: str | None,
        value: int,
        version: int | None,
        delay: int,
        priority: int,
    ) -> None:
        assert run_id not in self.model.runs
        if key:
            self.keys[name, key] = run_id
        tasks = {task.name: task for task in self.workflows[name][(version or self.current[name]) - 1]}
        due = self.model.now + timedelta(seconds=delay)
        rows = [
            TaskRun(found.id, tasks[found.task], due, due, tasks[found.task].priority + priority)
            for found in self.rows_of(ROWS)
            if found.run_id == run_id
        ]
        assert sorted(row.task.name for row in rows) == sorted(tasks)
        self.model.runs[run_id] = Run(run_id, name, tasks, rows, value)
        self.model.runs = dict(sorted(self.model.runs.items()))

    def run_of(self, pick: int, *states: str) -> Run:
        """Often one that has something in these states."""
        likely = [run for run, _ in self.model.in_state(*states)] + list(self.model.runs.values())
        return likely[pick % len(likely)]

    @turn(2, lambda self: self.model.in_state("running"), pick=picks)
    def cancel(self, pick: int) -> None:
        run = self.run_of(pick, "running")
        assert self.call("cancel_run(%s)", run.id) == self.model.cancel(run)

    # --- operators ---

    def is_queue(self, name: str) -> bool:
        return any(task.queue == name for all_ in self.workflows.values() for tasks in all_ for task in tasks)

    @turn(
        5,
        lambda self: self.model.in_state("failed", "cancelled"),
        pick=picks,
        task=st.none() | picks,
        request=st.sampled_from([None, None, "r1", "r2"]),
    )
    def retry(self, pick: int, task: int | None, request: str | None) -> None:
        run = self.run_of(pick, "failed", "cancelled")
        name = None if task is None else list(run.tasks)[task % len(run.tasks)]
        params = ("retry_run(%s, %s, %s)", run.id, name, request)
        if request in run.retries:
            earlier, answer = run.retries[request]
            if earlier != name:
                self.refused("WF004", *params)
            else:
                assert self.call(*params) == answer
            return
        trial = copy.deepcopy(run)
        trial.settle(self.model.now)
        if trial.refuses_retry(name):
            self.refused("WF007", *params)
            return
        run.settle(self.model.now)
        reset = run.retry(self.model.now, name)
        assert self.call(*params) == reset
        if request:
            run.retries[request] = name, reset

    @turn(1, pick=picks, other=picks)
    def activate(self, pick: int, other: int) -> None:
        name = sorted(self.workflows)[pick % len(self.workflows)]
        version = 1 + other % len(self.workflows[name])
        changes = self.current[name] != version
        self.current[name] = version
        assert self.call("activate_version(%s, %s)", name, version) == changes

    @turn(1, pick=picks)
    def pause(self, pick: int) -> None:
        self.switch(QUEUES[pick % 2], "pause_queue(%s)", pause=True)

    @turn(1, pick=picks)
    def resume(self, pick: int) -> None:
        self.switch(QUEUES[pick % 2], "resume_queue(%s)", pause=False)

    def switch(self, queue: str, function: str, *, pause: bool) -> None:
        if not self.is_queue(queue):
            self.refused("WF002", function, queue)
            return
        assert self.call(function, queue) == (pause != (queue in self.model.paused))
        (self.model.paused.add if pause else self.model.paused.discard)(queue)

    @turn(1, pick=picks, other=picks)
    def configure(self, pick: int, other: int) -> None:
        queue, window = QUEUES[pick % 2], [0, 1, 2][other % 3]
        if not self.is_queue(queue):
            self.refused("WF002", "configure_queue(%s, %s)", queue, window)
            return
        changes = self.model.windows.get(queue) != (window or None)
        self.model.windows[queue] = window or None
        assert self.call("configure_queue(%s, %s)", queue, window) == changes

    @turn(1, lambda self: self.model.active() < len(self.model.runs), pick=picks)
    def prune(self, pick: int) -> None:
        age = [60, 0][pick % 2]
        expected = self.model.prune(timedelta(seconds=age))
        assert self.call("prune(make_interval(secs => %s))", age) == expected

    @turn(1, pick=picks)
    def call_invalid(self, pick: int) -> None:
        self.refused(*INVALID[pick % len(INVALID)])
