"""What `flowforge conformance` does at a broker: publishes what it likes, counts, removes its namespace."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import pika
import pika.exceptions

from flowforge.broker.connection import NOT_CONNECTED, Names, cause
from flowforge.broker.parameters import Addresses
from flowforge.config import Config
from flowforge.errors import BrokerUnavailable


class Desk:
    """The exchanges and queues of the configuration's namespace, each call by a connection of its own. The
    calls raise BrokerUnavailable."""

    def __init__(self, config: Config) -> None:
        """Raises ConfigError for a URL that cannot be read."""
        self._names = Names(config.namespace)
        self._addresses = Addresses(config, "flowforge conformance")

    def place(self) -> tuple[str, int]:
        """Host and port of the broker."""
        _, parameters = self._addresses.next()
        return parameters.host, parameters.port

    def publish(self, queue: str, body: bytes, message_id: str | None = None) -> None:
        """Put a message into a queue that exists; returns when the broker has it."""
        with self._channel() as channel:
            channel.confirm_delivery()
            properties = pika.BasicProperties(
                message_id=message_id, delivery_mode=2, content_type="application/json"
            )
            channel.basic_publish(self._names.exchange, queue, body, properties, mandatory=True)

    def counts(self, queue: str) -> tuple[int, int]:
        """Messages waiting in a queue (not those given out) and its consumers; a queue that is not there has
        none of either."""
        try:
            with self._channel() as channel:
                found = channel.queue_declare(self._names.queue(queue), passive=True).method
                return found.message_count, found.consumer_count
        except pika.exceptions.ChannelClosedByBroker as exc:
            if exc.reply_code == 404:
                return 0, 0
            raise BrokerUnavailable(f"the broker refuses: {exc.reply_text}") from exc

    def purge(self, queue: str) -> None:
        """Throw away the messages of a queue, if it is there."""
        with self._channel() as channel, suppress(pika.exceptions.ChannelClosedByBroker):
            channel.queue_purge(self._names.queue(queue))

    def delete(self, queue: str) -> None:
        """Delete a queue with its messages, if it is there; its consumers are cancelled."""
        with self._channel() as channel:
            channel.queue_delete(self._names.queue(queue))

    def remove(self, *queues: str) -> None:
        """Delete queues, the dead-letter queue and the exchanges, with all that is in them."""
        with self._channel() as channel:
            for queue in map(self._names.queue, queues):
                channel.queue_delete(queue)
            channel.queue_delete(self._names.dead)
            channel.exchange_delete(self._names.dead)
            channel.exchange_delete(self._names.exchange)

    @contextmanager
    def _channel(self) -> Generator[Any]:
        _, parameters = self._addresses.next()
        try:
            connection = pika.BlockingConnection(parameters)
        except NOT_CONNECTED as exc:
            raise BrokerUnavailable(f"the broker cannot be reached: {cause(exc)}") from exc
        try:
            yield connection.channel()
        finally:
            with suppress(pika.exceptions.AMQPError):
                connection.close()
