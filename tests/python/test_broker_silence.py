"""A broker that keeps its connections and answers nothing on them is left for the next one."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flowforge.broker import ConsumeChannel, PublishChannel
from flowforge.broker.connection import Client
from flowforge.config import Config
from flowforge.errors import BrokerUnavailable
from tests.python.amqp_proxy import AmqpProxy
from tests.python.channels import ensure, kinds, message, opening, publisher
from tests.services.process import wait_until
from tests.services.rabbitmq import RabbitServer


@pytest.fixture
def wire(rabbit_server: RabbitServer) -> Iterator[AmqpProxy]:
    with AmqpProxy(rabbit_server.url) as wire:
        yield wire


@pytest.fixture
def config(
    rabbit_server: RabbitServer, wire: AmqpProxy, amqp_namespace: str, monkeypatch: pytest.MonkeyPatch
) -> Config:
    """First the proxy, then the broker itself."""
    monkeypatch.setattr(Client, "answer_limit", 2.0)
    return Config(amqp_urls=(wire.url, rabbit_server.url), namespace=amqp_namespace)


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    with opening() as start:
        yield start


def await_connection(channel: Client) -> None:
    with channel._changed:
        assert channel._changed.wait_for(lambda: channel.state == "connected", 60), channel.error


def test_a_publisher_goes_on_to_the_next_broker(
    config: Config, wire: AmqpProxy, opened: Callable[[Any], Any]
) -> None:
    wire.unanswered.add(f"{config.namespace}.flowforge.dead")
    channel: PublishChannel = opened(PublishChannel(config))
    await_connection(channel)
    ensure(channel, {"q"})
    assert kinds(channel, message("q")) == ["confirmed"]


def test_a_consumer_goes_on_to_the_next_broker(
    config: Config, wire: AmqpProxy, opened: Callable[[Any], Any]
) -> None:
    wire.unanswered.add(f"{config.namespace}.flowforge.q")
    channel = ConsumeChannel(config, ["q"], lambda _: None, prefetch=1, name="worker")
    await_connection(opened(channel))


def test_what_is_never_answered_later_ends_the_connection_too(
    config: Config, wire: AmqpProxy, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q")
    wire.unanswered.add(f"{config.namespace}.flowforge.other")
    with pytest.raises(BrokerUnavailable, match="no answer within 2 s"):
        channel.ensure({"other"}, timeout=60)
    await_connection(channel)
    ensure(channel, {"other"})
    assert kinds(channel, message("other")) == ["confirmed"]


def test_nothing_counts_as_confirmed_when_the_connection_ends_first(
    config: Config, wire: AmqpProxy, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    """Neither what is under way, nor what has not been sent since the window was full."""
    wire.silent.add("q")
    channel = publisher(config.replace(confirm_window=2), opened, "q")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(kinds, channel, *(message() for _ in range(5)))
        wait_until(lambda: len(channel._sent) == 2, "messages under way")
        rabbit_server.close_connections("test")
        assert asked.result() == ["unknown"] * 5
