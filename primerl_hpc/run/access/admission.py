"""Bound what clients cost a server of the run until their first request with the key of the attempt.

    admission = Admission(expected=560)
    gate = await admission.serve(factory, listener, tls)       # protocols of ``factory``, behind TLS
    admission.admit(address)                                   # a request from this address had the key

Any user of the node or network can connect. A connection costs a socket until it sends its first byte, then the state
of a TLS handshake, then a protocol of the server. Each step has a time limit, all such connections together a limit of
their number. Above it the oldest one is closed, not the newest: members of the run send the key within milliseconds, so
they are never the oldest, whereas refusing new connections would let a stranger lock them out. No limit applies to a
connection after its first request with the key.

Works with asyncio's and uvloop's event loops. Log lines about strangers are at most one a minute.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

SPARE = 256
"""Connections without a key in addition to those that members may open at once."""
TLS_TICKS, KEY_TICKS = 10, 30
"""Ticks from the accept to the end of the TLS handshake, and to the first request with the key. A tick is a second in
which the event loop ran: while it is blocked, members cannot answer."""
TICK_S = 1.0
LIBRARY_TIMEOUT_S = 600.0
"""The event loop's own limit of a handshake, which counts time in which it is blocked."""
MAX_BYTES = 1 << 20
"""Bytes of a connection without a key. A server reads a request's headers before that many arrive."""
TLS_HANDSHAKE = b"\x16"
"""First byte of a client's first TLS message."""
MOST_FREED = 64
"""Handshakes of strangers whose memory is returned to the kernel together. Each takes 50 KiB and a buffer of uvloop of
256 KiB. malloc keeps both, and each flood touches other pages of them: a router grew by 40 MiB with every flood."""
ACCEPTED_AT_ONCE = 16
"""Connections per iteration of the event loop, so that handshakes make progress between them."""
BACKLOG = 4096
REPORT_TICKS = 60
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
Address = tuple[str, int]
Factory = Callable[[], asyncio.Protocol]

logger = logging.getLogger(__name__)


class Admission:
    """All connections of one server that have not sent the key yet."""

    def __init__(self, *, expected: int) -> None:
        """``expected``: connections that members may open at once."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = SPARE + expected
        if files != resource.RLIM_INFINITY:
            self.limit = min(self.limit, max(SPARE, files // 4))
        self.tick = 0
        self.waiting: dict[Address, Visitor] = {}
        """In the order of their accept."""
        self._num_closed, self._num_freed, self._reported_at = 0, 0, -REPORT_TICKS

    async def serve(self, factory: Factory, listener: socket.socket, tls: ssl.SSLContext) -> Gate:
        """Accept connections of ``listener``, a bound socket, until the gate is closed."""
        listener.setblocking(False)
        listener.listen(BACKLOG)
        tls.minimum_version = ssl.TLSVersion.TLSv1_3  # uvicorn's context accepts older ones
        return Gate(self, factory, listener, tls)

    def guard(self, loop: Any) -> None:
        """Serve everything that is served in ``loop`` this way, for a library that calls ``loop.create_server``."""

        async def create_server(factory: Any, *, sock: socket.socket, ssl: ssl.SSLContext, **_: Any) -> Gate:
            return await self.serve(factory, sock, ssl)

        loop.create_server = create_server

    def admit(self, address: Any) -> None:
        """Remove the limits of the connection from ``address``, whose request had the key."""
        if (visitor := self.waiting.pop(tuple(address[:2]), None)) is not None:
            visitor.become_member()

    def enter(self, visitor: Visitor) -> None:
        self.waiting[visitor.address] = visitor
        if len(self.waiting) > self.limit:
            self.close_oldest()

    def leave(self, visitor: Visitor) -> None:
        if self.waiting.get(visitor.address) is visitor:
            del self.waiting[visitor.address]
            self._num_freed += visitor.task is not None

    def close_oldest(self) -> bool:
        """Close the oldest connection without a key; False if there is none."""
        oldest = next(iter(self.waiting.values()), None)
        if oldest is None:
            return False
        self._close(oldest)
        return True

    def close_all(self) -> None:
        for visitor in [*self.waiting.values()]:
            visitor.close()

    def count_tick(self) -> None:
        """Close connections that exceed a time limit, report how many were closed, and return their memory."""
        self.tick += 1
        if self._num_freed >= MOST_FREED:
            self._num_freed = 0
            ctypes.CDLL(None).malloc_trim(0)
        for visitor in [*self.waiting.values()]:
            if self.tick - visitor.tick > (TLS_TICKS if visitor.transport is None else KEY_TICKS):
                self._close(visitor)
        if self._num_closed and self.tick - self._reported_at >= REPORT_TICKS:
            logger.warning("Closed %d connections that did not send the key of the run", self._num_closed)
            self._num_closed, self._reported_at = 0, self.tick

    def _close(self, visitor: Visitor) -> None:
        self._num_closed += 1
        visitor.close()


class Gate:
    """The accept loop of one listener. Has the interface of ``asyncio.Server`` that servers use."""

    def __init__(
        self, admission: Admission, factory: Factory, listener: socket.socket, tls: ssl.SSLContext
    ) -> None:
        self.admission, self.factory, self.listener, self.tls = admission, factory, listener, tls
        self.loop = asyncio.get_running_loop()
        self._ticks = asyncio.ensure_future(self._count_ticks())
        self._resume: asyncio.TimerHandle | None = None
        self.loop.add_reader(listener, self._accept)

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        return (self.listener,)

    def close(self) -> None:
        """Stop to accept, and close connections without a key. Those of members are the server's."""
        self._ticks.cancel()
        if self._resume is not None:
            self._resume.cancel()
        if self.listener.fileno() >= 0:
            self.loop.remove_reader(self.listener)
            self.listener.close()
        self.admission.close_all()

    async def wait_closed(self) -> None:
        pass

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not self.admission.close_oldest():
                    self._pause()
                return
            connection.setblocking(False)
            self.admission.enter(Visitor(self, connection, address[:2]))

    def _pause(self) -> None:
        """Accept nothing for a second: members use all file descriptors."""
        self.loop.remove_reader(self.listener)
        self._resume = self.loop.call_later(TICK_S, self.loop.add_reader, self.listener, self._accept)

    async def _count_ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.admission.count_tick()


class Visitor(asyncio.Protocol):
    """A connection without a key: a socket, then a handshake, then a protocol of the server."""

    def __init__(self, gate: Gate, connection: socket.socket, address: Address) -> None:
        self.gate, self.connection, self.address = gate, connection, address
        self.tick = gate.admission.tick
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        self._inner: asyncio.Protocol | None = None
        self._num_bytes = 0
        gate.loop.add_reader(connection, self._begin_handshake)

    def close(self) -> None:
        self.gate.admission.leave(self)
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()
        else:
            self.gate.loop.remove_reader(self.connection)
            self.connection.close()

    def become_member(self) -> None:
        if self.transport is not None and self._inner is not None:
            self.transport.set_protocol(self._inner)

    def _begin_handshake(self) -> None:
        try:
            is_tls = self.connection.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE
            if not is_tls:
                self.connection.recv(1 << 16)  # unread bytes would end the connection with a reset
        except OSError:  # it was reset
            is_tls = False
        if not is_tls:
            return self.close()  # before the event loop allocates memory for TLS
        self.gate.loop.remove_reader(self.connection)
        self.task = asyncio.ensure_future(self._shake_hands())

    async def _shake_hands(self) -> None:
        try:
            await self.gate.loop.connect_accepted_socket(
                lambda: self, self.connection, ssl=self.gate.tls, ssl_handshake_timeout=LIBRARY_TIMEOUT_S
            )
        except (OSError, EOFError, asyncio.CancelledError):
            self.gate.admission.leave(self)
            self.connection.close()

    # -- until the key arrives, everything passes through to the server's protocol -----------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self._inner = cast(asyncio.Transport, transport), self.gate.factory()
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes > MAX_BYTES:
            self.close()
        elif self._inner is not None:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received() if self._inner is not None else None

    def connection_lost(self, error: Exception | None) -> None:
        self.gate.admission.leave(self)
        if self._inner is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()
