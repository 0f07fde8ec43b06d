"""The engines as the orchestrator sees them: who is there, which policy version each serves, and how all get a new one.

    fleet = Fleet(run, ensure_api_key(run), update_timeout_s=recipe.timeouts.weight_update_s,
                  recompute_kv=recipe.inference.recompute_kv_on_update)
    await fleet.wait_ready(num=2, timeout_s=recipe.timeouts.inference_ready_s)      # raises TimeoutWaitingError
    report = await fleet.update(run.weights_step(3), version=3)                     # pause → update → resume, in parallel
    report.updated, report.failed, report.seconds                                   # names, {name: reason}, wall clock
    report = await fleet.reconcile(run.weights_step(3), version=3)                  # only those that are not at 3
    await fleet.versions()                     # {"inference-0": 3, "inference-1": None}; None: does not answer
    await fleet.metrics()                      # {"inference-0": {"kv_usage", "running", "waiting", "generation_tokens",
                                               #   "prompt_tokens", "preemptions"}}
    await fleet.close()

Admin calls go to the engines themselves, never through the router. The list of engines is what
``control/endpoints/inference-*.json`` and ``prefill-*.json`` say at the moment of the call, so an engine that died is gone from it and one
that was restarted is a new member (same name, higher incarnation) which `reconcile` brings to the current version.
An engine that cannot be updated is not trusted: its name goes to ``control/restart_requests/<process>.json`` for the
supervisor, and the router's keeper leaves it out while that request stands. A folder that every engine refuses is the
folder's fault: all are in ``report.failed``, none is restarted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from primerl_hpc.common.errors import RoleError, TimeoutWaitingError
from primerl_hpc.common.long_call import while_published
from primerl_hpc.common.names import Role
from primerl_hpc.common.patience import Patience
from primerl_hpc.common.rundir import RunDir, read_endpoint, read_endpoints, request_restart
from primerl_hpc.orchestrator.groups import Groups
from primerl_hpc.transport.weights import Announcement, Source, to_body

logger = logging.getLogger(__name__)

LOOK_S = 1.0

# an engine's metric, of one label or of all → ours; summed over an engine's data-parallel ranks, except shares, of which the largest counts
_METRICS = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_preemptions_total": "preemptions",
    'primerl_prefill_total{by="other"}': "prefill_other",
    'primerl_prefill_total{by="self"}': "prefill_self",
}
_SHARES = frozenset({"kv_usage"})


class EngineError(RoleError):
    """An engine refused an admin call or did not answer it."""


class FolderRefused(EngineError):
    """An engine looked at the weights folder and refused it; its old weights serve on."""


@dataclass(frozen=True)
class Engine:
    """One published engine. A restart makes a different one: the incarnation is part of its identity."""

    process: str
    url: str
    attempt: int
    incarnation: int


@dataclass(frozen=True)
class UpdateReport:
    version: int
    updated: tuple[str, ...] = ()
    """Processes that serve ``version`` now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Processes that could not be updated, with the reason; a restart of each was requested."""
    is_refused: bool = False
    """An engine looked at the weights and refused them."""
    seconds: float = 0.0

    @property
    def is_served(self) -> bool:
        """At least one engine that answers requests serves the version; one that only prefills does not."""
        return any(process.startswith(f"{Role.INFERENCE.value}-") for process in self.updated)


class Fleet:
    def __init__(
        self,
        run_dir: RunDir,
        api_key: str,
        *,
        update_timeout_s: float = 720.0,
        request_timeout_s: float = 30.0,
        attempts: int = 3,
        backoff_s: float = 0.5,
        recompute_kv: bool = False,
        workers_per_engine: int = 1,
    ) -> None:
        """``attempts`` per engine and update, with ``backoff_s``, twice that, … between them."""
        self.groups = Groups(run_dir, workers_per_engine)
        self.run_dir, self.attempts, self.backoff_s = run_dir, attempts, backoff_s
        self.update_timeout_s, self.request_timeout_s = update_timeout_s, request_timeout_s
        self.recompute_kv = recompute_kv
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=request_timeout_s,
            # engines that receive a version together all wait for the last one
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._members: dict[Role, dict[str, Engine]] = {}
        self._patience = Patience("the engines")
        self._lock = asyncio.Lock()  # two updates of one engine at a time would pause it twice

    # -- who is there -------------------------------------------------------------------------------------------
    def policy(self) -> dict[str, Engine]:
        """Published engines that have the policy's weights, those that only prefill too."""
        return self.members(Role.INFERENCE) | self.members(Role.PREFILL)

    def members(self, role: Role = Role.INFERENCE) -> dict[str, Engine]:
        """Published engines of a role by process name, as the files say now; as they said before, while they cannot be read."""
        with self._patience:
            self._members[role] = {
                name: _engine_of(name, end) for name, end in read_endpoints(self.run_dir, role.value).items()
            }
        return self._members.get(role, {})

    async def wait_ready(self, num: int, timeout_s: float, *, poll_s: float = 0.2) -> dict[str, int]:
        """Versions by process once ``num`` engines are published and answer.

        Raises TimeoutWaitingError saying how many there were.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            versions = {name: v for name, v in (await self.versions()).items() if v is not None}
            if len(versions) >= num:
                return versions
            if time.monotonic() >= deadline:
                raise TimeoutWaitingError(
                    f"{len(versions)} of {num} engines were ready after {timeout_s:.0f} s",
                    mend="see logs/latest/inference/*.log",
                )
            await asyncio.sleep(poll_s)

    async def versions(self) -> dict[str, int | None]:
        """Policy version that each member serves; None for one that does not answer."""
        members = self.policy()
        states = await asyncio.gather(*(self._state_or_none(engine) for engine in members.values()))
        return {name: state and state["version"] for name, state in zip(members, states, strict=True)}

    # -- new weights -----------------------------------------------------------------------------------------------
    async def update(self, source: Source, version: int) -> UpdateReport:
        """Bring every member to ``version`` from ``source``, an HF folder or a chain: pause → update → resume, engines in parallel.

        Never raises for an engine's fault: those are in ``report.failed``. Requests in flight survive.
        """
        async with self._lock:
            return await self._update(list(self.policy().values()), source, version)

    async def reconcile(self, source: Source, version: int) -> UpdateReport:
        """Bring those members to ``version`` that serve another one or were left paused; cheap when all is well.

        Call it while waiting for the next version: a restarted engine joins here.
        """
        async with self._lock:
            members = list(self.policy().values())
            states = await asyncio.gather(*(self._state_or_none(engine) for engine in members))
            laggards, current = [], []
            for engine, state in zip(members, states, strict=True):
                if state is None:
                    continue  # dead or starting: the supervisor's business; it comes back as a new member
                is_current = state["version"] == version and not state["paused"]
                (current if is_current else laggards).append(engine)
            if isinstance(source, Announcement) and laggards:  # what was sent is gone: a folder must come
                return UpdateReport(version, tuple(engine.process for engine in current), is_refused=True)
            report = await self._update(laggards, source, version, is_folder_good=bool(current))
            updated = tuple(sorted([*report.updated, *(engine.process for engine in current)]))
            return replace(report, updated=updated)

    async def _update(
        self, engines: list[Engine], source: Source, version: int, *, is_folder_good: bool = False
    ) -> UpdateReport:
        """``is_folder_good``: some engine serves it already, so one that refuses it is itself at fault."""
        start = time.monotonic()
        if isinstance(source, Announcement):
            faults = await self._broadcast(engines, source)
        else:
            faults = await asyncio.gather(
                *(self._update_engine(engine, source, version) for engine in engines)
            )
        outcomes = list(zip(engines, faults, strict=True))
        updated = tuple(engine.process for engine, fault in outcomes if fault is None)
        for engine, fault in outcomes:
            is_own_fault = updated or is_folder_good or not isinstance(fault, FolderRefused)
            if fault is not None and is_own_fault and self._is_same(engine):
                self.request_restart(engine, str(fault))
        failed = {engine.process: str(fault) for engine, fault in outcomes if fault is not None}
        is_refused = any(isinstance(fault, FolderRefused) for fault in faults)
        if isinstance(source, Announcement):  # nothing is left of it for another try
            is_refused = bool(failed) or not updated
        return UpdateReport(version, updated, failed, is_refused, time.monotonic() - start)

    async def _broadcast(self, engines: list[Engine], announcement: Announcement) -> list[EngineError | None]:
        """All engines that can be paused receive the version in one group with the trainer, once and together."""
        frozen = {"clear_cache": self.recompute_kv}
        paused = await self._ask(engines, "/pause", frozen, self.request_timeout_s)
        faults = dict(zip(engines, paused, strict=True))
        members = [engine for engine, fault in faults.items() if fault is None]
        try:
            seats = self.groups.seat(announcement, members)
            if seats is None:
                too_late = FolderRefused(f"the trainer sends v{announcement.version} no more")
                faults |= dict.fromkeys(members, too_late)
            else:
                bodies = [to_body(seat, announcement.version) for seat in seats]
                loaded = await self._ask(members, "/update_weights", bodies, self.update_timeout_s)
                faults |= dict(zip(members, loaded, strict=True))
        finally:
            # also after a fault: the old weights are whole, and a paused engine would hold its requests for ever
            await asyncio.shield(self._ask(members, "/resume", {}, self.request_timeout_s))
        if any(faults.values()):
            self.groups.forget()
        return list(faults.values())

    async def _ask(
        self, engines: list[Engine], route: str, body: dict[str, Any] | list[dict[str, Any]], timeout_s: float
    ) -> list[EngineError | None]:
        """Post to all at once, the same or one body each; what was wrong, in their order."""
        bodies = body if isinstance(body, list) else [body] * len(engines)

        async def post(engine: Engine, body: dict[str, Any]) -> EngineError | None:
            try:
                await self._post(engine, route, body, timeout_s)
            except EngineError as error:
                logger.warning("%s", error)
                return error
            return None

        return list(await asyncio.gather(*map(post, engines, bodies)))

    async def _update_engine(self, engine: Engine, source: Source, version: int) -> EngineError | None:
        """None, or why the engine is not at ``version``."""
        fault = EngineError(f"{engine.process} was never asked")
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(self.backoff_s * 2 ** (attempt - 1))
            if not self._is_same(engine):
                return EngineError(f"{engine.process} died during the update")
            try:
                await self._pause_update_resume(engine, source, version)
                return None
            except EngineError as error:
                fault = error
                logger.warning("%s (attempt %d of %d)", fault, attempt + 1, self.attempts)
        return fault

    async def _pause_update_resume(self, engine: Engine, source: Source, version: int) -> None:
        try:
            await self._post(engine, "/pause", {"clear_cache": self.recompute_kv}, self.request_timeout_s)
            body = to_body(source, version)
            answer = await self._post(engine, "/update_weights", body, self.update_timeout_s)
            if answer.get("version") != version:
                raise EngineError(
                    f"{engine.process} says version {answer.get('version')} after version {version}"
                )
        finally:
            # also after a fault: the old weights are whole, and a paused engine would hold its requests for ever
            await asyncio.shield(self._post(engine, "/resume", {}, self.request_timeout_s))

    def request_restart(self, engine: Engine, reason: str) -> None:
        """Ask the supervisor for a new incarnation of this engine; the router leaves it out meanwhile."""
        request_restart(self.run_dir, engine.process, engine.incarnation, reason)

    # -- looking ---------------------------------------------------------------------------------------------------
    async def metrics(self, role: Role = Role.INFERENCE) -> dict[str, dict[str, float]]:
        """Gauges and counters of each member that answers (see the module's example for the names)."""
        members = self.members(role)
        texts = await asyncio.gather(*(self._metrics_text(engine) for engine in members.values()))
        return {
            name: parse_metrics(text) for name, text in zip(members, texts, strict=True) if text is not None
        }

    async def close(self) -> None:
        await self._client.aclose()

    def _is_same(self, engine: Engine) -> bool:
        return self.policy().get(engine.process) == engine

    def _is_published(self, engine: Engine) -> bool:
        """As its file says now; while that cannot be read, it is."""
        try:
            endpoint = read_endpoint(self.run_dir, engine.process)
        except OSError:
            return True
        return endpoint is not None and _engine_of(engine.process, endpoint) == engine

    async def _state_or_none(self, engine: Engine) -> dict[str, Any] | None:
        try:
            answer = await self._client.get(f"{engine.url}/primerl/state")
            return answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None

    async def _metrics_text(self, engine: Engine) -> str | None:
        try:
            answer = await self._client.get(f"{engine.url}/metrics")
            return answer.text if answer.status_code == 200 else None
        except httpx.HTTPError:
            return None

    async def _post(
        self, engine: Engine, route: str, body: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        try:
            answer = await while_published(
                self._client.post(f"{engine.url}{route}", json=body, timeout=timeout_s),
                lambda: asyncio.to_thread(self._is_published, engine),
                look_s=LOOK_S,
            )
            content = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EngineError(
                f"{engine.process} did not answer {route}: {type(error).__name__} {error}"
            ) from error
        if answer.status_code != 200:
            kind = FolderRefused if answer.status_code == 422 else EngineError
            raise kind(f"{engine.process} refused {route}: {content.get('error', content)}")
        return content


def _engine_of(process: str, endpoint: dict[str, Any]) -> Engine:
    return Engine(process, endpoint["url"], endpoint["attempt"], endpoint["incarnation"])


def parse_metrics(text: str) -> dict[str, float]:
    """Our metric names from Prometheus' text format; a metric that is not there is left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        key = line.rsplit(" ", 1)[0]
        name = _METRICS.get(key) or _METRICS.get(key.split("{", 1)[0])
        if name is None:
            continue
        value = float(line.rsplit(" ", 1)[1])
        found[name] = max(found.get(name, 0.0), value) if name in _SHARES else found.get(name, 0.0) + value
    return found
