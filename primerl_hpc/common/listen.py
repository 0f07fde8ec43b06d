"""Where a process of a run listens: an address its peers can reach, and a port that it keeps over restarts."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import struct
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none, write_json

_SIOCGIFADDR = 0x8915  # linux/sockios.h: an interface's IPv4 address
LOCAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
OWN_PORTS = 12_000
"""From here on; services of a site are below."""
TRIES = 100


def listen_host(num_nodes: int) -> str:
    """Loopback when the run has one node; else this node's address towards its cluster: of the profile's
    ``network.interface``, or of its own name.

    Raises ConfigError for an interface that this node has not, or that has no address.
    """
    if num_nodes <= 1:
        return "127.0.0.1"
    if (interface := env.interface()) is not None:
        return address_of(interface)
    address = socket.gethostbyname(socket.gethostname())
    if not address.startswith("127."):
        return address
    # some sites name the host 127.0.1.1 in /etc/hosts: ask the routing table instead (nothing is sent)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))
        return str(probe.getsockname()[0])


def address_of(interface: str) -> str:
    """This node's IPv4 address there. Raises ConfigError where there is none."""
    asked = struct.pack("256s", interface.encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            told = fcntl.ioctl(probe, _SIOCGIFADDR, asked)
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"{socket.gethostname()} has no IPv4 address on interface {interface} ({error.strerror})",
                mend=f"network.interface of the profile: one of {known}, or null",
            ) from None
    return socket.inet_ntoa(told[20:24])


def bind_listener(host: str, memory: Path) -> socket.socket:
    """A bound TCP socket on the port that ``memory`` remembers, or on any free one, which is remembered.

    ``memory``: ``run.last_port(process)``.
    """
    remembered = read_json_or_none(memory) or {}
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port = remembered.get("port", 0) if remembered.get("host") == host else 0
    try:
        listener.bind((host, port))
    except OSError:  # taken by somebody else meanwhile
        listener.close()
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((host, 0))
    write_json(memory, {"host": host, "port": listener.getsockname()[1]})
    return listener


def free_ports(host: str, num: int) -> int:
    """The first of ``num`` ports in a row that nobody listens on now, for children that count on from it."""
    while True:
        first = free_port(host)
        if all(_is_free(host, port) for port in range(first + 1, first + num)):
            return first


def free_port(host: str) -> int:
    """A port nobody listens on now, for a child that can only be told a number; it must be asked whether it got it.

    Below those that the kernel gives to connections as they are made: such a one could be gone before the child binds it.
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
