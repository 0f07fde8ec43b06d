"""Chat with the policy of a run, through its router. Any OpenAI-compatible client can do the same.

    server = find_server(run)                                     # raises NotFoundError if no router is up
    for text in server.answer([{"role": "user", "content": "hello"}], {"max_tokens": 64}):
        print(text, end="")
    server.last.versions, server.last.tokens                      # policy versions of the reply

Training continues during the chat: a reply may begin with one policy version and end with the next.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import httpx

from primerl_hpc.common.errors import DataError, NotFoundError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.observe.inside.steps import find_places, python_path, step_command, step_environ
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.access.keys import OwnServer, own_server
from primerl_hpc.run.rundir import VERSION_HEADER, RunDir

CONNECT_S = 10.0


@dataclass
class Answer:
    """Metadata of a reply."""

    versions: tuple[int, ...] = ()
    """Policy versions that were live when the reply began and when it ended."""
    tokens: int = 0
    finish_reason: str = ""

    @property
    def label(self) -> str:
        """``policy v12``, ``policy v12 to v13``"""
        return "policy " + " to ".join(f"v{version}" for version in dict.fromkeys(self.versions))


def lines_of(response: httpx.Response) -> Iterator[str]:
    """Yield the lines of server-sent events. `iter_lines` also divides at U+2028, which JSON texts may contain."""
    rest = b""
    for data in response.iter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        yield from (line.decode().removesuffix("\r") for line in lines)


@dataclass
class Server:
    run: RunDir
    router: OwnServer
    model: str
    last: Answer = field(default_factory=Answer)

    def answer(self, messages: Sequence[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
        """Yield the reply in pieces. `last` is complete after the last piece.

        Raises RoleError if the router refuses the request, cannot be reached, or the engine fails.
        """
        self.last = Answer()
        sampling = {name: value for name, value in sampling.items() if value is not None}
        body = {"model": self.model, "messages": list(messages), "stream": True, **sampling}
        body["stream_options"] = {"include_usage": True}
        # engines that are paused for new weights answer later
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        try:
            with self.router.client(timeout) as client, self._post(client, body) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refusal(response)
                first = response.headers.get(VERSION_HEADER)
                self.last.versions = (int(first) if first else self._live_version(),)
                for line in lines_of(response):
                    yield from self._piece(line)
        except httpx.HTTPError as error:
            raise RoleError(
                f"the router of {self.run.root.name} does not respond at {self.router.url}: {type(error).__name__}",
                hint=f"primerl-hpc status {shlex.quote(self.run.root.name)}",
            ) from error
        self.last.versions += (max(self._live_version(), self.last.versions[0]),)

    @contextmanager
    def _post(self, client: httpx.Client, body: dict[str, Any]) -> Iterator[httpx.Response]:
        """POST the request; if it is refused with HTTP 400, repeat it without ``max_tokens``.

        The engine refuses prompt + ``max_tokens`` beyond its maximum length. Without the limit it generates up to that
        length.
        """
        url = "/v1/chat/completions"
        with client.stream("POST", url, json=body) as response:
            if response.status_code != 400 or "max_tokens" not in body:
                yield response
                return
        shorter = {name: value for name, value in body.items() if name != "max_tokens"}
        with client.stream("POST", url, json=shorter) as response:
            yield response

    def _piece(self, line: str) -> Iterator[str]:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RoleError(f"the engine aborted the reply: {event['error']}")
        self.last.tokens = (event.get("usage") or {}).get("completion_tokens", self.last.tokens)
        for choice in event["choices"]:
            self.last.finish_reason = choice.get("finish_reason") or self.last.finish_reason
            if text := choice["delta"].get("content"):
                yield text

    def _refusal(self, response: httpx.Response) -> RoleError:
        try:
            detail = response.json()
            detail = detail.get("error", detail)
            detail = detail.get("message", detail) if isinstance(detail, dict) else detail
        except ValueError:
            detail = response.text[:300]
        hint = ""
        if response.status_code == 503:
            hint = f"primerl-hpc status {shlex.quote(self.run.root.name)} shows the state of the engines"
        return RoleError(f"HTTP {response.status_code} from the run's router: {detail}", hint=hint)

    def _live_version(self) -> int:
        return int((read_json_or_none(self.run.live_version) or {}).get("version", 0))


def find_server(run: RunDir) -> Server:
    """Return the run's router. Raises NotFoundError if no router is up, or if its keys cannot be read, and
    OccupiedError for a directory that another user prepared."""
    if (router := _router_of(run)) is None:
        raise _no_router_error(run)
    return Server(run, router, router.endpoint["model"])


def _router_of(run: RunDir) -> OwnServer | None:
    try:
        return own_server(run, process_name(Role.ROUTER, 0))
    except (DataError, OSError) as error:
        raise NotFoundError(
            f"the keys of this run cannot be read ({error}); only the user who submitted it can send requests "
            f"to its engines"
        ) from error


def _no_router_error(run: RunDir) -> NotFoundError:
    snapshot = take_snapshot(run, JobWatcher().facts_of([run]))
    if not any(name.startswith(Role.ROUTER.value) for name in snapshot.processes):
        why = f"its phase {snapshot.phase} has no engines" if snapshot.phase else "it has not started yet"
    else:
        why = "its router is not up"
    return NotFoundError(
        f"cannot chat with {snapshot.name}: the run is {snapshot.state.value}, {why}",
        hint=f"primerl-hpc status {shlex.quote(snapshot.name)}",
    )


def router_node_command(run: RunDir, words: Sequence[str], *, is_terminal: bool) -> list[str] | None:
    """Return the srun command that runs ``primerl_hpc`` with ``words`` on the router's node, or None if it is not
    needed.

    The router of a single-node run listens on the loopback interface only, so srun starts a step on that node. Raises
    NotFoundError if the run has no processes any more.
    """
    if (router := _router_of(run)) is None:
        return None
    host = router.endpoint["host"]
    if urlparse(router.url).hostname != "127.0.0.1" or host == socket.gethostname():
        return None
    command = [sys.executable, "-m", "primerl_hpc", *words]
    return step_command(find_places(run, node=host)[0], command, name="chat", is_terminal=is_terminal)


def exec_on_router_node(command: Sequence[str]) -> None:
    """Replace this process with ``command``. Raises RoleError if srun is not installed here."""
    try:
        os.execvpe(command[0], list(command), step_environ(PYTHONPATH=python_path()))
    except FileNotFoundError:
        raise RoleError(
            "this run listens on its own node only, and srun was not found on this machine",
            hint=f"run on a login node of its cluster: {shlex.join(command)}",
        ) from None
