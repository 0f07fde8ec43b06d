"""A local index of packages of environments, with the routes of the Environments Hub.

wheel = make_wheel("my-sums", "0.2.0", {"my_sums.py": SOURCE})
with serve_index({"owner": [wheel]}) as index:          # INDEX/owner/simple/my-sums/, INDEX/owner/my-sums/@0.2.0/…
    …
"""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote

from tests.support.api import serve_handler

V1_SOURCE = """\
import verifiers.v1 as vf


class SumTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == "4")


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        yield SumTask(vf.TaskData(prompt="2 + 2?"), self.config.task)


__all__ = ["Sums"]
"""
V0_SOURCE = """\
import verifiers as vf


def load_environment(**kwargs):
    return vf.SingleTurnEnv(**kwargs)
"""


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    file: str
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass
class Index:
    url: str
    asked: list[str] = field(default_factory=list)
    """Paths of all requests."""


def make_wheel(name: str, version: str, files: Mapping[str, str], *, requires: Sequence[str] = ()) -> Wheel:
    """Return a pure wheel; ``requires``: its requirements."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    content = {
        **files,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [
        f"{path},sha256={_urlsafe(text.encode())},{len(text.encode())}" for path, text in content.items()
    ]
    content[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return Wheel(name, version, f"{plain}-{version}-py3-none-any.whl", data.getvalue())


def _urlsafe(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@contextmanager
def serve_index(
    packages: Mapping[str, Sequence[Wheel]], *, sha256: Mapping[str, str] | None = None
) -> Iterator[Index]:
    """Serve the wheels of each owner. ``sha256``: other checksums in the index, by file."""
    pages: dict[str, bytes] = {}
    links: dict[str, list[str]] = {}
    for owner, wheels in packages.items():
        for wheel in wheels:
            path = f"/{owner}/{wheel.name}/@{wheel.version}/{wheel.file}"
            pages[path] = wheel.data
            digest = (sha256 or {}).get(wheel.file, wheel.sha256)
            link = f'<a href="{path}#sha256={digest}">{wheel.file}</a><br>'
            links.setdefault(f"/{owner}/simple/{wheel.name}/", []).append(link)
    pages |= {
        path: f"<html><body>{chr(10).join(found)}</body></html>".encode() for path, found in links.items()
    }
    index = Index("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(self.path)
            index.asked.append(path)
            data = pages.get(path)
            self.send_response(404 if data is None else 200)
            self.send_header("content-type", "text/html" if path.endswith("/") else "application/zip")
            self.send_header("content-length", str(len(data or b"")))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data or b"")

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with serve_handler(Handler) as url:
        index.url = url
        yield index
