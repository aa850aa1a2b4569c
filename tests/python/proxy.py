"""A TCP proxy in front of a server that can cut, delay, stop forwarding without closing, or behave as a
pooler of PostgreSQL does."""

import re
import select
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass


class Proxy:
    """Forwards 127.0.0.1:`port` to `target_port`; a context manager.

    `stalled` stops all forwarding while both sides stay connected, as on a path that went dead without a FIN.
    `refusing` closes every new connection. `delay` is how many seconds each piece of data is held back.
    `stall` is the same as `stalled` for some connections only.
    `pooled` does with notifications as a pooler in transaction mode: only those that arrive while the
    client's own query is under way reach it. The process id it tells the client is not the server's either.
    """

    def __init__(self, target_port: int, *, pooled: bool = False) -> None:
        self.stalled = self.refusing = False
        self.delay = 0.0
        self.target_port, self._pooled = target_port, pooled
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._links: list[_Link] = []
        self._stalled: tuple[str, ...] = ()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]

    def stall(self, *applications: str) -> None:
        """Forward nothing more on connections of these application_names, those to come included; for these
        the next call, such as one without names, says whether that still holds."""
        self._stalled = applications
        for link in self._links.copy():
            link.stalled |= link.application in applications

    def cut(self) -> None:
        """Close every connection there is."""
        for link in self._links.copy():
            link.cut = True

    def __enter__(self) -> "Proxy":
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._threads[0].join()
        for thread in self._threads[1:]:
            thread.join()
        for each in [self._listener, *self._sockets]:
            each.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listener], [], [], 0.05)[0]:
                continue
            client, _ = self._listener.accept()
            if self.refusing:
                client.close()
                continue
            if self.stalled:
                self._sockets.append(client)
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target_port))
            except OSError:
                client.close()
                continue
            thread = threading.Thread(target=self._carry, args=(client, server))
            self._threads.append(thread)
            thread.start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        link = _Link()
        self._links.append(link)
        try:
            self._forward(link, client, server)
        finally:
            for each in (client, server):
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
            self._links.remove(link)
            if not self._ended.is_set():
                self._threads.remove(threading.current_thread())

    def _forward(self, link: "_Link", client: socket.socket, server: socket.socket) -> None:
        answers = _Answers()
        while not self._ended.is_set() and not link.cut:
            ready, _, _ = select.select([client, server], [], [], 0.05)
            if self.stalled or link.stalled:
                self._ended.wait(0.05)
                continue
            if ready and self.delay:
                self._ended.wait(self.delay)
            for source in ready:
                with suppress(OSError):
                    if data := source.recv(65536):
                        if source is client:
                            answers.busy = True
                            if named := re.search(rb"\0application_name\0(.*?)\0", data):
                                link.application = named[1].decode()
                                link.stalled |= link.application in self._stalled
                            if link.stalled:
                                break
                            server.sendall(data)
                        else:
                            client.sendall(answers.pass_on(data) if self._pooled else data)
                        continue
                return


@dataclass(eq=False)
class _Link:
    """One connection: whose it is, and whether nothing is forwarded on it any more, or it is to be closed."""

    application: str = ""
    stalled: bool = False
    cut: bool = False


class _Answers:
    """The server's messages on one connection, as a pooler passes them on."""

    def __init__(self) -> None:
        self.busy = False
        self._data = b""

    def pass_on(self, data: bytes) -> bytes:
        self._data += data
        kept = b""
        while len(self._data) >= 5 and len(self._data) > (length := int.from_bytes(self._data[1:5])):
            message, self._data = self._data[: length + 1], self._data[length + 1 :]
            if message[:1] == b"K":
                message = message[:5] + (1).to_bytes(4) + message[9:]
            if message[:1] != b"A" or self.busy:
                kept += message
            if message[:1] == b"Z":
                self.busy = False
        return kept
