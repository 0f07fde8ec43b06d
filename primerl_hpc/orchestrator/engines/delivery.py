"""How a policy version reaches the engines: each reads it from files, or all receive it together from the trainer.

    delivery = make_delivery(source, version, client, groups, …)
    errors = await delivery.deliver(engines)            # pause → load → resume; one error or None per engine
    delivery.is_refused(errors)                         # True: the version is needed from another source

In the orchestrator, only this module distinguishes the forms of a `Source`.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.orchestrator.engines.admin_client import AdminClient, Engine, EngineError, WeightsRefused
from primerl_hpc.orchestrator.engines.broadcast_groups import BroadcastGroups
from primerl_hpc.transport.weights.sources import BroadcastOffer, DeltaChain, Source, to_body

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retries:
    """Attempts per engine, with ``backoff_s``, twice that, … between them."""

    attempts: int = 3
    backoff_s: float = 0.5


class Delivery(ABC):
    """One policy version on its way to engines."""

    @abstractmethod
    async def deliver(self, engines: Sequence[Engine]) -> list[EngineError | None]:
        """Bring ``engines`` to the version; return the error of each. Engines are resumed also after an error."""

    @abstractmethod
    def is_refused(self, errors: Sequence[EngineError | None]) -> bool:
        """True if the errors of `deliver` call for the version from another source."""


class FileDelivery(Delivery):
    """Every engine reads a folder, a hub model or a chain by itself."""

    def __init__(
        self,
        client: AdminClient,
        source: Path | str | DeltaChain,
        version: int,
        retries: Retries,
        is_current: Callable[[Engine], bool],
    ) -> None:
        """``is_current(engine)``: false once the engine has exited or was restarted."""
        self.client, self.version, self.retries, self.is_current = client, version, retries, is_current
        self.body = to_body(source, version)

    async def deliver(self, engines: Sequence[Engine]) -> list[EngineError | None]:
        return list(await asyncio.gather(*map(self._update, engines)))

    def is_refused(self, errors: Sequence[EngineError | None]) -> bool:
        return any(isinstance(error, WeightsRefused) for error in errors)

    async def _update(self, engine: Engine) -> EngineError | None:
        last_error = EngineError(f"{engine.process} was not updated")
        for attempt in range(self.retries.attempts):
            if attempt:
                await asyncio.sleep(self.retries.backoff_s * 2 ** (attempt - 1))
            if not self.is_current(engine):
                return EngineError(f"{engine.process} died during the update")
            try:
                await self._pause_load_resume(engine)
                return None
            except EngineError as error:
                last_error = error
                logger.warning("%s (attempt %d of %d)", error, attempt + 1, self.retries.attempts)
        return last_error

    async def _pause_load_resume(self, engine: Engine) -> None:
        try:
            await self.client.pause(engine)
            response = await self.client.load(engine, self.body)
            if response.get("version") != self.version:
                raise EngineError(
                    f"{engine.process} reports version {response.get('version')} after the update to {self.version}"
                )
        finally:
            # also after an error: the old weights are intact, and a paused engine would hold its requests forever
            await asyncio.shield(self.client.resume(engine))


class BroadcastDelivery(Delivery):
    """All engines that can be paused receive the version together, in one group with the trainer, once."""

    def __init__(self, client: AdminClient, offer: BroadcastOffer, groups: BroadcastGroups) -> None:
        self.client, self.offer, self.groups = client, offer, groups

    async def deliver(self, engines: Sequence[Engine]) -> list[EngineError | None]:
        errors = dict(zip(engines, await self.client.pause_all(engines), strict=True))
        members = [engine for engine, error in errors.items() if error is None]
        try:
            ranks = self.groups.assign_ranks(self.offer, members)
            if ranks is None:
                expired = WeightsRefused(f"the trainer's offer of v{self.offer.version} has expired")
                errors |= dict.fromkeys(members, expired)
            else:
                bodies = [to_body(assignment, self.offer.version) for assignment in ranks]
                errors |= dict(zip(members, await self.client.load_all(members, bodies), strict=True))
        finally:
            # also after an error: the old weights are intact, and a paused engine would hold its requests forever
            await asyncio.shield(self.client.resume_all(members))
        if any(errors.values()):
            self.groups.discard()
        return list(errors.values())

    def is_refused(self, errors: Sequence[EngineError | None]) -> bool:
        """True unless every engine received it, and there was one: it is not sent a second time."""
        return not errors or any(error is not None for error in errors)


def is_repeatable(source: Source) -> bool:
    """True if an engine that joins later can load the version from ``source``; a broadcast is sent only once."""
    return not isinstance(source, BroadcastOffer)


def make_delivery(
    source: Source,
    version: int,
    client: AdminClient,
    groups: BroadcastGroups,
    retries: Retries,
    is_current: Callable[[Engine], bool],
) -> Delivery:
    """Return the delivery of ``version`` from ``source``."""
    if isinstance(source, BroadcastOffer):
        return BroadcastDelivery(client, source, groups)
    return FileDelivery(client, source, version, retries, is_current)
