"""Endpoints: where the processes of a run listen, and restart requests for processes that do not respond.

publish_endpoint(run, "inference-0", "http://10.0.0.1:8000")    # by the process, after its port is bound
read_endpoints(run, "inference")                                # {"inference-0": {"url": …, "incarnation": 0, …}}
request_restart(run, "inference-0", incarnation=0, reason="…")  # by a peer
take_restart_request(run, "inference-0", incarnation=0)         # by the supervisor of that process

Processes that look again and again use the watchers, which cause few operations on a shared filesystem:

requests = ControlWatch(run)
requests.is_stop_requested(), requests.restarts()               # lists control/ if a look is due
EndpointWatch(run).get("inference-0")                           # reads only files that are new since the last look

A file has a second name, which contains its content in compressed form. So one listing of the folder reads the
endpoints of all processes.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import socket
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from primerl_hpc.common import env
from primerl_hpc.common.files import is_there, names_in, read_json_or_none, write_bytes, write_json
from primerl_hpc.common.safety.decoding import parse_json
from primerl_hpc.common.waiting import paced
from primerl_hpc.run.rundir import RunDir

BUSY_S, IDLE_S = 0.25, 5.0
"""Interval between looks: shortly after a change, and without one."""
CALM_S = 10.0
"""Time after the last change from which looks are rare."""
VERIFY_S = 5.0
MAX_NAME_BYTES = 255
MAX_ENDPOINT_BYTES = 1 << 16
"""Limit of the content in a name after decompression."""
_COMMON = (
    b'"processes":1,"cores":1,"split":"train","env":"","phases":{"imports":0.,"process group":0.,"model":0.'
    b'"engines and environments":0.,"first rollout":0.{"url":"http://127.0.0.1:{"url":"tcp://10.{"url":"","host":"'
    b'"model":"Qwen/Qwen3-","version":0,"admin":true,"phases":{"imports and arguments":10.,"model":10.,"compile":10.'
    b',"graph capture":10.,"engine":10.,"first token":0.'
    b'{"url":"https://10.0.0.1:80","host":"node","pid":10,"attempt":1,"incarnation":0}'
)
"""Text that endpoints have in common: the compression refers to it. Another version of it makes readers read files."""


def publish_endpoint(run_dir: RunDir, process: str, url: str, **details: Any) -> None:
    """Publish the address of ``process`` after its port is bound. ``url``: ``http://…`` or ``tcp://…``.

    The file contains the incarnation, so that a reader can distinguish a restarted process from its predecessor.
    """
    content = {
        "url": url,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "attempt": env.attempt(),
        "incarnation": env.incarnation(),
        **details,
    }
    name = _name_with_content(process, content)
    text = json.dumps({"process": process, **content}, indent=1, ensure_ascii=False) + "\n"
    alias = run_dir.endpoints / name if name else None
    write_bytes(run_dir.endpoint(process), text.encode(), alias=alias)


def publish_start(run_dir: RunDir, phases: Mapping[str, float]) -> None:
    """Publish how long the start of this process took, if it belongs to a run and serves nothing."""
    if process := env.process():
        publish_endpoint(run_dir, process, "", phases=dict(phases))


def read_endpoint(run_dir: RunDir, process: str) -> dict[str, Any] | None:
    """Return the endpoint of a process; None if it has not published one or has exited."""
    return read_json_or_none(run_dir.endpoint(process))


def _name_with_content(process: str, content: Mapping[str, Any]) -> str | None:
    """Return the second name of an endpoint's file: ``.inference-0~`` and the content; None if it is too long."""
    compressor = zlib.compressobj(9, wbits=-15, zdict=_COMMON)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    packed = compressor.compress(text.encode()) + compressor.flush()
    name = f".{process}~{base64.urlsafe_b64encode(packed).decode().rstrip('=')}"
    return name if len(name) <= MAX_NAME_BYTES else None


def _content_of_name(name: str) -> tuple[str, dict[str, Any]] | None:
    """Return the process and the content of its endpoint; None if the name has none, or one of another version."""
    process, _, text = name.removeprefix(".").partition("~")
    try:
        packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        content = parse_json(
            zlib.decompressobj(wbits=-15, zdict=_COMMON).decompress(packed, MAX_ENDPOINT_BYTES).decode()
        )
    except (ValueError, binascii.Error, zlib.error):
        return None
    is_complete = isinstance(content, dict) and {"url", "pid", "attempt", "incarnation"} <= content.keys()
    return (process, {"process": process, **content}) if is_complete else None


def read_endpoints(run_dir: RunDir, role: str) -> dict[str, dict[str, Any]]:
    """Return all endpoints of a role by process name."""
    found = {}
    for path in sorted(run_dir.endpoints.glob(f"{role}-*.json")):
        if (endpoint := read_json_or_none(path)) is not None:
            found[path.stem] = endpoint
    return found


def rendezvous_name(process: str) -> str:
    """Return the name of the rendezvous endpoint of a process that spans several nodes."""
    return f"rdzv-{process}"


def forget_endpoints(run_dir: RunDir, process: str) -> None:
    """Remove the endpoints of a process that has exited."""
    processes = (process, rendezvous_name(process))
    for name in processes:
        run_dir.endpoint(name).unlink(missing_ok=True)
    for name in names_in(run_dir.endpoints):
        if name.startswith(tuple(f".{process}~" for process in processes)):
            (run_dir.endpoints / name).unlink(missing_ok=True)


def request_restart(run_dir: RunDir, process: str, incarnation: int, reason: str) -> None:
    """Ask the supervisor to restart ``process``, whose incarnation ``incarnation`` does not serve its peers."""
    request = {"process": process, "incarnation": incarnation, "reason": reason, "time": time.time()}
    write_json(run_dir.restart_request(process), request)


def take_restart_request(run_dir: RunDir, process: str, incarnation: int) -> dict[str, Any] | None:
    """Remove and return the request to restart this incarnation of ``process``; None without one.

    A request for an incarnation that has already exited is discarded.
    """
    path = run_dir.restart_request(process)
    if path.name not in names_in(path.parent):
        return None
    request = read_json_or_none(path) or {}
    path.unlink(missing_ok=True)
    return request if request.get("incarnation", incarnation) == incarnation else None


# -- watching with few operations ------------------------------------------------------------------


class FolderWatch:
    """Names of the files in a folder, which is listed rarely while nothing changes."""

    def __init__(
        self, folder: Path, *, busy_s: float = BUSY_S, idle_s: float = IDLE_S, calm_s: float | None = None
    ) -> None:
        """``busy_s``: interval between looks shortly after a change. After `CALM_S` without one it is ``calm_s``
        (default: ``idle_s``), which grows to ``idle_s`` with the time without a change (`waiting.paced`).
        """
        self.folder, self.busy_s, self.idle_s = folder, busy_s, idle_s
        self.calm_s = idle_s if calm_s is None else calm_s
        self._found: frozenset[tuple[str, int]] = frozenset()
        self._names: frozenset[str] = frozenset()
        self._changed_at = time.monotonic()
        self._next_look = 0.0

    def names(self) -> frozenset[str]:
        """Return the names of visible files as of the last look. Raises OSError, except for a missing folder."""
        if time.monotonic() >= self._next_look:
            self.look()
        return self._names

    def hurry(self) -> None:
        """List the folder at the next call, and often for a while: a change is expected."""
        self._changed_at, self._next_look = time.monotonic(), 0.0

    def look(self) -> frozenset[tuple[str, int]]:
        """List the folder now; return (name, inode) of its visible files."""
        try:
            with os.scandir(self.folder) as entries:
                found = frozenset(
                    (entry.name, entry.inode()) for entry in entries if self._is_shown(entry.name)
                )
        except FileNotFoundError:
            found = frozenset()
        now = time.monotonic()
        names = frozenset(name for name, _ in found)
        if self._is_change(found, names):
            self._changed_at = now
        self._found, self._names = found, names
        without_s = now - self._changed_at
        is_calm = without_s > CALM_S
        self._next_look = now + (paced(without_s, self.calm_s, self.idle_s) if is_calm else self.busy_s)
        return found

    def _is_shown(self, name: str) -> bool:
        """True for names that a look returns: not for files that are being written."""
        return name[0] != "."

    def _is_change(self, found: frozenset[tuple[str, int]], names: frozenset[str]) -> bool:
        """True if the set of names changed: files such as state.json are replaced all the time."""
        return names != self._names


class EndpointWatch(FolderWatch):
    """The endpoints of a run's processes, from the names of their files. Several threads may use it.

    A file without a second name is read when its name or inode is new. A filesystem may give the inode of a deleted
    file to its successor, so all such files are read once more `VERIFY_S` after a change. The load thus does not depend
    on the number of endpoints.
    """

    def __init__(
        self, run: RunDir, *, busy_s: float = BUSY_S, idle_s: float = IDLE_S, calm_s: float | None = None
    ) -> None:
        super().__init__(run.endpoints, busy_s=busy_s, idle_s=idle_s, calm_s=calm_s)
        self._read: dict[tuple[str, int], dict[str, Any]] = {}
        self._found_before: frozenset[tuple[str, int]] = frozenset()
        self._endpoints: dict[str, dict[str, Any]] = {}
        self._verify_at = float("inf")
        self._changed_ns: int | None = None
        self._lock = threading.Lock()

    def get(self, process: str) -> dict[str, Any] | None:
        """Return the endpoint of a process as of the last look; None if it has not published one or has exited."""
        return self.all().get(process)

    def all(self) -> dict[str, dict[str, Any]]:
        """Return the endpoints by process, in the order of their names. Raises OSError."""
        with self._lock:
            if time.monotonic() >= self._next_look:
                self._update()
            return self._endpoints

    def of_role(self, role: str) -> dict[str, dict[str, Any]]:
        return {name: endpoint for name, endpoint in self.all().items() if name.startswith(f"{role}-")}

    def _update(self) -> None:
        changed_ns = self._modification_time()
        found = self.look()
        now = time.monotonic()
        is_verifying = now >= self._verify_at
        known = {} if is_verifying else self._read
        if found != self._found_before or changed_ns != self._changed_ns:
            self._verify_at = min(self._verify_at, now + VERIFY_S)
        if is_verifying:
            self._verify_at = float("inf")
        listed = self._listed(found)
        read: dict[tuple[str, int], dict[str, Any]] = {}
        for key in found:
            name, _ = key
            if not name.endswith(".json"):
                continue
            endpoint = known.get(key) or listed.get(key) or read_json_or_none(self.folder / name)
            if endpoint is not None:
                read[key] = endpoint
        self._read, self._found_before, self._changed_ns = read, found, changed_ns
        self._endpoints = {
            name.removesuffix(".json"): endpoint for (name, _), endpoint in sorted(read.items())
        }

    @staticmethod
    def _listed(found: frozenset[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the endpoints in names that belong to the current files.

        An inode has the same content as long as one of its names exists. Some filesystems return one number for all
        files; so a number counts if exactly two names have it.
        """
        num_names = Counter(inode for _, inode in found)
        contents = {
            inode: content
            for name, inode in found
            if name[0] == "." and num_names[inode] == 2 and (content := _content_of_name(name))
        }
        return {
            (name, inode): contents[inode][1]
            for name, inode in found
            if inode in contents and name == f"{contents[inode][0]}.json"
        }

    def _is_shown(self, name: str) -> bool:
        return name[0] != "." or "~" in name

    def _modification_time(self) -> int | None:
        """Return the folder's modification time in ns, which also changes when a file is replaced."""
        try:
            return os.stat(self.folder).st_mtime_ns
        except FileNotFoundError:
            return None

    def _is_change(self, found: frozenset[tuple[str, int]], names: frozenset[str]) -> bool:
        return found != self._found


def must_save(run: RunDir) -> bool:
    """True if the run is to save and stop, and not to stop immediately."""
    return is_there(run.stop_request) and not (read_json_or_none(run.stop_request) or {}).get("now")


class ControlWatch:
    """Requests in the control folder."""

    def __init__(self, run: RunDir, *, busy_s: float = BUSY_S, idle_s: float = IDLE_S) -> None:
        self.run = run
        self.control = FolderWatch(run.control, busy_s=busy_s, idle_s=idle_s)
        self.requests = FolderWatch(run.restart_request("").parent, busy_s=busy_s, idle_s=idle_s)

    def is_stop_requested(self) -> bool:
        return self.run.stop_request.name in self.control.names()

    def is_save_requested(self) -> bool:
        """True if the run is to save and stop. After ``cancel --now``, the supervisor ends the processes instead."""
        return self.is_stop_requested() and must_save(self.run)

    def has(self, request: Path) -> bool:
        """True if ``request``, a file of the control folder, was there at the last look."""
        return request.name in self.control.names()

    def restarts(self) -> set[str]:
        """Return the processes whose restart is requested. The folder of requests appears with the first one."""
        if self.requests.folder.name not in self.control.names():
            return set()
        return {name.removesuffix(".json") for name in self.requests.names()}

    def hurry(self) -> None:
        """List the folder at the next call, and often for a while: a change is expected."""
        self.control.hurry()
        self.requests.hurry()


class PublishedEngines:
    """The engines of a role that may serve: published, and without a restart request. Several threads may use it."""

    def __init__(self, run: RunDir, role: str, *, busy_s: float = BUSY_S) -> None:
        self.role, self._lock = role, threading.Lock()
        self.endpoints = EndpointWatch(run, busy_s=busy_s)
        self.control = ControlWatch(run, busy_s=busy_s)

    def hurry(self) -> None:
        """Read the folders again at the next call."""
        self.endpoints.hurry()
        self.control.hurry()

    def urls(self) -> dict[str, str]:
        """Return their URLs by process, as of the last look. Raises OSError."""
        with self._lock:
            restarting = self.control.restarts()
        engines = self.endpoints.of_role(self.role)
        return {name: str(endpoint["url"]) for name, endpoint in engines.items() if name not in restarting}
