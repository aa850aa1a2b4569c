"""TCP proxies between the worker under test and its servers: they cut connections, and lose answers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from flowforge import threads

_ENCRYPTION_REQUESTS = {80877103, 80877104}  # TLS, GSSAPI: each asks for a yes or no of one byte


class Proxy:
    """Forwards 127.0.0.1:`port` to a server: `target` is a host and port, or the path of a Unix socket.

    While it is `down` connections are cut, and new ones closed at once."""

    def __init__(self, target: tuple[str, int] | str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.is_down = False
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.RLock()
        threads.start(threading.Thread(target=self._accept, name="conformance-accept", daemon=True))

    def down(self) -> None:
        """Cut every connection, and take no new one until `up`."""
        self.is_down = True
        self.cut()

    def up(self) -> None:
        """Take connections again."""
        self.is_down = False

    def cut(self) -> None:
        """Cut every connection there is."""
        with self._lock:
            for pair in self._pairs:
                _shut(*pair)
            self._pairs.clear()

    def close(self) -> None:
        """Cut everything for good."""
        self.down()
        _shut(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(
                    target=self._serve, args=(client,), name="conformance-carry", daemon=True
                )
                try:
                    threads.start(thread)
                except threads.NoThread:
                    client.close()  # the worker comes again

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            if self.is_down:
                return
            if isinstance(self._target, str):
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._target)
            else:
                server = socket.create_connection(self._target)
            with server:
                self._join(client, server)

    def _join(self, client: socket.socket, server: socket.socket) -> None:
        pair = (client, server)
        with self._lock:
            if self.is_down:
                return
            self._pairs.add(pair)
        back = threading.Thread(target=self._carry_back, args=(pair,), name="conformance-carry", daemon=True)
        try:
            threads.start(back)
            with suppress(OSError):
                self._carry_on(client, server)
            _shut(client, server)
            back.join()
        finally:
            with self._lock:
                self._pairs.discard(pair)

    def _carry_on(self, client: socket.socket, server: socket.socket) -> None:
        while data := client.recv(65536):
            server.sendall(data)

    def _carry_back(self, pair: tuple[socket.socket, socket.socket]) -> None:
        client, server = pair
        with suppress(OSError):
            while data := server.recv(65536):
                if not self._deliver(pair, data):
                    break
        _shut(client, server)

    def _deliver(self, pair: tuple[socket.socket, socket.socket], data: bytes) -> bool:
        pair[0].sendall(data)
        return True


class DatabaseProxy(Proxy):
    """Before PostgreSQL, without TLS.

    While `loses` is set it is asked before each answer that ends a statement reaches the worker: when it says
    so, the answer is lost, with every connection. By then the statement has taken effect. It is asked in one
    thread at a time, and all answers wait meanwhile."""

    loses: Callable[[], bool] | None = None

    def __init__(self, target: tuple[str, int] | str) -> None:
        self._begun: dict[socket.socket, bytes] = {}  # the beginning of a message, by the client's socket
        super().__init__(target)

    def _carry_on(self, client: socket.socket, server: socket.socket) -> None:
        first = client.recv(8, socket.MSG_WAITALL)
        while len(first) == 8 and struct.unpack("!II", first)[1] in _ENCRYPTION_REQUESTS:
            client.sendall(b"N")
            first = client.recv(8, socket.MSG_WAITALL)
        server.sendall(first)
        super()._carry_on(client, server)

    def _deliver(self, pair: tuple[socket.socket, socket.socket], data: bytes) -> bool:
        client = pair[0]
        data = self._begun.pop(client, b"") + data
        end, ends_statement = 0, False
        while len(data) >= end + 5 and len(data) > end + (length := int.from_bytes(data[end + 1 : end + 5])):
            ends_statement = ends_statement or data[end : end + 1] == b"Z"
            end += 1 + length
        if end < len(data):
            self._begun[client] = data[end:]
        with self._lock:
            if pair not in self._pairs:
                return False
            if ends_statement and self.loses is not None and self.loses():
                self.loses = None
                self.cut()
                return False
        client.sendall(data[:end])
        return True


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
