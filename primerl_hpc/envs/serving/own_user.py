"""Servers of verifiers on loopback accept connections of this user only.

    check_users()       # once in an environment server, before verifiers serves

Any user of the node can connect to a port of loopback. Tool servers of verifiers 0.4.0 have no secret, and the one of
the endpoint is on the command line of agents. The kernel knows the user of the socket at the other end (sock_diag, as
``ss`` shows it); a connection of another user is closed before a byte of it is read. So is one whose other end no
process has open any longer: the kernel reports user 0 for it, which is the user of a run in a rootless container.
Where sock_diag is missing or forbidden (old kernels, containers), /proc/net/tcp is read, which takes longer the more
sockets the node has. Without both, the environment server ends before it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import runpy
import socket
import struct
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError

_SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLM_F_REQUEST, _NETLINK_SOCK_DIAG = 20, 2, 1, 4
_FAMILY = socket.AF_INET
_HEADER = struct.Struct("=IHHII")
_ALL_STATES = 0xFFFFFFFF
_OWNER_AT = 64
"""Offset of ``idiag_uid`` and ``idiag_inode`` in the kernel's ``struct inet_diag_msg``."""
_TABLES = {Path("/proc/net/tcp"): "", Path("/proc/net/tcp6"): "0000000000000000FFFF0000"}
"""Tables of sockets, and what precedes an address of IPv4 there."""
Address = tuple[str, int]


def check_users() -> None:
    """Patch verifiers in this process: its endpoint of model calls and its tool servers check who connects."""
    accept_own_user()
    _serve_endpoint_with_check()
    _start_tools_with_check()


def accept_own_user() -> None:
    """Patch sockets of this process: ``accept`` closes connections over loopback of other users.

    On a socket that does not block, it then raises ConnectionAbortedError, after which event loops call it again: they
    have other work than the connections of a stranger, who may open them without pause. Raises ConfigError if the
    kernel does not show the users of sockets.
    """
    source()
    accept = socket.socket.accept

    def accept_checked(self: socket.socket) -> tuple[socket.socket, Any]:
        while True:
            connection, address = accept(self)
            if self.family != socket.AF_INET or not address[0].startswith("127.") or is_own_peer(connection):
                return connection, address
            connection.close()
            if self.gettimeout() == 0:
                raise ConnectionAbortedError(errno.ECONNABORTED, "closed a connection of another user")

    socket.socket.accept = accept_checked


def is_own_peer(connection: socket.socket) -> bool:
    """True if the other end of a connection over loopback is a socket of this user.

    Raises OSError if the kernel cannot tell.
    """
    try:
        peer = connection.getpeername()
    except OSError:  # it was reset
        return False
    return peer_uid(connection.getsockname(), peer) == os.geteuid()


def peer_uid(own: Address, peer: Address) -> int | None:
    """Return the user of the socket at address ``peer`` that is connected to ``own``; None if it is closed.

    Raises OSError if the kernel cannot tell.
    """
    return source()(own, peer)


@cache
def source() -> Callable[[Address, Address], int | None]:
    """Return `ask_kernel` or `read_tables`, whichever finds the user of this process's own socket.

    sock_diag without its part for TCP reports every socket as closed. Raises ConfigError if neither finds the user.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = listener.getsockname()
        with socket.create_connection(own) as client:
            for find in (ask_kernel, read_tables):
                with contextlib.suppress(OSError):
                    if find(own, client.getsockname()) == os.geteuid():
                        return find
    raise ConfigError(
        "the kernel does not show which user connects to a tool server, so every user of this node could call tools",
        hint=f"permit netlink sockets of type NETLINK_SOCK_DIAG, or mount {next(iter(_TABLES))}, in the container",
    )


def ask_kernel(own: Address, peer: Address) -> int | None:
    """Same as `peer_uid`, by sock_diag."""
    addresses = struct.pack(
        "!HH4s12x4s12x", peer[1], own[1], socket.inet_aton(peer[0]), socket.inet_aton(own[0])
    )
    body = struct.pack("=BBBxI", _FAMILY, socket.IPPROTO_TCP, 0, _ALL_STATES) + addresses
    body += struct.pack("=III", 0, _ALL_STATES, _ALL_STATES)  # any interface, no cookie
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
        kernel.send(header + body)
        reply = kernel.recv(4096)
    _, kind, *_ = _HEADER.unpack_from(reply)
    if kind != _NLMSG_ERROR:
        uid, inode = struct.unpack_from("=II", reply, _HEADER.size + _OWNER_AT)
        return uid if inode else None
    (code,) = struct.unpack_from("=i", reply, _HEADER.size)
    if -code == errno.ENOENT:
        return None
    raise OSError(-code, os.strerror(-code))


def read_tables(own: Address, peer: Address) -> int | None:
    """Same as `peer_uid`, by /proc/net/tcp."""
    for table, before in _TABLES.items():
        ends = [
            f"{before}{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"
            for host, port in (peer, own)
        ]
        for line in table.read_text().splitlines() if table.exists() else ():
            _, local, remote, _, _, _, _, uid, _, inode, *_ = line.split()
            if [local, remote] == ends:
                return int(uid) if int(inode) else None
    return None


class OwnUserServer:
    """Serves a listener by Python's ``accept``, which `accept_own_user` patches; uvloop has an accept of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop, factory: Any, listener: socket.socket) -> None:
        self.loop, self.factory, self.sockets = loop, factory, (listener,)
        self._tasks: set[asyncio.Task[Any]] = set()
        listener.setblocking(False)
        loop.add_reader(listener, self._accept)

    def close(self) -> None:
        (listener,) = self.sockets
        if listener.fileno() >= 0:
            self.loop.remove_reader(listener)
            listener.close()

    async def wait_closed(self) -> None:
        pass

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # nothing more to accept, or no descriptor is free
            connection, _ = self.sockets[0].accept()
            task = self.loop.create_task(self.loop.connect_accepted_socket(self.factory, connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _serve_endpoint_with_check() -> None:
    from verifiers.v1.interception.server import InterceptionServer

    start = InterceptionServer.start

    async def start_checked(self: Any) -> None:
        loop: Any = asyncio.get_running_loop()
        create = loop.create_server

        async def create_server(factory: Any, host: str, port: int, **options: Any) -> Any:
            if not host.startswith("127."):  # a tunnel connects
                return await create(factory, host, port, **options)
            return OwnUserServer(loop, factory, socket.create_server((host, port), backlog=4096))

        loop.create_server = create_server
        try:
            await start(self)
        finally:
            del loop.create_server

    InterceptionServer.start = start_checked


def _start_tools_with_check() -> None:
    """Start tool servers with this module in front of theirs."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    run_background = SubprocessRuntime.run_background

    async def run_checked(self: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        if "VF_CONFIG" in env and argv[1:2] == ["-m"]:
            argv = [argv[0], "-m", __name__, *argv[2:]]
        await run_background(self, argv, env, log)

    SubprocessRuntime.run_background = run_checked


if __name__ == "__main__":
    accept_own_user()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
