"""The server below the page: uvicorn, with few connections at once, none of which is waited for for ever."""

from __future__ import annotations

import asyncio
import time
from socket import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from flowforge import log
from flowforge.errors import first_line

MOST_CONNECTIONS = 64
"""Connections at once; further ones are closed."""

REQUEST_LIMIT = 10.0
"""Seconds within which a connection makes a complete request, whether it sends little or nothing."""

ANSWER_LIMIT = 60.0
"""Seconds from a request to the end of its answer, however slowly it is read."""

QUIET = 60.0
"""Seconds between two lines of the log about connections that could not be accepted."""


class _Connection(H11Protocol):
    """Ends what waits for longer than it may."""

    _timer: asyncio.TimerHandle | None = None
    _awaited: object = None  # the request whose answer is limited; None: the next request is

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        else:
            self._limit(REQUEST_LIMIT)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Called with whatever arrives, and after each answer."""
        super().handle_events()
        cycle: RequestResponseCycle | None = self.cycle
        under_way = None if cycle is None or cycle.response_complete else cycle
        if under_way is not self._awaited:
            self._awaited = under_way
            if under_way is not None:
                self._limit(ANSWER_LIMIT)
            elif self.transport.get_write_buffer_size() == 0:
                # Else the answer's limit goes on: it is whole, and not read yet.
                self._limit(REQUEST_LIMIT)

    def _limit(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.transport.abort)


class Server(uvicorn.Server):
    """Serves an application, with no signal handlers of its own in any thread but the main one."""

    def __init__(self, app: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_Connection,
                ws="none",
                loop="asyncio",
                lifespan="off",
                # asyncio tries to accept as many at once, and for want of descriptors tells of each of them.
                backlog=MOST_CONNECTIONS,
                log_level="error",
                access_log=False,
                server_header=False,
            )
        )
        self._told = float("-inf")

    async def startup(self, sockets: list[socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._tell)
        await super().startup(sockets)

    def _tell(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told > QUIET:
            self._told = time.monotonic()
            log.of("web").warning("a connection could not be accepted", error=first_line(error))
