"""Chunks of a base model between the nodes of a run, over HTTPS with the attempt's key.

    with serve_chunks(copy, keys, process, host) as url: ...      # GET url/<digest>/<index>
    client = PeerClient(keys, copy.table.digest)
    client.fetch(url, 7)                                          # bytes, checked against the sender's SHA-256

A request for a chunk that the peer does not have yet waits there.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.run.access.admission import KEY_TICKS, SPARE, TLS_TICKS
from primerl_hpc.run.access.keys import RunKeys, is_bearer
from primerl_hpc.transport.base_models.chunks import LocalCopy

HOLD_S = 10.0
"""How long a request waits at the peer for a chunk."""
TIMEOUT_S = 30.0
CHECKSUM = "x-sha256"


class _Server(ThreadingHTTPServer):
    """One thread for each connection. Those without a key have the limits of `run.access.admission`."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], limit: int) -> None:
        super().__init__(address, handler)
        self.limit = limit
        self._waiting: dict[socket.socket, float] = {}  # connections without a key: when they were accepted
        self._lock = Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._waiting[request] = time.monotonic()
            if len(self._waiting) > self.limit:
                self._end(next(iter(self._waiting)))
        super().process_request(request, client_address)

    def service_actions(self) -> None:  # twice a second
        latest = time.monotonic() - KEY_TICKS
        with self._lock:
            for request in [request for request, start in self._waiting.items() if start < latest]:
                self._end(request)

    def admit(self, request: socket.socket) -> None:
        """Remove the limits of a connection that has sent the key."""
        with self._lock:
            self._waiting.pop(request, None)
        request.settimeout(None)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._waiting.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore handshakes and requests that end early; the server would print a traceback for each."""

    def _end(self, request: socket.socket) -> None:
        del self._waiting[request]
        with contextlib.suppress(OSError):
            socket.socket.shutdown(request, socket.SHUT_RDWR)  # its thread notices and closes it


@contextlib.contextmanager
def serve_chunks(
    copy: LocalCopy, keys: RunKeys, process: str, host: str, *, num_connections: int = 64
) -> Iterator[str]:
    """Serve the chunks of a copy in daemon threads; yield the URL. ``num_connections``: of peers at once."""
    prefix = f"/{copy.table.digest}/"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = TLS_TICKS

        def do_GET(self) -> None:
            if not is_bearer(self.headers.get("Authorization", ""), keys.api_key):
                self.close_connection = True
                return self._send(401)
            server.admit(self.connection)
            number = self.path.removeprefix(prefix)
            if not number.isdecimal() or int(number) >= len(copy.table.chunks):
                return self._send(404)
            if not copy.wait_for(int(number), HOLD_S):
                return self._send(425)  # Too Early
            return self._send(200, copy.read(int(number)))

        def _send(self, status: int, data: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.send_header(CHECKSUM, hashlib.sha256(data).hexdigest())
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = _Server((host, 0), Handler, SPARE + num_connections)
    context = keys.server_context(f"{process}-base-model", host)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://{host}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class PeerClient:
    def __init__(self, keys: RunKeys, digest: str) -> None:
        self.digest = digest
        self._client = keys.client(timeout=TIMEOUT_S)

    def fetch(self, url: str, index: int) -> bytes | None:
        """Return a chunk, None if the peer does not have it yet.

        Raises httpx.HTTPError without a usable answer, DataError for a chunk that was damaged on the way.
        """
        answer = self._client.get(f"{url}/{self.digest}/{index}")
        if answer.status_code == 425:
            return None
        answer.raise_for_status()
        if hashlib.sha256(answer.content).hexdigest() != answer.headers.get(CHECKSUM):
            raise DataError(f"chunk {index} from {url} was damaged on the way")
        return answer.content

    def close(self) -> None:
        self._client.close()
