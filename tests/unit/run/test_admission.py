"""Connections without a key: the oldest one is closed, a silent one ends, and none of this applies after the key."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvloop

from primerl_hpc.run.access import admission as limits
from primerl_hpc.run.access.admission import MAX_BYTES, SPARE, Admission
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S

KEY = b"key"


@dataclass
class Echo:
    """A server that answers each line with the same line, and knows members by the line ``key``."""

    admission: Admission
    tls: ssl.SSLContext
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    @contextlib.contextmanager
    def running(self, new_loop: object) -> Iterator[None]:
        port, started = self.port, threading.Event()
        assert callable(new_loop)
        loop: asyncio.AbstractEventLoop = new_loop()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while line := await reader.readline():
                    if line.strip() == KEY:
                        self.admission.admit(writer.get_extra_info("peername"))
                    writer.write(line)
            writer.close()

        def run() -> None:
            asyncio.set_event_loop(loop)
            gate = loop.run_until_complete(
                self.admission.serve(
                    lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=MAX_BYTES), serve),
                    self.listener,
                    self.tls,
                )
            )
            started.set()
            loop.run_forever()
            gate.close()
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(PATIENCE_S), port
        try:
            yield
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return run_keys(RunDir(tmp_path))


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def server(keys: RunKeys, request: pytest.FixtureRequest) -> Iterator[Echo]:
    echo = Echo(Admission(expected=4), keys.server_context("echo", "127.0.0.1"))
    with echo.running(request.param):
        yield echo


def connect(server: Echo) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)


def is_closed(connection: socket.socket) -> bool:
    """Wait for data or the end of the connection; True if it ended."""
    try:
        return connection.recv(1) == b""
    except OSError:
        return True


class Member:
    def __init__(self, server: Echo, keys: RunKeys) -> None:
        self.channel = keys.client_context().wrap_socket(connect(server), server_hostname="127.0.0.1")

    def says(self, line: bytes) -> bool:
        """Send a line; True if it comes back."""
        self.channel.sendall(line + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += self.channel.recv(100)
        return answer == line + b"\n"


def test_above_the_limit_the_oldest_connection_is_closed_and_a_new_member_is_served(
    server: Echo, keys: RunKeys
) -> None:
    member = Member(server, keys)
    assert member.says(KEY)
    strangers = [connect(server) for _ in range(SPARE + 4)]
    newcomer = Member(server, keys)
    assert newcomer.says(KEY), "the newest is not refused"
    assert is_closed(strangers[0])
    assert member.says(b"still here"), "a connection with the key does not count"
    assert len(server.admission.waiting) < server.admission.limit
    for connection in strangers:
        connection.close()


def test_without_free_descriptors_the_oldest_connection_is_closed(keys: RunKeys) -> None:
    server = Echo(Admission(expected=4), keys.server_context("echo", "127.0.0.1"))
    if (pid := os.fork()) == 0:
        try:
            limit = max(map(int, os.listdir("/proc/self/fd"))) + 48  # this process may have many
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            with server.running(uvloop.new_event_loop):
                signal.pause()
        finally:
            os._exit(1)
    try:
        member = Member(server, keys)
        assert member.says(KEY)
        strangers = [connect(server) for _ in range(100)]
        assert Member(server, keys).says(KEY)
        assert is_closed(strangers[0])
        assert member.says(b"still here")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01"], ids=["idle", "half handshake"])
def test_a_silent_connection_ends_and_a_silent_member_stays(
    server: Echo, keys: RunKeys, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TICK_S", 0.01)
    member = Member(server, keys)
    assert member.says(KEY)
    guest = Member(server, keys)  # it completes the handshake and sends no key
    stranger = connect(server)
    stranger.sendall(data)
    assert is_closed(stranger)
    assert is_closed(guest.channel)
    assert member.says(b"still here")


def test_a_connection_without_the_key_sends_a_bounded_number_of_bytes(server: Echo, keys: RunKeys) -> None:
    guest, member = Member(server, keys), Member(server, keys)
    line = b"x" * (MAX_BYTES // 16) + b"\n"
    with pytest.raises(OSError):
        while True:
            guest.channel.sendall(line)
    assert member.says(KEY)
    for _ in range(32):
        assert member.says(line[:-1])
