"""The broker's two connections: each message is judged by itself; nothing that the broker does hangs them."""

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pika
import pika.exceptions
import pytest

from flowforge.broker import ConsumeChannel, Delivery, PublishChannel
from flowforge.config import Config
from flowforge.errors import BrokerBlocked, BrokerUnavailable
from tests.python.amqp_proxy import AmqpProxy
from tests.python.channels import TIMEOUT, Inbox, consumer, ensure, kinds, message, opening, publisher
from tests.services.process import free_port, wait_until
from tests.services.rabbitmq import Broker, RabbitServer


@pytest.fixture
def config(rabbit_server: RabbitServer, amqp_namespace: str) -> Config:
    return Config(amqp_urls=(rabbit_server.url,), namespace=amqp_namespace, blocked_timeout=1.0)


@pytest.fixture
def wire(rabbit_server: RabbitServer) -> Iterator[AmqpProxy]:
    with AmqpProxy(rabbit_server.url) as wire:
        yield wire


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    with opening() as start:
        yield start


def test_a_confirmed_message_is_in_its_queue_with_all_its_properties(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q", "ünïcode queue")
    sent = message(headers={"traceparent": "00-1-2-01"})
    assert kinds(channel, sent, message("ünïcode queue")) == ["confirmed", "confirmed"]
    with rabbit.channel() as peer:
        method, properties, body = peer.basic_get(f"{config.namespace}.flowforge.q", auto_ack=True)
    assert (method.exchange, method.routing_key) == (f"{config.namespace}.flowforge", "q")
    assert properties.message_id == sent.message_id
    assert properties.type == "etl.extract"
    assert properties.delivery_mode == 2
    assert properties.content_type == "application/json"
    assert properties.headers["traceparent"] == "00-1-2-01"
    assert properties.timestamp is not None
    assert body == b"{}"
    assert rabbit.counts(f"{config.namespace}.flowforge.ünïcode queue") is not None


def test_more_messages_than_the_window_are_all_confirmed(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config.replace(confirm_window=7), opened, "q")
    assert kinds(channel, *(message() for _ in range(500))) == ["confirmed"] * 500
    wait_until(lambda: rabbit.counts(f"{config.namespace}.flowforge.q") == (500, 0), "500 messages")


def test_a_message_to_a_missing_queue_is_refused_and_the_queue_is_declared_again(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q", "other")
    rabbit.delete_queue(f"{config.namespace}.flowforge.q")
    outcomes = channel.publish_batch([message("other"), message("q"), message("other")], TIMEOUT)
    assert [each.kind for each in outcomes] == ["confirmed", "refused", "confirmed"]
    assert "NO_ROUTE" in outcomes[1].reason
    assert channel.undeclared({"q", "other"}) == {"q"}
    ensure(channel, {"q", "other"})
    assert channel.gone == {"q"}  # evidence that what was in it is lost
    assert kinds(channel, message("q")) == ["confirmed"]


def test_a_queue_that_is_there_is_no_evidence_of_loss(config: Config, opened: Callable[[Any], Any]) -> None:
    publisher(config, opened, "q")
    second: PublishChannel = opened(PublishChannel(config))
    assert second.wait_ready(TIMEOUT)
    second.ensure({"q", "new"})
    assert second.gone == {"new"}


def test_a_nack_refuses_exactly_the_nacked_messages(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    classic = config.replace(queue_type="classic")  # which counts exactly, where quorum queues lag
    channel = publisher(classic, opened, "q", "other")
    name = f"{config.namespace}.flowforge.q"
    rabbit_server.set_policy("full", f"^{name}$", '{"max-length": 1, "overflow": "reject-publish"}')
    try:
        batch = [message("q" if number % 2 else "other") for number in range(20)]

        def nacked() -> bool:
            found = kinds(channel, *batch)
            assert found[0::2] == ["confirmed"] * 10
            return found[1::2] == ["refused"] * 10

        wait_until(nacked, "the policy to be in force")
        assert "nack" in channel.publish_batch([message("q")], TIMEOUT)[0].reason
    finally:
        rabbit_server.clear_policy("full")
    wait_until(lambda: kinds(channel, message("q")) == ["confirmed"], "the policy to be gone")


def test_two_messages_of_one_dispatch_are_judged_one_by_one(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q", "other")
    rabbit.delete_queue(f"{config.namespace}.flowforge.q")
    lost = message("q")
    # A return names a message only by its id and queue.
    assert kinds(channel, lost, replace(lost, queue="other"), lost, replace(lost, queue="other")) == [
        "refused",
        "confirmed",
        "refused",
        "confirmed",
    ]


def test_each_confirmed_message_is_logged_for_debugging(
    config: Config, opened: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "flowforge")
    channel = publisher(config, opened, "q")
    sent = [message(), message(type="t" * 256), message()]
    assert kinds(channel, *sent) == ["confirmed", "permanent", "confirmed"]
    logged = [record.keys["dispatch"] for record in caplog.records if record.getMessage() == "confirmed"]  # type: ignore[attr-defined]
    assert sorted(logged) == sorted([sent[0].message_id, sent[2].message_id])


def test_urls_are_tried_in_turn(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    nobody = f"amqp://a:s3cret@127.0.0.1:{free_port()}"
    channel: PublishChannel = opened(PublishChannel(config.replace(amqp_urls=(nobody, rabbit_server.url))))
    errors = set()

    def connected() -> bool:
        errors.add(str(channel.error))
        return channel.state == "connected"

    wait_until(connected, "the second URL")
    assert any("no connection to amqp://a:***@127.0.0.1" in each for each in errors)


def test_a_server_that_never_answers_keeps_nobody_from_stopping(
    config: Config, opened: Callable[[Any], Any]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        channel: PublishChannel = opened(
            PublishChannel(config.replace(amqp_urls=(f"amqp://127.0.0.1:{port}",)))
        )
        accepted, _ = silent.accept()
        with accepted, pytest.raises(BrokerUnavailable, match="not connected to the broker yet"):
            channel.check()
        channel.close()
        assert not channel.is_alive()


def test_a_blocked_broker_is_reported_in_time_and_then_everything_arrives(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q")
    consuming, inbox = consumer(config, opened)
    assert kinds(channel, message()) == ["confirmed"]
    rabbit_server.set_memory_watermark(0)
    try:
        first = message()
        # The blocked time-out ends the wait, however long confirms may take.
        assert [each.kind for each in channel.publish_batch([first], 3600)] == ["unknown"]
        with pytest.raises(BrokerBlocked):
            channel.check()
        with pytest.raises(BrokerBlocked):
            channel.publish_batch([message()], TIMEOUT)
        # Consumers are not blocked.
        consuming.ack([inbox.take()])
        queue = f"{config.namespace}.flowforge.q"
        wait_until(lambda: rabbit_server.queues()[queue] == (0, 0, 1), "the ack")
        # A blocked connection never answers a close either.
        stuck: PublishChannel = opened(PublishChannel(config))
        wait_until(lambda: stuck.state == "blocked", "a new connection to be blocked")
        stuck.close()
        assert not stuck.is_alive()
    finally:
        rabbit_server.set_memory_watermark(0.4)
    assert channel.wait_ready(TIMEOUT)
    wait_until(lambda: channel.state == "connected", "the end of the alarm")
    # The same dispatch goes out again; its first message may have arrived as well.
    assert kinds(channel, first) == ["confirmed"]
    assert first.message_id in {inbox.take().message_id, inbox.take().message_id}


def test_a_broker_that_dies_leaves_the_outcome_unknown_and_is_found_again(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q")
    rabbit_server.stop()
    wait_until(lambda: channel.state != "connected", "the loss to be noticed")
    with pytest.raises(BrokerUnavailable):
        channel.publish_batch([message()], TIMEOUT)
    rabbit_server.start()
    wait_until(lambda: channel.state == "connected", "the reconnect")
    assert channel.gone == set()
    assert kinds(channel, message()) == ["confirmed"]


def test_a_queue_lost_while_disconnected_is_reported_on_reconnect(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q", "other")
    generation = channel.generation
    rabbit_server.delete_queue(f"{config.namespace}.flowforge.q")
    rabbit_server.close_connections("test")
    wait_until(lambda: channel.generation > generation and channel.state == "connected", "the reconnect")
    assert channel.gone == {"q"}
    assert kinds(channel, message("q")) == ["confirmed"]


def test_of_two_queues_that_hold_up_a_batch_none_stays_behind_the_other(
    config: Config, wire: AmqpProxy, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config.replace(amqp_urls=(wire.url,)), opened, "lost", "q")
    wire.silent.add("q")
    (outcome,) = channel.publish_batch([message("q")], 0.5)
    assert (outcome.kind, outcome.reason) == ("unconfirmed", "no confirm within 0.5 s")
    wire.silent.clear()
    wire.silent.add("lost")

    def goes_through() -> bool:
        with suppress(BrokerUnavailable):
            lost, outcome = channel.publish_batch([message("lost"), message("q")], 3)
            assert lost.kind != "confirmed"
            return outcome.kind == "confirmed"
        return False

    wait_until(goes_through, "the message to the queue that works again")


def test_a_consumer_creates_no_queue_and_waits_for_each(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    sender = publisher(config, opened, "q")
    inbox = Inbox()
    consuming: ConsumeChannel = opened(
        ConsumeChannel(config, ["late", "q", "other"], inbox.put, prefetch=5, name="worker")
    )
    assert consuming.wait_ready(TIMEOUT)
    assert kinds(sender, message("q")) == ["confirmed"]
    assert inbox.take().queue == "q"  # one that is missing holds up no other
    sender.ensure({"late"})
    assert sender.gone == {"late"}
    assert kinds(sender, message("late"), message("q")) == ["confirmed"] * 2
    assert {inbox.take().queue, inbox.take().queue} == {"late", "q"}
    assert rabbit.counts(f"{config.namespace}.flowforge.other") is None
    told = [record.keys["queue"] for record in caplog.records if "are missing" in record.getMessage()]  # type: ignore[attr-defined]
    assert told == ["late, other", "other"]


def test_what_is_acknowledged_is_gone_and_what_is_not_is_offered_again(
    config: Config, opened: Callable[[Any], Any]
) -> None:
    sender = publisher(config, opened, "q")
    receiving, inbox = consumer(config, opened)
    sent = [message() for _ in range(6)]
    kinds(sender, *sent)
    got = [inbox.take() for _ in sent]
    assert [each.message_id for each in got] == [each.message_id for each in sent]
    # In several orders: the first ones together, some from the middle, one twice.
    receiving.ack([got[1], got[0]])
    receiving.ack([got[4], got[4]])
    receiving.ack([got[4]])
    receiving.close()
    _, second = consumer(config, opened)
    again = [second.take() for _ in range(3)]
    assert {each.message_id for each in again} == {sent[index].message_id for index in (2, 3, 5)}
    assert all(each.redelivered for each in again)
    # What comes again comes before what is new.
    last = message()
    kinds(sender, last)
    assert second.take().message_id == last.message_id


def test_at_most_prefetch_messages_are_undecided(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    sender = publisher(config, opened, "q")
    kinds(sender, *(message() for _ in range(5)))
    receiving, inbox = consumer(config, opened, prefetch=2)
    for left in (3, 1):
        taken = [inbox.take(), inbox.take()]
        counts = left, 1
        wait_until(lambda: rabbit.counts(f"{config.namespace}.flowforge.q") == counts, "two to be taken")  # noqa: B023
        if left > 1:
            receiving.ack(taken)
    receiving.close()
    assert inbox.empty()


def test_settling_after_the_connection_is_lost_does_nothing(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    sender = publisher(config, opened, "q")
    receiving, inbox = consumer(config, opened, prefetch=1)
    first, second = message(), message()
    kinds(sender, first)
    stale = inbox.take()
    rabbit_server.close_connections("test")
    fresh = inbox.take()
    assert (fresh.message_id, fresh.redelivered) == (first.message_id, True)
    assert (
        fresh.tag == stale.tag
    )  # the tags begin anew, so an ack across connections would hit another message
    receiving.ack([stale])
    receiving.reject([stale])
    receiving.give_back([fresh])
    assert inbox.take().message_id == first.message_id
    wait_until(lambda: sender.state == "connected", "the publisher")
    assert kinds(sender, second) == ["confirmed"]
    receiving.close()
    assert inbox.empty()
    # Only one at a time is given out, so the broker knew the first one as undecided until the end.
    _, other = consumer(config, opened)
    got = {each.message_id: each.redelivered for each in (other.take(), other.take())}
    assert got == {first.message_id: True, second.message_id: False}


def test_settling_after_the_channel_is_closed_does_nothing() -> None:
    """The broker closes the channel first, and the loss of the connection is yet to be heard of."""
    channel: Any = object()
    receiving = ConsumeChannel(Config(amqp_urls=("amqp://nowhere",)), ["q"], print, prefetch=3, name="worker")
    deliveries = [Delivery(0, tag, "q", None, None, b"", False, {}) for tag in (1, 2, 3)]
    receiving._consuming, receiving._unsettled = channel, dict.fromkeys((1, 2, 3))
    receiving._channel_closed(channel, pika.exceptions.ChannelClosedByBroker(406, "PRECONDITION_FAILED"))
    receiving._acknowledge(deliveries[:1])
    receiving._acknowledge(deliveries[2:])
    receiving._refuse(deliveries[1:2], requeue=True)
    receiving._loop.close()  # it was never started


def test_pause_gives_others_what_was_prefetched_and_resume_takes_again(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    sender = publisher(config, opened, "q")
    receiving, inbox = consumer(config, opened, prefetch=3)
    kinds(sender, *(message() for _ in range(3)))
    got = [inbox.take() for _ in range(3)]
    receiving.pause()
    receiving.give_back(got)
    queue = f"{config.namespace}.flowforge.q"
    wait_until(lambda: rabbit_server.counts(queue) == (3, 0), "all to be back")
    receiving.resume()
    receiving.ack([inbox.take() for _ in range(3)])
    wait_until(lambda: rabbit_server.queues()[queue] == (0, 0, 1), "the acks")
    receiving.close()
    assert inbox.empty()


def test_what_is_on_its_way_when_the_pause_begins_goes_back() -> None:
    """The broker delivers until it has heard of the pause."""
    channel, taken = Mock(), list[Delivery]()
    receiving = ConsumeChannel(
        Config(amqp_urls=("amqp://nowhere",)), ["q"], taken.append, prefetch=3, name="worker"
    )
    receiving._paused = True
    receiving._received("q", 0, channel, Mock(delivery_tag=7), pika.BasicProperties(), b"")
    channel.basic_nack.assert_called_once_with(7, requeue=True)
    assert not taken
    receiving._loop.close()  # it was never started


def test_a_pause_outlasts_a_reconnect(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    sender = publisher(config, opened, "q")
    receiving, inbox = consumer(config, opened)
    receiving.pause()
    generation = receiving.generation
    rabbit_server.close_connections("test")
    wait_until(lambda: receiving.generation > generation and receiving.state == "connected", "the reconnect")
    wait_until(lambda: sender.state == "connected", "the publisher")
    assert kinds(sender, message()) == ["confirmed"]
    assert rabbit_server.counts(f"{config.namespace}.flowforge.q") == (1, 0)
    receiving.resume()
    inbox.take()


def test_what_is_rejected_goes_to_the_dead_letter_queue(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    sender = publisher(config, opened, "q")
    receiving, inbox = consumer(config, opened)
    kinds(sender, message(body=b"not json"))
    receiving.reject([inbox.take()])
    wait_until(lambda: rabbit.counts(f"{config.namespace}.flowforge.dead") == (1, 0), "the dead letter")
    receiving.close()
    assert inbox.empty()
    assert rabbit.counts(f"{config.namespace}.flowforge.q") == (0, 0)


def test_a_consumer_whose_queue_is_deleted_leaves_the_evidence_and_takes_again_from_the_new_one(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    publisher(config, opened, "q")
    receiving, inbox = consumer(config, opened)
    generation = receiving.generation
    rabbit.delete_queue(f"{config.namespace}.flowforge.q")
    wait_until(lambda: receiving.generation > generation and receiving.state == "connected", "the reconnect")
    sender: PublishChannel = opened(PublishChannel(config))
    assert sender.wait_ready(TIMEOUT)
    sender.ensure({"q"})
    assert sender.gone == {"q"}
    assert kinds(sender, message()) == ["confirmed"]
    inbox.take()


@pytest.mark.parametrize("where", ["while receiving", "while acknowledging"])
def test_an_unforeseen_error_in_the_thread_does_not_end_it(
    config: Config, opened: Callable[[Any], Any], caplog: pytest.LogCaptureFixture, where: str
) -> None:
    inbox = Inbox()

    def receive(delivery: Delivery) -> None:
        inbox.put(delivery)
        if where == "while receiving" and not delivery.redelivered:
            raise RuntimeError("unforeseen")

    sender = publisher(config, opened, "q")
    kinds(sender, message())
    receiving = opened(ConsumeChannel(config, ["q"], receive, prefetch=1, name="worker"))
    assert not inbox.take().redelivered
    if where == "while acknowledging":
        receiving.ack([None])
    again = inbox.take()
    assert again.redelivered
    receiving.ack([again])
    assert [record.levelname for record in caplog.records if record.name == "flowforge.worker"]
