"""A TCP proxy in front of RabbitMQ that reads what passes: a witness of what the broker confirmed, and a
broker that closes a channel or a connection with any reply code."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from pika import frame, spec


@dataclass
class Confirm:
    """The broker took a message and did not return it; `at` is the time of this machine's clock."""

    message_id: str
    at: float


@dataclass
class _Publishing:
    """One channel: what was published on it in confirm mode and not decided, by delivery tag."""

    tag: int = 0
    waiting: dict[int, str] = field(default_factory=dict)
    returned: set[int] = field(default_factory=set)


class AmqpProxy:
    """Forwards 127.0.0.1:`port` to the broker of `url`; a context manager. Its own `url` leads through it.

    `confirms` is what the broker confirmed so far, noted before the publisher could know. A message whose
    type, or a declaration of a queue whose name, is in `closures` does not reach the broker: its channel, or
    from code 500 on or 320 its connection, is closed with that reply code and text. After a message whose
    routing key is in `silent` nothing more is confirmed on its channel, as by a quorum queue without a
    leader. A declaration of a queue whose name is in `unanswered` is never answered."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.scheme == "amqp"
        self._target = (parts.hostname or "127.0.0.1", parts.port or 5672)
        self._listener = socket.create_server(("127.0.0.1", 0))
        login = parts.netloc.rpartition("@")[0]
        place = f"{login}@127.0.0.1:{self._listener.getsockname()[1]}"
        self.url = urlunsplit(parts._replace(netloc=place))
        self.confirms: list[Confirm] = []
        self.closures: dict[str, tuple[int, str]] = {}
        self.silent: set[str] = set()
        self.unanswered: set[str] = set()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> "AmqpProxy":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        # Whoever waits in accept, recv or sendall wakes from that.
        _shut(self._listener)
        self._threads[0].join()
        _shut(*self._sockets)
        for thread in self._threads:
            thread.join()
        for each in [self._listener, *self._sockets]:
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                link = _Link(self, client, server)
                for forward in (link.from_client, link.from_server):
                    thread = threading.Thread(target=link.run, args=(forward,))
                    self._threads.append(thread)
                    thread.start()


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _frames(source: socket.socket) -> Any:
    """Each frame with its bytes, until the end of the stream."""
    data = b""
    while received := source.recv(65536):
        data += received
        while (found := frame.decode_frame(data))[1] is not None:
            used, value = found
            yield value, data[:used]
            data = data[used:]


class _Link:
    """One connection through the proxy; a thread for each direction."""

    def __init__(self, proxy: AmqpProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._channels: dict[int, _Publishing] = {}
        # Channels that the proxy closed, until the client and until the broker has agreed.
        self._closed_to_client: set[int] = set()
        self._closed_to_server: set[int] = set()
        self._silenced: set[int] = set()
        self._lock = threading.Lock()

    def run(self, forward: Any) -> None:
        try:
            with suppress(OSError):
                forward()
        finally:
            _shut(self._client, self._server)

    def from_client(self) -> None:
        held: dict[int, bytes] = {}  # publish frames whose message is not known yet
        for value, data in _frames(self._client):
            channel = getattr(value, "channel_number", 0)
            method = getattr(value, "method", None)
            if channel in self._closed_to_client:
                if isinstance(method, spec.Channel.CloseOk):
                    self._closed_to_client.discard(channel)
            elif (queue := getattr(method, "queue", None)) in self._proxy.closures:
                self._close(channel, *self._proxy.closures[queue])
            elif queue in self._proxy.unanswered:
                continue
            elif isinstance(method, spec.Basic.Publish):
                held[channel] = data
                if method.routing_key in self._proxy.silent:
                    self._silenced.add(channel)
            elif isinstance(value, frame.Header) and channel in held:
                if (closure := self._proxy.closures.get(str(value.properties.type))) is not None:
                    del held[channel]
                    self._close(channel, *closure)
                    continue
                with self._lock:
                    state = self._channels.setdefault(channel, _Publishing())
                    state.tag += 1
                    state.waiting[state.tag] = str(value.properties.message_id)
                self._server.sendall(held.pop(channel) + data)
            else:
                if isinstance(method, spec.Confirm.Select):
                    with self._lock:
                        self._channels[channel] = _Publishing()
                self._server.sendall(data)

    def _close(self, channel: int, code: int, text: str) -> None:
        self._closed_to_client.add(channel)
        if code >= 500 or code == 320:
            self._client.sendall(frame.Method(0, spec.Connection.Close(code, text, 60, 40)).marshal())
            return
        self._closed_to_server.add(channel)
        self._server.sendall(frame.Method(channel, spec.Channel.Close(200, "", 0, 0)).marshal())
        self._client.sendall(frame.Method(channel, spec.Channel.Close(code, text, 60, 40)).marshal())

    def from_server(self) -> None:
        returning: set[int] = set()
        for value, data in _frames(self._server):
            channel = getattr(value, "channel_number", 0)
            method = getattr(value, "method", None)
            if channel in self._closed_to_server:
                if isinstance(method, spec.Channel.CloseOk):
                    self._closed_to_server.discard(channel)
                continue
            if isinstance(method, spec.Basic.Ack | spec.Basic.Nack):
                if channel in self._silenced:
                    continue
                self._decided(channel, method)
            elif isinstance(method, spec.Basic.Return):
                returning.add(channel)
            elif isinstance(value, frame.Header) and channel in returning:
                returning.discard(channel)
                self._returned(channel, str(value.properties.message_id))
            self._client.sendall(data)

    def _decided(self, channel: int, method: Any) -> None:
        with self._lock:
            state = self._channels.get(channel, _Publishing())
            tags = [method.delivery_tag]
            if method.multiple:
                tags = [tag for tag in state.waiting if tag <= method.delivery_tag]
            for tag in tags:
                message_id = state.waiting.pop(tag, None)
                if message_id is None or tag in state.returned or isinstance(method, spec.Basic.Nack):
                    continue
                self._proxy.confirms.append(Confirm(message_id, time.time()))

    def _returned(self, channel: int, message_id: str) -> None:
        with self._lock:
            state = self._channels.get(channel, _Publishing())
            state.returned |= {tag for tag, waiting in state.waiting.items() if waiting == message_id}
