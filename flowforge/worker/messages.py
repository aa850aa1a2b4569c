"""Claiming by RabbitMQ's messages.

A message is acknowledged when its claim was decided, won or lost, and not before: from there on the lease
protects the work. What cannot be claimed for now, for want of a slot or of the database, goes back to the
broker for others to take; what is refused by itself, again and again, after a delay that grows.
"""

from __future__ import annotations

import json
import queue
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID, uuid4

import psycopg

from flowforge import db, log
from flowforge.broker import ConsumeChannel, Delivery
from flowforge.crash import crash_point
from flowforge.errors import first_line
from flowforge.worker.claim import BARE_CLAIM_TASK_RUNS, CLAIM_TASK_RUNS, Answer
from flowforge.worker.claiming import Claimer, Parts, TooMuch
from flowforge.worker.session import Unanswered

_log = log.of("worker")

PAUSE_AFTER = 5.0
"""Seconds without a free slot after which prefetched messages are given back."""

_SLOW_FOR = 60.0  # seconds after that for which hardly anything is prefetched
_AHEAD = 0.05  # seconds of work prefetched beyond twice the slots: about a round trip through the broker
_MOST_PREFETCHED = 2000
_MOST_SET_ASIDE = 5  # refused messages at the same time; more, and it is hardly the messages


class _Message(NamedTuple):
    delivery: Delivery
    task_run_id: int
    dispatch_id: UUID


class MessageClaimer(Claimer):
    """Takes dispatches from RabbitMQ."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._arrived: queue.SimpleQueue[Delivery | None] = queue.SimpleQueue()
        self._waiting: deque[_Message] = deque()
        self._aside = False
        # Messages whose claim was refused, by when they are given back; how often each dispatch's was.
        self._set_aside: list[tuple[float, _Message]] = []
        self._refusals: dict[UUID, db.Backoff] = {}
        self._free_at = time.monotonic()
        self._sat_out_at = float("-inf")
        self._prefetch = 2 * parts.config.concurrency
        self._measured_at, self._decided = time.monotonic(), 0
        self.channel = ConsumeChannel(
            parts.config, parts.config.queues, self._arrived.put, prefetch=self._prefetch, name="worker"
        )

    def stop(self) -> None:
        super().stop()
        self.channel.pause()
        self._arrived.put(None)

    def _turn(self) -> None:
        self._receive()
        self._adapt()
        self._give_back_due()
        if not self._waiting:
            self._free_at = time.monotonic()
            self.session.resting = True  # others may have got what was refused here
            return
        slots = self._reserve(min(len(self._waiting), self._most), timeout=0.5)
        if slots:
            self._free_at = time.monotonic()
            self._claim_waiting(slots)
        elif not self.stopping and time.monotonic() - self._free_at >= PAUSE_AFTER:
            self._sit_out()

    def _receive(self) -> None:
        """Take what has arrived; wait for something when nothing waits yet."""
        try:
            delivery = self._arrived.get(block=not self._waiting, timeout=1.0)
            while delivery is not None:
                if (message := _parsed(delivery)) is not None:
                    self._waiting.append(message)
                else:
                    self.channel.reject([delivery])
                    self.parts.counts["unreadable"] += 1
                    _log.error(
                        "unreadable message; to the dead letters",
                        dispatch=delivery.message_id,
                        queue=delivery.queue,
                    )
                delivery = self._arrived.get_nowait()
        except queue.Empty:
            pass

    # -- claiming

    def _claim_waiting(self, slots: int) -> None:
        """Claim as many waiting messages as there are reserved slots. A second one of the same dispatch waits
        until the first is decided."""
        batch: list[_Message] = []
        second: list[_Message] = []
        named: set[UUID] = set()
        while self._waiting and len(batch) < slots:
            message = self._waiting.popleft()
            (second if message.dispatch_id in named else batch).append(message)
            named.add(message.dispatch_id)
        self._waiting.extendleft(reversed(second))
        self.parts.executor.give_back(slots - len(batch))
        crash_point("worker:after-delivery")
        self._claim_batch(batch)
        if self._aside:
            self._resume()

    def _claim_batch(self, batch: list[_Message]) -> bool:
        """Claim `batch`, for which slots are reserved, and settle its messages. False: to no avail, and no
        other message would fare better."""
        ids, dispatches = [each.task_run_id for each in batch], [each.dispatch_id for each in batch]
        claim_id = uuid4()
        arguments = ids, dispatches, self.parts.worker, claim_id, self.parts.config.lease

        def decided(found: Sequence[Answer]) -> None:
            self.parts.counts.update(f"dropped_{each.outcome}" for each in found if each.claim is None)
            self._decided += len(batch)
            for each in batch:
                self._refusals.pop(each.dispatch_id, None)
            self.channel.ack(each.delivery for each in batch)
            crash_point("worker:after-ack")

        try:
            crash_point("worker:before-claim-commit")
            found, sent = self._claim(CLAIM_TASK_RUNS, *arguments)
        except TooMuch as exc:
            self._claim_in_parts(exc, BARE_CLAIM_TASK_RUNS, arguments, claim_id, len(batch), decided)
            return True
        except psycopg.Error as exc:
            return self._one_by_one(batch) if len(batch) > 1 else self._refused(batch[0], exc)
        except Unanswered:
            # Told to end. Whether these are claimed is not known; the broker or the reaper offers them again.
            self.parts.executor.give_back(len(batch))
            return False
        crash_point("worker:after-claim-commit")
        self._more_at_once()
        decided(found)
        won = [answer.claim for answer in found if answer.claim is not None]
        self.parts.executor.give_back(len(batch) - len(won))
        if won:
            self._execute(won, sent)
        return True

    def _one_by_one(self, batch: Sequence[_Message]) -> bool:
        """After a definite error, so that nothing was claimed: who is to blame shows when each is alone."""
        for index, message in enumerate(batch):
            if not self._claim_batch([message]):
                self._return(batch[index + 1 :])
                return False
        return True

    def _refused(self, message: _Message, exc: psycopg.Error) -> bool:
        keys = {"task_run": message.task_run_id, "error": first_line(exc)}
        passing = db.is_transient(exc)
        if not passing and (exc.sqlstate or "")[:2] in ("WF", "22"):
            self.channel.reject([message.delivery])
            self.parts.executor.give_back(1)
            self._refusals.pop(message.dispatch_id, None)
            _log.error("message cannot be claimed; to the dead letters", **keys)
            return True
        if not passing and len(self._set_aside) < _MOST_SET_ASIDE:
            if len(self._refusals) >= _MOST_PREFETCHED:
                self._refusals.clear()  # others got and decided them, since
            delay = self._refusals.setdefault(message.dispatch_id, db.Backoff(first=1.0, cap=60.0)).next()
            self._set_aside.append((time.monotonic() + delay, message))
            self.parts.executor.give_back(1)
            _log.error("claim of a message refused; keeping it aside", seconds=round(delay, 1), **keys)
            return True
        (_log.warning if passing else _log.error)("claim refused; trying again later", **keys)
        self.session.stuck(exc)
        self._step_aside()
        self._return([message])
        self._given_up.wait(self.session.pause())
        return False

    def _give_back_due(self) -> None:
        now = time.monotonic()
        self.channel.give_back(message.delivery for due, message in self._set_aside if due <= now)
        self._set_aside = [each for each in self._set_aside if each[0] > now]

    def _return(self, batch: Sequence[_Message]) -> None:
        self.channel.give_back(each.delivery for each in batch)
        self.parts.executor.give_back(len(batch))

    # -- stepping aside for others

    def _step_aside(self) -> None:
        self._aside = True
        self.channel.pause()
        self._give_back_arrived()
        self.channel.give_back(each.delivery for each in self._waiting)
        self.channel.give_back(message.delivery for _, message in self._set_aside)
        self._waiting.clear()
        self._set_aside.clear()

    def _give_back_arrived(self) -> None:
        try:
            while True:
                if (delivery := self._arrived.get_nowait()) is not None:
                    self.channel.give_back([delivery])
        except queue.Empty:
            pass

    def _resume(self) -> None:
        if not self.stopping:
            self._aside = False
            self.channel.resume()

    def _sit_out(self) -> None:
        """No slot came free for a while: take nothing until one does, and then little."""
        _log.info("no free slot; giving prefetched messages back", count=len(self._waiting))
        self._step_aside()
        while not self.stopping:
            # The channel pauses in its own thread: until then it goes on delivering.
            self._give_back_arrived()
            if self._reserve(1, timeout=1.0):
                self.parts.executor.give_back(1)
                break
        self._free_at = self._sat_out_at = time.monotonic()
        self._set_prefetch(self._base())
        self._resume()

    # -- how much to prefetch

    def _base(self) -> int:
        slots = self.parts.config.concurrency
        return 2 * slots if time.monotonic() - self._sat_out_at > _SLOW_FOR else max(1, slots // 4)

    def _adapt(self) -> None:
        """Short tasks need more messages under way than long ones, which others should get. Looked at once a
        second, and changed only by half or double, since every change subscribes anew."""
        elapsed = time.monotonic() - self._measured_at
        if elapsed < 1.0 or self._aside:
            return
        wanted = min(_MOST_PREFETCHED, self._base() + round(self._decided / elapsed * _AHEAD))
        self._measured_at, self._decided = time.monotonic(), 0
        if wanted >= 2 * self._prefetch or 2 * wanted <= self._prefetch:
            self._set_prefetch(wanted)
            self.channel.pause()
            self._resume()

    def _set_prefetch(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self.channel.set_prefetch(prefetch)


def _parsed(delivery: Delivery) -> _Message | None:
    """The dispatch that a message names, or None when it cannot be read."""
    try:
        body = json.loads(delivery.body)
        task_run_id, dispatch_id = body["task_run_id"], UUID(body["dispatch_id"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if type(task_run_id) is not int or not 0 < task_run_id < 2**63:
        return None
    return _Message(delivery, task_run_id, dispatch_id)
