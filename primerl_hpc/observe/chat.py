"""Talks to the engines of a run, through its router, as any OpenAI-compatible client could.

    server = find_server(run)                                     # raises NotFoundError when nothing serves
    for text in server.answer([{"role": "user", "content": "hello"}], {"max_tokens": 64}):
        print(text, end="")
    server.last.versions, server.last.tokens                      # policy versions that answered

Training goes on meanwhile: the answer may begin with one policy version and end with the next.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlparse

import httpx

from primerl_hpc.common.errors import NotFoundError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.rundir import VERSION_HEADER, RunDir, read_endpoint
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import take_snapshot

CONNECT_S = 10.0


@dataclass
class Answer:
    """What is known of an answer besides its text."""

    versions: tuple[int, ...] = ()
    """Policy versions that were live when it began and when it ended."""
    tokens: int = 0
    finish_reason: str = ""

    @property
    def label(self) -> str:
        """``policy v12``, ``policy v12 to v13``"""
        return "policy " + " to ".join(f"v{version}" for version in dict.fromkeys(self.versions))


@dataclass
class Server:
    run: RunDir
    url: str
    model: str
    key: str
    last: Answer = field(default_factory=Answer)

    def answer(self, messages: Sequence[dict[str, str]], sampling: dict[str, Any]) -> Iterator[str]:
        """Pieces of the reply as they come; `last` is whole after the last one. Raises RoleError."""
        self.last = Answer()
        body = {"model": self.model, "messages": list(messages), "stream": True, **sampling}
        body["stream_options"] = {"include_usage": True}
        headers = {"Authorization": f"Bearer {self.key}"}
        timeout = httpx.Timeout(
            None, connect=CONNECT_S
        )  # engines that are paused for new weights answer later
        try:
            with (
                httpx.Client(timeout=timeout, trust_env=False) as client,
                client.stream(
                    "POST", f"{self.url}/v1/chat/completions", json=body, headers=headers
                ) as response,
            ):
                if response.status_code != 200:
                    response.read()
                    raise self._refused(response)
                first = response.headers.get(VERSION_HEADER)
                self.last.versions = (int(first) if first else self._live(),)
                for line in response.iter_lines():
                    yield from self._piece(line)
        except httpx.HTTPError as error:
            raise RoleError(
                f"the router of {self.run.root.name} does not answer at {self.url}: {type(error).__name__}",
                mend=f"primerl-hpc status {self.run.root.name}",
            ) from error
        self.last.versions += (max(self._live(), self.last.versions[0]),)

    def _piece(self, line: str) -> Iterator[str]:
        if not line.startswith("data: ") or line == "data: [DONE]":
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise RoleError(f"the engine broke off: {event['error']}")
        self.last.tokens = (event.get("usage") or {}).get("completion_tokens", self.last.tokens)
        for choice in event["choices"]:
            self.last.finish_reason = choice.get("finish_reason") or self.last.finish_reason
            if text := choice["delta"].get("content"):
                yield text

    def _refused(self, response: httpx.Response) -> RoleError:
        try:
            said = response.json()
            said = said.get("error", said)
            said = said.get("message", said) if isinstance(said, dict) else said
        except ValueError:
            said = response.text[:300]
        mend = ""
        if response.status_code == 503:
            mend = f"no engine is ready: primerl-hpc status {self.run.root.name}"
        return RoleError(f"HTTP {response.status_code} from the run's router: {said}", mend=mend)

    def _live(self) -> int:
        return int((read_json_or_none(self.run.live_version) or {}).get("version", 0))


def find_server(run: RunDir) -> Server:
    """The run's router. Raises NotFoundError saying why nobody serves, or that the key is not ours to read."""
    endpoint = read_endpoint(run, process_name(Role.ROUTER, 0))
    if endpoint is None:
        raise _nobody(run)
    try:
        key = run.api_key.read_text().strip()
    except (FileNotFoundError, PermissionError) as error:
        raise NotFoundError(
            f"the key of this run cannot be read ({error.strerror}): only who started it may ask its engines",
            place=str(run.api_key),
        ) from error
    return Server(run, endpoint["url"].rstrip("/"), endpoint["model"], key)


def _nobody(run: RunDir) -> NotFoundError:
    snapshot = take_snapshot(run, JobWatcher().facts_of([run]))
    if not any(name.startswith(Role.ROUTER.value) for name in snapshot.processes):
        why = f"its phase {snapshot.phase} has no engines" if snapshot.phase else "it has not started yet"
    else:
        why = "its router is not up"
    return NotFoundError(
        f"nothing of {snapshot.name} serves: it is {snapshot.state.value}, {why}",
        mend=f"primerl-hpc status {snapshot.name}",
    )


def hop_command(run: RunDir, words: Sequence[str], *, is_terminal: bool) -> list[str] | None:
    """A command that runs ``words`` on the node of a router which listens on its loopback only; None: no need to.

    A run of one node keeps its engines to that node; srun puts one more step into its allocation.
    """
    endpoint = read_endpoint(run, process_name(Role.ROUTER, 0)) or {}
    host = urlparse(endpoint.get("url", "")).hostname
    if host != "127.0.0.1" or endpoint["host"] == socket.gethostname():
        return None
    job = (read_json_or_none(run.state) or {}).get("job_id")
    if job is None:
        return None
    where = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={endpoint['host'].split('.')[0]}"]
    terminal = ["--pty"] if is_terminal else []
    return [
        "srun",
        f"--jobid={job}",
        "--quiet",
        *where,
        *terminal,
        sys.executable,
        "-m",
        "primerl_hpc",
        *words,
    ]


def hop(command: Sequence[str]) -> None:
    """Replace this process. Raises RoleError where there is no srun."""
    try:
        os.execvp(command[0], list(command))
    except FileNotFoundError:
        raise RoleError(
            "this run listens on its own node only, and srun is not here to go there",
            mend=f"on a login node of its cluster: {shlex.join(command)}",
        ) from None
