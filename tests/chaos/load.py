"""The load: a client that triggers runs, cancels some, retries what has failed, pauses a queue now and then,
and survives whatever happens to its connection. What it does is drawn from the seed; how much of it, the time
decides."""

import heapq
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import psycopg

from flowforge import Client, db
from flowforge.errors import DatabaseError, DatabaseUnavailable, StateConflict
from tests.chaos.flows import SHARES, WORKFLOWS

MOST_OPEN = 80
"""Runs under way beyond which no more are triggered."""

BURST = 25
"""As many come at once now and then, besides the others, so that messages wait in queues."""

T = TypeVar("T")


@dataclass
class Triggered:
    """A run as the client knows it: the first answer to its key, and those to later triggers of it."""

    key: str
    workflow: str
    run: int | None = None
    again: list[int] = field(default_factory=list)
    cancelled: bool = False
    retried: int = 0


class Load(threading.Thread):
    """Triggers until told to `end`, then lets what is under way end by itself."""

    def __init__(self, dsn: str, seed: int, per_second: float) -> None:
        super().__init__(name="load", daemon=True)
        self.runs: dict[str, Triggered] = {}
        self.error: BaseException | None = None
        self.counts: dict[str, int] = {
            "calls repeated": 0, "cancels": 0, "retries": 0, "pauses": 0, "triggers repeated": 0,
        }  # fmt: skip
        self._dsn, self._seed, self._per_second = dsn, seed, per_second
        self._draw = random.Random(f"load/{seed}")
        self._over, self._abandoned = threading.Event(), threading.Event()
        self._client = Client(dsn)
        self._connection: db.Connection | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = self._paced = 0

    def end(self) -> None:
        """Trigger no more; what was begun is still asked to its answer."""
        self._over.set()

    def abandon(self) -> None:
        """End whatever is unanswered."""
        self._abandoned.set()

    def run(self) -> None:
        try:
            self._trigger_all()
            while self._due and not self._abandoned.is_set():
                _, _, action = heapq.heappop(self._due)
                action()
        except BaseException as error:  # noqa: BLE001 -- told by the laboratory
            self.error = error
        finally:
            self._client.close()
            if self._connection is not None:
                self._connection.close()

    def _trigger_all(self) -> None:
        began, open_runs, looked = time.monotonic(), 0, 0.0
        while not self._over.wait(max(0.0, began + self._paced / self._per_second - time.monotonic())):
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            if time.monotonic() - looked > 0.2 or open_runs >= MOST_OPEN:
                open_runs = self._ask("select count(*) from flowforge.run where finished_at is null")
                looked = time.monotonic()
            if open_runs >= MOST_OPEN:
                self._over.wait(0.05)
                began = time.monotonic() - self._paced / self._per_second
                continue
            self._trigger()
            open_runs += 1

    def _trigger(self) -> None:
        self._paced += 1
        for _ in range(BURST if self._draw.random() < 0.3 / BURST else 1):
            self._trigger_one()

    def _trigger_one(self) -> None:
        self._number += 1
        key, draw = f"run-{self._number}", self._draw
        workflow = draw.choices(WORKFLOWS, SHARES)[0].name
        run = self.runs[key] = Triggered(key, workflow)
        run.run = self._send(run)
        chances = draw.random(), draw.random(), draw.random(), draw.random()
        if chances[0] < 0.06:
            self._later(draw.choice((0.0, 0.05, 0.3, 1.5)), lambda: self._cancel(run))
        if chances[1] < 0.5 and workflow in ("broken", "flaky", "wide", "limited"):
            self._later(draw.uniform(1, 8), lambda: self._retry(run))
        if chances[2] < 0.05:
            self._later(draw.uniform(0, 3), lambda: self._repeat(run))
        if chances[3] < 0.01:
            self._pause(True)
            self._later(draw.uniform(0.2, 1.0), lambda: self._pause(False))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, len(self._due) + self._number * 1000, action))

    def _send(self, run: Triggered) -> int:
        value = {"seed": self._seed, "key": run.key}
        return self._patiently(lambda: self._client.trigger(run.workflow, value, idempotency_key=run.key))

    def _repeat(self, run: Triggered) -> None:
        self.counts["triggers repeated"] += 1
        run.again.append(self._send(run))

    def _cancel(self, run: Triggered) -> None:
        number = run.run
        assert number is not None
        run.cancelled = True
        self.counts["cancels"] += 1
        self._patiently(lambda: self._client.cancel(number, reason="by the load"))

    def _retry(self, run: Triggered) -> None:
        number = run.run
        assert number is not None
        run.retried += 1
        with suppress(StateConflict):
            request = f"retry-{run.retried}"
            self._patiently(lambda: self._client.retry(number, request_id=request))
            self.counts["retries"] += 1

    def _pause(self, paused: bool) -> None:
        self.counts["pauses"] += paused
        self._ask(f"select flowforge.{'pause' if paused else 'resume'}_queue('wide')")

    def _ask(self, query: str) -> Any:
        """The value that a statement answers which may be repeated."""

        def ask() -> Any:
            try:
                if self._connection is None:
                    self._connection = db.connect(self._dsn, application_name="flowforge load")
                return db.call(self._connection, query)[0][0]
            except psycopg.Error as error:
                if self._connection is not None:
                    self._connection.close()
                self._connection = None
                raise DatabaseUnavailable(str(error)) from error

        return self._patiently(ask)

    def _patiently(self, call: Callable[[], T]) -> T:
        """Call until there is an answer: each of these calls may be repeated."""
        backoff = db.Backoff(first=0.05, cap=1.0)
        while True:
            try:
                return call()
            except (StateConflict, AssertionError):
                raise
            except DatabaseError as error:
                if (error.sqlstate or "").startswith("WF") or self._abandoned.wait(backoff.next()):
                    raise
                self.counts["calls repeated"] += 1
