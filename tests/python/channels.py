"""What the tests of the broker's two connections share."""

import queue
import secrets
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from flowforge.broker import ConsumeChannel, Delivery, Message, PublishChannel
from flowforge.config import Config
from flowforge.errors import BrokerUnavailable
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer

TIMEOUT = 30.0


@contextmanager
def opening() -> Generator[Callable[[Any], Any]]:
    """A function that starts a channel, which is closed at the end of the block."""
    channels: list[Any] = []

    def start(channel: Any) -> Any:
        channel.start()
        channels.append(channel)
        return channel

    yield start
    for channel in channels:
        channel.close()
        assert not channel.is_alive()


def message(queue: str = "q", **changes: Any) -> Message:
    return replace(Message(str(uuid.uuid4()), queue, "etl.extract", b"{}"), **changes)


def publisher(config: Config, opened: Callable[[Any], Any], *queues: str) -> PublishChannel:
    channel: PublishChannel = opened(PublishChannel(config))
    assert channel.wait_ready(TIMEOUT), channel.error
    channel.ensure(queues)
    channel.gone.clear()
    return channel


def ensure(channel: PublishChannel, queues: set[str]) -> None:
    """As a daemon does: the broker may close the connection over a queue that is just being deleted."""

    def done() -> bool:
        with suppress(BrokerUnavailable):
            channel.ensure(queues)
            return True
        return False

    wait_until(done, "the queues to be declared")


def kinds(channel: PublishChannel, *messages: Message) -> list[str]:
    return [outcome.kind for outcome in channel.publish_batch(messages, TIMEOUT)]


class Inbox(queue.Queue[Delivery]):
    """What a consuming channel delivered."""

    def take(self) -> Delivery:
        try:
            return self.get(timeout=TIMEOUT)
        except queue.Empty:
            raise TimeoutError(f"waited {TIMEOUT:g} s in vain: a message") from None


def consumer(
    config: Config, opened: Callable[[Any], Any], *, prefetch: int = 10
) -> tuple[ConsumeChannel, Inbox]:
    inbox = Inbox()
    channel: ConsumeChannel = opened(
        ConsumeChannel(config, ["q"], inbox.put, prefetch=prefetch, name="worker")
    )
    assert channel.wait_ready(TIMEOUT), channel.error
    return channel, inbox


class User:
    """A user of the broker who may do everything, but write or read only where it is allowed."""

    def __init__(self, server: RabbitServer) -> None:
        self._server, self.name = server, f"u{secrets.token_hex(6)}"
        server.ctl("add_user", self.name, "secret")
        self.url = f"amqp://{self.name}:secret@127.0.0.1:{server.port}"

    def delete(self) -> None:
        self._server.ctl("delete_user", self.name)

    def may_write(self, pattern: str) -> None:
        self._server.ctl("set_permissions", self.name, ".*", pattern, ".*")

    def may_read(self, pattern: str) -> None:
        self._server.ctl("set_permissions", self.name, ".*", ".*", pattern)
