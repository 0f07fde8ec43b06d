"""The servers of one environment as one: a rollout runs on the server with the fewest rollouts among those that are up.

pool = EnvServerPool([client, …])           # same interface as `EnvServerClient` for running rollouts
episode = await pool.run(task_data, client_config, model, sampling, timeout_s=60)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from primerl_hpc.orchestrator.rollouts.env_client import EnvServerClient

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode


class EnvServerPool:
    """Distributes rollouts over `EnvServerClient`s."""

    def __init__(self, clients: Sequence[EnvServerClient]) -> None:
        self.clients = tuple(clients)
        self._running: Counter[str] = Counter()  # by process

    @property
    def published_endpoints(self) -> list[dict[str, Any]]:
        return [client.published for client in self.clients]

    @property
    def episodes(self) -> dict[str, int]:
        """Number of episodes at each server, by its name."""
        return {name: number for client in self.clients for name, number in client.episodes.items()}

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until all servers are ready. Raises TimeoutWaitingError if one is not ready in time."""
        await asyncio.gather(*(client.wait_ready(timeout_s) for client in self.clients))

    async def run(self, *args: Any, **kwargs: Any) -> WireEpisode:
        """Run a rollout with the arguments of `EnvServerClient.run`; raises the same errors."""
        await self._wait_until_any_is_up()
        server = min(self.clients, key=lambda client: (not client.is_up, self._running[client.process]))
        self._running[server.process] += 1
        try:
            return await server.run(*args, **kwargs)
        finally:
            self._running[server.process] -= 1

    async def _wait_until_any_is_up(self) -> None:
        """Wait until any server is up, so that no rollout is assigned to one of several dead servers.

        If none is up in time, `EnvServerClient.run` raises the error.
        """
        if any(client.is_up for client in self.clients):
            return
        waits = [asyncio.create_task(client.wait_ready(client.restart_timeout_s)) for client in self.clients]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))
