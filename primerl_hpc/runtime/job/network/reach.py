"""Connect from every node to every other one, on the addresses that a run uses: finds firewalls and wrong interfaces.

with Listener(listen_host(num_nodes)) as listener:
    failed = connect_to({"n2": ("10.0.0.2", 41234)})          # {} or {"n2": "timed out"}
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self

LIMIT_S = 5.0
"""Time limit of a connection: a firewall that drops packets answers nothing."""
GREETING = b"primerl"


class Listener:
    """Accepts connections on a free port and greets each of them, in a thread."""

    def __init__(self, host: str) -> None:
        self.socket = socket.create_server((host, 0), backlog=1024)
        self.address: tuple[str, int] = self.socket.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends accept
        self.socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.sendall(GREETING)


def connect_to(addresses: Mapping[str, tuple[str, int]], limit_s: float = LIMIT_S) -> dict[str, str]:
    """Return the nodes that cannot be reached, with the reason."""
    if not addresses:
        return {}
    with ThreadPoolExecutor(min(64, len(addresses))) as pool:
        reasons = pool.map(lambda address: _try(address, limit_s), addresses.values())
        return {
            node: f"{':'.join(map(str, addresses[node]))}: {reason}"
            for node, reason in zip(addresses, reasons, strict=True)
            if reason
        }


def _try(address: tuple[str, int], limit_s: float) -> str:
    try:
        with socket.create_connection(address, timeout=limit_s) as connection:
            return "" if connection.recv(len(GREETING)) == GREETING else "another program answers there"
    except OSError as error:
        return error.strerror or str(error)
