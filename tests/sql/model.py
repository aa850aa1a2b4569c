"""What FlowForge promises, as a small program: the reference that the real functions are compared with.

Written from the design, not from the functions. Where the design leaves a choice (which rows a bounded call
takes, a random delay), the caller tells what was chosen, and the model checks that it was allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from tests.sql.model_run import Run, TaskRun

ANY_DELAY = timedelta(minutes=5)
UNKNOWN_HANDLER_LIMIT = timedelta(minutes=15)
REAPER_GAP = timedelta(seconds=10)
DEFAULT_WINDOW = 100


@dataclass
class Order:
    """A row of the outbox."""

    id: int
    row: int
    dispatch: UUID
    created_at: datetime
    next_at: datetime
    state: str = "unpublished"  # published, parked
    published_at: datetime | None = None
    parked_at: datetime | None = None


class Model:
    """Every run, order and setting of one database, at a time that only moves forward."""

    def __init__(self, now: datetime, max_width: int) -> None:
        self.now = now
        self.runs: dict[int, Run] = {}
        self.orders: dict[int, Order] = {}
        self.expected_orders: list[int] = []  # task runs for which the present call must write one
        self.possible_orders: list[int] = []  # those for which it may
        self.paused: set[str] = set()
        self.windows: dict[str, int | None] = {}  # None: the default
        self.reaper_tick: datetime | None = None
        self.reaper_period = timedelta()
        self.gaps: list[tuple[datetime, datetime]] = []
        self.max_width = max_width
        self.dispatch_ids: set[UUID] = set()

    def rows(self) -> Iterator[tuple[Run, TaskRun]]:
        for run in self.runs.values():
            for row in run.rows:
                yield run, row

    def find(self, row_id: int) -> tuple[Run, TaskRun] | None:
        return next(((run, row) for run, row in self.rows() if row.id == row_id), None)

    def in_state(self, *states: str) -> list[tuple[Run, TaskRun]]:
        return [(run, row) for run, row in self.rows() if row.state in states]

    def active(self) -> int:
        return sum(run.state == "running" for run in self.runs.values())

    def is_eligible(self, run: Run, row: TaskRun) -> bool:
        return (
            (row.state == "pending" and run.unmet(row) == 0 and row.available_at <= self.now)
            and (row.task.queue not in self.paused and not run.cancelling)
            and (row.task.map is None or row.index is not None)
        )

    def room(self, queue: str) -> int:
        """How many more may be dispatched now: the window counts what is dispatched and due, and what is to
        be offered again later only beyond its own size."""
        ready = [row for _, row in self.in_state("ready") if row.task.queue == queue]
        window, later = self.windows.get(queue) or DEFAULT_WINDOW, sum(row.reoffered for row in ready)
        return max(0, window - (len(ready) - later) - max(0, later - window))

    def expand(self, run: Run, row: TaskRun, ids: list[int]) -> None:
        """One map; `ids` are the elements that came into being, in order."""
        assert run.waits_for_expansion(row)
        upstream = run.own(str(row.task.map))
        output = upstream.output if upstream.state == "succeeded" else None
        items = output if isinstance(output, list) and len(output) <= self.max_width else None
        if items is None:
            row.become("failed")
        elif not items:
            row.become("succeeded")
            row.width, row.output = 0, []
        else:
            row.width = len(items)
        for index, (row_id, item) in enumerate(zip(ids, items or [], strict=True)):
            element = TaskRun(row_id, row.task, self.now, self.now, row.priority, index, row.generation, item)
            run.rows.append(element)

    def dispatch(self, run: Run, row: TaskRun, dispatch_id: UUID) -> None:
        assert self.is_eligible(run, row), f"{row} is not eligible"
        assert dispatch_id not in self.dispatch_ids, "the dispatch id is not new"
        self.dispatch_ids.add(dispatch_id)
        if not row.in_line:
            row.line_up(self.now, self.now)
        row.state, row.dispatch = "ready", dispatch_id
        row.offer(self.now)
        self.expected_orders.append(row.id)

    def orders_of(self, row: TaskRun) -> list[Order]:
        return [o for o in self.orders.values() if o.row == row.id and o.dispatch == row.dispatch]

    def arm(self, row: TaskRun) -> None:
        """See to an order for a ready task run: one that is still to be published serves, unless it waits for
        longer than the task run does; that may hang on a delay which the database chooses."""
        waiting = [order.next_at for order in self.orders_of(row) if order.state == "unpublished"]
        if not any(each <= max(row.available_at, self.now) for each in waiting):
            sure = not any(each <= max(row.available_by, self.now) for each in waiting)
            (self.expected_orders if sure else self.possible_orders).append(row.id)

    def is_live(self, order: Order) -> bool:
        found = self.find(order.row)
        return found is not None and found[1].state == "ready" and found[1].dispatch == order.dispatch

    def is_fetched(self, order: Order) -> bool:
        """Whether the order is to be published now: never before the task run may be offered again."""
        found = self.find(order.row)
        return (order.state == "unpublished" and order.next_at <= self.now and self.is_live(order)) and (
            found is not None and found[1].available_at <= self.now and not found[0].cancelling
        )

    def is_swept(self, order: Order) -> bool:
        """Whether the order serves nothing any more."""
        return self.is_replaced(order) or not self.is_live(order)

    def is_replaced(self, order: Order) -> bool:
        """Whether an order of its dispatch was written since it was parked; at the same time the ids tell."""
        return order.parked_at is not None and any(
            (other.row, other.dispatch) == (order.row, order.dispatch)
            and other.state != "parked"
            and (other.created_at, other.id) > (order.parked_at, order.id)
            for other in self.orders.values()
        )

    def claim_answer(self, row_id: int, dispatch_id: UUID, claim_id: UUID) -> str:
        """What a claim by one message is answered now."""
        found = self.find(row_id)
        if found is None:
            return "unknown"
        run, row = found
        if row.dispatch != dispatch_id:
            return "superseded" if dispatch_id in row.earlier else "unknown"
        if row.state == "ready":
            return "cancelled" if run.cancelling else "claimed"
        if row.state == "running":
            return "claimed" if row.claim == claim_id else "running"
        return "cancelled" if row.state == "cancelled" else "finished"

    def claim(self, row: TaskRun, claim_id: UUID, lease: timedelta) -> None:
        """A claim that is won, or given back to the call that had won it."""
        if row.state == "running":
            assert row.claim == claim_id
            assert row.lease is not None
            row.hold(self.now, row.lease, shorten=False)
            return
        row.start_by_claimed = row.start_by
        row.become("running")
        row.claim, row.token = claim_id, row.token + 1
        if row.task.time_limit is not None:
            row.deadline = self.now + timedelta(seconds=row.task.time_limit)
        row.hold(self.now, self.lease_of(row, lease), shorten=True)

    def lease_of(self, row: TaskRun, lease: timedelta) -> timedelta:
        return timedelta(seconds=row.task.lease) if row.task.lease is not None else lease

    def holder(self, row_id: int, token: int) -> tuple[Run, TaskRun] | None:
        found = self.find(row_id)
        return found if found and found[1].state == "running" and found[1].token == token else None

    def renew(self, row_id: int, token: int, lease: timedelta) -> str:
        held = self.holder(row_id, token)
        if held is None:
            return "lost"
        run, row = held
        row.hold(self.now, self.lease_of(row, lease), shorten=True)
        return "cancel" if run.cancelling else "held"

    def finish(self, row_id: int, token: int, outcome: str, output: Any, retryable: bool) -> str:
        held = self.holder(row_id, token)
        if held is None:
            found = self.find(row_id)
            return "repeated" if found and token in found[1].answered else "fenced"
        run, row = held
        row.answered.add(token)
        if outcome == "succeeded":
            row.become("succeeded")
            row.output, row.reaps, row.unknown_since = output, 0, None
        else:
            self._end_attempt(run, row, retryable=retryable)
        return "accepted"

    def _end_attempt(self, run: Run, row: TaskRun, *, retryable: bool) -> None:
        row.failures, row.reaps, row.unknown_since = row.failures + 1, 0, None
        if run.cancelling:
            row.become("cancelled")
        elif retryable and row.failures < row.task.max_attempts:
            row.next_attempt()
            row.wait(self.now, *row.task.back_off(row.failures))
        else:
            row.become("failed")

    def release(self, row_id: int, token: int, reason: str) -> str:
        held = self.holder(row_id, token)
        if held is None:
            return "fenced"
        run, row = held
        if reason == "unknown_handler":
            since = row.unknown_since or self.now
            if self.now - since >= UNKNOWN_HANDLER_LIMIT:
                self._end_attempt(run, row, retryable=False)
            else:
                self._give_back(run, row, timedelta(seconds=1), timedelta(seconds=60))
                row.unknown_since = since
        else:
            self._give_back(run, row, timedelta(), timedelta(), counted=reason == "crashed")
        if reason in ("unstarted", "unknown_handler") and row.state == "ready":
            row.start_by = row.start_by_claimed  # nobody has begun it
        return "released" if row.state == "ready" else row.state

    def _give_back(
        self, run: Run, row: TaskRun, shortest: timedelta, longest: timedelta, *, counted: bool = False
    ) -> None:
        """The same attempt, under the same dispatch id; counted, the first time at once, then later."""
        row.reaps += counted
        row.unknown_since = None
        if run.cancelling:
            row.become("cancelled")
        elif counted and row.reaps > row.task.max_reaps:
            row.become("failed")
        else:
            row.become("ready")
            if counted and row.reaps > 1:
                shortest, longest = timedelta(seconds=1), ANY_DELAY
            row.wait(self.now, shortest, longest)
            row.offer(row.available_at)
            row.reoffered = longest > timedelta()
            self.arm(row)

    def reap(self) -> int:
        """After a gap in its ticks each lease has its length anew, in which other gaps do not count."""
        since = self.now - self.reaper_tick if self.reaper_tick else timedelta()
        if since > max(REAPER_GAP, 3 * self.reaper_period):
            assert self.reaper_tick is not None
            self.gaps.append((self.reaper_tick + timedelta(seconds=3), self.now))
            since = timedelta()
        self.reaper_tick = self.now
        self.reaper_period = max(since, self.reaper_period * 0.9)
        expired = [(run, row) for run, row in self.in_state("running") if self._is_lost(row)]
        for run, row in expired:
            if not run.cancelling and row.deadline and row.deadline <= self.now:
                self._end_attempt(run, row, retryable=True)
            else:
                self._give_back(run, row, timedelta(), timedelta(), counted=True)
        return len(expired)

    def _is_lost(self, row: TaskRun) -> bool:
        assert row.lease is not None
        assert row.lease_end is not None
        spared = False
        if self.gaps:
            self.gaps = self.gaps[-20:]
            since = min((end for _, end in self.gaps if end >= row.lease_end), default=self.gaps[-1][1])
            later = sum((end - start for start, end in self.gaps if end > since), timedelta())
            spared = self.now - since - later < row.lease and self.now - since < 3 * row.lease
            if len(self.gaps) == 20 and row.lease_end <= self.gaps[0][0] - timedelta(seconds=3):
                spared = False  # it has been, for one that is forgotten
        over = row.deadline is not None and row.deadline <= self.now
        return row.lease_end <= self.now and (over or not spared)

    def fail_undeliverable(self) -> int:
        late = [
            row
            for _, row in self.in_state("ready")
            if row.start_by and row.start_by <= self.now and not row.reoffered
        ]
        for _, row in self.in_state("ready"):
            orders = self.orders_of(row)
            stays = any(order.state == "parked" and not self.is_replaced(order) for order in orders)
            if row not in late and stays and all(order.state != "unpublished" for order in orders):
                late.append(row)
        for row in late:
            row.become("failed")
        return len(late)

    def cancel(self, run: Run) -> bool:
        run.settle(self.now)
        if run.state != "running" or run.cancelling:
            return False
        run.cancelling = True
        for row in run.rows:
            if row.state in ("pending", "ready"):
                row.become("cancelled")
        run.settle(self.now)
        return True

    def prune(self, older_than: timedelta) -> int:
        old = [r for r in self.runs.values() if r.finished_at and r.finished_at < self.now - older_than]
        for run in old:
            del self.runs[run.id]
        return len(old)
