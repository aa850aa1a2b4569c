"""A look at the broker that changes nothing there, for whoever wants to know whether it will do."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import pika
import pika.exceptions

from flowforge.broker.connection import NOT_CONNECTED, Names, cause
from flowforge.broker.declare import queue_arguments, refusal
from flowforge.broker.parameters import Addresses
from flowforge.config import Config, without_password
from flowforge.errors import BrokerMisconfigured

_HEARTBEAT = 10  # seconds; twice that, and a broker that no longer answers is given up
_BLOCKED = 2.0  # seconds that a broker which says that it is blocked is waited for


Kind = Literal["login", "vhost", "file", "authority", "name", "certificate", "plain", "other", "silent"]

_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"vhost|\b530\b|ProbableAccessDenied", "vhost"),
    (r"ProbableAuthentication|ACCESS_REFUSED|\b403\b", "login"),
    (r"mismatch, certificate is not valid", "name"),
    (r"CERTIFICATE_VERIFY_FAILED", "authority"),
    (r"CERTIFICATE_REQUIRED|ALERT_(UNKNOWN_CA|BAD_CERTIFICATE|HANDSHAKE_FAILURE)", "certificate"),
    (r"WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE", "plain"),
    (r"IncompatibleProtocol", "other"),
)


@dataclass(frozen=True)
class Unreachable:
    """Why one of the URLs is of no use: its login is refused, its virtual host is, or a file for it cannot be
    read; its certificate is not of a trusted authority, or of another name, or it wants one; it takes no TLS,
    or speaks something else, as TLS; or nobody answers."""

    url: str
    kind: Kind
    reason: str
    user: str = ""
    vhost: str = ""


@dataclass(frozen=True)
class QueueState:
    """A queue as it is: `missing`, `wrong` (why the publisher will not be able to use it), or neither."""

    name: str
    messages: int = 0
    consumers: int = 0
    missing: bool = False
    wrong: str = ""
    unchecked: bool = False  # this user may not declare, which alone tells the arguments


class Probe:
    """A connection to the first broker that takes one: its `url`, without password, or empty. `unreachable`
    are those that do not. Raises ConfigError for a URL that cannot be read."""

    def __init__(self, config: Config) -> None:
        self.url = ""
        self.unreachable: list[Unreachable] = []
        self._config, self._names = config, Names(config.namespace)
        self._connection: pika.BlockingConnection | None = None
        addresses = Addresses(config, "flowforge doctor")
        for url in map(without_password, config.amqp_urls):
            try:
                _, parameters = addresses.next()
            except BrokerMisconfigured as exc:
                self.unreachable.append(Unreachable(url, "file", str(exc)))
                continue
            parameters.heartbeat = _HEARTBEAT
            parameters.blocked_connection_timeout = _BLOCKED
            try:
                connection = pika.BlockingConnection(parameters)
            except NOT_CONNECTED as exc:
                self.unreachable.append(_explained(exc, url, parameters))
                continue
            if self._connection is None:
                self._connection, self.url = connection, url
            else:
                connection.close()

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            with suppress(pika.exceptions.AMQPError):
                self._connection.close()

    def _channel(self) -> Any:
        assert self._connection is not None  # noqa: S101 -- asked only of one that is connected
        try:
            return self._connection.channel()
        except pika.exceptions.AMQPError as exc:
            raise ConnectionError(cause(exc)) from exc

    def queue(self, queue: str) -> QueueState:
        """The state of FlowForge's queue `queue`. Raises ConnectionError when the broker goes away."""
        return self._look(self._names.queue(queue))

    def dead_letters(self) -> QueueState:
        """The state of the dead-letter queue. Raises ConnectionError."""
        return self._look(self._names.dead)

    def _look(self, name: str) -> QueueState:
        try:
            found = self._channel().queue_declare(name, passive=True).method
        except pika.exceptions.ChannelClosedByBroker as exc:
            missing = exc.reply_code == 404
            return QueueState(name, missing=missing, wrong="" if missing else str(refusal(exc)))
        except pika.exceptions.AMQPError as exc:
            raise ConnectionError(cause(exc)) from exc
        wrong, unchecked = "", False
        try:
            # Of a queue that is there a declaration is a comparison. One that is deleted at this very moment
            # comes back by it, unbound; the publisher then notices by its first message.
            arguments = queue_arguments(self._config, name)
            self._channel().queue_declare(name, durable=True, arguments=arguments)
        except pika.exceptions.ChannelClosedByBroker as exc:
            unchecked = exc.reply_code == 403
            wrong = "" if unchecked else str(refusal(exc))
        except pika.exceptions.AMQPError as exc:
            raise ConnectionError(cause(exc)) from exc
        return QueueState(name, found.message_count, found.consumer_count, wrong=wrong, unchecked=unchecked)

    def exchanges(self) -> str:
        """Why the exchanges cannot be used, or empty. Raises ConnectionError."""
        for name, kind in ((self._names.exchange, "direct"), (self._names.dead, "fanout")):
            try:
                self._channel().exchange_declare(name, passive=True)
                self._channel().exchange_declare(name, exchange_type=kind, durable=True)
            except pika.exceptions.ChannelClosedByBroker as exc:
                if exc.reply_code == 406:
                    return str(refusal(exc))
            except pika.exceptions.AMQPError as exc:
                raise ConnectionError(cause(exc)) from exc
        return ""

    def blocked(self) -> bool | str:
        """Whether an alarm keeps the broker from taking messages, or why that cannot be told.

        Only whoever publishes is told of it: this publishes what no queue gets. The connection cannot be used
        any more when it is. Raises ConnectionError."""
        channel = self._channel()
        try:
            channel.exchange_declare(self._names.exchange, passive=True)
            channel.confirm_delivery()
            # The first one is still taken, and has the connection blocked.
            for _ in range(2):
                channel.basic_publish(self._names.exchange, "", b"")
        except pika.exceptions.ChannelClosedByBroker as exc:
            if exc.reply_code == 404:
                return f"there is no exchange '{self._names.exchange}' yet"
            return f"this user may not publish: {exc.reply_text}"
        except pika.exceptions.ConnectionBlockedTimeout:
            return True
        except pika.exceptions.AMQPError as exc:
            raise ConnectionError(cause(exc)) from exc
        return False


def _explained(exc: BaseException, url: str, parameters: pika.URLParameters) -> Unreachable:
    reason, user = cause(exc), parameters.credentials.username
    kind: Kind = next((kind for pattern, kind in _KINDS if re.search(pattern, reason)), "silent")
    if kind == "other" and parameters.ssl_options is not None:
        kind = "certificate"  # what TLS 1.3 says of it comes too late to be heard
    return Unreachable(url, kind, reason, user, parameters.virtual_host)
