"""A local server that speaks the part of the W&B protocol that the wandb client needs: GraphQL, file streams, files.

with serve_wandb() as server:
    …                                    # WANDB_BASE_URL=server.url
    server.runs["id"].history            # the rows, in order
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Lock
from typing import Any

from tests.support.api import serve_handler

API_KEY = "0123456789" * 4


@dataclass
class WandbRun:
    """One run as the server stores it."""

    project: str
    display_name: str = ""
    config: str = "{}"
    lines: dict[int, str] = field(default_factory=dict)  # rows of the history by their position
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def history(self) -> list[dict[str, Any]]:
        return [json.loads(self.lines[position]) for position in sorted(self.lines)]


@dataclass
class WandbServer:
    url: str = ""
    runs: dict[str, WandbRun] = field(default_factory=dict)
    cuts: Callable[[str], str | None] = lambda path: None
    """Called with each path: ``before`` drops the request, ``after`` handles it and drops the reply."""
    keys: set[str] = field(default_factory=set)  # authorization headers
    lock: Lock = field(default_factory=Lock)

    def bucket(self, name: str, *, is_resumed: bool) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        tail = [self.runs[name].lines[max(run.lines)]] if run.lines else []
        return {
            "id": f"bucket-{name}",
            "name": name,
            "displayName": run.display_name,
            "description": "",
            "config": run.config,
            "summaryMetrics": "{}",
            "logLineCount": 0,
            "historyLineCount": len(run.lines),
            "eventsLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "tags": [],
            "notes": "",
            "wandbConfig": json.dumps({"t": 1}) if is_resumed else None,
            "sweepName": None,
            "project": {"id": "p", "name": run.project, "entity": {"id": "e", "name": "me"}},
        }

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        name = re.search(r"(?:query|mutation)\s+(\w+)", query)
        match name[1] if name else "":
            case "Viewer":
                viewer = {
                    "id": "me",
                    "entity": "me",
                    "username": "me",
                    "email": "me@localhost",
                    "flags": "{}",
                }
                return {"viewer": {**viewer, "teams": {"edges": []}}}
            case "RunResumeStatus":
                bucket = self.bucket(variables["name"], is_resumed=True)
                owner = {"id": "e", "name": "me"}
                return {"model": {"id": "p", "name": variables["project"], "entity": owner, "bucket": bucket}}
            case "UpsertBucket":
                return {"upsertBucket": self._upsert(variables)}
            case "CreateRunFiles":
                files = [
                    {"name": file, "uploadUrl": f"{self.url}/upload/{variables['run']}/{file}"}
                    for file in variables["files"]
                ]
                return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
            case "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            case "OrganizationCoreWeaveOrganizationID":
                return {"organization": None}
            case "ArtifactType":
                return {"project": {"artifact": None}}
            case "CreateArtifact":  # a table; its content is also a file of the run
                sequence = {"latestArtifact": {"id": "artifact"}}
                known = {"id": "artifact", "state": "COMMITTED", "artifactSequence": sequence}
                return {"createArtifact": {"artifact": known}}
            case other:
                raise ValueError(f"the wandb client sent an unknown operation: {other}")

    def _upsert(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables.get("name") or str(variables.get("id", "")).removeprefix("bucket-")
        is_new = name not in self.runs
        run = self.runs.setdefault(name, WandbRun(variables.get("project") or "uncategorized"))
        run.display_name = variables.get("displayName") or run.display_name
        run.config = variables.get("config") or run.config
        return {"bucket": self.bucket(name, is_resumed=False), "inserted": is_new}


@contextmanager
def serve_wandb() -> Iterator[WandbServer]:
    server = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            cut = server.cuts(self.path)
            if cut != "before":
                with server.lock:
                    server.keys.add(self.headers.get("authorization", ""))
                    reply = self._handle(data)
            if cut is not None:
                self.close_connection = True
                self.connection.close()
                return
            text = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_PUT = do_POST

        def _handle(self, data: bytes) -> dict[str, Any]:
            if self.path.startswith("/graphql"):
                request = json.loads(data)
                return {"data": server.answer(request["query"], request.get("variables") or {})}
            if match := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
                history = json.loads(data).get("files", {}).get("wandb-history.jsonl")
                for index, line in enumerate(history["content"] if history else ()):
                    server.runs[match[1]].lines[history["offset"] + index] = line
            elif match := re.fullmatch(r"/upload/([^/]+)/(.+)", self.path):
                server.runs[match[1]].files[match[2]] = data
            return {}

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as url:
        server.url = url
        yield server
