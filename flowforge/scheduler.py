"""The scheduler: which task runs are dispatched, and that none is forgotten.

It calls the functions of its role in turn, each as a short transaction of its own; the database decides
everything, so several schedulers may run at once. It may die at any moment: what it had not committed is
found again by state.

Finishing task runs notify only a scheduler that has declared itself asleep. So before a long sleep it
declares, waits a moment for those that finished without having seen the declaration, looks again, and sleeps;
while it is busy, it declares itself awake."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import psycopg

from flowforge import db, log
from flowforge.config import Config
from flowforge.crash import crash_point
from flowforge.metrics import Figures, Metric, counted
from flowforge.runner import Daemon

# For a transaction that was finishing when the declaration was committed.
_MOMENT = 0.02
# Ticks in a row with work after which finishes need not notify any more. A lone run goes from wake-up to
# wake-up.
_BUSY = 3
# The function itself does nothing more often than each 4 s, for all schedulers.
_FRONTIERS_INTERVAL = 5.0
# A due task run that cannot be moved yet (its row is locked) must not turn waiting into spinning.
_SHORTEST = 0.05


@dataclass
class _Duty:
    """One function, how often it is called at least (seconds; 0: in every tick), whether it can take what it
    finds one by one, and how it has been going."""

    function: str
    max_rows: int | None
    every: float
    divisible: bool = False
    due: float = 0.0
    error: str = ""
    failures: int = 0
    moved: int = 0  # in all
    failed: int = 0  # in all
    passing: bool = False  # whether its last error was of the kind that passes by itself
    told: set[str] = field(default_factory=set)  # what the database has warned of, since it last worked
    backoff: db.Backoff = field(default_factory=db.Backoff)

    def is_due(self) -> bool:
        """Also a little early, so that duties of the same pace share their wake-ups."""
        return time.monotonic() >= self.due - self.every / 4

    def query(self, *, one_by_one: bool = False) -> str:
        """The call of the function."""
        arguments = [] if self.max_rows is None else [str(self.max_rows)]
        if one_by_one:
            arguments.append("one_by_one => true")
        return f"select flowforge.{self.function}({', '.join(arguments)})"


class Scheduler(Daemon):
    """The duty of the scheduler, for `runner.run`."""

    name = "scheduler"
    role = "flowforge_scheduler"
    channels = ("flowforge_scheduler",)
    functions = (
        "settle_finished",
        "expand_map",
        "dispatch_ready",
        "reap_expired_leases",
        "redispatch_lost",
        "fail_undeliverable",
        "cancel_leftovers",
        "sweep_outbox",
        "advance_frontiers",
        "declare_scheduler",
        "next_due",
    )

    def __init__(self, config: Config) -> None:
        self._config = config
        self._log = log.of(self.name)
        self._figures = Figures(config)
        self._asleep = False
        self._busy = 0
        self._duties = [
            _Duty("reap_expired_leases", 500, config.reap_interval, divisible=True),
            _Duty("cancel_leftovers", 100, config.recover_interval, divisible=True),
            _Duty("settle_finished", config.settle_batch, 0, divisible=True),
            _Duty("expand_map", None, 0, divisible=True),
            _Duty("dispatch_ready", config.dispatch_batch, 0),
            _Duty("redispatch_lost", 500, config.recover_interval),
            _Duty("fail_undeliverable", 500, config.recover_interval),
            _Duty("sweep_outbox", 2000, config.sweep_interval),
            _Duty("advance_frontiers", None, _FRONTIERS_INTERVAL),
        ]

    def trouble(self) -> str:
        """Which functions fail at present, and how."""
        failing = [duty for duty in self._duties if duty.failures > (2 if duty.passing else 0)]
        return "; ".join(f"{duty.function}: {duty.error}" for duty in failing)

    def metrics(self) -> list[Metric]:
        """What each function moved and how often it failed, and the figures of the database."""
        return [
            counted(
                "scheduler_moved", "What a function of the scheduler moved: task runs, messages or runs.",
                "function", {duty.function: duty.moved for duty in self._duties},
            ),
            counted(
                "scheduler_failures", "Calls of a function of the scheduler that failed.",
                "function", {duty.function: duty.failed for duty in self._duties},
            ),
            *self._figures.metrics(),
        ]  # fmt: skip

    def close(self) -> None:
        self._figures.close()

    def on_connect(self) -> None:
        self._asleep, self._busy = False, 0
        for duty in self._duties:
            duty.due = 0.0

    def tick(self, conn: db.Connection) -> int:
        moved = 0
        for duty in self._duties:
            # Where all of them wait for a lock, that is a time-out for each.
            if self.stop is not None and self.stop.requested:
                return moved
            if duty.is_due():
                moved += self._perform(conn, duty)
        self._busy = self._busy + 1 if moved else 0
        if self._asleep and self._busy >= _BUSY:
            self._declare(conn, asleep=False)
        return moved

    def pause(self, conn: db.Connection) -> float:
        if not self._asleep:
            self._declare(conn, asleep=True)
            return _MOMENT
        # Again each time: another scheduler may have declared itself awake, and died.
        self._declare(conn, asleep=True)
        waits = [self._config.poll_interval * random.uniform(0.8, 1.0)]  # noqa: S311 -- jitter, not a secret
        waits += [duty.due - time.monotonic() for duty in self._duties if duty.every or duty.failures]
        # In seconds: how the server writes intervals is a setting that psycopg may not be able to read.
        query = "select extract(epoch from flowforge.next_due())::float8"
        due = db.call(conn, query, lock_timeout=self._config.lock_timeout)[0][0]
        if due is not None:
            waits.append(due)
        return max(min(waits), _SHORTEST)

    def _perform(self, conn: db.Connection, duty: _Duty) -> int:
        """Call one function. One that fails waits for its next turn and holds up none of the others, and what
        made it fail none of the rest that it found; only a lost or useless connection is the caller's
        matter."""
        crash_point(f"scheduler:before-{duty.function}")
        try:
            moved = self._call(conn, duty.query())
        except psycopg.Error as exc:
            if db.connection_useless(conn, exc):
                raise
            error = f"{exc.diag.message_primary or type(exc).__name__} [{exc.sqlstate}]"
            if error != duty.error:
                self._log.warning("a function failed; trying it again", function=duty.function, error=error)
            duty.failed += 1
            duty.failures, duty.passing = duty.failures + 1, db.is_transient(exc)
            moved = self._one_by_one(conn, duty) if duty.divisible and not duty.passing else 0
            duty.error, duty.due = error, 0.0 if moved else time.monotonic() + duty.backoff.next()
            return moved
        if duty.failures:
            self._log.info("the function works again", function=duty.function)
            duty.error, duty.failures = "", 0
            duty.told.clear()
            duty.backoff.reset()
        duty.moved += moved
        # With work found there may be more: it stays due.
        duty.due = 0.0 if moved else time.monotonic() + duty.every
        if moved:
            crash_point(f"scheduler:after-{duty.function}")
            self._log.debug("moved", function=duty.function, count=moved)
        return moved

    def _call(self, conn: db.Connection, query: str) -> int:
        return int(db.call(conn, query, lock_timeout=self._config.lock_timeout)[0][0] or 0)

    def _one_by_one(self, conn: db.Connection, duty: _Duty) -> int:
        """What a function failed for must not hold up the rest: the database warns of it and goes on."""

        def tell(diagnostic: psycopg.errors.Diagnostic) -> None:
            text = str(diagnostic.message_primary)
            if text not in duty.told:
                duty.told.add(text)
                self._log.error("left as it is; see flowforge.violations()", error=text)

        conn.add_notice_handler(tell)
        try:
            return self._call(conn, duty.query(one_by_one=True))
        except psycopg.Error as exc:
            if db.connection_useless(conn, exc):
                raise
            return 0
        finally:
            conn.remove_notice_handler(tell)

    def _declare(self, conn: db.Connection, *, asleep: bool) -> None:
        db.call(
            conn, "select flowforge.declare_scheduler(%s)", [asleep], lock_timeout=self._config.lock_timeout
        )
        self._asleep = asleep
