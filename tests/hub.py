"""A hub of datasets on this machine, for tests: the few routes of huggingface.co that reading one takes.

with serve_hub({"org/rows": {"train.jsonl": b"…", "README.md": b"…"}}) as url:      # HF_ENDPOINT=url
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.api import serve_handler

COMMIT = "0" * 39 + "1"


@contextmanager
def serve_hub(datasets: Mapping[str, Mapping[str, bytes]], agents: list[str] | None = None) -> Iterator[str]:
    """``datasets``: by name, their files by path; ``agents`` gets who asks for one, once a request. Yields the hub's URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if agents is not None and "datasets/" in path:
                agents.append(self.headers["user-agent"])
            if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+?)(/revision/[^/]+)?", path):
                self._answer_info(match[1])
            elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+/?(.*)", path):
                self._reply([entry(name, data) for name, data in self._files(match[1], match[2])])
            elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                self._answer_file(datasets.get(match[1], {}).get(match[2]))
            else:
                self._refuse("EntryNotFound")

        do_HEAD = do_GET

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            asked = json.loads(text) if text.startswith("{") else parse_qs(text)
            match = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/.+", unquote(self.path))
            assert match is not None, self.path
            known = datasets[match[1]]
            self._reply([entry(name, known[name]) for name in asked["paths"] if name in known])

        def _answer_info(self, name: str) -> None:
            if name not in datasets:
                return self._refuse("RepoNotFound")
            siblings = [{"rfilename": path} for path in datasets[name]]
            return self._reply({"id": name, "sha": COMMIT, "siblings": siblings, "tags": []})

        def _answer_file(self, data: bytes | None) -> None:
            if data is None:
                return self._refuse("EntryNotFound")
            return self._send(200, data, {"etag": f'"{digest(data)}"', "x-repo-commit": COMMIT})

        @staticmethod
        def _files(name: str, folder: str) -> list[tuple[str, bytes]]:
            start = f"{folder}/" if folder else ""
            return [(path, data) for path, data in datasets[name].items() if path.startswith(start)]

        def _reply(self, content: Any) -> None:
            self._send(200, json.dumps(content).encode(), {"content-type": "application/json"})

        def _refuse(self, code: str) -> None:
            self._send(404, b"", {"x-error-code": code})

        def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as url:
        yield url


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def entry(path: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(data), "oid": digest(data)}
