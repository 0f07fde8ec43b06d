"""Start one engine: bind its port, choose the initial weights, serve, and publish the endpoint once it is ready.

    run_engine(run, plan, phase, "inference-0")        # returns after SIGTERM, raises RoleError if the engine dies

The port is bound here and the open socket is passed to vLLM, so no other process can take the port in between. A
restarted engine tries its previous port first, so that its URL stays the same. The endpoint is published only after the
engine has generated a token: a listening port does not mean that it is ready.

A multi-node engine runs this process on every node. The first one chooses the weights for all, serves and publishes the
endpoint; the others are headless. If one of the processes exits, the complete engine ends (srun's ``--wait``).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, DataError, RoleError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.common.node.compile_caches import CompileCaches
from primerl_hpc.common.node.imports import without_collections
from primerl_hpc.common.node.start_phases import own_phases
from primerl_hpc.common.safety.error_text import describe_error, last_error
from primerl_hpc.common.safety.images import restrict_pillow
from primerl_hpc.inference import routes
from primerl_hpc.inference.checkpoint import read_headers
from primerl_hpc.inference.engine_args import engine_args, engine_seed, node_args
from primerl_hpc.inference.token_responses import numbers_tokens
from primerl_hpc.inference.turns import KEEP_WEIGHTS, sleep_level, wait_for_turn
from primerl_hpc.inference.worker.start_times import read_start_times
from primerl_hpc.plan.plan import PhasePlan, Plan
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.access.admission import Admission
from primerl_hpc.run.access.elsewhere import homes_of
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.leases import HeldLease
from primerl_hpc.run.ports import bind_listener, free_ports, listen_host, set_collective_interfaces
from primerl_hpc.run.rendezvous import meet
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.base_models.engine_options import ADJUSTED, check_engine, text_family
from primerl_hpc.transport.base_models.staging import local_copy
from primerl_hpc.transport.weights.filesystem import MANIFEST

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartWeights:
    """The weights that an engine starts with."""

    path: str
    version: int
    lease: HeldLease | None = None
    """Held while loading, so that the trainer does not delete the folder."""
    adapter: Path | None = None
    """Adapter that is loaded on top of ``path`` once the engine serves."""
    manifest: Any = None
    """The version's manifest at the time it was chosen; None for a base model or an adapter."""

    def check(self) -> None:
        """Raise RoleError if a restarted trainer wrote the version again while the engine loaded its files."""
        if self.manifest is not None and read_json_or_none(Path(self.path) / MANIFEST) != self.manifest:
            raise RoleError("the weights were replaced while the engine loaded them", location=self.path)

    def release(self) -> None:
        """Release the lease."""
        if self.lease is not None:
            self.lease.release()


def choose_start_weights(run: RunDir, base: str, reader: str, *, has_adapters: bool = False) -> StartWeights:
    """Return the newest policy version whose folder is intact; the base model as version 0 if there is none.

    A damaged folder is skipped with a warning. Adapters are loaded on top of the base model; before the first adapter
    there is no version (-1).
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
            logger.warning("cannot serve policy version %d, trying the previous one: %s", version, error)
    return StartWeights(base, -1 if has_adapters else 0)


def run_engine(
    run: RunDir,
    plan: Plan,
    phase: PhasePlan,
    process: str,
    *,
    is_frozen: bool = False,
    caches: CompileCaches | None = None,
) -> None:
    """Serve until SIGTERM. ``is_frozen``: serve the phase's initial weights instead of the newest policy version.
    ``caches``: compile caches that are saved once the engine is ready.

    Raises ConfigError for arguments that vLLM rejects, RoleError if the engine dies.
    """
    num_nodes, node_rank = len(phase.process(process).nodes), env.slurm_node_rank()
    set_collective_interfaces(plan.num_hosts)
    if phase.recipe.layout.inference.prefill is not None:
        open_side_channel(plan, phase.recipe)
    if phase.recipe.layout.takes_turns and not is_frozen:
        wait_for_turn(run, process)
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
        return _serve(run, plan, phase, process, chosen[0], [], caches)
    address = meet(run, process, node_rank=node_rank, choose=choose)
    os.environ["VLLM_HOST_IP"] = listen_host(num_nodes)  # vLLM's default is the address of the internet route
    more = node_args(phase.recipe.layout.inference, num_nodes, node_rank, address)
    if node_rank == 0:
        return _serve(run, plan, phase, process, chosen[0], more, caches)
    return _serve_headless(plan, phase, process, address["path"], more)


def _serve(
    run: RunDir,
    plan: Plan,
    phase: PhasePlan,
    process: str,
    weights: StartWeights,
    more: list[str],
    caches: CompileCaches | None,
) -> None:
    from primerl_hpc.inference import vllm_compat

    listener = bind_listener(listen_host(plan.num_hosts), run.last_port(process))
    host, port = listener.getsockname()[:2]
    url, keys, recipe = f"https://{host}:{port}", run_keys(run), phase.recipe
    admission = Admission(expected=phase.max_connections)
    with without_collections():  # imports transformers and torch
        state = _engine_state(run, phase, process, weights, admission)
    routes.install(state)
    certificate = str(keys.server_certificate(process, host))
    more = [*more, "--ssl-keyfile", certificate, "--ssl-certfile", certificate]
    args = _parse([*_arguments(plan, phase, process, weights.path), *more])
    logger.info("starting vLLM on %s:%d with policy version %d", host, port, weights.version)

    phases = own_phases()
    phases.end("imports and arguments")

    async def publish_when_ready() -> None:
        try:
            await wait_until_healthy(url, keys)
            phases.end("engine", read_start_times())
            await probe(url, keys)
            phases.end("first token")
            weights.check()
            if weights.adapter is not None:
                await load_adapter(url, keys, weights)
        finally:
            weights.release()
        publish_endpoint(
            run,
            process,
            url,
            model=recipe.policy_name,
            version=weights.version,
            admin=True,
            phases=phases.seconds,
        )
        logger.info("serving %s at %s", recipe.policy_name, url)
        if caches is not None:
            await asyncio.to_thread(caches.save)
        await wait_for_stop(state)

    try:
        vllm_compat.serve(args, listener, publish_when_ready, admission)
    finally:
        weights.release()
        listener.close()


def _engine_state(
    run: RunDir, phase: PhasePlan, process: str, weights: StartWeights, admission: Admission
) -> routes.EngineState:
    recipe = phase.recipe
    return routes.EngineState(
        process,
        env.attempt(),
        env.incarnation(),
        weights.version if weights.adapter is None else -1,
        api_key=run_keys(run).api_key,
        admission=admission,
        base_path=phase.model_path,
        weight_roots=weight_roots(run, recipe),
        adapter_roots=(run.root, *homes_of(run), *map(Path, recipe.inference.adapter_dirs)),
        max_adapters=recipe.inference.num_adapters,
        adapter=None if recipe.lora is None else recipe.policy_name,
        template_settings=_template_settings(recipe),
        returns_experts=recipe.replays_routers,
        numbers_tokens=numbers_tokens(),
        prefill_run=run if _uses_remote_prefill(phase, process) else None,
        sleep_level=_sleep_level(phase),
    )


def _sleep_level(phase: PhasePlan) -> int:
    """Return vLLM's level of sleep for the engines of a phase; it matters only where they take turns."""
    if not phase.recipe.layout.takes_turns:
        return KEEP_WEIGHTS
    return sleep_level(phase.recipe, is_stored_quantized=_has_quantization(phase.recipe, phase.model_path))


def _template_settings(recipe: Recipe) -> frozenset[str]:
    """Return the names that ``chat_template_kwargs`` of requests may set; none if the tokenizer cannot be loaded."""
    from primerl_hpc.recipe.renderer import load_tokenizer
    from primerl_hpc.recipe.template_settings import template_settings

    try:
        return template_settings(load_tokenizer(recipe.model))
    except (OSError, ValueError) as error:  # vLLM reports a missing tokenizer in more detail
        logger.warning("the tokenizer cannot be loaded, so no chat_template_kwargs are accepted: %s", error)
        return frozenset()


def weight_roots(run: RunDir, recipe: Recipe) -> tuple[Path, ...]:
    """Return the folders of the run, and for an evaluation the folder of the evaluated versions."""
    evaluated = recipe.evaluation.weights if recipe.evaluation is not None else None
    return (run.root, *homes_of(run), *([Path(evaluated)] if evaluated is not None else []))


def _uses_remote_prefill(phase: PhasePlan, process: str) -> bool:
    """True if prefill engines process prompts for this engine."""
    has_prefill = phase.recipe.layout.inference.prefill is not None
    return has_prefill and phase.process(process).role == Role.INFERENCE


def open_side_channel(plan: Plan, recipe: Recipe) -> None:
    """Set the address at which vLLM's connector exchanges metadata of KV blocks, and on one node that of transfers.

    One free port per data-parallel rank. Raises ConfigError if the package nixl is not installed.
    """
    from primerl_hpc.inference import vllm_compat

    if not vllm_compat.has_nixl():
        raise ConfigError(
            "layout.inference.prefill requires the package nixl, which transfers KV blocks between engines",
            hint="pip install 'primerl-hpc[prefill]' in the engines' environment, or remove prefill",
        )
    host = listen_host(plan.num_hosts)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
    if plan.num_hosts == 1:  # GPUs of one node use no network; UCX listens on all its interfaces otherwise
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    num_ranks = recipe.layout.inference.data_parallel
    assert isinstance(num_ranks, int)  # `auto` is resolved in the plan
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_ports(host, num_ranks))


def _serve_headless(plan: Plan, phase: PhasePlan, process: str, model_path: str, more: list[str]) -> None:
    from primerl_hpc.inference import vllm_compat

    logger.info("starting vLLM without an API")
    vllm_compat.serve_headless(_parse([*_arguments(plan, phase, process, model_path), *more]))


def check_adapters(recipe: Recipe, model_path: str, accelerator: str) -> None:
    """Raise ConfigError if vLLM cannot serve the adapters that the run trains."""
    if (recipe.lora is None and not recipe.inference.num_adapters) or accelerator != "cpu":
        return
    text = _model_config(recipe, model_path).get_text_config()
    if any(getattr(text, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(
            "vLLM on CPUs does not support adapters for mixture-of-experts models",
            location=f"model {recipe.model.name}",
            hint="remove lora or inference.adapter_dirs, or train adapters with kind sft",
        )


def is_stored_quantized(recipe: Recipe, model_path: str) -> bool:
    """True if the recipe sets a quantization and the checkpoint's own configuration names one too."""
    return recipe.inference.quantization is not None and _has_quantization(recipe, model_path)


def _has_quantization(recipe: Recipe, model_path: str) -> bool:
    """True if the checkpoint's own configuration names a quantization."""
    return bool(getattr(_model_config(recipe, model_path), "quantization_config", None))


def _model_config(recipe: Recipe, model_path: str) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model_path, trust_remote_code=recipe.model.trust_remote_code)


def family_config(recipe: Recipe, model_path: str) -> dict[str, Any]:
    """Return the model's config.json, with transformers' defaults for families that have `engine_options`.

    Empty if it cannot be read: vLLM reports that in more detail, and knows families that transformers does not.
    """
    from transformers import PreTrainedConfig

    try:
        found, _ = PreTrainedConfig.get_config_dict(model_path)
    except (OSError, ValueError):
        return {}
    is_adjusted = text_family(found) in ADJUSTED
    return _model_config(recipe, model_path).to_dict() if is_adjusted else found


def _arguments(plan: Plan, phase: PhasePlan, process: str, model_path: str) -> list[str]:
    recipe, config = phase.recipe, family_config(phase.recipe, phase.model_path)
    check_adapters(recipe, phase.model_path, plan.accelerator)
    if recipe.kind == Kind.RL:
        family = config.get("model_type")
        check_engine(family, recipe.model.name, plan.accelerator, is_accepted=recipe.model.accept_uncompared)
    # the base model, not a policy version: those are copied as deltas, or read once
    if model_path == phase.model_path:
        model_path = local_copy(model_path)
    seed = engine_seed(recipe.seed, process, env.instance_id())
    return engine_args(
        recipe.model_copy(update={"seed": seed}),
        model_path=model_path,
        accelerator=plan.accelerator,
        is_prefill=phase.process(process).role == Role.PREFILL,
        is_stored_quantized=is_stored_quantized(recipe, model_path),
        traces=str(RunDir(Path(plan.run_dir)).engine_traces(process)),
        model_config=config,
    )


def _parse(arguments: list[str]) -> Any:
    from primerl_hpc.inference import vllm_compat

    logger.info("vLLM's arguments: %s", arguments)
    printed = io.StringIO()  # argparse prints the reason and exits with 2
    restrict_pillow(for_vllm=True)  # before vLLM reads its variables
    try:
        with contextlib.redirect_stderr(printed), without_collections():  # imports vLLM
            parsed = vllm_compat.parse_serve_args(arguments)
    except (SystemExit, ValueError) as error:
        reason = last_error(printed.getvalue().splitlines()) or describe_error(error)
        raise ConfigError(
            f"vLLM rejects the engine's arguments: {reason}",
            hint="check inference.extra_args and layout.inference",
        ) from error
    sys.stderr.write(printed.getvalue())
    return parsed


async def wait_until_healthy(url: str, keys: RunKeys) -> None:
    """Wait until the server accepts requests. The supervisor enforces the plan's ``ready_timeout_s``."""
    async with keys.async_client(timeout=None) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            await asyncio.sleep(0.05)


async def probe(url: str, keys: RunKeys) -> None:
    """Generate one token with a healthy server. Raises RoleError if it cannot.

    vLLM's CPU kernel of Qwen3.5's convolution fails on a prompt of one token.
    """
    async with keys.async_client(timeout=None) as client:
        body = {"token_ids": [0, 0], "sampling_params": {"max_tokens": 1, "temperature": 0.0}}
        response = await client.post(f"{url}/inference/v1/generate", json=body)
    if response.status_code != 200:
        raise RoleError(
            f"the engine started but cannot generate: HTTP {response.status_code} {response.text[:300]}"
        )


async def load_adapter(url: str, keys: RunKeys, weights: StartWeights) -> None:
    """Load the initial adapter through ``POST /update_weights``. Raises RoleError if the engine rejects it."""
    body = {"path": str(weights.adapter), "version": weights.version}
    async with keys.async_client(timeout=None) as client:
        response = await client.post(f"{url}/update_weights", json=body)
    if response.status_code != 200:
        raise RoleError(f"the engine rejected its initial adapter: {response.text[:300]}")


async def wait_for_stop(state: routes.EngineState) -> None:
    """Wait for SIGTERM. Raises the exception with which a route ends this engine (`routes.EngineState.fault`)."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()
    state.fault = stop
    loop.add_signal_handler(signal.SIGTERM, lambda: stop.done() or stop.set_result(None))
    await stop
