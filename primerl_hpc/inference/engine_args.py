"""Translate a recipe to vLLM's command line. Pure: same recipe, same arguments; nothing is imported from vLLM.

    engine_args(recipe, model_path="/runs/x/weights/step_3", accelerator="cpu")
    → ["--model", "/runs/x/weights/step_3", "--served-model-name", "Qwen/Qwen3-0.6B", …]

The API key is never an argument, because `ps` would show it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from primerl_hpc.common.model_families import family_of
from primerl_hpc.common.names import Kind
from primerl_hpc.recipe.schema.cross_checks import DEPRECATED_FP8, ONLINE_FP8
from primerl_hpc.recipe.schema.model import MAX_SERVED_RANK
from primerl_hpc.recipe.schema.recipe import InferenceLayout, Recipe
from primerl_hpc.transport.base_models.engine_options import engine_options

MIDDLEWARE = "primerl_hpc.inference.routes.EngineRoutes"
WORKER_EXTENSION = "primerl_hpc.inference.worker.extension.WeightUpdate"
CPU_EXPERTS_EXTENSION = "primerl_hpc.inference.worker.cpu_worker.CPUWeightUpdate"
"""Replaces `WORKER_EXTENSION` for expert parallelism on CPUs, which vLLM's CPU build does not support."""
SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_SERVED_RANK)  # values that vLLM's --max-lora-rank accepts
KV_LEASE_S = 30  # vLLM's default: how long a prefill engine keeps blocks that no engine pulls
MAX_TRACED_ITERATIONS = 500
_SWITCHES = frozenset({"disable-log-stats", "aggregate-engine-logging"})  # vLLM's flags without a --no- form
CPU_KV_CACHE_GIB = 1.0  # vLLM's default would reserve 92 % of the machine's memory


def engine_args(
    recipe: Recipe,
    *,
    model_path: str,
    accelerator: str,
    is_prefill: bool = False,
    is_stored_quantized: bool = False,
    traces: str | None = None,
    model_config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Return vLLM's arguments for one engine, without host and port (the server passes a bound socket).

    ``model_path``: hub id or folder of the initial weights. The served name is the recipe's model for every policy
    version; adapters are loaded later, under `Recipe.policy_name`. ``is_stored_quantized``: the checkpoint is stored in
    quantized form; for any other checkpoint, ``quantization: fp8`` is passed under its current name in vLLM 0.31.
    ``traces``: folder for traces of iterations. ``model_config``: the model's config.json, for `engine_options`.
    """
    inference, layout = recipe.inference, recipe.layout.inference
    is_cpu = accelerator == "cpu"
    options: dict[str, str | int | float | bool | None] = {
        "model": model_path,
        "served-model-name": recipe.model.name,
        "tokenizer": recipe.model.tokenizer or recipe.model.name,
        "dtype": recipe.model.dtype,
        "max-model-len": recipe.max_model_len,
        "seed": recipe.seed,
        "tensor-parallel-size": layout.tensor_parallel,
        "data-parallel-size": layout.data_parallel,
        "api-server-count": 1,  # the routes keep the policy version in one process
        "enable-expert-parallel": layout.expert_parallel,
        "enforce-eager": is_cpu if inference.enforce_eager == "auto" else inference.enforce_eager,
        # chunked prefill rewinds the generator of a seeded request, which fails for torch generators on CPUs
        "no-enable-chunked-prefill": is_cpu,
        # log-probabilities of the temperature-scaled distribution, as the trainer computes them
        "logprobs-mode": "processed_logprobs",
        # requests set all sampling parameters; the model's generation_config must not add defaults
        "generation-config": "vllm",
        **_prefix_caching(is_cpu, model_config),
        # on CPUs vLLM sleeps without freeing memory
        "enable-sleep-mode": recipe.layout.takes_turns and not is_cpu,
        "enable-scale-out": True,  # serves the token-in, token-out route
        "enable-return-routed-experts": recipe.replays_routers,
        "trust-remote-code": recipe.model.trust_remote_code,
        "worker-extension-cls": _worker_extension(is_cpu, layout),
        "middleware": MIDDLEWARE,
        "disable-fastapi-docs": True,
        "disable-uvicorn-access-log": True,
        **_profiler(traces),
        **_memory(recipe, is_cpu),
        **_adapters(recipe),
        **_kv_transfer(recipe, is_prefill),
        **_of_family(recipe, model_config or {}),
    }
    for name, value in inference.extra_args.items():
        key = _key_of(name)
        is_old_name = key == "quantization" and value == DEPRECATED_FP8 and not is_stored_quantized
        options[key] = ONLINE_FP8 if is_old_name else value
    negated = {_key_of(name) for name, value in inference.extra_args.items() if value is False}
    arguments = [part for name, value in options.items() for part in _as_flag(name, value)]
    return [*arguments, *(_negate(name) for name in sorted(negated - _SWITCHES))]


def engine_seed(seed: int, process: str, instance_id: str) -> int:
    """Return the seed of a process of vLLM, in 0..2³¹−1.

    It differs between replicas and incarnations: with one seed, engines that get the same prompts in the same order
    sample the same replies. All nodes of an engine have the same.
    """
    digest = hashlib.sha256(f"{seed} {process} {instance_id}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def node_args(layout: InferenceLayout, num_nodes: int, node_rank: int, address: dict[str, Any]) -> list[str]:
    """Return additional arguments for one node of a multi-node engine. ``address``: ``host`` and ``port`` of node 0.

    The engine is split over nodes by data-parallel ranks if it has more than one, otherwise by tensor-parallel ranks
    (`plan/split.py` rejects other layouts). Only the first node serves the API; the others are headless workers.
    """
    host, port = str(address["host"]), str(address["port"])
    headless = ["--headless"] if node_rank else []
    if layout.data_parallel == 1:
        where = ["--nnodes", str(num_nodes), "--node-rank", str(node_rank)]
        return [*where, "--master-addr", host, "--master-port", port, *headless]
    assert isinstance(layout.data_parallel, int)  # `auto` is resolved in the plan
    local = layout.data_parallel // num_nodes
    start = ["--data-parallel-start-rank", str(node_rank * local)] if node_rank else []
    meeting = ["--data-parallel-address", host, "--data-parallel-rpc-port", port]
    return ["--data-parallel-size-local", str(local), *meeting, *headless, *start]


def _worker_extension(is_cpu: bool, layout: InferenceLayout) -> str:
    return CPU_EXPERTS_EXTENSION if is_cpu and layout.expert_parallel else WORKER_EXTENSION


def _profiler(folder: str | None) -> dict[str, str]:
    """Return the configuration of the profiler, which costs nothing until a trace starts.

    A trace that no client stops ends after `MAX_TRACED_ITERATIONS`.
    """
    if folder is None:
        return {}
    config = {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        "torch_profiler_with_stack": False,  # stacks of each operator slow the engine down several times
        "ignore_frontend": True,
        "max_iterations": MAX_TRACED_ITERATIONS,
    }
    return {"profiler-config": json.dumps(config)}


def _prefix_caching(is_cpu: bool, config: Mapping[str, Any] | None) -> dict[str, bool]:
    """Return the option for prompts that begin alike. Layers with state need chunked prefill for it, as vLLM does."""
    text = (config or {}).get("text_config") or config or {}
    has_state = family_of(text.get("model_type")).has_state
    return {"no-enable-prefix-caching": True} if is_cpu and has_state else {"enable-prefix-caching": True}


def _of_family(recipe: Recipe, config: Mapping[str, Any]) -> dict[str, str | bool]:
    """Return `engine_options`, and for a composite model whether the tower is left out as in the trainer."""
    layout = recipe.layout.trainer
    is_shared = layout.context_parallel not in ("auto", 1) or layout.tensor_degree > 1
    is_loaded = recipe.trainer.loads_tower(config.get("model_type"), is_shared=is_shared)
    is_text = "text_config" in config and recipe.kind == Kind.RL and not is_loaded
    options = {name: json.dumps(value) for name, value in engine_options(config).items()}
    return options | {"language-model-only": is_text}


def _memory(recipe: Recipe, is_cpu: bool) -> dict[str, int | float]:
    gib, offload_gib = recipe.inference.kv_cache_gib, recipe.inference.kv_offload_gib
    offload = {} if offload_gib is None else {"kv-offloading-size": offload_gib}
    if gib is None and not is_cpu:
        return {"gpu-memory-utilization": recipe.engine_memory_share, **offload}
    limit = {"kv-cache-memory-bytes": int((gib or CPU_KV_CACHE_GIB) * 2**30), **offload}
    # vLLM does not start while less than this share is free
    return (
        limit
        if is_cpu or not recipe.layout.colocated
        else {"gpu-memory-utilization": recipe.engine_memory_share, **limit}
    )


def _adapters(recipe: Recipe) -> dict[str, int | bool]:
    """Return the options of the policy's adapter and of those that are loaded while the engine runs.

    Host memory holds twice as many: a request in flight loads the adapter that was unloaded meanwhile again, and vLLM
    would evict another one.
    """
    more, lora = recipe.inference.num_adapters, recipe.lora
    ranks = ([] if lora is None else [lora.rank]) + ([recipe.inference.max_adapter_rank] if more else [])
    if not ranks:
        return {}
    rank = min(served for served in SERVED_RANKS if served >= max(ranks))
    total = more + (lora is not None)
    host = {"max-cpu-loras": 2 * total} if more else {}
    return {"enable-lora": True, "max-lora-rank": rank, "max-loras": total, **host}


def _kv_transfer(recipe: Recipe, is_prefill: bool) -> dict[str, str]:
    """Return the configuration for pulling KV blocks from prefill engines.

    If pulling fails, the blocks are recomputed. The lease covers a weight update, during which both engines are paused.
    """
    if recipe.layout.inference.prefill is None:
        return {}
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if is_prefill else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": recipe.timeouts.weight_update_s + KV_LEASE_S},
    }
    return {"kv-transfer-config": json.dumps(config)}


def _key_of(name: str) -> str:
    """Return the name of an option as in `options`, without dashes in front."""
    return name.lstrip("-").replace("_", "-")


def _negate(name: str) -> str:
    """Return ``--no-<name>``, for options that vLLM enables by default; ``--<name>`` for a ``no-<name>``."""
    return f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}"


def _as_flag(name: str, value: str | int | float | bool | None) -> list[str]:
    """Return ``--name value``; only ``--name`` for True; nothing for False and None."""
    if value is None or value is False:
        return []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]
