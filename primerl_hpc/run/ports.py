"""Addresses and ports of a run's processes: reachable by peers, and stable over restarts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none, write_json

_SIOCGIFADDR = 0x8915  # linux/sockios.h: IPv4 address of an interface
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
OWN_PORTS = 12_000
"""First port that is used; services of a site usually have lower ones."""
TRIES = 100


def listen_host(num_nodes: int) -> str:
    """Return the address to listen on: loopback for one node, else the address of ``network.interface`` or host name.

    Raises ConfigError for an interface that does not exist on this node or has no address.
    """
    if num_nodes <= 1:
        return "127.0.0.1"
    if (interface := env.interface()) is not None:
        return address_of(interface)
    if (suffix := env.host_suffix()) is not None:
        return suffixed_address(suffix)
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    # some sites map the host name to 127.0.1.1 in /etc/hosts: use the routing table (nothing is sent)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))
        return str(probe.getsockname()[0])


def suffixed_address(suffix: str) -> str:
    """Return the address of this node's name in the fast network. Raises ConfigError if that name does not resolve."""
    short, dot, domain = socket.gethostname().partition(".")
    name = f"{short}{suffix}{dot}{domain}"
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise ConfigError(
            f"{name} does not resolve ({error.strerror})",
            hint="correct network.host_suffix of the profile, or set network.interface instead",
        ) from None


def address_of(interface: str) -> str:
    """Return this node's IPv4 address on ``interface``. Raises ConfigError without one."""
    request = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"{socket.gethostname()} has no IPv4 address on interface {interface} ({error.strerror})",
                hint=f"set network.interface of the profile to one of {known}, or null",
            ) from None
    return socket.inet_ntoa(reply[20:24])


def interface_of(address: str) -> str | None:
    """Return the name of this node's interface with that IPv4 address."""
    for _, name in socket.if_nameindex():
        try:
            if address_of(name) == address:
                return name
        except ConfigError:  # it has no address
            continue
    return None


def set_collective_interfaces(num_nodes: int) -> None:
    """Set the interface on which gloo and NCCL of this process and its children listen, unless it is set already.

    gloo listens on the address of the host name by default, which is 127.0.1.1 at some sites: peers on other nodes
    would connect to themselves. With one node it listens on loopback, which other nodes cannot reach.
    """
    if num_nodes <= 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif (name := interface_of(listen_host(num_nodes))) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # exactly this name, not a prefix


def bind_listener(host: str, memory: Path) -> socket.socket:
    """Return a TCP socket bound to the port stored in ``memory``, or to a free port, which is stored there.

    ``memory``: the file ``run.last_port(process)``.
    """
    remembered = read_json_or_none(memory) or {}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port = remembered.get("port", 0) if remembered.get("host") == host else 0
    try:
        listener.bind((host, port))
    except OSError:  # in use by another process
        listener.close()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, 0))
    write_json(memory, {"host": host, "port": listener.getsockname()[1]})
    return listener


def free_ports(host: str, num: int) -> int:
    """Return the first of ``num`` consecutive free ports, for child processes that derive their ports from it."""
    while True:
        first = free_port(host)
        if all(_is_free(host, port) for port in range(first + 1, first + num)):
            return first


def free_port(host: str) -> int:
    """Return a free port for a child process that binds it later; the caller must check that the child succeeded.

    The port is below the kernel's range for outgoing connections, which could use it before the child binds it.
    """
    first, end = OWN_PORTS, int(LOCAL_PORTS.read_text().split()[0])
    for _ in range(TRIES if end > first else 0):
        if _is_free(host, port := secrets.choice(range(first, end))):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def _is_free(host: str, port: int) -> bool:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe,
        contextlib.suppress(OSError, OverflowError),
    ):
        probe.bind((host, port))
        return True
    return False
