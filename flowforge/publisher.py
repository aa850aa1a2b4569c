"""The publisher: that a message is never lost.

One tick is one transaction: fetch orders from the outbox, publish them, mark what the broker confirmed. The
mark and the fetch share the transaction, so whatever happens in between (a crash, a lost connection) the
order is still there and goes out again under the same dispatch id, which the claim recognises. No transaction
is open while the broker is away or blocked, but for the bounded time in which that shows."""

from __future__ import annotations

import json
import typing
from collections import Counter
from collections.abc import Iterable

from flowforge import db, log, threads
from flowforge.broker import Message, Outcome, PublishChannel
from flowforge.broker.publish import Kind
from flowforge.config import Config
from flowforge.crash import crash_point
from flowforge.errors import (
    BrokerForbidden,
    BrokerMisconfigured,
    BrokerMismatch,
    BrokerUnavailable,
    ConfigError,
)
from flowforge.metrics import Metric, counted
from flowforge.runner import Daemon

_KEPT = {
    "refused": "the broker refused messages; kept for a later try",
    "unconfirmed": "messages were not confirmed in time; kept for a later try, they may have arrived",
}


class Publisher(Daemon):
    """The duty of the publisher, for `runner.run`. Raises ConfigError when no broker is configured.

    At the start, until its first tick has succeeded, it ends when the broker refuses its login. From then on
    that is waited for, and even from the start a missing permission, and an exchange or a dead-letter queue
    with other arguments: health names it, and nothing is marked.

    A queue that cannot be used, as one that exists with other arguments, never ends it, nor touches others:
    health names it, its orders are kept and refused with the reason, and it is looked at again until it can
    be."""

    name = "publisher"
    role = "flowforge_publisher"
    channels = ("flowforge_outbox",)
    functions = (
        "fetch_outbox",
        "mark_published",
        "mark_refused",
        "mark_unpublishable",
        "queue_names",
        "redispatch",
    )

    def __init__(self, config: Config) -> None:
        if not config.uses_broker:
            raise ConfigError(
                "FLOWFORGE_AMQP_URL is not set: without a broker there is nothing to publish to"
            )
        self._config = config
        self._log = log.of(self.name)
        self._channel = PublishChannel(config, self.name)
        threads.start(self._channel)
        self._counts: Counter[str] = Counter()
        self._new_connection = True
        self._started = False
        self._told = ""  # the misconfiguration that was logged
        self._told_wrong: dict[str, str] = {}  # likewise of queues
        self.tick_limit = 60.0 + config.confirm_timeout + config.blocked_timeout
        self.stop_limit = 5.0 + config.confirm_timeout

    def metrics(self) -> list[Metric]:
        """Messages by what became of them."""
        kinds = typing.get_args(Kind)
        return [
            counted(
                "publisher_messages", "Messages by what became of them.", "outcome",
                {kind: self._counts[kind] for kind in kinds},
            )
        ]  # fmt: skip

    def on_connect(self) -> None:
        self._new_connection = True

    def close(self) -> None:
        self._channel.close()

    def tick(self, conn: db.Connection) -> int:
        try:
            done = self._tick(conn)
        except BrokerMisconfigured as exc:
            if not self._started and not isinstance(exc, (BrokerForbidden, BrokerMismatch)):
                raise
            if self._told != str(exc):
                self._log.error("the broker is misconfigured; waiting for the remedy", error=str(exc))
            self._told = str(exc)
            raise BrokerUnavailable(str(exc)) from exc
        self._started, self._told = True, ""
        return done

    def _tick(self, conn: db.Connection) -> int:
        self._channel.wait_ready(1.0)
        self._channel.check()
        if self._new_connection:
            queues = [str(row[0]) for row in self._call(conn, "select flowforge.queue_names()")]
            self._declare(conn, queues)
            self._new_connection = False
        self._tell_wrong()
        self._offer_again(conn)
        undeclared, done = self._publish(conn)
        if undeclared:
            self._declare(conn, undeclared)
            return 1
        if not done:
            # Orders whose outcome is unknown show here why it is.
            self._channel.check()
        return done

    def _call(self, conn: db.Connection, query: str, *params: object) -> list[tuple[object, ...]]:
        return db.call(conn, query, params, lock_timeout=self._config.lock_timeout)

    def _tell_wrong(self) -> None:
        wrong = {queue: str(error) for queue, error in self._channel.wrong.copy().items()}
        for queue, error in wrong.items() - self._told_wrong.items():
            self._log.error("a queue cannot be used; its orders are kept", queue=queue, error=error)
        for queue in self._told_wrong.keys() - wrong.keys():
            self._log.info("the queue can be used again", queue=queue)
        self._told_wrong = wrong

    def trouble(self) -> str:
        """The queues that cannot be used, three of them by name."""
        wrong = [str(error) for _, error in sorted(self._channel.wrong.copy().items())]
        more = [f"and {len(wrong) - 3} more queues"] if len(wrong) > 3 else []
        return "; ".join(wrong[:3] + more)

    def _declare(self, conn: db.Connection, queues: Iterable[str]) -> None:
        self._channel.ensure(queues)
        self._offer_again(conn)

    def _offer_again(self, conn: db.Connection) -> None:
        """A queue that was not there has lost whatever was in it: arm its dispatches again at once."""
        for queue in sorted(self._channel.gone):
            # Before the call: what is lost again meanwhile is noted again.
            self._channel.gone.discard(queue)
            try:
                armed = self._call(conn, "select flowforge.redispatch(%s)", queue)[0][0]
            except BaseException:
                self._channel.gone.add(queue)
                raise
            if armed:
                self._log.warning(
                    "the queue was gone; its dispatches are published again", queue=queue, count=armed
                )

    def _publish(self, conn: db.Connection) -> tuple[set[str], int]:
        """One transaction. Returns the queues that must be declared before anything can be published, or how
        many orders were decided."""
        with db.begin(conn, lock_timeout=self._config.lock_timeout) as tx:
            rows = tx.execute(
                "select outbox_id, task_run_id, dispatch_id, queue, handler, attempt, traceparent"
                " from flowforge.fetch_outbox(%s)",
                [self._config.publish_batch],
            ).fetchall()
            if not rows:
                return set(), 0
            if undeclared := self._channel.undeclared({row[3] for row in rows}):
                return undeclared, 0
            crash_point("publisher:after-fetch")
            outcomes = self._channel.publish_batch(
                [_message(*row[1:]) for row in rows], self._config.confirm_timeout
            )
            self._counts.update(outcome.kind for outcome in outcomes)
            crash_point("publisher:after-confirm")
            decided = self._mark(tx, [row[0] for row in rows], outcomes)
            crash_point("publisher:after-mark")
        crash_point("publisher:after-commit")
        return set(), decided

    def _mark(self, tx: db.Connection, ids: list[int], outcomes: list[Outcome]) -> int:
        """Record each order's outcome. An unknown one stays as it was, since its message may still arrive; so
        does an unconfirmed one, but for the delay: a queue that never confirms must not hold up the rest."""
        pairs = list(zip(ids, outcomes, strict=True))
        confirmed = [each for each, outcome in pairs if outcome.kind == "confirmed"]
        kept = [(each, outcome) for each, outcome in pairs if outcome.kind in ("refused", "unconfirmed")]
        permanent = [(each, outcome.reason) for each, outcome in pairs if outcome.kind == "permanent"]
        if confirmed:
            tx.execute("select flowforge.mark_published(%s::bigint[])", [confirmed])
        if kept:
            tx.execute(
                "select flowforge.mark_refused(%s::bigint[], %s::text[])",
                [[each for each, _ in kept], [outcome.reason for _, outcome in kept]],
            )
            for outcome, count in Counter(outcome for _, outcome in kept).items():
                if outcome.reason not in self._told_wrong.values():
                    self._log.warning(_KEPT[outcome.kind], count=count, error=outcome.reason)
        for each, reason in permanent:
            tx.execute("select flowforge.mark_unpublishable(%s, %s)", [each, reason])
            self._log.error("a message can never be published; parked", outbox=each, error=reason)
        return len(confirmed) + len(kept) + len(permanent)


def _message(
    task_run_id: int, dispatch_id: object, queue: str, handler: str, attempt: int, traceparent: str | None
) -> Message:
    """The message of one order, as other languages' workers read it too."""
    dispatch = str(dispatch_id)
    body = {"task_run_id": task_run_id, "dispatch_id": dispatch, "handler": handler, "attempt": attempt}
    headers = {} if traceparent is None else {"traceparent": traceparent}
    return Message(dispatch, queue, handler, json.dumps(body, ensure_ascii=False).encode(), headers)
