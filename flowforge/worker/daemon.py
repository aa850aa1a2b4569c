"""The worker: takes dispatches, claims them, runs their handlers, reports how they ended.

It may lose everything it has in memory at any moment. What it had claimed is offered again by the reaper when
the lease runs out; what it had not is still the broker's or the database's. What it still believes to own is
checked by the fencing token at every step that could change anything.

Threads and connections: claiming (claim), handlers (none, but one for each open transaction of a handler),
reporting (finish), leases, progress and presence (renew). The thread that calls `run` only watches.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg

from flowforge import connecting, db, exits, log, stopping, threads, tracing
from flowforge.config import Config
from flowforge.definition import Workflow
from flowforge.errors import (
    BrokerForbidden,
    BrokerMisconfigured,
    ConfigError,
    DatabaseUnavailable,
    FlowForgeError,
    first_line,
    from_database,
)
from flowforge.health import Health
from flowforge.metrics import Metric, counted, of_daemon, serving
from flowforge.stopping import Stop, signals
from flowforge.worker.children import Children
from flowforge.worker.claiming import Claimer, Parts
from flowforge.worker.context import Context
from flowforge.worker.dispatches import QueueClaimer
from flowforge.worker.execution import StopReason
from flowforge.worker.executor import Executor, Handler
from flowforge.worker.finishing import Finisher
from flowforge.worker.leases import LeaseKeeper
from flowforge.worker.messages import MessageClaimer
from flowforge.worker.session import Session

_log = log.of("worker")

ROLE = "flowforge_worker"
FUNCTIONS = (
    "announce_worker", "assert_lease", "claim_next", "claim_task_runs", "finish_task_run", "finish_task_runs",
    "release_task_run", "renew_leases", "report_progress", "traceparents",
)  # fmt: skip

COUNTS_INTERVAL = 60.0
"""Seconds between two log lines with what was done."""

SWITCH_INTERVAL = 0.0005
"""Seconds after which a thread of this process asks for the interpreter that another one holds. A handler
that computes, and makes a short call of the system every few milliseconds, takes the interpreter back each
time before anybody else has woken, and nobody asks it for more: with Python's own 5 ms, leases go without
renewal for seconds."""


def handlers_of(workflows: Iterable[Workflow]) -> dict[str, Handler]:
    """The handlers of `workflows` by name. Raises ConfigError when one name means two functions."""
    handlers: dict[str, Handler] = {}
    for workflow in workflows:
        for name, task in workflow.handlers.items():
            other: Any = handlers.setdefault(name, task)
            if other.function is not task.function:
                raise ConfigError(f"two functions under one handler name, {name!r}: {other!r} and {task!r}")
    return handlers


def run(
    handlers: Mapping[str, Handler],
    config: Config,
    *,
    sources: Iterable[str] = (),
    stop: Stop | None = None,
    health: Health | None = None,
) -> int:
    """Run a worker until asked to stop and return its exit code.

    `handlers` are functions of one Context, sync or async, by handler name. `sources` are the modules
    (MODULE[:NAME]) that they are from, for those that run in processes of their own. Without `stop` the
    signals of the process ask for it (main thread only), and the process ends in here, with that code, if
    handlers are left that did not stop: it is the last thing a program does. Other threads that handlers have
    left may hold up the interpreter's end. With `stop` this may be any thread, and it always returns.
    Asked once: nothing new is taken, handlers get `config.grace` seconds, what then still runs is given back.
    Asked twice: that happens at once, and the exit code says so.

    Raises ConfigError when handlers are to run in processes of their own and `sources` is empty, when they
    are to be traced and OpenTelemetry is not installed, and when the process, being a worker alone, cannot
    serve metrics as it is configured to.
    """
    if stop is None:
        with signals(Stop()) as own:
            worker = Worker(handlers, config, own, health, sources=sources, alone=True)
            with serving(config, worker.metrics):
                code = worker.run()
        if worker.left_behind:
            # The interpreter's own end is no place for handlers that did not stop.
            stopping.end_now(code)
        return code
    return Worker(handlers, config, stop, health, sources=sources).run()


def _children(
    handlers: Mapping[str, Handler], config: Config, sources: Iterable[str], keeper: LeaseKeeper
) -> Children | None:
    """For the handlers that run in processes of their own, if there are any."""
    isolated = frozenset(
        name
        for name, handler in handlers.items()
        if (getattr(handler, "isolation", None) or config.isolation) == "processes"
    )
    if not isolated:
        return None
    sources = tuple(sources)
    if not sources:
        raise ConfigError(
            f"handler {min(isolated)!r} is to run in a process of its own, which needs the name of its "
            "module: give it as one of `sources`"
        )
    return Children(config, sources, isolated, keeper.renew_soon)


class Worker:
    """One worker. `run` may be called once."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        config: Config,
        stop: Stop,
        health: Health | None = None,
        *,
        sources: Iterable[str] = (),
        alone: bool = False,
    ) -> None:
        """`alone`: nothing else runs in the process, so it is for the worker to say what a stop waits for.

        Raises ConfigError when handlers are to run in processes of their own and `sources` is empty, and when
        they are to be traced and OpenTelemetry is not installed.
        """
        # The random part tells this process from an earlier one of the same host and pid.
        self.name = f"{socket.gethostname()[:100]}:{os.getpid()}:{secrets.token_hex(4)}"
        self.counts: Counter[str] = Counter()
        self._config, self._stop, self._alone = config, stop, alone
        self.health = health or Health("worker", config.health_file)
        self._broken: str | None = None
        renew, finish = Session(config, "renew"), Session(config, "finish")
        self._keeper = LeaseKeeper(
            renew, self.name, config.queues, config.concurrency, config.lease, self.counts,
            self._break_down,
        )  # fmt: skip
        self._finisher = Finisher(finish, self._keeper, self.counts, self._break_down)
        self._executor = Executor(
            handlers,
            config.concurrency,
            lambda execution: Context(execution, self._keeper, config),
            self._finisher.put,
            self._break_down,
            _children(handlers, config, sources, self._keeper),
            tracing.spans(config),
        )
        parts = Parts(
            config, self.name, self._executor, self._keeper, self._finisher, self.counts, self._break_down
        )
        self._messages = MessageClaimer(parts) if config.uses_broker else None
        self._claimer: Claimer = self._messages or QueueClaimer(parts)
        self._sessions = (self._claimer.session, finish, renew)

    @property
    def left_behind(self) -> bool:
        """Whether a thread is left that runs a handler which did not stop."""
        return self._executor.lost > 0

    @property
    def running(self) -> list[tuple[str, int]]:
        """The handlers that run at present: `workflow.task` and the run of each, in order. For any thread."""
        claims = (execution.claim for execution in self._executor.running)
        return sorted((f"{claim.workflow}.{claim.task}", claim.run_id) for claim in claims)

    def metrics(self) -> list[Metric]:
        """What it counts, for whoever scrapes it. For any thread."""
        counts = Counter(dict(self.counts))
        dropped = {key.removeprefix("dropped_"): counts[key] for key in counts if key.startswith("dropped_")}
        ends = {outcome: counts[f"finished_{outcome}"] for outcome in ("succeeded", "failed", "cancelled")}
        ends["succeeded"] += counts["finished_in_transaction"]
        refused = {answer: counts[answer] for answer in ("repeated", "fenced")}
        return [
            *of_daemon("worker", self.health.state),
            counted(
                "worker_claims", "Answers to its claims: claimed, or why a message was of no use.", "outcome",
                {"claimed": counts["claimed"]} | dropped,
            ),
            counted(
                "worker_attempts", "Attempts whose end was accepted, by how they ended.", "outcome", ends
            ),
            counted(
                "worker_finishes", "Answers to its reports of results.", "answer",
                {"accepted": sum(ends.values())} | refused,
            ),
            counted(
                "worker_renewals", "Answers to its renewals of leases.", "answer",
                {answer: self._keeper.renewals[answer] for answer in ("held", "cancel", "busy", "lost")},
            ),
            counted(
                "worker_unknown_handlers", "Task runs given back for want of their handler.", "",
                {"": counts["unknown_handler"]},
            ),
            Metric("gauge", "worker_slots", "Slots by what they are.", self._executor.slots, "state"),
        ]  # fmt: skip

    def run(self) -> int:
        """Work until asked to stop, or until nothing can be done any more; the exit code."""
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH_INTERVAL))
        try:
            return self._run()
        finally:
            sys.setswitchinterval(before)

    def _run(self) -> int:
        try:
            self._check()
            if self._stop.requested:
                self.health.report("stopping")
                if self._messages is not None:
                    self._messages.channel.close()
                return self._stopped
            self._start()
        except FlowForgeError as exc:
            _log.error(str(exc))
            self.health.report("failed", str(exc))
            if self._messages is not None:
                self._messages.channel.close()
            return exits.exit_code(exc)
        self._watch()
        # Not what comes of the stop, which abandons what does not end in time.
        code = exits.EXIT_NO_SLOTS if self._executor.exhausted else exits.EXIT_FAILED
        if not self._stop.requested:
            self._break_down("what wakes the worker is gone; a handler may have closed its descriptors")
        self._shut_down()
        _log.info("stopped", **self._totals())
        if self._broken is not None:
            self.health.report("failed", self._broken)
            return code
        return self._stopped

    @property
    def _stopped(self) -> int:
        return exits.EXIT_INTERRUPTED if self._stop.immediate else exits.EXIT_OK

    def _break_down(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            _log.error(reason)
            if not self._stop.requested:
                # One request to stop would give the remaining handlers their grace time; they have it only
                # with all parts alive.
                self._stop.request()

    def _check(self) -> None:
        """Wait for the database, then check schema and privileges. Raises FlowForgeError for what will not
        pass."""
        backoff = db.Backoff()
        while not self._stop.requested:
            try:
                connecting.connect(self._config, "worker", self._stop, FUNCTIONS, ROLE).close()
                return
            except DatabaseUnavailable as exc:
                reason = str(exc)
            except psycopg.Error as exc:
                if not db.is_transient(exc):
                    raise from_database(exc) from exc
                reason = first_line(exc)
            self._without_database(reason, backoff.next())

    def _without_database(self, reason: str, seconds: float) -> None:
        if self._stop.requested:
            return  # for which the attempt was given up: there is no outage to tell of
        if self.health.report("no database", reason):
            _log.warning("no database; waiting for it", error=reason, seconds=round(seconds, 3))
        self._stop.wait(seconds)

    def _start(self) -> None:
        if self._messages is not None:
            channel = self._messages.channel
            threads.start(channel)
            while not self._stop.requested and not channel.wait_ready(1.0):
                error = channel.error
                if isinstance(error, BrokerMisconfigured) and not isinstance(error, BrokerForbidden):
                    raise error
                if error is not None:
                    # It comes back by itself, and a permission may be granted at any time; a worker that
                    # waits for that may as well be up.
                    self.health.report("no broker", str(error))
                    break
        try:
            self._finisher.start()
            self._keeper.start()
            self._claimer.start()
        except threads.NoThread:
            self._finisher.close()
            self._keeper.close(1.0)
            raise
        _log.info(
            "started", worker=self.name, queues=",".join(self._config.queues), count=self._config.concurrency
        )

    def _watch(self) -> None:
        """Until asked to stop: say how it is, and what was done."""
        said, counted = time.monotonic(), self._totals()
        while not self._stop.wait(1.0):
            refused = {each.purpose for each in self._sessions if each.refused}
            if refused := refused | ({"renew"} if self._keeper.refused else set()):
                refusals = ", ".join(sorted(refused))
                self.health.report("error", f"the database refuses to {refusals}; see the log")
            elif silent := [each.purpose for each in self._sessions if not each.healthy]:
                self.health.report("no database", f"no answer on: {', '.join(silent)}")
            elif self._messages is not None and self._messages.channel.state != "connected":
                self.health.report("no broker", str(self._messages.channel.error or ""))
            else:
                self.health.ticked(self._executor.blocked)
            if time.monotonic() - said >= COUNTS_INTERVAL and counted != self._totals():
                said, counted = time.monotonic(), self._totals()
                _log.info("so far", **counted)

    def _shut_down(self) -> None:
        """Take nothing new, let handlers finish, give back the rest just before the grace time is over."""
        self.health.report("stopping")
        grace = 0.0 if self._broken is not None else self._config.grace
        deadline = time.monotonic() + grace
        giving_back = deadline - min(2.0, grace / 4)
        self._claimer.stop()
        if self._alone and grace > 0 and (running := self.running) and not self._stop_now():
            _log.info(
                "waiting for handlers that still run; a second Ctrl-C or SIGTERM stops at once",
                count=len(running), at_most=f"{grace:g} s",
            )  # fmt: skip
        while not self._stop_now() and time.monotonic() < giving_back:
            if self._claimer.ended and self._executor.wait_idle(0.05):
                break
            time.sleep(0.01)
        if told := self._executor.stop_all(StopReason.SHUTDOWN):
            why = "at once" if self._broken is not None or self._stop_now() else "the grace time is over"
            _log.warning(f"stopping handlers, {why}; giving their task runs back", count=told)
            self._executor.wait_idle(0.5)
        self._executor.abandon_all()
        if not self._claimer.ended:
            self._claimer.close()
        self._finisher.close()
        answered = self._finisher.wait_ended(2.0)
        while not answered and not self._stop_now() and time.monotonic() < deadline:
            answered = self._finisher.wait_ended(0.05)
        if not answered:
            self._finisher.give_up()
            _log.warning(
                "the database did not take every result; the leases of the rest run out",
                count=self._keeper.held,
            )
        self._keeper.close(1.0)
        if self._messages is not None:
            self._messages.channel.close(2.0)
        self._executor.close()

    def _stop_now(self) -> bool:
        return self._broken is None and self._stop.immediate

    def _totals(self) -> dict[str, int]:
        return dict(sorted(dict(self.counts).items()))
