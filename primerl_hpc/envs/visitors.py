"""Bound what connections without keys cost a ZMQ socket: their number and the bytes that each may send.

    limit_visitors(router, limit=300)        # a thread, until the socket is closed

libzmq itself ends a handshake that takes longer than ``HANDSHAKE_IVL``, but accepts any number of connections and
messages of any size before that. The kernel's statistics tell members from strangers: a CURVE server sends more than
its greeting of 64 bytes only to a client that knows its public key.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

HANDSHAKE_MS = 10_000
GREETING_BYTES = 80
"""More than a server sends to a client that does not know its public key, less than its second message."""
MAX_BYTES = 16 << 10
"""More than a client sends until its handshake is complete."""
LOOK_EVERY_MS = 50
_BYTES = struct.Struct("@QQ")
_BYTES_AT = 120
"""Offset of ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` in the kernel's ``struct tcp_info``."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED


def limit_visitors(server: zmq.Socket[Any], limit: int) -> None:
    """Start the thread for a bound socket of TCP."""
    port = int(server.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    name = f"inproc://visitors-{port}"
    server.monitor(name, _EVENTS)
    monitor = zmq.Context.shadow(server.context.underlying).socket(zmq.PAIR)
    monitor.connect(name)
    visitors = Visitors(monitor, port, limit)
    threading.Thread(target=visitors.watch, name="visitors", daemon=True).start()


class Visitors:
    def __init__(self, monitor: zmq.Socket[bytes], port: int, limit: int) -> None:
        self.monitor, self.port, self.limit = monitor, port, limit
        self._waiting: dict[int, None] = {}  # file descriptors, in the order of their accept

    def watch(self) -> None:
        looked_at = 0.0
        with self.monitor:
            while True:
                # without visitors, nothing is to be done until the next one
                if self.monitor.poll(LOOK_EVERY_MS if self._waiting else None):
                    event = recv_monitor_message(self.monitor)
                    if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                        return
                    self._enter(int(event["value"]))
                if time.monotonic() - looked_at > LOOK_EVERY_MS / 1000:
                    self._waiting = {number: None for number in self._waiting if self._may_stay(number)}
                    looked_at = time.monotonic()

    def _enter(self, number: int) -> None:
        self._waiting.pop(number, None)  # the number of a connection that was closed
        self._waiting[number] = None
        if len(self._waiting) > self.limit:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._may_stay(oldest, is_surplus=True)

    def _may_stay(self, number: int, *, is_surplus: bool = False) -> bool:
        """True if the descriptor is that of a visitor, whose connection stays open.

        A visitor that sent too much or ``is_surplus`` is disconnected; libzmq notices and closes the descriptor.
        """
        try:
            duplicate = os.dup(number)
        except OSError:
            return False
        try:
            connection = socket.socket(fileno=duplicate)
        except OSError:  # the number of a file or pipe
            os.close(duplicate)
            return False
        with connection, contextlib.suppress(OSError):
            # libzmq closed the connection, and the number is that of another file
            if connection.getsockname()[1:2] != (self.port,):
                return False
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_AT + _BYTES.size)
            num_sent, num_received = _BYTES.unpack_from(info, _BYTES_AT)
            if num_sent > GREETING_BYTES:
                return False
            if not is_surplus and num_received <= MAX_BYTES:
                return True
            connection.shutdown(socket.SHUT_RDWR)
        return False
