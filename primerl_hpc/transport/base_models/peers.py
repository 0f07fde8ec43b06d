"""Chunks of a base model between the nodes of a run, over HTTPS with the attempt's key.

    with serve_chunks(copy, keys, process, host) as url: ...      # GET url/<digest>/<index>
    client = PeerClient(keys, copy.table.digest)
    client.fetch(url, 7)                                          # bytes, checked against the sender's SHA-256

A request for a chunk that the peer does not have yet waits there.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx

from primerl_hpc.common.errors import DataError
from primerl_hpc.run.access.keys import RunKeys
from primerl_hpc.transport.base_models.chunks import LocalCopy

HOLD_S = 10.0
"""How long a request waits at the peer for a chunk."""
TIMEOUT_S = 30.0
CHECKSUM = "x-sha256"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


@contextlib.contextmanager
def serve_chunks(copy: LocalCopy, keys: RunKeys, process: str, host: str) -> Iterator[str]:
    """Serve the chunks of a copy in daemon threads; yield the URL."""
    prefix, expected = f"/{copy.table.digest}/", keys.headers["Authorization"]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not hmac.compare_digest(self.headers.get("Authorization", ""), expected):
                return self._send(401)
            number = self.path.removeprefix(prefix)
            if not number.isdecimal() or int(number) >= len(copy.table.chunks):
                return self._send(404)
            if not copy.wait_for(int(number), HOLD_S):
                return self._send(425)  # Too Early
            return self._send(200, copy.read(int(number)))

        def _send(self, status: int, data: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.send_header(CHECKSUM, hashlib.sha256(data).hexdigest())
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = _Server((host, 0), Handler)
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
        self._client = httpx.Client(
            verify=keys.client_context(), headers=keys.headers, trust_env=False, timeout=TIMEOUT_S
        )

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
