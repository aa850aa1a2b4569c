"""Receiving messages and settling them, from any thread and across reconnects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pika
import pika.exceptions
import pika.spec

from flowforge.broker.connection import Client, Steps, cause, unusable
from flowforge.config import Config
from flowforge.db import Backoff
from flowforge.errors import BrokerForbidden


class _Properties(pika.BasicProperties):  # type: ignore[misc]  # pika has no types
    """The properties of a message as far as they can be read.

    pika raises in the middle of a connection over a header that Python has no value for, such as a time far
    ahead. The broker would deliver that message again on the next connection, and so on without an end."""

    def decode(self, encoded: bytes, offset: int = 0) -> pika.BasicProperties:
        try:
            return super().decode(encoded, offset)
        except Exception:  # noqa: BLE001 -- whatever a stranger wrote; the body alone says what to do
            self.headers = None
            return self


pika.spec.props[pika.BasicProperties.INDEX] = _Properties


@dataclass(frozen=True, slots=True)
class Delivery:
    """One received message. It belongs to the connection that delivered it (`generation`) and is void after
    it."""

    generation: int
    tag: int
    queue: str
    message_id: str | None
    type: str | None
    body: bytes
    redelivered: bool
    headers: Mapping[str, Any]


class ConsumeChannel(Client):
    """The consuming connection.

    It declares nothing: a queue that is missing is the publisher's evidence that what was in it is lost, and
    whoever creates it destroys that. Queues that are not there yet are looked for every so often.

    `start()` it; `on_message` is then called with each Delivery, in the connection's thread, so it must not
    block: put it into a queue. Every delivery is settled once, by `ack` (its claim is decided), `give_back`
    (not taken: the broker offers it to others) or `reject` (unreadable: to the dead-letter queue). All three
    may be called from any thread, any number of times, and do nothing for deliveries of a connection that is
    gone: the broker has offered those again by itself."""

    def __init__(
        self,
        config: Config,
        queues: Sequence[str],
        on_message: Callable[[Delivery], None],
        *,
        prefetch: int,
        name: str,
    ) -> None:
        super().__init__(config, name)
        self._wanted = tuple(queues)
        self._on_message, self._prefetch = on_message, prefetch
        self._consuming: Any = None
        self._there: list[str] = []  # the wanted queues that this connection has found
        self._consumers: dict[str, str] = {}
        self._unsettled: dict[int, None] = {}  # tags in the order of delivery
        self._paused = False
        self._told_missing: list[str] = []
        self._looking = Backoff(first=0.2, cap=5.0)

    def pause(self) -> None:
        """Stop taking messages. What arrives from now on is given back at once; what was delivered before is
        the caller's to settle."""
        self._post(functools.partial(self._switch, True))

    def resume(self) -> None:
        """Take messages again."""
        self._post(functools.partial(self._switch, False))

    def set_prefetch(self, prefetch: int) -> None:
        """Deliver at most so many unsettled messages from each queue, from the next resume or reconnect
        on."""
        self._prefetch = prefetch

    def ack(self, deliveries: Iterable[Delivery]) -> None:
        """Acknowledge."""
        self._post(functools.partial(self._acknowledge, list(deliveries)))

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Hand back to the broker, for any consumer."""
        self._post(functools.partial(self._refuse, list(deliveries), True))

    def reject(self, deliveries: Iterable[Delivery]) -> None:
        """Hand over to the dead-letter queue."""
        self._post(functools.partial(self._refuse, list(deliveries), False))

    # -- in the thread

    def _set_up(self) -> Steps:
        self._consuming = channel = yield from self._channel()
        channel.add_on_cancel_callback(lambda _: self._abort("a queue was deleted under its consumer"))
        missing = yield from self._look()
        if not self._paused:
            self._consume()
        try:
            # Whether this user may read a queue shows only by consuming; the answers come in order.
            yield from self._ask(channel, "basic_qos", prefetch_count=self._prefetch)
        except pika.exceptions.ChannelClosedByBroker as exc:
            if exc.reply_code == 403:
                raise BrokerForbidden(f"the broker forbids consuming: {exc.reply_text}") from exc
            raise
        self._ready()
        self._after_look(missing)

    def _look(self) -> Steps:
        """Look for the queues not found so far; those that are still missing."""
        missing = []
        channel = yield from self._channel()
        for queue in self._wanted:
            if queue in self._there or unusable(queue) is not None:
                continue
            try:
                yield from self._ask(channel, "queue_declare", queue=self._names.queue(queue), passive=True)
                self._there.append(queue)
            except pika.exceptions.ChannelClosedByBroker as exc:
                if exc.reply_code == 403:
                    raise BrokerForbidden(f"the broker refuses: {exc.reply_text}") from exc
                if exc.reply_code != 404:
                    raise
                missing.append(queue)
                channel = yield from self._channel()
        channel.close()
        return missing

    def _look_again(self) -> Steps:
        self._after_look((yield from self._look()))

    def _after_look(self, missing: list[str]) -> None:
        if not self._paused:
            self._consume()
        if missing:
            if missing != self._told_missing:
                self._log.warning(
                    "queues are missing on the broker; waiting for the publisher to create them",
                    queue=", ".join(missing),
                )
            self._loop.call_later(self._looking.next(), functools.partial(self._again, self.generation))
        else:
            if self._told_missing:
                self._log.info("all queues are there")
            self._looking.reset()
        self._told_missing = missing

    def _again(self, generation: int) -> None:
        if generation == self.generation:
            self._spawn(self._look_again())

    def _consume(self) -> None:
        channel = self._consuming
        if channel is None:
            return
        channel.basic_qos(prefetch_count=self._prefetch)
        for queue in self._there:
            if queue not in self._consumers:
                deliver = functools.partial(self._received, queue, self.generation)
                self._consumers[queue] = channel.basic_consume(self._names.queue(queue), deliver)

    def _switch(self, paused: bool) -> None:
        if paused == self._paused:
            return
        self._paused = paused
        if self._consuming is None:
            return
        if paused:
            for tag in self._consumers.values():
                self._consuming.basic_cancel(tag)
            self._consumers = {}
        else:
            self._consume()

    def _received(
        self,
        queue: str,
        generation: int,
        channel: Any,
        method: Any,
        properties: pika.BasicProperties,
        body: bytes,
    ) -> None:
        if self._paused:
            channel.basic_nack(method.delivery_tag, requeue=True)
            return
        self._unsettled[method.delivery_tag] = None
        self._on_message(
            Delivery(
                generation, method.delivery_tag, queue, properties.message_id, properties.type, body,
                bool(method.redelivered), properties.headers or {},
            )
        )  # fmt: skip

    def _current(self, deliveries: list[Delivery]) -> list[int]:
        return [
            each.tag
            for each in deliveries
            if each.generation == self.generation and each.tag in self._unsettled
        ]

    def _acknowledge(self, deliveries: list[Delivery]) -> None:
        tags = set(self._current(deliveries))
        # One frame for as many as possible: all that were delivered first.
        upto = 0
        for tag in self._unsettled:
            if tag not in tags:
                break
            upto = tag
        if upto:
            self._consuming.basic_ack(upto, multiple=True)
        for tag in tags:
            del self._unsettled[tag]
            if tag > upto:
                self._consuming.basic_ack(tag)

    def _refuse(self, deliveries: list[Delivery], requeue: bool) -> None:
        for tag in self._current(deliveries):
            del self._unsettled[tag]
            self._consuming.basic_nack(tag, requeue=requeue)

    def _channel_closed(self, channel: Any, reason: BaseException) -> None:
        setting_up = channel in self._waiting
        super()._channel_closed(channel, reason)
        if channel is self._consuming:
            # Also when the broker closed only the channel: a fresh connection is the simplest fresh start.
            self._consuming, self._unsettled = None, {}
            if not setting_up:
                self._abort(cause(reason))

    def _forget(self) -> None:
        self._consuming = None
        self._there, self._consumers = [], {}
        self._unsettled = {}
