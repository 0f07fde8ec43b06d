"""Admin calls to single engines: pause, load weights, resume, state, metrics.

The calls go to the engines themselves, never through the router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from primerl_hpc.common.errors import RoleError
from primerl_hpc.run.access.keys import RunKeys
from primerl_hpc.run.calls import while_published
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.rundir import RunDir

logger = logging.getLogger(__name__)

PUBLISHED_POLL_S = 1.0


class EngineError(RoleError):
    """An engine refused an admin call or did not respond to it."""


class WeightsRefused(EngineError):
    """An engine checked the weights and refused them; it still serves its old weights."""


@dataclass(frozen=True)
class Engine:
    """One published engine. A restarted engine is another one: the incarnation is part of its identity."""

    process: str
    url: str
    attempt: int
    incarnation: int

    @classmethod
    def from_endpoint(cls, process: str, endpoint: dict[str, Any]) -> Engine:
        return cls(process, endpoint["url"], endpoint["attempt"], endpoint["incarnation"])


class AdminClient:
    def __init__(
        self,
        run_dir: RunDir,
        keys: RunKeys,
        *,
        update_timeout_s: float,
        request_timeout_s: float,
        recompute_kv: bool,
    ) -> None:
        """``recompute_kv``: engines drop their KV cache when they are paused for new weights."""
        self.run_dir, self.recompute_kv = run_dir, recompute_kv
        self.update_timeout_s, self.request_timeout_s = update_timeout_s, request_timeout_s
        # engines that receive a version together all wait for the last one
        limits = httpx.Limits(max_connections=None)
        self._client = keys.async_client(timeout=request_timeout_s, limits=limits)

    async def pause(self, engine: Engine) -> None:
        """Pause generation; requests in flight are kept. Raises EngineError."""
        await self._post(engine, "/pause", {"clear_cache": self.recompute_kv}, self.request_timeout_s)

    async def resume(self, engine: Engine) -> None:
        """Resume generation. Raises EngineError."""
        await self._post(engine, "/resume", {}, self.request_timeout_s)

    async def sleep(self, engine: Engine) -> None:
        """Freeze requests and free the accelerators' memory. Raises EngineError."""
        await self._post(engine, "/sleep", {}, self.update_timeout_s)

    async def load(self, engine: Engine, body: dict[str, Any]) -> dict[str, Any]:
        """Load weights; return the engine's response. Raises EngineError, WeightsRefused for bad weights."""
        return await self._post(engine, "/update_weights", body, self.update_timeout_s)

    async def pause_all(self, engines: Sequence[Engine]) -> list[EngineError | None]:
        """Pause all engines in parallel; return the error of each."""
        return list(await asyncio.gather(*(_error_of(self.pause(engine)) for engine in engines)))

    async def resume_all(self, engines: Sequence[Engine]) -> list[EngineError | None]:
        """Resume all engines in parallel; return the error of each."""
        return list(await asyncio.gather(*(_error_of(self.resume(engine)) for engine in engines)))

    async def load_all(
        self, engines: Sequence[Engine], bodies: Sequence[dict[str, Any]]
    ) -> list[EngineError | None]:
        """Load weights into all engines in parallel, with one body for each; return the error of each."""
        loads = (self.load(engine, body) for engine, body in zip(engines, bodies, strict=True))
        return list(await asyncio.gather(*map(_error_of, loads)))

    async def state_or_none(self, engine: Engine) -> dict[str, Any] | None:
        """Return the engine's state; None if it does not respond."""
        try:
            response = await self._client.get(f"{engine.url}/primerl/state")
            return response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    async def metrics_text_or_none(self, engine: Engine) -> str | None:
        """Return the engine's metrics in Prometheus' text format; None if it does not respond."""
        try:
            response = await self._client.get(f"{engine.url}/metrics")
            return response.text if response.status_code == 200 else None
        except httpx.HTTPError:
            return None

    async def close(self) -> None:
        await self._client.aclose()

    async def _post(
        self, engine: Engine, route: str, body: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        try:
            response = await while_published(
                self._client.post(f"{engine.url}{route}", json=body, timeout=timeout_s),
                lambda: asyncio.to_thread(self._is_published, engine),
                poll_s=PUBLISHED_POLL_S,
            )
            content = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                f"{engine.process} did not respond to {route}: {type(error).__name__} {error}"
            ) from error
        if response.status_code != 200:
            kind = WeightsRefused if response.status_code == 422 else EngineError
            raise kind(f"{engine.process} refused {route}: {content.get('error', content)}")
        return content

    def _is_published(self, engine: Engine) -> bool:
        """True if the endpoint file still names this engine (or cannot be read)."""
        try:
            endpoint = read_endpoint(self.run_dir, engine.process)
        except OSError:
            return True
        return endpoint is not None and Engine.from_endpoint(engine.process, endpoint) == engine


async def _error_of(call: Awaitable[object]) -> EngineError | None:
    """Await an admin call; return and log its EngineError, None if it succeeded."""
    try:
        await call
    except EngineError as error:
        logger.warning("%s", error)
        return error
    return None
