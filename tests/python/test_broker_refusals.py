"""What the broker refuses, a message, a queue, a user, or everything: whose fault it is, and who waits."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from pika import exceptions

from flowforge.broker import ConsumeChannel, PublishChannel
from flowforge.broker.publish import blame
from flowforge.config import Config
from flowforge.errors import BrokerForbidden, BrokerMisconfigured, BrokerUnavailable, ConfigError
from tests.python.amqp_proxy import AmqpProxy
from tests.python.channels import TIMEOUT, Inbox, User, ensure, kinds, message, opening, publisher
from tests.services.process import wait_until
from tests.services.rabbitmq import Broker, RabbitServer


@pytest.fixture
def config(rabbit_server: RabbitServer, amqp_namespace: str) -> Config:
    return Config(amqp_urls=(rabbit_server.url,), namespace=amqp_namespace, blocked_timeout=1.0)


@pytest.fixture
def proxy(rabbit_server: RabbitServer) -> Iterator[AmqpProxy]:
    with AmqpProxy(rabbit_server.url) as proxy:
        yield proxy


@pytest.fixture
def user(rabbit_server: RabbitServer) -> Iterator[User]:
    user = User(rabbit_server)
    yield user
    user.delete()


@pytest.fixture
def opened() -> Iterator[Callable[[Any], Any]]:
    with opening() as start:
        yield start


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "t" * 256},
        {"queue": "dead"},
        {"queue": "q" * 201},
        {"headers": {"traceparent": object()}},
        {"headers": {"traceparent": "x" * 200_000}},
    ],
    ids=["type", "reserved queue", "long queue", "header", "long header"],
)
def test_an_invalid_message_is_permanent_and_alone(
    config: Config, opened: Callable[[Any], Any], bad: dict[str, Any]
) -> None:
    channel = publisher(config, opened, "q")
    assert kinds(channel, message(), message(**bad), message()) == ["confirmed", "permanent", "confirmed"]


def test_a_message_above_the_brokers_limit_is_permanent_and_alone(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    limit = rabbit_server.ctl("eval", "element(2, application:get_env(rabbit, max_message_size)).").strip()
    rabbit_server.ctl("eval", "application:set_env(rabbit, max_message_size, 1000).")
    try:
        channel = publisher(config, opened, "q")
        # The broker closes the whole channel over it.
        found = kinds(channel, message(), message(body=b"x" * 1001), *(message() for _ in range(20)))
        assert found == ["confirmed", "permanent", *["confirmed"] * 20]
        assert kinds(channel, message(), message()) == ["confirmed", "confirmed"]
    finally:
        rabbit_server.ctl("eval", f"application:set_env(rabbit, max_message_size, {limit}).")


def test_a_message_over_which_the_connection_is_closed_is_found_and_alone(
    config: Config, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q")
    open_ones = {each.message_id: each for each in (message() for _ in range(20))}
    offenders = [message(headers={"long": "x" * 200_000}) for _ in range(2)]
    batch = list(open_ones.values())
    for place, offender in zip((5, 12), offenders, strict=True):
        batch.insert(place, offender)
    found: dict[str, str] = {}

    def judged() -> bool:
        """As the publisher does: what is known is marked, what is not comes again."""
        with suppress(BrokerUnavailable):
            left = [each for each in batch if each.message_id not in found]
            channel._frame_max = 0  # as if the broker took less than it had said
            outcomes = zip(left, channel.publish_batch(left, TIMEOUT), strict=True)
            found.update((each.message_id, known.kind) for each, known in outcomes if known.kind != "unknown")
        return len(found) == len(batch)

    wait_until(judged, "every message to be judged")
    assert {each for each, kind in found.items() if kind == "permanent"} == {x.message_id for x in offenders}
    assert {each for each, kind in found.items() if kind == "confirmed"} == open_ones.keys()
    assert channel.wait_ready(TIMEOUT)
    wait_until(lambda: channel.state == "connected", "the connection")
    assert kinds(channel, *(message() for _ in range(5))) == ["confirmed"] * 5


def test_only_a_confirm_ends_the_growth_of_the_pauses_between_connections(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q")
    for _ in range(3):
        generation = channel.generation
        rabbit_server.close_connections("test")
        wait_until(lambda: channel.generation > generation and channel.state == "connected", "the reconnect")  # noqa: B023
    assert channel._backoff.next() > 0.2
    assert kinds(channel, message()) == ["confirmed"]
    assert channel._backoff.next() <= 0.1


def test_a_deleted_exchange_is_declared_again(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any]
) -> None:
    channel = publisher(config, opened, "q")
    with rabbit.channel() as peer:
        peer.exchange_delete(f"{config.namespace}.flowforge")
    assert kinds(channel, message()) == ["unknown"]
    assert channel.wait_ready(TIMEOUT)
    wait_until(lambda: kinds(channel, message()) == ["confirmed"], "the exchange to be back")


@pytest.mark.parametrize("kind", ["type", "argument", "durable", "exchange"])
def test_other_arguments_are_named_with_both_values(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any], kind: str
) -> None:
    name, dead = f"{config.namespace}.flowforge.q", f"{config.namespace}.flowforge.dead"
    said = f"queue '{name}' exists with other arguments: "
    if kind == "type":
        rabbit.declare(name, arguments={"x-queue-type": "classic", "x-dead-letter-exchange": dead})
        said += "x-queue-type should be 'quorum' and is 'classic'"
    elif kind == "argument":
        rabbit.declare(name)
        said += f"x-dead-letter-exchange should be '{dead}' and is none"
    elif kind == "durable":
        config = config.replace(queue_type="classic")
        rabbit.declare(name, durable=False, arguments={"x-dead-letter-exchange": dead})
        said += "durable should be 'true' and is 'false'"
    else:
        with rabbit.channel() as peer:
            peer.exchange_declare(f"{config.namespace}.flowforge", "topic", durable=True)
        said = f"exchange '{config.namespace}.flowforge' .* type should be 'direct' and is 'topic'"
    channel: PublishChannel = opened(PublishChannel(config))
    channel.wait_ready(TIMEOUT)
    if kind == "exchange":
        with pytest.raises(BrokerMisconfigured, match=said):
            channel.check()
        return
    channel.ensure({"q"})
    assert said in str(channel.wrong["q"])


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues are looked at every little while."""
    monkeypatch.setattr(PublishChannel, "look_interval", 0.1)


@pytest.mark.parametrize("remedy", ["deleted", "made anew"])
@pytest.mark.usefixtures("often")
def test_a_queue_that_cannot_be_used_is_refused_alone_and_comes_back_by_itself(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any], remedy: str
) -> None:
    name = f"{config.namespace}.flowforge.evil"
    rabbit.declare(name, arguments={"x-queue-type": "classic"})
    channel = publisher(config, opened, "evil", "q")
    generation = channel.generation
    for _ in range(2):
        bad, good = channel.publish_batch([message("evil"), message("q")], TIMEOUT)
        assert (bad.kind, good.kind) == ("refused", "confirmed")
        assert f"queue '{name}' exists with other arguments" in bad.reason
        # At a fresh connection just as well.
        if channel.generation == generation:
            channel._post(lambda: channel._abort("test"))
            wait_until(
                lambda: channel.generation > generation and channel.state == "connected", "another one"
            )
    assert not channel.undeclared({"evil", "q"})
    assert channel.gone == set()
    rabbit.delete_queue(name)
    if remedy == "made anew":
        arguments = {"x-queue-type": "quorum", "x-dead-letter-exchange": f"{config.namespace}.flowforge.dead"}
        with suppress(exceptions.ChannelClosedByBroker):  # the publisher may come first
            rabbit.declare(name, arguments=arguments)
    wait_until(lambda: not channel.wrong, "the queue to be right")
    assert channel.gone == {"evil"}  # what was in the other one is lost
    assert channel.undeclared({"evil", "q"}) == {"evil"}  # nothing is sent before that is dealt with
    channel.gone.clear()
    assert not channel.undeclared({"evil", "q"})
    assert kinds(channel, message("evil"), message("q")) == ["confirmed", "confirmed"]


@pytest.mark.usefixtures("often")
def test_nothing_is_sent_to_a_queue_whose_loss_is_not_told_of_yet(
    config: Config, rabbit: Broker, opened: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is there again before, and what is sent then is sent once more for the loss."""
    channel = publisher(config, opened, "q")
    is_right, anew, told = channel._is_right, threading.Event(), threading.Event()

    def hesitate(queue: str) -> None:
        if queue in channel._missing:
            anew.set()
            told.wait(TIMEOUT)
        is_right(queue)

    monkeypatch.setattr(channel, "_is_right", hesitate)
    assert not channel.undeclared({"q"})
    rabbit.delete_queue(f"{config.namespace}.flowforge.q")
    assert anew.wait(TIMEOUT)
    assert channel.undeclared({"q"}) == {"q"}
    told.set()
    wait_until(lambda: channel.gone == {"q"}, "the note")
    assert channel.undeclared({"q"}) == {"q"}
    channel.gone.clear()
    wait_until(lambda: not channel.undeclared({"q"}), "the queue to be right")


def test_a_queue_over_which_the_connection_is_closed_is_left_out(
    config: Config, opened: Callable[[Any], Any], proxy: AmqpProxy
) -> None:
    proxy.closures[f"{config.namespace}.flowforge.evil"] = (541, "INTERNAL_ERROR")
    channel: PublishChannel = opened(PublishChannel(config.replace(amqp_urls=(proxy.url,))))
    assert channel.wait_ready(TIMEOUT)
    ensure(channel, {"evil", "q"})

    def goes_on() -> bool:
        with suppress(BrokerUnavailable):
            return kinds(channel, message("evil"), message("q")) == ["refused", "confirmed"]
        return False

    wait_until(goes_on, "the other queue's message")
    assert "closes the connection over queue" in str(channel.wrong["evil"])
    proxy.closures.clear()
    wait_until(lambda: not channel.wrong, "the queue to be right")


@pytest.mark.usefixtures("often")
def test_a_queue_that_only_its_user_may_not_declare_is_refused_alone(
    config: Config, opened: Callable[[Any], Any], user: User
) -> None:
    user.may_write(f"^{config.namespace}[.]flowforge([.]q|[.]dead)?$")
    channel = publisher(config.replace(amqp_urls=(user.url,)), opened, "evil", "q")
    assert kinds(channel, message("evil"), message("q")) == ["refused", "confirmed"]
    assert isinstance(channel.wrong["evil"], BrokerForbidden)
    user.may_write(".*")
    wait_until(lambda: not channel.wrong, "the permission to be noticed")
    assert kinds(channel, message("evil")) == ["confirmed"]


@pytest.mark.parametrize("part", ["password", "virtual host"])
def test_a_refused_login_is_told_apart_and_keeps_the_password_to_itself(
    config: Config, rabbit_server: RabbitServer, opened: Callable[[Any], Any], part: str
) -> None:
    password = rabbit_server.url.partition("flowforge:")[2].partition("@")[0]
    wrong = "s3cret" if part == "password" else password
    host = f"flowforge:{wrong}@127.0.0.1:{rabbit_server.port}"
    url = f"amqp://{host}/nowhere" if part == "virtual host" else f"amqp://{host}"
    channel: PublishChannel = opened(PublishChannel(config.replace(amqp_urls=(url,))))
    assert not channel.wait_ready(TIMEOUT)
    with pytest.raises(BrokerMisconfigured, match="login, password or virtual host") as caught:
        channel.check()
    assert wrong not in str(caught.value)


@pytest.mark.parametrize("url", ["amqp://user:pa/s3cret@host/", "amqp://user:s3cret"])
def test_a_url_that_cannot_be_read_is_refused_and_nothing_of_it_shown(config: Config, url: str) -> None:
    with pytest.raises(ConfigError, match="URL 2 of FLOWFORGE_AMQP_URL cannot be read") as caught:
        PublishChannel(config.replace(amqp_urls=(*config.amqp_urls, url)))
    assert "s3cret" not in str(caught.value)


def test_a_user_without_a_password_is_told_where_it_goes(config: Config) -> None:
    with pytest.raises(
        ConfigError, match="URL 1 of FLOWFORGE_AMQP_URL has no password for user 'a b': set F"
    ):
        PublishChannel(config.replace(amqp_urls=("amqps://a%20b@host/x",)))


@pytest.mark.parametrize(
    ("code", "text", "about"),
    [
        (311, "CONTENT_TOO_LARGE", "message"),
        (403, "ACCESS_REFUSED - access to exchange 'flowforge' refused", "permission"),
        (404, "NOT_FOUND - no exchange 'flowforge'", "exchange"),
        (405, "RESOURCE_LOCKED", "suspect"),
        (406, "PRECONDITION_FAILED - message size 9 is larger than configured max size 8", "message"),
        (406, "PRECONDITION_FAILED - anything else", "suspect"),
    ],
)
def test_a_channel_that_the_broker_closes_is_judged_by_the_reply_code(
    code: int, text: str, about: str
) -> None:
    assert blame(exceptions.ChannelClosedByBroker(code, text)) == about


@pytest.mark.parametrize(
    ("code", "about"),
    [(320, "other"), (402, "other"), (403, "other"), (501, "message"), (502, "message"), (503, "suspect"),
     (504, "suspect"), (505, "suspect"), (506, "other"), (530, "other"), (540, "suspect"), (541, "suspect")],
)  # fmt: skip
def test_a_connection_that_the_broker_closes_is_judged_by_the_reply_code(code: int, about: str) -> None:
    assert blame(exceptions.ConnectionClosedByBroker(code, "")) == about
    # Not even that it was this broker is known.
    assert blame(exceptions.StreamLostError("")) == "other"


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (311, "", "permanent"),
        (405, "", "refused"),
        (406, "message size", "permanent"),
        (406, "", "refused"),
        (501, "", "permanent"),
        (541, "", "refused"),
    ],
)
def test_a_message_over_which_the_broker_closes_holds_up_no_other_and_only_its_own_fault_is_permanent(
    config: Config, opened: Callable[[Any], Any], proxy: AmqpProxy, code: int, text: str, kind: str
) -> None:
    proxy.closures["bad"] = (code, text)
    channel = publisher(config.replace(amqp_urls=(proxy.url,)), opened, "q")
    batch = {each.message_id: each for each in (message(), message(type="bad"), message())}
    found: dict[str, str] = {}

    def judged() -> bool:
        """As the publisher does: what is known is marked, what is not comes again."""
        left = [each for each in batch.values() if each.message_id not in found]
        with suppress(BrokerUnavailable):
            outcomes = zip(left, channel.publish_batch(left, TIMEOUT), strict=True)
            found.update((each.message_id, known.kind) for each, known in outcomes if known.kind != "unknown")
        return len(found) == 3

    wait_until(judged, "every message to be judged")
    assert [found[each] for each in batch] == ["confirmed", kind, "confirmed"]


@pytest.mark.parametrize("code", [320, 506, 530])
def test_a_message_is_not_blamed_for_the_end_of_a_connection(
    config: Config, opened: Callable[[Any], Any], proxy: AmqpProxy, code: int
) -> None:
    proxy.closures["bad"] = (code, "")
    channel = publisher(config.replace(amqp_urls=(proxy.url,)), opened, "q")
    assert kinds(channel, message(type="bad")) == ["unknown"]
    proxy.closures.clear()
    wait_until(lambda: channel.state == "connected", "the reconnect")
    assert kinds(channel, message(type="bad")) == ["confirmed"]


def test_a_user_who_may_not_publish_is_misconfigured_and_blames_no_message(
    config: Config, opened: Callable[[Any], Any], user: User
) -> None:
    """Queues may be declared and bound, but nothing published."""
    user.may_write(f"^{config.namespace}[.]flowforge[.]")
    channel: PublishChannel = opened(PublishChannel(config.replace(amqp_urls=(user.url,))))
    assert not channel.wait_ready(TIMEOUT)
    assert channel.state == "misconfigured"
    with pytest.raises(BrokerForbidden, match=f"write on exchange '{config.namespace}.flowforge'.*403"):
        channel.publish_batch([message()], TIMEOUT)
    user.may_write(".*")
    wait_until(lambda: channel.state == "connected", "the permission to be noticed")
    channel.ensure({"q"})
    assert kinds(channel, message()) == ["confirmed"]


def test_a_permission_taken_away_blames_no_message(
    config: Config, opened: Callable[[Any], Any], proxy: AmqpProxy
) -> None:
    """The broker may tell in the middle of a batch, or over a single message."""
    channel = publisher(config.replace(amqp_urls=(proxy.url,)), opened, "q")
    proxy.closures["bad"] = (403, "ACCESS_REFUSED - access to exchange 'flowforge' refused")
    for batch in ([message(type="bad")], [message(type="bad") for _ in range(3)]):
        assert channel.wait_ready(TIMEOUT)
        states: set[str] = set()

        def refused(batch: list[Any] = batch, states: set[str] = states) -> bool:
            with suppress(BrokerUnavailable, BrokerMisconfigured):
                states.update(kinds(channel, *batch))
            return isinstance(channel.error, BrokerForbidden)

        wait_until(refused, "the state")
        assert states == {"unknown"}
        wait_until(lambda: channel.state == "connected", "the next connection")


def test_a_user_who_may_not_consume_is_misconfigured_and_waits_longer_and_longer(
    config: Config, opened: Callable[[Any], Any], user: User
) -> None:
    sender = publisher(config, opened, "q")
    assert kinds(sender, message()) == ["confirmed"]
    user.may_read("^$")
    inbox = Inbox()
    seen: set[str] = set()
    channel: ConsumeChannel = opened(
        ConsumeChannel(config.replace(amqp_urls=(user.url,)), ["q"], inbox.put, prefetch=1, name="worker")
    )

    def refused_often() -> bool:
        seen.add(channel.state)
        return channel.generation >= 4

    wait_until(refused_often, "several connections")
    assert seen == {"connecting", "misconfigured"}
    with pytest.raises(BrokerForbidden, match=f"ACCESS_REFUSED.*{config.namespace}.flowforge.q"):
        channel.check()
    assert channel._backoff.next() > 0.2
    user.may_read(".*")
    inbox.take()
    wait_until(lambda: channel.state == "connected", "the state")
