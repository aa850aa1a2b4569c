"""Scheduler, publisher, broker and workers as rules of the state machine: replies get lost, messages too."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from psycopg.types.json import Jsonb

from tests.sql.machine import ORDERS, QUEUES, ROWS, DatabaseMachine, picks, turn
from tests.sql.model_run import TERMINAL, Run, TaskRun

LEASE = timedelta(seconds=4)
FATES = ["succeeded", "succeeded", "failed", "crashed", "unknown_handler", "silence"]

few_picks = st.lists(picks, min_size=1, max_size=4)
outputs = st.sampled_from([None, 7, {"k": 1}, [], ["x"], ["x", None], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
outcomes = st.lists(
    st.sampled_from(["succeeded", "succeeded", "failed", "succeeded", "cancelled"]), min_size=4, max_size=4
)
leases = st.sampled_from([LEASE, timedelta(seconds=30)])


class Witness:
    """G5 and G6, from the answers alone: what workers were told."""

    def __init__(self) -> None:
        self.handed: dict[int, list[tuple[int, int, uuid.UUID]]] = {}  # token, attempt, claim
        self.accepted: set[tuple[int, int]] = set()

    def claimed(self, row_id: int, token: int, attempt: int, claim_id: uuid.UUID) -> None:
        handed = self.handed.setdefault(row_id, [])
        if handed and handed[-1] == (token, attempt, claim_id):
            return  # given back to the call that had won it
        if handed:
            assert token > handed[-1][0], "G6: a fencing token did not increase"
            assert attempt >= handed[-1][1], "G6: an attempt decreased"
        handed.append((token, attempt, claim_id))

    def finished(self, row_id: int, token: int) -> None:
        attempt = next(attempt for t, attempt, _ in self.handed[row_id] if t == token)
        highest = max(t for t, a, _ in self.handed[row_id] if a == attempt)
        assert token == highest, "G5: accepted under an old token"
        assert (row_id, attempt) not in self.accepted, "G5: accepted twice"
        self.accepted.add((row_id, attempt))


class DaemonMachine(DatabaseMachine):
    """The daemons of one database, taking turns with those who call it."""

    def __init__(self) -> None:
        super().__init__()
        self.witness = Witness()
        self.messages: list[tuple[int, uuid.UUID]] = []  # everything that was ever delivered
        self.held: list[tuple[int, int]] = []  # every token that a worker was ever told
        self.lost: list[Callable[[], None]] = []  # calls whose replies were lost, to be repeated whole
        self.broker = True
        self.fate = "succeeded"

    @initialize(broker=st.booleans(), fate=st.sampled_from(FATES))
    def choose_workers(self, broker: bool, fate: str) -> None:
        """How work reaches them, and what becomes of it when everything is driven to its end."""
        self.broker = broker
        self.fate = fate

    # --- scheduler ---

    def unsettled(self) -> list[TaskRun]:
        return [row for _, row in self.model.in_state(*TERMINAL) if not row.settled]

    def has_work(self, run: Run, row: TaskRun) -> bool:
        return (
            (row.state in TERMINAL and not row.settled)
            or run.waits_for_expansion(row)
            or self.model.is_eligible(run, row)
        )

    @turn(8, lambda self: any(self.has_work(run, row) for run, row in self.model.rows()))
    def schedule(self) -> None:
        """All that the scheduler can do for progress now."""
        self.settle(1000)
        while any(run.waits_for_expansion(row) for run, row in self.model.rows()):
            self.expand()
            self.settle(1000)
        self.dispatch(500)
        self.agrees()

    @turn(2, lambda self: self.unsettled(), max_rows=st.sampled_from([1, 2, 1000]))
    def settle(self, max_rows: int) -> None:
        answer = self.call("settle_finished(%s)", max_rows)
        chosen = {row.id for row in self.rows_of(ROWS) if row.stage == "settled"}
        settled = sum(run.settle(self.model.now, only=chosen) for run in self.model.runs.values())
        assert settled == answer <= max_rows
        assert settled or not self.unsettled()

    @turn(1, lambda self: any(run.waits_for_expansion(row) for run, row in self.model.rows()))
    def expand(self) -> None:
        waiting = [(run, row) for run, row in self.model.rows() if run.waits_for_expansion(row)]
        assert self.call("expand_map()") == bool(waiting)
        found = self.rows_of(ROWS)
        known = {row.id for _, row in self.model.rows()}
        done = {row.id for row in found if row.stage != "expand"}
        [(run, row)] = [(run, row) for run, row in waiting if row.id in done]
        self.model.expand(run, row, [new.id for new in found if new.id not in known])

    @turn(
        2,
        lambda self: any(
            self.model.is_eligible(run, row) or (row.reoffered and row.available_at <= self.model.now)
            for run, row in self.model.rows()
        ),
        max_rows=st.sampled_from([1, 500]),
    )
    def dispatch(self, max_rows: int) -> None:
        model = self.model
        eligible = [row for run, row in model.rows() if model.is_eligible(run, row)]
        answer = self.call("dispatch_ready(%s)", max_rows)
        found = {row.id: row for row in self.rows_of(ROWS)}
        due = [row for _, row in model.in_state("ready") if row.reoffered and row.available_at <= model.now]
        promoted = [
            row for _, row in model.in_state("ready") if row.reoffered and found[row.id].stage == "dispatched"
        ]
        assert len(promoted) == min(len(due), max_rows)
        for row in promoted:
            row.enter_window(model.now)
        room = {queue: model.room(queue) for queue in QUEUES}
        taken = [row for _, row in model.in_state("pending") if found[row.id].state == "ready"]
        for run, row in model.in_state("pending"):
            if row in taken:
                model.dispatch(run, row, found[row.id].dispatch_id)
        assert len(taken) <= max_rows
        for queue in QUEUES:
            there = [row for row in eligible if row.task.queue == queue]
            assert sum(row in taken for row in there) <= room[queue]
            # 0 says that there is nothing to do now; and what is not bounded takes all that has room.
            assert answer or not there or not room[queue]
            if max_rows > len(eligible):
                assert sum(row in taken for row in there) == min(room[queue], len(there))
        # What is delayed and due is moved into line by bounded steps too, the longest due first.
        self.by_priority([row for row in eligible if found[row.id].stage != "delayed"], taken)

    def by_priority(self, candidates: list[TaskRun], taken: list[TaskRun]) -> None:
        """Within a queue none is taken before one of higher priority."""
        for queue in QUEUES:
            left = [row.priority for row in candidates if row.task.queue == queue and row not in taken]
            chosen = [row.priority for row in taken if row.task.queue == queue]
            assert not left or not chosen or max(left) <= min(chosen)

    @turn(3, lambda self: self.model.in_state("running"))
    def reap(self) -> None:
        expected = self.model.reap()
        assert self.call("reap_expired_leases()") == expected

    @turn(1, lambda self: self.model.in_state("ready"))
    def redispatch_lost(self) -> None:
        answer = self.call("redispatch_lost()")
        new = [order for order in self.rows_of(ORDERS) if order.id not in self.model.orders]
        assert len(new) == answer
        for order in new:
            found = self.model.find(order.task_run_id)
            assert found is not None
            row = found[1]
            assert (row.state, row.dispatch) == ("ready", order.dispatch_id)
            self.model.arm(row)
            # Not as long as an order that was published lately may still be on its way.
            for earlier in self.model.orders_of(row):
                assert earlier.published_at
                assert earlier.published_at + timedelta(seconds=30) <= self.model.now

    def is_parked(self, row: TaskRun) -> bool:
        return any(order.state == "parked" for order in self.model.orders_of(row))

    @turn(3, lambda self: self.model.in_state("ready"), pick=picks)
    def redispatch(self, pick: int) -> None:
        queues = [row.task.queue for _, row in self.model.in_state("ready")]
        queue = queues[pick % len(queues)]
        ready = [
            row for _, row in self.model.in_state("ready") if row.task.queue == queue and not row.reoffered
        ]
        for row in ready:
            self.model.arm(row)
        assert self.call("redispatch(%s)", queue) == len(ready)

    @turn(4, lambda self: any(row.start_by or self.is_parked(row) for _, row in self.model.in_state("ready")))
    def fail_undeliverable(self) -> None:
        expected = self.model.fail_undeliverable()
        assert self.call("fail_undeliverable()") == expected

    @turn(1, lambda self: any(run.cancelling for run in self.model.runs.values()))
    def cancel_leftovers(self) -> None:
        # What is cancelled while the run's lock is held leaves nothing over.
        assert self.call("cancel_leftovers()") == 0

    @turn(1, lambda self: self.model.orders)
    def sweep(self) -> None:
        swept = [i for i, order in self.model.orders.items() if self.model.is_swept(order)]
        for i in swept:
            del self.model.orders[i]
        assert self.call("sweep_outbox()") == len(swept)

    @turn(3, lambda self: self.model.active())
    def advance_frontiers(self) -> None:
        self.call("advance_frontiers()")

    @turn(5, lambda self: self.model.active(), seconds=st.sampled_from([1, 3, 6, 9, 6, 9, 11, 40, 1000]))
    def advance(self, seconds: int) -> None:
        self.model.now += timedelta(seconds=seconds)
        self.clock.set(self.model.now)
        self.redispatch_lost()  # what is overdue by more than a moment is a violation

    # --- publisher and broker ---

    @turn(
        4,
        lambda self: any(self.model.is_fetched(order) for order in self.model.orders.values()),
        fates=st.lists(
            st.sampled_from(["confirmed", "refused", "parked", "forgotten"]), min_size=1, max_size=3
        ),
        max_rows=st.sampled_from([1, 500]),
        marked=st.sampled_from([True, True, False]),
    )
    def publish(self, fates: list[str], max_rows: int, marked: bool) -> None:
        model = self.model
        expected = {i for i, order in model.orders.items() if model.is_fetched(order)}
        with self.connection.transaction(force_rollback=not marked):
            fetched = self.rows_of("select * from flowforge.fetch_outbox(%s)", max_rows)
            ids = [order.outbox_id for order in fetched]
            assert len(ids) == min(max_rows, len(expected))
            assert set(ids) <= expected
            by_fate: dict[str, list[int]] = {}
            for number, order in enumerate(fetched):
                fate = fates[number % len(fates)]
                by_fate.setdefault(fate, []).append(order.outbox_id)
                if fate == "confirmed":
                    self.messages.append((order.task_run_id, order.dispatch_id))
            published = by_fate.get("confirmed", []) + by_fate.get("forgotten", [])
            refused, parked = by_fate.get("refused", []), by_fate.get("parked", [])
            assert self.call("mark_published(%s::bigint[])", published) == len(published)
            nacks = ["nack"] * len(refused)
            assert self.call("mark_refused(%s::bigint[], %s)", refused, nacks) == len(refused)
            for i in parked:
                assert self.call("mark_unpublishable(%s, %s)", i, "too large")
        if not marked:
            return  # the connection was lost: what went out goes out again
        now = {order.id: order.next_attempt_at for order in self.rows_of(ORDERS)}
        for i in published:
            model.orders[i].state, model.orders[i].published_at = "published", model.now
        for i in refused:
            assert timedelta(seconds=1) <= now[i] - model.now <= timedelta(seconds=75)
            model.orders[i].next_at = now[i]
        for i in parked:
            model.orders[i].state, model.orders[i].parked_at = "parked", model.now

    # --- workers ---

    @turn(
        6,
        lambda self: self.messages,
        chosen=few_picks,
        lease=leases,
        lost=st.booleans(),
        foreign=st.booleans(),
    )
    def claim(self, chosen: list[int], lease: timedelta, lost: bool, foreign: bool) -> None:
        """By messages: new, stale, doubled, or from another database."""
        offered = {row.id for _, row in self.model.in_state("ready")}
        likely = [message for message in self.messages[::-1] if message[0] in offered] + self.messages[::-1]
        messages = [likely[pick % len(likely)] for pick in chosen]
        if foreign:
            messages.append((messages[0][0], uuid.UUID(int=7)))
        self.claim_messages(messages, uuid.uuid4(), lease, lost)

    def live_messages(self) -> list[tuple[int, uuid.UUID]]:
        nobody = uuid.UUID(int=0)
        return [m for m in dict.fromkeys(self.messages) if self.model.claim_answer(*m, nobody) == "claimed"]

    def claim_messages(
        self, messages: list[tuple[int, uuid.UUID]], claim_id: uuid.UUID, lease: timedelta, lost: bool
    ) -> None:
        ids, dispatch_ids = [m[0] for m in messages], [m[1] for m in messages]
        answers = self.rows_of(
            "select * from flowforge.claim_task_runs(%s::bigint[], %s, 'worker', %s, %s)",
            *(ids, dispatch_ids, claim_id, lease),
        )
        assert [(a.position, a.task_run_id, a.dispatch_id) for a in answers] == [
            (position, *message) for position, message in enumerate(messages, 1)
        ]
        won: set[int] = set()
        for answer in answers:
            expected = self.model.claim_answer(answer.task_run_id, answer.dispatch_id, claim_id)
            if expected == "claimed" and answer.task_run_id in won:
                expected = "running"  # only the first position that names a task run can win
            assert answer.outcome == expected
            if expected == "claimed":
                won.add(answer.task_run_id)
                self.claimed(answer, claim_id, lease, lost)
            else:
                assert answer.fencing_token is None
        if lost:
            self.lost.append(lambda: self.claim_messages(messages, claim_id, lease, lost=False))

    def claimed(self, answer: Any, claim_id: uuid.UUID, lease: timedelta, lost: bool) -> None:
        found = self.model.find(answer.task_run_id)
        assert found is not None
        run, row = found
        self.model.claim(row, claim_id, lease)
        upstream = [other for other in run.upstream(row) if other.task.name != row.task.map]
        time_limit = row.task.time_limit
        assert answer[4:] == (
            *(row.token, row.attempt, run.id, run.workflow, row.task.name, f"{run.workflow}.{row.task.name}"),
            run.input,
            {other.task.name: other.output for other in upstream if other.state == "succeeded"},
            {other.task.name: other.state for other in upstream},
            *(row.item, row.index, row.lease, row.lease_end),
            None if time_limit is None else timedelta(seconds=time_limit),
        )
        self.witness.claimed(row.id, row.token, row.attempt, claim_id)
        if not lost:
            self.held.append((row.id, row.token))

    @turn(
        3,
        lambda self: self.model.in_state("ready"),
        queues=st.sampled_from([QUEUES, QUEUES[:1]]),
        max_rows=st.integers(1, 3),
        lease=leases,
        lost=st.booleans(),
    )
    def claim_next(self, queues: list[str], max_rows: int, lease: timedelta, lost: bool) -> None:
        self.claim_chosen(queues, max_rows, uuid.uuid4(), lease, lost)

    def claim_chosen(
        self, queues: list[str], max_rows: int, claim_id: uuid.UUID, lease: timedelta, lost: bool
    ) -> None:
        answers = self.rows_of(
            "select * from flowforge.claim_next(%s, 'worker', %s, %s, %s)", queues, claim_id, lease, max_rows
        )
        assert {answer.outcome for answer in answers} <= {"claimed"}
        taken = {answer.task_run_id for answer in answers}
        holds = [row for _, row in self.model.in_state("running") if row.claim == claim_id]
        if holds:
            assert taken == {row.id for row in holds}  # a repeat chooses nothing new
        else:
            candidates = [
                row
                for _, row in self.model.in_state("ready")
                if row.task.queue in queues and not row.reoffered
            ]
            chosen = [row for row in candidates if row.id in taken]
            assert len(answers) == len(chosen) == min(max_rows, len(candidates))
            self.by_priority(candidates, chosen)
            self.model.orders = {i: order for i, order in self.model.orders.items() if order.row not in taken}
        for answer in answers:
            self.claimed(answer, claim_id, lease, lost)
        if lost:
            self.lost.append(lambda: self.claim_chosen(queues, max_rows, claim_id, lease, lost=False))

    @turn(4, lambda self: self.lost, pick=picks)
    def repeat_after_lost_reply(self, pick: int) -> None:
        self.lost.pop(pick % len(self.lost))()

    def token_of(self, pick: int) -> tuple[int, int]:
        """Often one that still holds."""
        live = [token for token in self.held if self.model.holder(*token)]
        likely = live * 3 + self.held[::-1]
        return likely[pick % len(likely)]

    @turn(
        3,
        lambda self: self.model.in_state("ready"),
        fates=st.sampled_from([["succeeded"], ["succeeded", "failed"]]),
        output=outputs,
    )
    def work(self, fates: list[str], output: Any) -> None:
        """Workers that lose nothing: everything that can be claimed is, and is finished."""
        tokens = self.claim_all()
        self.finish_all(tokens, (fates * len(tokens))[: len(tokens)], output, retryable=True)
        self.agrees()

    def claim_all(self) -> list[tuple[int, int]]:
        """The tokens of all that workers then hold."""
        if self.broker:
            self.publish(["confirmed"], 500, marked=True)
            self.claim_messages(self.live_messages(), uuid.uuid4(), LEASE, lost=False)
        else:
            self.claim_chosen(QUEUES, 500, uuid.uuid4(), LEASE, lost=False)
        self.agrees()
        return [token for token in self.held if self.model.holder(*token)]

    @turn(3, lambda self: self.held, chosen=few_picks, lease=leases)
    def renew(self, chosen: list[int], lease: timedelta) -> None:
        tokens = [self.token_of(pick) for pick in chosen]
        expected = [self.model.renew(row_id, token, lease) for row_id, token in tokens]
        answers = self.rows_of(
            "select * from flowforge.renew_leases(%s::bigint[], %s::bigint[], %s)",
            *([row_id for row_id, _ in tokens], [token for _, token in tokens], lease),
        )
        assert [answer.outcome for answer in answers] == expected

    @turn(1, lambda self: self.held, pick=picks)
    def assert_lease(self, pick: int) -> None:
        row_id, token = self.token_of(pick)
        held = self.model.holder(row_id, token)
        if held is None or (held[1].deadline and held[1].deadline <= self.model.now):
            self.refused("WF006", "assert_lease(%s, %s)", row_id, token)
        else:
            assert held[1].lease is not None
            held[1].hold(self.model.now, held[1].lease, shorten=False)
            self.call("assert_lease(%s, %s)", row_id, token)

    @turn(
        6,
        lambda self: self.held,
        chosen=few_picks,
        fates=outcomes,
        output=outputs,
        retryable=st.sampled_from([True, True, False]),
        bogus=st.booleans(),
    )
    def finish(self, chosen: list[int], fates: list[str], output: Any, retryable: bool, bogus: bool) -> None:
        tokens = [self.token_of(pick) for pick in chosen]
        if bogus:
            tokens[-1] = (tokens[-1][0], tokens[-1][1] + 1000)
        self.finish_all(tokens, fates[: len(tokens)], output, retryable)

    def finish_all(
        self, tokens: list[tuple[int, int]], outcomes: list[str], output: Any, retryable: bool
    ) -> None:
        number = len(tokens)
        calls = [(*token, outcome) for token, outcome in zip(tokens, outcomes, strict=True)]
        held = {call[:2]: self.model.holder(*call[:2]) for call in calls}
        firsts = {call[:2]: call for call in reversed(calls)}
        params = (
            "select * from flowforge.finish_task_runs(%s::bigint[], %s::bigint[], %s, %s::jsonb[], %s, %s)",
            *([row_id for row_id, _ in tokens], [token for _, token in tokens], outcomes),
            [None if output is None else Jsonb(output)] * number,
            *(["it failed"] * number, [retryable] * number),
        )
        if any(
            found and not found[0].cancelling and firsts[t][2] == "cancelled" for t, found in held.items()
        ):
            with pytest.raises(psycopg.DatabaseError) as caught:
                self.rows_of(*params)
            assert caught.value.sqlstate == "WF007"
            return
        expected = [self.model.finish(*call, output, retryable) for call in calls]
        assert [answer.answer for answer in self.rows_of(*params)] == expected
        for (row_id, token, _), answer in zip(calls, expected, strict=True):
            if answer == "accepted":
                self.witness.finished(row_id, token)

    @turn(
        3,
        lambda self: self.held,
        pick=picks,
        reason=st.sampled_from(["unstarted", "shutdown", "crashed", "unknown_handler"]),
    )
    def release(self, pick: int, reason: str) -> None:
        self.give_back(self.token_of(pick), reason)

    def give_back(self, token: tuple[int, int], reason: str) -> None:
        expected = self.model.release(*token, reason)
        assert self.call("release_task_run(%s, %s, %s)", *token, reason) == expected
