"""Exchanges and queues: declared, looked at every so often, each queue judged by itself."""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Iterable
from typing import Any, ClassVar

import pika.exceptions

from flowforge.broker.connection import Client, Names, Steps, unusable
from flowforge.config import Config
from flowforge.db import Backoff
from flowforge.errors import (
    BrokerError,
    BrokerForbidden,
    BrokerMisconfigured,
    BrokerMismatch,
    BrokerUnavailable,
)


class Declaring(Client):
    """A connection that declares.

    `gone` holds the queues that were not there when they were declared or looked at: what had been in them is
    lost. The caller takes out what it has dealt with. `wrong` holds the queues that cannot be used as they
    are (other arguments, no permission), and why; each is looked at again, and leaves by itself."""

    look_interval: ClassVar[float] = 30.0  # seconds between looks at queues of which none is wrong

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name)
        self.gone: set[str] = set()
        self.wrong: dict[str, BrokerError] = {}
        self._queues: set[str] = set()  # to be declared at every connect
        self._declared: set[str] = set()  # there, as far as this connection knows
        self._missing: set[str] = set()  # found missing, and not declared since
        self._upsetting: set[str] = set()  # over whose declaration the broker closed the last connection
        self._looking = Backoff(first=1.0, cap=self.look_interval)
        self._next_look: object = None

    def undeclared(self, queues: Iterable[str]) -> set[str]:
        """Those of `queues` that `ensure` has to be called for, and `gone` dealt with, before publishing to
        them: what is sent before its queue's loss is dealt with is sent twice."""
        return {
            queue
            for queue in queues
            if (queue not in self._declared or queue in self.gone)
            and queue not in self.wrong
            and unusable(queue) is None
        }

    def ensure(self, queues: Iterable[str], timeout: float = 10.0) -> None:
        """Declare `queues`; those that were not there are in `gone` afterwards, those that cannot be used in
        `wrong`.

        Raises what `check` raises, and BrokerUnavailable when it takes longer."""
        wanted, done = self.undeclared(queues) - self._declared, threading.Event()
        if not wanted:
            return
        self.check()
        self._post(lambda: self._spawn(self._ensure(wanted, done)))
        with self._changed:
            self._changed.wait_for(lambda: done.is_set() or self.state != "connected", timeout)
        if not done.is_set():
            self.check()
            raise BrokerUnavailable("the broker did not answer in time")

    # -- in the thread

    def _ensure(self, queues: set[str], done: threading.Event) -> Steps:
        self._queues |= queues
        yield from self._declare(queues)
        with self._changed:
            done.set()
            self._changed.notify_all()

    def _declare(self, queues: set[str]) -> Steps:
        """Declare the exchanges, the dead-letter queue and `queues`.

        Without what all share nothing can be published, but a queue that is refused, whose name a client
        may have chosen, must not be in the way of the others."""
        channel = yield from self._channel()
        try:
            yield from self._declare_shared(channel)
        except pika.exceptions.ChannelClosedByBroker as exc:
            if isinstance(error := refusal(exc), BrokerMisconfigured):
                raise error from exc
            raise
        for queue in sorted(queues):
            try:
                channel = yield from self._declare_queue(channel, queue)
            except pika.exceptions.ChannelClosedByBroker as exc:
                self._is_wrong(queue, refusal(exc))
                channel = yield from self._channel()
            except pika.exceptions.ConnectionClosedByBroker as exc:
                # 320: it would have been closed anyway. Others may pass, as while a queue is being deleted.
                if exc.reply_code != 320:
                    if queue in self._upsetting:
                        text = f"the broker closes the connection over queue '{self._names.queue(queue)}'"
                        self._is_wrong(queue, BrokerUnavailable(f"{text}: {exc.reply_text}"))
                    self._upsetting.add(queue)
                raise
            else:
                self._is_right(queue)
        channel.close()
        self._look_later()

    def _declare_shared(self, channel: Any) -> Steps:
        names = self._names
        for exchange, kind in ((names.exchange, "direct"), (names.dead, "fanout")):
            yield from self._ask(
                channel, "exchange_declare", exchange=exchange, exchange_type=kind, durable=True
            )
        arguments = queue_arguments(self._config, names.dead)
        yield from self._ask(channel, "queue_declare", queue=names.dead, durable=True, arguments=arguments)
        yield from self._ask(channel, "queue_bind", queue=names.dead, exchange=names.dead, routing_key="")

    def _declare_queue(self, channel: Any, queue: str) -> Steps:
        """Declare and bind it; the channel to go on with."""
        name = self._names.queue(queue)
        try:
            yield from self._ask(channel, "queue_declare", queue=name, passive=True)
        except pika.exceptions.ChannelClosedByBroker as exc:
            if exc.reply_code != 404:
                raise
            # Noted at once, so that the evidence outlasts what fails afterwards; nothing is sent meanwhile.
            self._missing.add(queue)
            self._declared.discard(queue)
            channel = yield from self._channel()
        else:
            if queue in self._declared:
                return channel  # a look costs one question for each queue
        arguments = queue_arguments(self._config, name)
        yield from self._ask(channel, "queue_declare", queue=name, durable=True, arguments=arguments)
        yield from self._ask(
            channel, "queue_bind", queue=name, exchange=self._names.exchange, routing_key=queue
        )
        return channel

    def _is_wrong(self, queue: str, error: BrokerError) -> None:
        if str(self.wrong.get(queue)) != str(error):
            self._looking.reset()
        self._declared.discard(queue)
        self.wrong[queue] = error

    def _is_right(self, queue: str) -> None:
        # Arguments never change: with other ones it was another queue. Noted before it can be published to.
        if isinstance(self.wrong.get(queue), BrokerMismatch) or queue in self._missing:
            self._missing.discard(queue)
            self.gone.add(queue)
        self._declared.add(queue)
        self._upsetting.discard(queue)
        self.wrong.pop(queue, None)

    def _look_later(self) -> None:
        """Look at everything again after a while. A queue that is deleted or changed while nothing is
        published to it shows only so."""
        if self._next_look is not None:
            self._loop.remove_timeout(self._next_look)
        delay = self._looking.next() if self.wrong else self.look_interval
        self._next_look = self._loop.call_later(delay, functools.partial(self._look, self.generation))

    def _look(self, generation: int) -> None:
        self._next_look = None
        if generation == self.generation:
            self._spawn(self._declare(set(self._queues)))


def queue_arguments(config: Config, name: str) -> dict[str, str]:
    """What the queue of this name on the broker, perhaps the dead-letter queue, is declared with."""
    names = Names(config.namespace)
    arguments = {"x-queue-type": config.queue_type}
    return arguments if name == names.dead else arguments | {"x-dead-letter-exchange": names.dead}


def refusal(exc: pika.exceptions.ChannelClosedByBroker) -> BrokerError:
    """The broker's refusal of a declaration, naming what it is about, and both values where it tells
    them."""
    if exc.reply_code != 406:
        kind = BrokerForbidden if exc.reply_code == 403 else BrokerUnavailable
        return kind(f"the broker refuses: {exc.reply_text}")
    found = re.search(
        r"inequivalent arg '(.+?)' for (queue|exchange) '(.+?)' in vhost '.*?': "
        r"received (.+?) but current is (.+)",
        exc.reply_text,
    )
    if found is None:
        return BrokerMismatch(f"the broker refuses: {exc.reply_text}")
    argument, what, name, *values = found.groups()
    expected, actual = (re.sub(r"^the value ('.*') of type '\w+'$", r"\1", value) for value in values)
    return BrokerMismatch(
        f"{what} '{name}' exists with other arguments: {argument} should be {expected} and is {actual}; "
        f"delete it, or change the setting that it follows"
    )
