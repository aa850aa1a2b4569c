"""One connection in its own thread: making it, keeping it, telling its state."""

from __future__ import annotations

import abc
import functools
import logging
import re
import threading
from collections.abc import Callable, Generator
from typing import Any, ClassVar, Literal

import pika
import pika.exceptions
from pika.adapters.select_connection import IOLoop
from pika.adapters.utils.connection_workflow import AMQPConnectorException

from flowforge import log
from flowforge.broker.parameters import Addresses
from flowforge.config import Config, without_password
from flowforge.db import Backoff
from flowforge.errors import BrokerBlocked, BrokerError, BrokerMisconfigured, BrokerUnavailable

# Whatever it has to say arrives here as an exception and is logged once, by us.
logging.getLogger("pika").setLevel(logging.CRITICAL)

DEAD = "dead"  # the queue name that the dead-letter queue takes
_SHORT = 255  # bytes that a name of AMQP may have

State = Literal["connecting", "connected", "blocked", "misconfigured", "closed"]


class Names:
    """Names of exchanges and queues under a namespace."""

    def __init__(self, namespace: str) -> None:
        self.exchange = f"{namespace}.flowforge" if namespace else "flowforge"
        self.dead = f"{self.exchange}.{DEAD}"

    def queue(self, name: str) -> str:
        """The broker's name of FlowForge's queue `name`."""
        return f"{self.exchange}.{name}"


def unusable(queue: str) -> str | None:
    """Why a queue of this name can't exist on the broker, or None."""
    if queue == DEAD:
        return f"the queue name {DEAD} is taken by the dead-letter queue"
    return None if len(queue.encode()) <= _SHORT - 55 else "the queue name is too long for the broker"


Resume = Callable[..., None]
Steps = Generator[Callable[[Resume], None], Any, Any]


class Client(threading.Thread, abc.ABC):
    """A connection in its own thread. Everything with an underscore runs in that thread, the rest in any."""

    answer_limit: ClassVar[float] = 30.0  # seconds that the broker has for each step, such as a declaration

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(name=f"flowforge-broker-{name}", daemon=True)
        self.state: State = "connecting"
        self.error: BrokerError | None = None
        self.generation = 0
        self._config, self._daemon = config, name
        self._names = Names(config.namespace)
        self._addresses = Addresses(config, f"flowforge {name}")
        self._log = log.of(name)
        self._loop = IOLoop()
        self._connection: pika.SelectConnection | None = None
        self._waiting: dict[Any, Resume] = {}
        self._backoff = Backoff(cap=5.0)
        self._changed = threading.Condition()
        self._was_connected = False
        self._unblocked_state: State = "connecting"  # what it is when not blocked, on this connection
        self._closing = False
        self._ended = False

    # -- from any thread

    def wait_ready(self, seconds: float) -> bool:
        """Wait until connected or known not to be able to, at most `seconds`; whether it is connected."""
        with self._changed:
            self._changed.wait_for(lambda: self.state != "connecting" or self.error is not None, seconds)
        return self.state == "connected"

    def check(self) -> None:
        """Return when connected and not blocked; otherwise raise what keeps it from that: BrokerUnavailable,
        BrokerBlocked or BrokerMisconfigured."""
        if self.state == "connected":
            return
        raise self.error or BrokerUnavailable("not connected to the broker yet")

    def close(self, seconds: float = 5.0) -> None:
        """End the connection and the thread, at the latest after `seconds`, whatever the broker does."""
        if self.is_alive():
            self._post(self._close)
            self.join(seconds)
            # A broker that is blocked or gone does not answer.
            self._post(lambda: self._abort("closed"))
            self.join(seconds)
        elif self.ident is None:  # never started: nobody else closes it
            self._loop.close()

    def run(self) -> None:
        self._post(self._connect)
        while not self._served():
            pass
        with self._changed:
            self._ended = True
        self._set_state("closed", BrokerUnavailable("the connection was closed"))
        self._loop.close()

    def _served(self) -> bool:
        """Serve the connection until it is closed (true) or an unforeseen error shows (false)."""
        try:
            self._loop.start()
        except Exception:  # noqa: BLE001 -- a thread that ended here would leave its daemon waiting for ever
            self._log.exception("unforeseen error; starting anew with a fresh connection")
            if not self._closing:
                self._abort("unforeseen error")
                self._loop.call_later(self._backoff.next(), self._connect)
                return False
        return True

    # -- in the thread

    def _post(self, call: Callable[[], None]) -> None:
        with self._changed:
            if not self._ended:
                self._loop.add_callback_threadsafe(call)

    def _set_state(self, state: State, error: BrokerError | None = None) -> None:
        with self._changed:
            self.state, self.error = state, error
            self._changed.notify_all()

    def _connect(self) -> None:
        if self._connection is not None and not self._connection.is_closed:
            return None
        try:
            url, parameters = self._addresses.next()
        except BrokerMisconfigured as error:
            return self._failed(error)
        self._unblocked_state = "connecting"
        self._connection = pika.SelectConnection(
            parameters,
            on_open_callback=self._opened,
            on_open_error_callback=lambda _, exc: self._failed(self._explained(exc, url)),
            on_close_callback=lambda _, exc: self._lost(exc),
            custom_ioloop=self._loop,
        )
        return None

    def _explained(self, exc: BaseException, url: str) -> BrokerError:
        """The error of a failed connection. A refusal is permanent only until the first connection succeeded:
        a broker that is just being started may not know its users yet."""
        text, place = cause(exc), without_password(url)
        if not self._was_connected and re.search(
            r"Probable(Authentication|AccessDenied)|\b(403|530)\b", text
        ):
            return BrokerMisconfigured(
                f"the broker refuses {place}: wrong login, password or virtual host ({text})"
            )
        return BrokerUnavailable(f"no connection to {place}: {text}")

    def _opened(self, connection: pika.SelectConnection) -> None:
        connection.add_on_connection_blocked_callback(lambda *_: self._blocked())
        connection.add_on_connection_unblocked_callback(lambda *_: self._unblocked())
        self._spawn(self._set_up())

    @abc.abstractmethod
    def _set_up(self) -> Steps:
        """Make the connection ready for use; then state is connected."""

    def _ready(self, *, proven: bool = True) -> None:
        """The connection is ready. If that alone does not prove that it works, the back-off is the caller's
        to reset."""
        if self._was_connected and self.state != "connected":
            self._log.info("connected to the broker again")
        self._was_connected = True
        if proven:
            self._backoff.reset()
        self._unblocked_state = "connected"
        if self.state != "blocked":
            self._set_state("connected")

    def _failed(self, error: BrokerError) -> None:
        """The connection cannot be made or used: try again after a while."""
        if self._closing:
            self._loop.stop()
            return
        if self.error is None or str(self.error) != str(error):
            self._log.warning("no broker; trying again", error=str(error))
        self._set_state("misconfigured" if isinstance(error, BrokerMisconfigured) else "connecting", error)
        self._loop.call_later(self._backoff.next(), self._connect)
        return

    def _lost(self, exc: BaseException) -> None:
        """An open connection has ended."""
        self.generation += 1
        self._connection = None
        self._waiting.clear()
        self._forget()
        if isinstance(self.error, BrokerMisconfigured):
            return self._failed(self.error)
        return self._failed(BrokerUnavailable(f"the connection to the broker was lost: {cause(exc)}"))

    def _forget(self) -> None:
        """Drop what belonged to the lost connection."""

    def _blocked(self) -> None:
        self._set_state("blocked", BrokerBlocked("the broker does not take messages (memory or disk alarm)"))

    def _unblocked(self) -> None:
        if self.state == "blocked":
            self._set_state(self._unblocked_state)

    def _close(self) -> None:
        self._closing = True
        if self._connection is None or self._connection.is_closed:
            self._loop.stop()
        elif self._connection.is_open and not isinstance(self.error, BrokerBlocked):
            self._connection.close()
        else:
            self._abort("closed")

    def _abort(self, reason: str) -> None:
        """End the connection without asking the broker, who may never answer."""
        if self._connection is not None and not self._connection.is_closed:
            self._connection._terminate_stream(pika.exceptions.AMQPConnectionError(reason))

    # -- steps: generators that yield one operation after the other and are resumed with its answer, or its
    # error

    def _spawn(self, steps: Steps) -> None:
        if self._connection is not None and self._connection.is_open:
            self._step(steps, self.generation)

    def _step(
        self, steps: Steps, generation: int, value: Any = None, error: BaseException | None = None
    ) -> None:
        if generation != self.generation:
            return steps.close()
        try:
            operation = steps.throw(error) if error is not None else steps.send(value)
        except StopIteration:
            return None
        except BrokerMisconfigured as exc:
            self._set_state("misconfigured", exc)
            return self._abort(str(exc))
        except pika.exceptions.AMQPError as exc:
            return self._abort(cause(exc))
        return operation(self._in_time(functools.partial(self._step, steps, generation)))

    def _in_time(self, resume: Resume) -> Resume:
        """`resume`, to be called within `answer_limit`: else the connection is ended. A broker may send its
        heartbeats and yet never answer, while the next one would."""
        generation = self.generation
        timer: Any = None

        def wait() -> None:
            nonlocal timer
            timer = self._loop.call_later(self.answer_limit, over)

        def over() -> None:
            if generation != self.generation:
                return
            if self.state == "blocked":
                wait()  # it answers nothing until its alarm ends
            else:
                self._abort(f"no answer within {self.answer_limit:g} s")

        def answered(value: Any = None, error: BaseException | None = None) -> None:
            self._loop.remove_timeout(timer)
            resume(value, error)

        wait()
        return answered

    def _channel(self) -> Steps:
        connection = self._connection
        assert connection is not None  # noqa: S101 -- steps end with their connection

        def open_channel(resume: Resume) -> None:
            connection.channel(on_open_callback=resume)

        channel = yield open_channel
        channel.add_on_close_callback(self._channel_closed)
        return channel

    def _ask(self, channel: Any, method: str, **arguments: Any) -> Steps:
        def ask(resume: Resume) -> None:
            self._waiting[channel] = resume
            getattr(channel, method)(**arguments, callback=functools.partial(self._answered, channel))

        return (yield ask)

    def _answered(self, channel: Any, frame: Any = None) -> None:
        if (resume := self._waiting.pop(channel, None)) is not None:
            resume(frame)

    def _channel_closed(self, channel: Any, reason: BaseException) -> None:
        if (resume := self._waiting.pop(channel, None)) is not None:
            resume(error=reason)


NOT_CONNECTED = pika.exceptions.AMQPError, AMQPConnectorException, OSError, ValueError
"""What a BlockingConnection raises instead of being made; ValueError for what is no name of a host."""


def cause(exc: BaseException) -> str:
    """What pika's exception says, in one line; it nests the cause in wrappers whose own text is empty."""
    inner = [getattr(exc, "exception", None), *getattr(exc, "exceptions", ()), *exc.args]
    wrapped = [each for each in inner if isinstance(each, BaseException)]
    if wrapped:
        return cause(wrapped[-1])
    return f"{type(exc).__name__}: {exc}".strip(": ").replace("\n", " ")
