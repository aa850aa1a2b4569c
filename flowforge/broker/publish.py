"""Publishing in batches with pipelined confirms, each message judged by itself."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pika
import pika.exceptions

from flowforge.broker.connection import Resume, Steps, cause, unusable
from flowforge.broker.declare import Declaring
from flowforge.config import Config
from flowforge.crash import crash_point
from flowforge.errors import BrokerForbidden

_HEADER_FRAME = (
    7 + 1 + 2 + 2 + 8
)  # bytes around the properties: frame, its end, class, weight, size of the body

Kind = Literal["confirmed", "refused", "unconfirmed", "permanent", "unknown"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message to publish. `queue` is FlowForge's name of the queue; `message_id` the dispatch id."""

    message_id: str
    queue: str
    type: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one message.

    confirmed: the broker has it, in its queue. refused: nacked or returned, or its queue cannot be used as it
    is; a later try may succeed. unconfirmed: sent, and no confirm came in time; it may have arrived or not.
    permanent: this message can never be published. unknown: the connection or the time was over; it may have
    arrived or not, and may not even have been sent."""

    kind: Kind
    reason: str = ""


Blame = Literal["message", "suspect", "permission", "exchange", "other"]


def blame(reason: BaseException) -> Blame:
    """What a closure of the channel or the connection is about, by the reply code of AMQP.

    message: one under way, which can never be published. suspect: perhaps one under way, though it may be
    fit. permission: this user may not publish. exchange: it is gone. other: nothing that was sent."""
    if isinstance(reason, pika.exceptions.ChannelClosedByBroker):
        if reason.reply_code == 403:
            return "permission"
        if reason.reply_code == 404:
            return "exchange"
        # 311 is AMQP's own code for it, which RabbitMQ does not use. 406 has many meanings, and only the text
        # tells which.
        if reason.reply_code == 311 or (reason.reply_code == 406 and "message size" in reason.reply_text):
            return "message"
        return "suspect"
    if isinstance(reason, pika.exceptions.ConnectionClosedByBroker):
        if reason.reply_code in (501, 502):  # a frame, or what is in it, that cannot be read
            return "message"
        # Command invalid, channel error, unexpected frame, not implemented, internal error: something that
        # was sent upset the broker, which need not be the message's own fault.
        if reason.reply_code in (503, 504, 505, 540, 541):
            return "suspect"
    # The connection was lost; or 320 an operator or the broker's end, 402, 403 and 530 the virtual host or
    # the login, 506 the broker's resources.
    return "other"


class _Batch:
    """Messages handed over together, and what became of each so far."""

    def __init__(
        self, messages: Sequence[Message], properties: Sequence[pika.BasicProperties | Outcome]
    ) -> None:
        self.messages, self.properties = messages, properties
        self.outcomes: list[Outcome | None] = [
            each if isinstance(each, Outcome) else None for each in properties
        ]
        self.open = self.outcomes.count(None)
        self.done = threading.Event()
        self.at_the_end: Callable[[], None] = lambda: None

    def settle(self, index: int, outcome: Outcome) -> None:
        if self.outcomes[index] is None:
            self.outcomes[index] = outcome
            self.open -= 1
            if self.open == 0:
                self.at_the_end()
                self.done.set()


@dataclass(slots=True)
class _Sent:
    """A message on its way: which of which batch, under which key, and why it came back, if it did."""

    batch: _Batch
    index: int
    key: tuple[str, str]
    returned: str | None = None


class PublishChannel(Declaring):
    """The publishing connection.

    `start()` it, `ensure` the queues, then `publish_batch`; one caller at a time."""

    def __init__(self, config: Config, name: str = "publisher") -> None:
        super().__init__(config, name)
        self._publishing: Any = None
        self._tag = 0
        self._pending: deque[tuple[_Batch, int]] = deque()
        self._sent: dict[int, _Sent] = {}
        self._keys: dict[tuple[str, str], _Sent] = {}
        self._deferred: dict[tuple[str, str], deque[tuple[_Batch, int]]] = {}
        self._one_by_one = False
        self._slow: dict[str, float] = {}  # when a queue, not confirming since, last held up a batch
        self._frame_max = 0  # bytes that a frame may have on the last connection; 0: any number

    def publish_batch(self, messages: Sequence[Message], timeout: float) -> list[Outcome]:
        """Publish `messages`, in order but pipelined, and say what became of each, in order, within `timeout`
        seconds or the blocked time-out.

        Raises what `check` raises, when nothing has been sent.
        """
        self.check()
        batch = _Batch(messages, [self._properties(message) for message in messages])
        if batch.open:
            self._post(lambda: self._begin(batch, timeout))
            batch.done.wait(timeout + self._config.blocked_timeout + 5)
        return [outcome or Outcome("unknown", "the broker did not answer") for outcome in batch.outcomes]

    def _properties(self, message: Message) -> pika.BasicProperties | Outcome:
        """The properties, or the outcome of a message that cannot even be written down."""
        if (reason := unusable(message.queue)) is not None:
            return Outcome("permanent", reason)
        if (error := self.wrong.get(message.queue)) is not None:
            return Outcome("refused", str(error))
        try:
            properties = pika.BasicProperties(
                message_id=message.message_id,
                type=message.type,
                delivery_mode=2,
                content_type="application/json",
                timestamp=int(time.time()),
                headers=dict(message.headers),
            )
            size = sum(map(len, properties.encode())) + _HEADER_FRAME
        except (pika.exceptions.AMQPError, ValueError, TypeError, AssertionError, OverflowError) as exc:
            return Outcome("permanent", f"not a valid message: {cause(exc)}")
        if 0 < self._frame_max < size:
            # Only bodies are split into frames. The broker would close the whole connection over it.
            return Outcome("permanent", f"its properties need {size} bytes of the broker's {self._frame_max}")
        return properties

    # -- in the thread

    def _set_up(self) -> Steps:
        self._declared.clear()
        # Those that are wrong are looked at later: the broker may close the connection over one.
        yield from self._declare(self._queues - self.wrong.keys())
        yield from self._open_publishing()

    def _open_publishing(self) -> Steps:
        channel = yield from self._channel()
        channel.add_on_return_callback(self._returned)
        yield from self._confirm_mode(channel)
        yield from self._probe(channel)
        self._publishing, self._tag = channel, 1
        assert self._connection is not None  # noqa: S101 -- steps end with their connection
        self._frame_max = self._connection.params.frame_max
        self._ready(proven=False)
        self._pump()

    def _confirm_mode(self, channel: Any) -> Steps:
        def ask(resume: Resume) -> None:
            self._waiting[channel] = resume
            confirmed = functools.partial(self._confirmed, channel)
            channel.confirm_delivery(confirmed, callback=functools.partial(self._answered, channel))

        yield ask

    def _probe(self, channel: Any) -> Steps:
        """Publish what no queue gets, and wait for its confirm. Whether this user may publish shows only so,
        and has to before any order depends on it."""

        def ask(resume: Resume) -> None:
            self._waiting[channel] = resume
            channel.basic_publish(self._names.exchange, "", b"")

        try:
            yield ask
        except pika.exceptions.ChannelClosedByBroker as exc:
            if blame(exc) == "permission":
                raise self._forbidden(exc) from exc
            raise

    def _forbidden(self, exc: BaseException) -> BrokerForbidden:
        return BrokerForbidden(
            f"the broker forbids publishing; grant its user write on exchange '{self._names.exchange}' "
            f"({cause(exc)})"
        )

    def _begin(self, batch: _Batch, timeout: float) -> None:
        order = [index for index, outcome in enumerate(batch.outcomes) if outcome is None]
        order.sort(key=lambda index: self._slow.get(batch.messages[index].queue, 0.0))
        self._pending.extend((batch, index) for index in order)
        timer = self._loop.call_later(timeout, functools.partial(self._late, batch, timeout))
        batch.at_the_end = functools.partial(self._loop.remove_timeout, timer)
        self._pump()

    def _pump(self) -> None:
        """Send while the window has room."""
        window = 1 if self._one_by_one else self._config.confirm_window
        while self._pending and len(self._sent) < window and self.state == "connected" and self._publishing:
            batch, index = self._pending.popleft()
            message = batch.messages[index]
            if batch.outcomes[index] is not None:
                continue
            if message.queue in self._slow and any(queue != message.queue for _, queue in self._keys):
                # While the broker looks for the leader of such a queue it does not even send the confirms of
                # what came before on the channel.
                self._pending.appendleft((batch, index))
                break
            key = (message.message_id, message.queue)
            if key in self._keys:
                # A return names only this key, so a second message of it waits until the first one is judged.
                self._deferred.setdefault(key, deque()).append((batch, index))
                continue
            self._tag += 1
            self._sent[self._tag] = self._keys[key] = _Sent(batch, index, key)
            self._publishing.basic_publish(
                self._names.exchange, message.queue, message.body, batch.properties[index], mandatory=True
            )
            crash_point("publisher:after-publish")

    def _returned(self, _channel: Any, method: Any, properties: pika.BasicProperties, _body: bytes) -> None:
        # It precedes the confirm of the same message.
        self._declared.discard(method.routing_key)
        if (sent := self._keys.get((str(properties.message_id), method.routing_key))) is not None:
            sent.returned = f"returned by the broker: {method.reply_code} {method.reply_text}"

    def _confirmed(self, channel: Any, frame: Any) -> None:
        if channel is not self._publishing:
            self._answered(channel, frame)  # the probe
            return
        crash_point("publisher:before-confirm")
        method = frame.method
        acked = method.NAME == "Basic.Ack"
        tags = [method.delivery_tag]
        if method.multiple:
            tags = list(itertools.takewhile(lambda tag: tag <= method.delivery_tag, self._sent))
        for tag in tags:
            if (sent := self._sent.get(tag)) is None:
                continue
            if sent.returned is not None:
                self._settle(tag, Outcome("refused", sent.returned))
            elif acked:
                self._log.debug("confirmed", dispatch=sent.key[0])
                self._settle(tag, Outcome("confirmed"))
            else:
                self._settle(tag, Outcome("refused", "refused by the broker (nack)"))
        # Not earlier: a message that ends every connection must not be sent again without a pause.
        self._backoff.reset()
        if not self._pending and not self._sent:
            self._one_by_one = False
        self._pump()

    def _settle(self, tag: int, outcome: Outcome) -> None:
        sent = self._sent.pop(tag)
        del self._keys[sent.key]
        sent.batch.settle(sent.index, outcome)
        self._slow.pop(sent.key[1], None)
        self._pending.extendleft(self._deferred.pop(sent.key, ()))

    def _late(self, batch: _Batch, seconds: float) -> None:
        """The time for `batch` is over. A quorum queue without a leader confirms nothing, and the broker
        holds up whatever else is on the same channel. So the next try has a fresh connection, and the queue
        that the first open message waits for comes last in it, and alone; of several such queues none stays
        behind another."""
        if self.state != "connected":
            self._answer(batch, Outcome("unknown", f"no confirm within {seconds:g} s"))
            return
        # What has not even been sent is put off only if it would wait for the same queue.
        stuck = {queue for _, queue in self._keys}
        for each, index in self._pending:
            if each.messages[index].queue not in stuck:
                each.settle(index, Outcome("unknown", f"not sent within {seconds:g} s"))
        if self._sent:
            self._slow[next(iter(self._sent.values())).key[1]] = time.monotonic()
        self._answer(batch, Outcome("unconfirmed", f"no confirm within {seconds:g} s"))
        self._abort("confirms are missing")

    def _answer(self, batch: _Batch, outcome: Outcome) -> None:
        """Answer `outcome` for all that is still open."""
        for index, known in enumerate(batch.outcomes):
            if known is None:
                batch.settle(index, outcome)

    def _blocked(self) -> None:
        super()._blocked()
        for batch in {id(sent.batch): sent.batch for sent in self._sent.values()}.values():
            self._loop.call_later(self._config.blocked_timeout, functools.partial(self._still_blocked, batch))

    def _still_blocked(self, batch: _Batch) -> None:
        # The connection is kept, because only it is told when the alarm ends.
        if self.state == "blocked":
            self._answer(batch, Outcome("unknown", "the broker is blocked"))

    def _unblocked(self) -> None:
        super()._unblocked()
        self._pump()

    def _channel_closed(self, channel: Any, reason: BaseException) -> None:
        super()._channel_closed(channel, reason)
        if channel is not self._publishing:
            return
        self._publishing = None
        about = blame(reason)
        if about == "permission":
            # Until someone grants it every message would end so: none is to blame, and all stay as they were.
            self._set_state("misconfigured", self._forbidden(reason))
            self._abort(cause(reason))
            return
        sent, self._sent, self._keys = list(self._sent.values()), {}, {}
        left = [(each.batch, each.index) for each in sent]
        left += [each for queue in self._deferred.values() for each in queue]
        self._deferred.clear()
        text = cause(reason)
        if about in ("message", "suspect"):
            # Alone it is found out; among others they all go again one by one.
            if len(sent) == 1:
                kind: Kind = "permanent" if about == "message" else "refused"
                sent[0].batch.settle(sent[0].index, Outcome(kind, f"the broker refuses it: {text}"))
                del left[0]
            self._one_by_one = self._one_by_one or bool(sent)
            if isinstance(reason, pika.exceptions.ChannelClosedByBroker):
                self._pending.extendleft(reversed(left))
                self._spawn(self._open_publishing())
                return
        # No transaction waits for the next connection, or for the exchange.
        for batch, index in left:
            batch.settle(index, Outcome("unknown", text))
        self._spawn(self._set_up())

    def _forget(self) -> None:
        self._publishing = None
        for batch, index in [
            *((sent.batch, sent.index) for sent in self._sent.values()),
            *self._pending,
            *(each for queue in self._deferred.values() for each in queue),
        ]:
            batch.settle(index, Outcome("unknown", "the connection to the broker was lost"))
        self._sent, self._keys = {}, {}
        self._pending.clear()
        self._deferred.clear()
