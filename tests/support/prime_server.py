"""A local server that speaks the protocol of the Prime platform's monitor.

with serve_prime() as server:
    server.base_url, server.calls
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from pyarrow import parquet

from tests.support.api import serve_handler

KEY = "prime-key-of-a-test"


@dataclass
class PrimeServer:
    base_url: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Path and body of each accepted call, in order."""
    tables: list[list[dict[str, Any]]] = field(default_factory=list)
    """Rows of each uploaded table."""
    status: Callable[[str], int | None] = lambda path: 201 if path == "/external-runs" else 200
    """Status of the reply to a path; None: the connection is closed."""
    keys_of_storage: set[str] = field(default_factory=set)

    def bodies(self, path: str) -> list[dict[str, Any]]:
        return [body for called, body in self.calls if called == path]


@contextmanager
def serve_prime() -> Iterator[PrimeServer]:
    server = PrimeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.path.startswith("/storage/"):
                server.keys_of_storage |= {
                    self.headers.get("authorization", ""),
                    self.headers.get("x-api-key", ""),
                }
                server.tables.append(parquet.read_table(io.BytesIO(data)).to_pylist())
                return self._reply(200, {})
            path = self.path.removeprefix("/api/v1/rft")
            status = server.status(path)
            if status is None:
                self.close_connection = True
                return None
            if (self.headers["authorization"], self.headers["x-api-key"]) != (f"Bearer {KEY}", KEY):
                status = 401
            reply: dict[str, Any] = {"detail": "no"} if status >= 400 else {}
            if status < 400:
                server.calls.append((path, json.loads(data, parse_constant=_refuse)))
                reply = {
                    "/external-runs": {"run": {"id": f"run-{len(server.bodies('/external-runs'))}"}},
                    "/samples/presign": {"data": {"presignedUrl": f"{url}/storage/1", "s3Key": "key-1"}},
                }.get(path, {})
            return self._reply(status, reply)

        do_PUT = do_POST

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as url:
        server.base_url = f"{url}/api/v1/rft"
        yield server


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
