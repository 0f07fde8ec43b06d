"""Open thousands of connections to a server as another user, without a key, and hold them.

    with flood(port, "half headers", 3000):
        ...                                   # they are open, or the server has closed them

A connection is idle, sends the first message of a TLS handshake, or completes it and sends a part of a request's
headers, or sends ZMQ's greeting.
"""

from __future__ import annotations

import os
import resource
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.support.helpers import PATIENCE_S
from tests.support.stranger import NOBODY

ZMQ_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47)


def careless() -> ssl.SSLContext:
    """Return the TLS of an attacker, who verifies no certificate."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


CARELESS = careless()


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        CARELESS.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


def _half_header(connection: socket.socket) -> socket.socket:
    channel = CARELESS.wrap_socket(connection)
    channel.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nX-")
    return channel


def _sender(data: bytes) -> Callable[[socket.socket], socket.socket]:
    def send(connection: socket.socket) -> socket.socket:
        connection.sendall(data)
        return connection

    return send


KINDS: dict[str, Callable[[socket.socket], socket.socket]] = {
    "idle": lambda connection: connection,
    "half handshakes": _sender(client_hello()),
    "half headers": _half_header,
    "ZMQ greetings": _sender(ZMQ_GREETING),
}


@contextmanager
def flood(port: int, kind: str, count: int) -> Iterator[int]:
    """Hold ``count`` connections to a port of loopback; yield how many the stranger could open."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    ready, hold = os.pipe(), os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.close(hold[1])
            opened = _open(port, KINDS[kind], count)
            os.write(ready[1], f"{len(opened)}\n".encode())
            os.read(hold[0], 1)  # until the test closes its end
        finally:
            os._exit(0)
    os.close(ready[1])
    os.close(hold[0])
    try:
        with os.fdopen(ready[0]) as told:
            yield int(told.readline() or "0")
    finally:
        os.close(hold[1])
        os.waitpid(pid, 0)


def _open(port: int, begin: Callable[[socket.socket], socket.socket], count: int) -> list[socket.socket]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    opened = []
    for _ in range(count):
        with suppress(OSError):  # the server closed it
            opened.append(begin(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)))
    return opened
