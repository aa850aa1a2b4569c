"""A TCP proxy in front of PostgreSQL that can stop forwarding without closing, or swallow notifications."""

import select
import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards 127.0.0.1:`port` to a server; a context manager.

    `stalled` stops all forwarding while both sides stay connected, as on a path that went dead without a FIN.
    `deaf` drops the server's notifications, as a pooler in transaction mode does.
    """

    def __init__(self, target_port: int, *, deaf: bool = False) -> None:
        self.stalled = False
        self._target_port, self._deaf = target_port, deaf
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> "Proxy":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for each in [self._listener, *self._sockets]:
            each.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            if self.stalled:
                self._sockets.append(client)
                continue
            server = socket.create_connection(("127.0.0.1", self._target_port))
            self._sockets += [client, server]
            thread = threading.Thread(target=self._forward, args=(client, server))
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        buffer = b""
        while not self._ended.is_set():
            ready, _, _ = select.select([client, server], [], [], 0.05)
            if self.stalled:
                self._ended.wait(0.05)
                continue
            for source in ready:
                with suppress(OSError):
                    if data := source.recv(65536):
                        if source is client:
                            server.sendall(data)
                            continue
                        buffer += data
                        kept, buffer = self._messages(buffer)
                        client.sendall(kept)
                        continue
                for each in (client, server):
                    with suppress(OSError):
                        each.shutdown(socket.SHUT_RDWR)
                return

    def _messages(self, data: bytes) -> tuple[bytes, bytes]:
        """What to pass on of the server's messages, and the incomplete rest."""
        if not self._deaf:
            return data, b""
        kept = b""
        while len(data) >= 5 and len(data) > (length := int.from_bytes(data[1:5])):
            if data[:1] != b"A":
                kept += data[: length + 1]
            data = data[length + 1 :]
        return kept, data
