"""Starts one engine: binds its port, picks the weights to start from, serves, and publishes itself when it works.

    run_engine(run, plan, phase, "inference-0")        # returns after SIGTERM, raises RoleError when the engine dies

The port is bound here and the open socket handed to vLLM, so nobody can take it in between; a restarted engine asks
for its old port first, so that its URL stays the same. The endpoint is published only after the engine has generated a
token: a listening port is not readiness.

An engine over several nodes is this process on each of them. The first one decides the weights for all, serves and
publishes; the others are headless. A node that ends takes the whole engine with it (srun's ``--wait``).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, DataError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.leases import HeldLease
from primerl_hpc.common.listen import bind_listener, free_ports, listen_host
from primerl_hpc.common.names import Role
from primerl_hpc.common.rendezvous import meet
from primerl_hpc.common.rundir import RunDir, ensure_api_key, publish_endpoint
from primerl_hpc.inference import routes
from primerl_hpc.inference.checkpoint import read_headers
from primerl_hpc.inference.engine_args import engine_args, node_args
from primerl_hpc.plan.types import PhasePlan, Plan
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.transport.weights_filesystem import MANIFEST

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartWeights:
    path: str
    version: int
    lease: HeldLease | None = None
    """Held while loading, so that the trainer does not delete the folder."""
    adapter: Path | None = None
    """What is loaded on top of ``path``, once the engine runs."""
    manifest: Any = None
    """Of a policy version, as it was when it was chosen."""

    def check(self) -> None:
        """Raises RoleError when a recovered trainer wrote the version again while it was loaded, file by file."""
        if self.manifest is not None and read_json_or_none(Path(self.path) / MANIFEST) != self.manifest:
            raise RoleError("the weights were replaced while the engine loaded them", place=self.path)

    def release(self) -> None:
        if self.lease is not None:
            self.lease.release()


def choose_start_weights(run: RunDir, base: str, reader: str, *, has_adapters: bool = False) -> StartWeights:
    """The newest whole policy version, else the base model as version 0. A damaged folder is passed over aloud.

    Adapters go on top of the base model; before the first of them there is no version (-1).
    """
    for version in reversed(run.stable_weights()):
        folder = run.weights_step(version)
        lease = run.lease(folder, reader)
        manifest = read_json_or_none(folder / MANIFEST)
        try:
            read_headers(folder)
            held = HeldLease(lease)
            if has_adapters:
                return StartWeights(base, version, held, folder)
            return StartWeights(str(folder), version, held, manifest=manifest)
        except (DataError, OSError) as error:
            lease.unlink(missing_ok=True)
            logger.warning("policy version %d cannot be served: %s", version, error)
    return StartWeights(base, -1 if has_adapters else 0)


def run_engine(run: RunDir, plan: Plan, phase: PhasePlan, process: str, *, is_frozen: bool = False) -> None:
    """Serve until SIGTERM, a frozen model from the phase's initial weights, the policy from its newest ones.

    Raises ConfigError for arguments vLLM refuses, RoleError when the engine dies.
    """
    num_nodes, node_rank = len(phase.process(process).nodes), env.slurm_node_rank()
    if phase.recipe.layout.inference.prefill is not None:
        open_side_channel(plan, phase.recipe)
    chosen: list[StartWeights] = []

    def choose() -> dict[str, Any]:
        if is_frozen:
            chosen.append(StartWeights(phase.model_path, 0))
        else:
            has_adapters = phase.recipe.lora is not None
            chosen.append(choose_start_weights(run, phase.model_path, process, has_adapters=has_adapters))
        return {"path": chosen[0].path, "version": chosen[0].version}

    if num_nodes == 1:
        choose()
        return _serve(run, plan, phase, process, chosen[0], more=[])
    address = meet(run, process, node_rank=node_rank, choose=choose)
    os.environ["VLLM_HOST_IP"] = listen_host(num_nodes)  # vLLM would ask the route to the internet
    more = node_args(phase.recipe.layout.inference, num_nodes, node_rank, address)
    if node_rank == 0:
        return _serve(run, plan, phase, process, chosen[0], more)
    return _serve_headless(plan, phase, process, address["path"], more)


def _serve(
    run: RunDir, plan: Plan, phase: PhasePlan, process: str, weights: StartWeights, more: list[str]
) -> None:
    from primerl_hpc.inference import vllm_compat

    listener = bind_listener(listen_host(plan.num_hosts), run.last_port(process))
    host, port = listener.getsockname()[:2]
    recipe = phase.recipe
    state = routes.EngineState(
        process,
        env.attempt(),
        env.incarnation(),
        weights.version if weights.adapter is None else -1,
        api_key=ensure_api_key(run),
        base_path=phase.model_path,
        adapter=None if recipe.lora is None else recipe.policy_name,
        returns_experts=recipe.replays_routers,
        prefill_run=run if _decodes(phase, process) else None,
    )
    routes.install(state)
    args = _parse([*_arguments(plan, phase, process, weights.path), *more])
    logger.info("starting vLLM on %s:%d with policy version %d", host, port, weights.version)

    async def companion() -> None:
        try:
            await probe(f"http://{host}:{port}", state.api_key)
            weights.check()
            if weights.adapter is not None:
                await load_adapter(f"http://{host}:{port}", state.api_key, weights)
        finally:
            weights.release()
        publish_endpoint(
            run,
            process,
            f"http://{host}:{port}",
            model=recipe.policy_name,
            version=weights.version,
            admin=True,
        )
        logger.info("serving %s at http://%s:%d", recipe.policy_name, host, port)
        await until_told_to_stop(state)

    try:
        vllm_compat.serve(args, listener, companion)
    finally:
        weights.release()
        listener.close()


def _decodes(phase: PhasePlan, process: str) -> bool:
    """Whether others prefill for this engine."""
    has_prefill = phase.recipe.layout.inference.prefill is not None
    return has_prefill and phase.process(process).role == Role.INFERENCE


def open_side_channel(plan: Plan, recipe: Recipe) -> None:
    """Say where engines tell each other of their KV blocks: free ports of this life, one per data-parallel rank.

    Raises ConfigError where vLLM's connector cannot work.
    """
    from primerl_hpc.inference import vllm_compat

    if not vllm_compat.has_nixl():
        raise ConfigError(
            "layout.inference.prefill needs the package nixl, which carries KV blocks between engines",
            mend="pip install 'primerl-hpc[prefill]' in the engines' environment, or leave prefill out",
        )
    host = listen_host(plan.num_hosts)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(host, recipe.layout.inference.data_parallel))


def _serve_headless(plan: Plan, phase: PhasePlan, process: str, model_path: str, more: list[str]) -> None:
    from primerl_hpc.inference import vllm_compat

    logger.info("starting vLLM without an API")
    vllm_compat.serve_headless(_parse([*_arguments(plan, phase, process, model_path), *more]))


def check_adapters(recipe: Recipe, model_path: str, accelerator: str) -> None:
    """Raises ConfigError where vLLM could not serve the adapters that the run trains."""
    if recipe.lora is None or accelerator != "cpu":
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=recipe.model.trust_remote_code)
    text = config.get_text_config()
    if any(getattr(text, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(
            "vLLM on CPUs serves no adapters on a mixture of experts",
            place=f"model {recipe.model.name}",
            mend="leave out lora, or train adapters with kind sft",
        )


def _arguments(plan: Plan, phase: PhasePlan, process: str, model_path: str) -> list[str]:
    check_adapters(phase.recipe, phase.model_path, plan.accelerator)
    return engine_args(
        phase.recipe,
        model_path=model_path,
        accelerator=plan.accelerator,
        is_prefill=phase.process(process).role == Role.PREFILL,
    )


def _parse(arguments: list[str]) -> Any:
    from primerl_hpc.inference import vllm_compat

    logger.info("vLLM's arguments: %s", arguments)
    try:
        return vllm_compat.parse_serve_args(arguments)
    except (SystemExit, ValueError) as error:
        raise ConfigError(
            f"vLLM refuses the engine's arguments ({error})",
            mend="look at inference.extra_args and layout.inference",
        ) from error


async def probe(url: str, api_key: str) -> None:
    """Wait until the server listens and has generated one token. Raises RoleError when it answers but cannot."""
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        while True:  # bounded by the plan's ready_timeout_s, which the supervisor watches
            try:
                if (await client.get(f"{url}/health")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
        body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}
        headers = {"Authorization": f"Bearer {api_key}"}
        answer = await client.post(f"{url}/inference/v1/generate", json=body, headers=headers)
    if answer.status_code != 200:
        raise RoleError(
            f"the engine started but cannot generate: HTTP {answer.status_code} {answer.text[:300]}"
        )


async def load_adapter(url: str, api_key: str, weights: StartWeights) -> None:
    """As the orchestrator would. Raises RoleError when the engine refuses it."""
    body = {"path": str(weights.adapter), "version": weights.version}
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        answer = await client.post(
            f"{url}/update_weights", json=body, headers={"Authorization": f"Bearer {api_key}"}
        )
    if answer.status_code != 200:
        raise RoleError(f"the engine does not take its adapter: {answer.text[:300]}")


async def until_told_to_stop(state: routes.EngineState) -> None:
    """Returns on SIGTERM; raises what a route found to be the end of this engine."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    state.fault = stop
    loop.add_signal_handler(signal.SIGTERM, lambda: stop.done() or stop.set_result(None))
    await stop
