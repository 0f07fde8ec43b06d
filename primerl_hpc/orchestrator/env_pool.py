"""The servers of one environment as one: a rollout goes to the one with the fewest, of those that are up.

pool = EnvServerPool([client, …])           # has what runs rollouts of an `EnvServerClient`
episode = await pool.run(task_data, client_config, model, sampling, timeout_s=60)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from primerl_hpc.orchestrator.env_client import EnvServerClient

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode


class EnvServerPool:
    def __init__(self, clients: Sequence[EnvServerClient]) -> None:
        self.clients = tuple(clients)
        self._running: Counter[str] = Counter()  # by process

    async def wait_ready(self, timeout_s: float) -> None:
        """Raises TimeoutWaitingError when one of them is not ready in time."""
        await asyncio.gather(*(client.wait_ready(timeout_s) for client in self.clients))

    async def run(self, *rollout: Any, **more: Any) -> WireEpisode:
        """As `EnvServerClient.run`: it takes what that takes, and raises what that raises."""
        await self._until_one_is_up()
        server = min(self.clients, key=lambda each: (not each.is_up, self._running[each.process]))
        self._running[server.process] += 1
        try:
            return await server.run(*rollout, **more)
        finally:
            self._running[server.process] -= 1

    async def _until_one_is_up(self) -> None:
        """Nobody is bound to one of several dead servers. Where none comes in time the rollout finds out by itself."""
        if any(client.is_up for client in self.clients):
            return
        first = [asyncio.create_task(each.wait_ready(each.restart_timeout_s)) for each in self.clients]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in first:
                each.cancel()
            await asyncio.gather(*first, return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self.clients))
