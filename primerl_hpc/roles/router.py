"""The router and its keeper: ``python -m primerl_hpc.roles.router RUN_DIR PHASE router-0``.

vllm-router does the work; this process starts it, publishes it, and keeps its list of workers equal to the engines that
are published and healthy. Data requests pass through the router; admin calls never do, because it would hand one to an
arbitrary engine: callers go to the engines themselves.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.listen import bind_listener, free_port, listen_host
from primerl_hpc.common.names import Role
from primerl_hpc.common.patience import Patience
from primerl_hpc.common.rundir import RunDir, ensure_api_key, publish_endpoint, read_endpoints
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.roles.start import RoleProcess, start_role

POLL_S = 0.25
_CALL_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 3.0
_POLICIES = {"prefix": "cache_aware", "session": "consistent_hash"}  # vllm-router's names


@dataclass(frozen=True)
class Membership:
    """What to change so that the router's workers are the engines. Pure."""

    add: tuple[str, ...]
    remove: tuple[str, ...]


def plan_membership(workers: Iterable[str], healthy: Iterable[str], published: Iterable[str]) -> Membership:
    """URLs to add and to remove.

    An engine is added when it is healthy, and removed when it is no longer published: one that is only slow for a
    moment stays, for the router itself sends nothing to a worker that fails its health checks.
    """
    workers, published = set(workers), set(published)
    return Membership(
        add=tuple(sorted((set(healthy) & published) - workers)), remove=tuple(sorted(workers - published))
    )


def published_engines(run: RunDir) -> list[str]:
    """URLs of the engines that may serve: published, and no restart of them was asked for."""
    return [
        endpoint["url"]
        for process, endpoint in read_endpoints(run, Role.INFERENCE.value).items()
        if not run.restart_request(process).exists()
    ]


def main(argv: list[str]) -> int:
    return start_role("router", argv, serve)


def serve(role: RoleProcess) -> None:
    """Until SIGTERM. Raises RoleError when the router ends by itself or does not come up."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    host = listen_host(role.plan.num_hosts)
    with contextlib.closing(bind_listener(host, role.run.last_port(role.process))) as listener:
        port = listener.getsockname()[1]
    command = router_command(host, port, free_port(host), role.recipe)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        keeper = Keeper(role, f"http://{host}:{port}", child)
        keeper.wait_until_it_answers(stop)
        if not stop.is_set():
            publish_endpoint(role.run, role.process, keeper.url, model=role.recipe.policy_name)
            role.logger.info("router at %s", keeper.url)
        while not stop.wait(POLL_S):
            keeper.check_child()
            keeper.reconcile()
    finally:
        _end(child)


def router_command(host: str, port: int, metrics_port: int, recipe: Recipe) -> list[str]:
    """With ``layout.inference.routing: prefix`` engines differ by about a group before prompts give way to load.

    A group has no id that could travel: verifiers sends each rollout's own (X-Session-ID), and another header would
    need a client of the group's own (70 ms, 0.8 MiB, never closed). So its rollouts meet by their prompt.
    """
    options: dict[str, Any] = {
        "host": host,
        "port": port,
        "policy": _POLICIES[recipe.layout.inference.routing],
        "balance-abs-threshold": recipe.rollouts.group_size,
        "balance-rel-threshold": 1.1,
        "max-tree-size": 1 << 24,  # characters of prompts that it remembers of an engine, 3 bytes each
        "prometheus-host": host,
        "prometheus-port": metrics_port,
        "health-check-interval-secs": 2,
        "health-failure-threshold": 2,
        "health-check-timeout-secs": 20,  # of a busy engine; one that answers nobody is the supervisor's
        # An engine that fails everything at once gets nothing for a while. By default ten failures, which are two requests
        # and the router's own retries, would close it for a minute: with a single engine, to everybody.
        "cb-failure-threshold": 64,
        "cb-success-threshold": 1,
        "cb-timeout-duration-secs": 5,
        "worker-startup-check-interval": 1,
        "request-timeout-secs": 86400,  # a rollout's own timeout ends it
        "log-level": "error",  # it knows no "warning" and would print five lines per request
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", "vllm_router.launch_router", *flags]


class Keeper:
    """Talks to one running router."""

    def __init__(self, role: RoleProcess, url: str, child: subprocess.Popen[bytes]) -> None:
        self.role, self.url, self.child = role, url, child
        self.patience = Patience("the published engines")
        key = ensure_api_key(role.run)
        self.client = httpx.Client(
            timeout=_CALL_TIMEOUT_S, trust_env=False, headers={"Authorization": f"Bearer {key}"}
        )

    def check_child(self) -> None:
        if (code := self.child.poll()) is not None:
            raise RoleError(f"vllm-router ended with code {code}", mend="see the lines above")

    def wait_until_it_answers(self, stop: threading.Event) -> None:
        """Ours and not a stranger's: the child must live while its port answers."""
        for _ in range(int(_START_TIMEOUT_S / POLL_S)):
            self.check_child()
            with contextlib.suppress(httpx.TransportError):
                self.client.get(f"{self.url}/list_workers").raise_for_status()
                return
            if stop.wait(POLL_S):
                return
        raise RoleError(f"vllm-router did not answer at {self.url} in {_START_TIMEOUT_S:.0f} s")

    def workers(self) -> list[str]:
        answer = self.client.get(f"{self.url}/list_workers")
        answer.raise_for_status()
        return list(answer.json()["urls"])

    def reconcile(self) -> None:
        """One look at the endpoints and the changes that follow. What fails now is tried at the next look."""
        try:
            with self.patience:
                published = published_engines(self.role.run)
                workers = self.workers()
                healthy = [url for url in published if url not in workers and self._may_serve(url)]
                change = plan_membership(workers, healthy, published)
                for url in change.remove:
                    self._call("remove_worker", url)
                for url in change.add:
                    self._call("add_worker", url)
        except httpx.HTTPError as error:
            self.role.logger.warning("router membership: %s: %s", type(error).__name__, error)

    def _may_serve(self, url: str) -> bool:
        """Healthy, and at the live policy version: one that joins late is brought there before its first request."""
        live = read_json_or_none(self.role.run.live_version)
        try:
            if self.client.get(f"{url}/health").status_code != 200:
                return False
            if live is None:
                return True
            answer = self.client.get(f"{url}/primerl/state")
            return answer.status_code == 200 and answer.json()["version"] == live["version"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False  # a stranger at its address may answer anything

    def _call(self, action: str, url: str) -> None:
        self.client.post(f"{self.url}/{action}", params={"url": url}).raise_for_status()
        self.role.logger.info("%s %s", action, url)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
