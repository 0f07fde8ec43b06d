"""A local Hugging Face hub that accepts uploads: repositories, LFS objects and commits.

with serve_uploads(token="hf_…") as hub:           # HF_ENDPOINT=hub.url, HF_TOKEN=hf_…
    …
hub.repositories["owner/name"].files               # path → content
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.support.api import serve_handler


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@dataclass
class UploadHub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by SHA-256."""


@contextmanager
def serve_uploads(*, token: str) -> Iterator[UploadHub]:
    """Serve a hub on which ``token`` may write; other tokens are answered with 403."""
    hub = UploadHub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            path, data = unquote(urlsplit(self.path).path), self._body()
            if self.headers.get("authorization") != f"Bearer {token}":
                return self._reply(403, {"error": "You don't have the rights"})
            if path == "/api/repos/create":
                return self._create(json.loads(data))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/main", path):
                files = [
                    {"path": item["path"], "uploadMode": _mode(item["path"]), "shouldIgnore": False}
                    for item in json.loads(data)["files"]
                ]
                return self._reply(200, {"files": files})
            if re.fullmatch(r"/[^/]+/[^/]+\.git/info/lfs/objects/batch", path):
                objects = [
                    {**item, "actions": {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}}
                    for item in json.loads(data)["objects"]
                ]
                return self._reply(200, {"transfer": "basic", "objects": objects})
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
                return self._commit(match[1], data)
            return self._reply(404, {"error": path})

        def do_PUT(self) -> None:
            data, oid = self._body(), self.path.rpartition("/")[2]
            if hashlib.sha256(data).hexdigest() != oid:
                return self._reply(400, {"error": "wrong checksum"})
            hub.objects[oid] = data
            return self._reply(200, {})

        def do_GET(self) -> None:
            match = re.fullmatch(
                r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", unquote(urlsplit(self.path).path)
            )
            if match is None or match[1] not in hub.repositories:
                return self._reply(404, {"error": "not found"})
            siblings = [{"rfilename": name} for name in hub.repositories[match[1]].files]
            return self._reply(200, {"id": match[1], "sha": "0" * 40, "siblings": siblings, "tags": []})

        def _create(self, request: dict[str, Any]) -> None:
            name = f"{request.get('organization') or 'me'}/{request['name']}"
            if name in hub.repositories:
                return self._reply(409, {"error": "exists", "url": f"{hub.url}/{name}"})
            hub.repositories[name] = Repository(request.get("visibility") == "private")
            return self._reply(200, {"url": f"{hub.url}/{name}", "name": name})

        def _commit(self, name: str, data: bytes) -> None:
            repository = hub.repositories[name]
            for line in map(json.loads, data.splitlines()):
                value = line["value"]
                match line["key"]:
                    case "header":
                        repository.messages.append(value["summary"])
                    case "file":
                        repository.files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        repository.files[value["path"]] = hub.objects[value["oid"]]
            oid = hashlib.sha1(data).hexdigest()
            self._reply(200, {"commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}"})

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("content-length") or 0))
            data = bytearray()
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(data)

        def _reply(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as url:
        hub.url = url
        yield hub


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"
