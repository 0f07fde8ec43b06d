"""A local hub of models and datasets for tests, with the routes of huggingface.co that are needed to read one.

with serve_hub({"org/rows": {"train.jsonl": b"…", "README.md": b"…"}}) as url:      # HF_ENDPOINT=url
with serve_hub({}, models={"org/model": files_of(folder)}) as url:
cache_model(hub_cache, "org/model")                                                # as after a download
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.api import serve_handler
from tests.support.helpers import safetensors_bytes

COMMIT = "0" * 39 + "1"
Repositories = Mapping[str, Mapping[str, bytes]]


@contextmanager
def serve_hub(
    datasets: Repositories,
    agents: list[str] | None = None,
    *,
    models: Repositories | None = None,
    asked: list[str] | None = None,
    send: Callable[[str, bytes], bytes | None] = lambda _, data: data,
) -> Iterator[str]:
    """Yield the hub's URL. ``datasets``, ``models``: name → path → content.

    ``agents``: collects the user agent of each request for a dataset; ``asked``: the path of each file that is sent.
    ``send``: returns the bytes that are sent for (path, content); None: the connection is closed.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if agents is not None and "datasets/" in path:
                agents.append(self.headers["user-agent"])
            if match := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+?)(/revision/[^/]+)?", path):
                self._answer_info(match[1], match[2])
            elif match := re.fullmatch(r"/api/(datasets|models)/([^/]+/[^/]+)/tree/[^/]+/?(.*)", path):
                self._reply([entry(name, data) for name, data in self._files(match[1], match[2], match[3])])
            elif match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
                kind = "datasets" if match[1] else "models"
                self._answer_file(match[3], _of(kind).get(match[2], {}).get(match[3]))
            else:
                self._refuse("EntryNotFound")

        do_HEAD = do_GET

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["content-length"])).decode()
            request = json.loads(text) if text.startswith("{") else parse_qs(text)
            match = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/.+", unquote(self.path))
            assert match is not None, self.path
            known = datasets[match[1]]
            self._reply([entry(name, known[name]) for name in request["paths"] if name in known])

        def _answer_info(self, kind: str, name: str) -> None:
            if name not in _of(kind):
                return self._refuse("RepoNotFound")
            siblings = [sibling(path, data) for path, data in _of(kind)[name].items()]
            return self._reply({"id": name, "sha": COMMIT, "siblings": siblings, "tags": []})

        def _answer_file(self, path: str, data: bytes | None) -> None:
            if data is None:
                return self._refuse("EntryNotFound")
            headers = {"etag": f'"{etag(path, data)}"', "x-repo-commit": COMMIT}
            if self.command == "HEAD":
                return self._send(200, data, headers)
            if asked is not None:
                asked.append(path)
            content = send(path, data)
            if content is None:
                self.close_connection = True
                return None
            return self._send(200, content, headers, len(data))

        @staticmethod
        def _files(kind: str, name: str, folder: str) -> list[tuple[str, bytes]]:
            start = f"{folder}/" if folder else ""
            return [(path, data) for path, data in _of(kind)[name].items() if path.startswith(start)]

        def _reply(self, content: Any) -> None:
            self._send(200, json.dumps(content).encode(), {"content-type": "application/json"})

        def _refuse(self, code: str) -> None:
            self._send(404, b"", {"x-error-code": code})

        def _send(self, status: int, data: bytes, headers: dict[str, str], size: int | None = None) -> None:
            self.send_response(status)
            length = str(len(data) if size is None else size)
            for name, value in {**headers, "content-length": length}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    def _of(kind: str) -> Repositories:
        return datasets if kind == "datasets" else models or {}

    with serve_handler(Handler) as url:
        yield url


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def is_large(path: str) -> bool:
    """True for files that a hub stores outside git, with their SHA-256."""
    return path.endswith((".safetensors", ".bin", ".gguf"))


def etag(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if is_large(path) else digest(data)


def entry(path: str, data: bytes) -> dict[str, Any]:
    large = (
        {"lfs": {"oid": etag(path, data), "size": len(data), "pointerSize": 100}} if is_large(path) else {}
    )
    return {"type": "file", "path": path, "size": len(data), "oid": digest(data), **large}


def sibling(path: str, data: bytes) -> dict[str, Any]:
    large = (
        {"lfs": {"sha256": etag(path, data), "size": len(data), "pointerSize": 100}} if is_large(path) else {}
    )
    return {"rfilename": path, "size": len(data), "blobId": digest(data), **large}


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of a folder's files by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def cache_model(hub: Path, name: str, files: Mapping[str, bytes] | None = None) -> Path:
    """Create a complete model in a cache of huggingface_hub; return its snapshot."""
    root = hub / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT)
    files = files or {"config.json": b'{"model_type": "qwen3"}', "model.safetensors": safetensors_bytes()}
    for path, data in files.items():
        (snapshot / path).write_bytes(data)
    return snapshot


def cache_dataset(folder: Path, name: str) -> Path:
    """Create the folder of a dataset that package datasets has prepared."""
    prepared = folder / name.replace("/", "___") / "default"
    prepared.mkdir(parents=True, exist_ok=True)
    return prepared
