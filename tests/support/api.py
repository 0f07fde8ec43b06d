"""An external HTTP API for tests: a function from JSON to JSON.

with serve(lambda request: (200, chat_completion("hello"))) as url:
    httpx.post(f"{url}/v1/chat/completions", json={…})
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass(frozen=True)
class Request:
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]  # empty of a GET


@contextmanager
def serve(answer: Callable[[Request], tuple[int, Any] | None]) -> Iterator[str]:
    """Yield the URL of a server. ``answer`` returns status and body, or None to close the connection; one thread per
    request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply({})

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["content-length"])) or "{}"))

        def _reply(self, body: dict[str, Any]) -> None:
            given = answer(Request(self.path, self.headers, body))
            if given is None:
                self.close_connection = True
                self.connection.close()
                return
            status, reply = given
            text = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as url:
        yield url


@contextmanager
def serve_handler(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on a free port in a thread; yield the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def chat_completion(message: dict[str, Any], model: str = "m") -> dict[str, Any]:
    """Return the body of a response with one choice. ``message`` gets a ``role`` and ``content`` if it has none."""
    choice = {
        "index": 0,
        "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        "message": {"role": "assistant", "content": None} | message,
    }
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "c", "object": "chat.completion", "created": 0, "model": model}
    return {**head, "choices": [choice], "usage": usage}
