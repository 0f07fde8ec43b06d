"""All engines of a run: which are published, which policy version each serves, and how all get a new one.

    fleet = Fleet(run, run_keys(run), FleetOptions(update_timeout_s=recipe.timeouts.weight_update_s))
    await fleet.wait_ready(num=2, timeout_s=recipe.timeouts.inference_ready_s)      # raises TimeoutWaitingError
    report = await fleet.update(run.weights_step(3), version=3)                     # pause → load → resume, in parallel
    report.updated, report.failed, report.seconds                                   # names, {name: reason}, wall clock
    report = await fleet.reconcile(run.weights_step(3), version=3)                  # only engines that are not at 3
    await fleet.versions()                     # {"inference-0": 3, "inference-1": None}; None: does not respond
    await fleet.metrics()                      # {"inference-0": {"kv_usage", "running", "waiting", "generation_tokens",
                                               #   "prompt_tokens", "preemptions"}}
    await fleet.close()

The members are those named by ``control/endpoints/inference-*.json`` and ``prefill-*.json`` at the time of the call. An
engine that died is not among them, and a restarted one is a new member (same name, higher incarnation) that `reconcile`
brings to the current version. If an engine cannot be updated, its restart is requested in
``control/restart_requests/<process>.json``; the supervisor carries it out, and the router does not use the engine while
the request exists. If every engine refuses the weights, the weights are at fault: all engines are in ``report.failed``,
and none is restarted.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from primerl_hpc.common.errors import TimeoutWaitingError
from primerl_hpc.common.names import Role
from primerl_hpc.common.waiting import Polling, TransientIOErrors
from primerl_hpc.orchestrator.engines.admin_client import AdminClient, Engine, WeightsRefused
from primerl_hpc.orchestrator.engines.broadcast_groups import BroadcastGroups
from primerl_hpc.orchestrator.engines.delivery import Delivery, Retries, is_repeatable, make_delivery
from primerl_hpc.run.access.keys import RunKeys
from primerl_hpc.run.endpoints import EndpointWatch, request_restart
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.sources import Source

# Prometheus metric → our name, in which {label} is replaced by the value of that label. Values are summed over an
# engine's data-parallel ranks, except shares, of which the largest counts.
METRICS = {
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_preemptions_total": "preemptions",
    "primerl_prefill_total": "prefill_{by}",
}
_NAMES = tuple(METRICS)
_SHARES = frozenset({"kv_usage"})


@dataclass(frozen=True)
class UpdateReport:
    """Result of an update or reconciliation."""

    version: int
    updated: tuple[str, ...] = ()
    """Processes that serve ``version`` now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Processes that could not be updated, with the reason."""
    is_refused: bool = False
    """True if the version is needed from another source: engines refused it, or it is not sent again."""
    seconds: float = 0.0

    @property
    def is_served(self) -> bool:
        """True if an engine that answers requests serves the version; one that only prefills does not."""
        return any(process.startswith(f"{Role.INFERENCE.value}-") for process in self.updated)


@dataclass(frozen=True)
class FleetOptions:
    """How updates are sent."""

    update_timeout_s: float = 720.0
    request_timeout_s: float = 30.0
    attempts: int = 3
    """Per engine and update, with ``backoff_s``, twice that, … between them."""
    backoff_s: float = 0.5
    recompute_kv: bool = False
    workers_per_engine: int = 1


LOOK_S, IDLE_LOOK_S = 2.5, 10.0
"""Interval between listings of the endpoints while none changes: at first, and in a long wait."""


class Fleet:
    def __init__(
        self,
        run_dir: RunDir,
        keys: RunKeys,
        options: FleetOptions | None = None,
    ) -> None:
        options = options or FleetOptions()
        self.run_dir, self.retries = run_dir, Retries(options.attempts, options.backoff_s)
        self.groups = BroadcastGroups(run_dir, options.workers_per_engine)
        self.client = AdminClient(
            run_dir,
            keys,
            update_timeout_s=options.update_timeout_s,
            request_timeout_s=options.request_timeout_s,
            recompute_kv=options.recompute_kv,
        )
        # changes come in series: shortly after one, each look reads the files
        self.endpoints = EndpointWatch(run_dir, busy_s=0.0, calm_s=LOOK_S, idle_s=IDLE_LOOK_S)
        self._members: dict[Role, dict[str, Engine]] = {}
        self._patience = TransientIOErrors("the engines")
        self._lock = asyncio.Lock()  # two concurrent updates would pause an engine twice

    # -- members -----------------------------------------------------------------------------------
    def policy(self) -> dict[str, Engine]:
        """Return the published engines that have the policy's weights, including those that only prefill."""
        return self.members(Role.INFERENCE) | self.members(Role.PREFILL)

    def members(self, role: Role = Role.INFERENCE) -> dict[str, Engine]:
        """Return the published engines of a role by process name; the last known ones after a filesystem error.

        Coroutines call it in a thread, because it waits for a filesystem that does not respond.
        """
        with self._patience:
            self._members[role] = {
                name: Engine.from_endpoint(name, endpoint)
                for name, endpoint in self.endpoints.of_role(role.value).items()
            }
        return self._members.get(role, {})

    async def wait_ready(self, num: int, timeout_s: float, *, poll_s: float = 0.2) -> dict[str, int]:
        """Wait until ``num`` engines are published and respond; return their versions by process.

        Raises TimeoutWaitingError with the number of engines that were ready.
        """
        versions: dict[str, int] = {}
        async for _ in Polling(timeout_s, poll_s):
            versions = {name: v for name, v in (await self.versions()).items() if v is not None}
            if len(versions) >= num:
                return versions
        raise TimeoutWaitingError(
            f"{len(versions)} of {num} engines were ready after {timeout_s:.0f} s",
            hint="see logs/latest/inference/*.log",
        )

    async def versions(self) -> dict[str, int | None]:
        """Return the policy version that each member serves; None for one that does not respond."""
        members = await asyncio.to_thread(self.policy)
        states = await asyncio.gather(*(self.client.state_or_none(engine) for engine in members.values()))
        return {
            name: state["version"] if state else None for name, state in zip(members, states, strict=True)
        }

    # -- new weights -------------------------------------------------------------------------------
    async def update(self, source: Source, version: int) -> UpdateReport:
        """Bring every member to ``version`` from ``source``: pause → load → resume, engines in parallel.

        Engine failures are not raised: they are in ``report.failed``. Requests in flight are kept.
        """
        async with self._lock:
            self.endpoints.hurry()
            members = list((await asyncio.to_thread(self.policy)).values())
            return await self._update(members, self._delivery(source, version), version)

    async def reconcile(self, source: Source, version: int) -> UpdateReport:
        """Bring the members to ``version`` that serve another one or were left paused; cheap if there are none.

        Call it while waiting for the next version: restarted engines join here.
        """
        async with self._lock:
            members = list((await asyncio.to_thread(self.policy)).values())
            states = await asyncio.gather(*(self.client.state_or_none(engine) for engine in members))
            laggards, current = [], []
            for engine, state in zip(members, states, strict=True):
                if state is None:
                    continue  # dead or starting: the supervisor restarts it, and it returns as a new member
                is_current = state["version"] == version and not state["paused"]
                (current if is_current else laggards).append(engine)
            names = tuple(engine.process for engine in current)
            if not is_repeatable(source):  # laggards need the version from another source
                return UpdateReport(version, names, is_refused=bool(laggards))
            report = await self._update(
                laggards, self._delivery(source, version), version, is_known_good=bool(current)
            )
            return replace(report, updated=tuple(sorted([*report.updated, *names])))

    async def _update(
        self, engines: list[Engine], delivery: Delivery, version: int, *, is_known_good: bool = False
    ) -> UpdateReport:
        """``is_known_good``: some engine serves the version already, so one that refuses it is itself at fault."""
        start = time.monotonic()
        errors = await delivery.deliver(engines)
        outcomes = list(zip(engines, errors, strict=True))
        updated = tuple(engine.process for engine, error in outcomes if error is None)
        for engine, error in outcomes:
            is_own_fault = updated or is_known_good or not isinstance(error, WeightsRefused)
            if error is not None and is_own_fault and self._is_current(engine):
                self.request_restart(engine, str(error))
        return UpdateReport(
            version,
            updated,
            failed={engine.process: str(error) for engine, error in outcomes if error is not None},
            is_refused=delivery.is_refused(errors),
            seconds=time.monotonic() - start,
        )

    def _delivery(self, source: Source, version: int) -> Delivery:
        return make_delivery(source, version, self.client, self.groups, self.retries, self._is_current)

    def _is_current(self, engine: Engine) -> bool:
        self.endpoints.hurry()
        return self.policy().get(engine.process) == engine

    def request_restart(self, engine: Engine, reason: str) -> None:
        """Request a new incarnation of this engine from the supervisor; the router does not use it until then."""
        request_restart(self.run_dir, engine.process, engine.incarnation, reason)

    # -- metrics -----------------------------------------------------------------------------------
    async def metrics(self, role: Role = Role.INFERENCE) -> dict[str, dict[str, float]]:
        """Return gauges and counters of each member that responds (names: see the module's example)."""
        members = await asyncio.to_thread(self.members, role)
        texts = await asyncio.gather(
            *(self.client.metrics_text_or_none(engine) for engine in members.values())
        )
        return {
            name: parse_metrics(text) for name, text in zip(members, texts, strict=True) if text is not None
        }

    async def close(self) -> None:
        await self.client.close()


def parse_metrics(text: str) -> dict[str, float]:
    """Return our metrics from Prometheus' text format, without those that are missing there."""
    # parsing all of vLLM's lines takes 48 times as long (docs/decisions/0015-layout.md)
    lines = [line for line in text.splitlines() if line.startswith(_NAMES)]
    metrics: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            if sample.name not in METRICS:
                continue  # a longer name
            name = METRICS[sample.name].format(**sample.labels)
            before = metrics.get(name, 0.0)
            metrics[name] = max(before, sample.value) if name in _SHARES else before + sample.value
    return metrics
