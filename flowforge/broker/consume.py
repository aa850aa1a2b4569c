"""Receiving messages and settling them, from any thread and across reconnects."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pika

from flowforge.broker.connection import Client, Steps, cause, unusable
from flowforge.config import Config


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
        self._consumers: dict[str, str] = {}
        self._unsettled: dict[int, None] = {}  # tags in the order of delivery
        self._paused = False

    @property
    def paused(self) -> bool:
        """Whether `pause` was called last."""
        return self._paused

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
        yield from self._declare([queue for queue in self._wanted if unusable(queue) is None], set())
        self._consuming = channel = yield from self._channel()
        channel.add_on_cancel_callback(lambda _: self._abort("a queue was deleted under its consumer"))
        self._ready()
        if not self._paused:
            self._consume()

    def _consume(self) -> None:
        channel = self._consuming
        channel.basic_qos(prefetch_count=self._prefetch)
        for queue in self._wanted:
            if unusable(queue) is None:
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
        super()._channel_closed(channel, reason)
        if channel is self._consuming:
            # Also when the broker closed only the channel: a fresh connection is the simplest fresh start.
            self._consuming = None
            self._abort(cause(reason))

    def _forget(self) -> None:
        self._consuming = None
        self._consumers = {}
        self._unsettled = {}
