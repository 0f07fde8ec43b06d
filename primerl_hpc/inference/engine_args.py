"""A recipe as vLLM's command line. Pure: same recipe, same arguments; nothing is imported from vLLM.

    engine_args(recipe, model_path="/runs/x/weights/step_3", accelerator="cpu")
    → ["--model", "/runs/x/weights/step_3", "--served-model-name", "Qwen/Qwen3-0.6B", …]

The API key is never an argument: `ps` would show it.
"""

from __future__ import annotations

import json
from typing import Any

from primerl_hpc.recipe.combinations import MAX_SERVED_RANK
from primerl_hpc.recipe.schema import InferenceLayout, Recipe

MIDDLEWARE = "primerl_hpc.inference.routes.EngineRoutes"
WORKER_EXTENSION = "primerl_hpc.inference.extension.WeightUpdate"
CPU_EXPERTS_EXTENSION = "primerl_hpc.inference.cpu_worker.CPUWeightUpdate"
"""Instead of the one above where experts are spread over CPUs, which vLLM's CPU build does not know by itself."""
SERVED_RANKS = (8, 16, 32, 64, 128, 256, 320, MAX_SERVED_RANK)  # of which vLLM's --max-lora-rank must be one
KV_LEASE_S = 30  # vLLM's own: how long a prefill engine keeps blocks that nobody asks for
_SWITCHES = frozenset(
    {"disable-log-stats", "aggregate-engine-logging"}
)  # vLLM's flags that have no --no- form
CPU_KV_CACHE_GIB = 1.0  # vLLM's own default would reserve 92 % of the machine's memory


def engine_args(recipe: Recipe, *, model_path: str, accelerator: str, is_prefill: bool = False) -> list[str]:
    """vLLM's arguments for one engine, without host and port (the server hands over a bound socket).

    ``model_path``: hub id or folder of the weights to start with. The served name stays the recipe's model for every
    policy version; an adapter is loaded later, under `Recipe.policy_name`.
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
        # a prompt in parts rewinds the generator of its seed, which torch's on a CPU cannot: vLLM's engine would die
        "no-enable-chunked-prefill": is_cpu,
        # log-probabilities of the temperature-scaled distribution, as the trainer computes them
        "logprobs-mode": "processed_logprobs",
        # sampling parameters come with each request; a model's own defaults must not slip in
        "generation-config": "vllm",
        "enable-prefix-caching": True,
        "enable-scale-out": True,  # token-in, token-out route
        "enable-return-routed-experts": recipe.replays_routers,
        "trust-remote-code": recipe.model.trust_remote_code,
        "worker-extension-cls": CPU_EXPERTS_EXTENSION
        if is_cpu and layout.expert_parallel
        else WORKER_EXTENSION,
        "middleware": MIDDLEWARE,
        "disable-fastapi-docs": True,
        "disable-uvicorn-access-log": True,
        **_memory(recipe, is_cpu),
        **_adapters(recipe),
        **_kv_transfer(recipe, is_prefill),
    }
    for name, value in inference.extra_args.items():
        key = name.lstrip("-").replace("_", "-")
        options[key] = value
    denied = {
        name.lstrip("-").replace("_", "-") for name, value in inference.extra_args.items() if value is False
    }
    arguments = [part for name, value in options.items() for part in _as_flag(name, value)]
    return [*arguments, *(_denial(name) for name in sorted(denied - _SWITCHES))]


def node_args(layout: InferenceLayout, num_nodes: int, node_rank: int, address: dict[str, Any]) -> list[str]:
    """More arguments on one node of an engine that spans several; ``address``: ``host`` and ``port`` of its first node.

    An engine splits by data parallel ranks where each fits into a node, else by tensor parallel ones (`plan/split.py`
    lets nothing else through). Only the first node has an API; the others are headless and take work from it.
    """
    host, port = str(address["host"]), str(address["port"])
    headless = ["--headless"] if node_rank else []
    if layout.data_parallel == 1:
        where = ["--nnodes", str(num_nodes), "--node-rank", str(node_rank)]
        return [*where, "--master-addr", host, "--master-port", port, *headless]
    local = layout.data_parallel // num_nodes
    start = ["--data-parallel-start-rank", str(node_rank * local)] if node_rank else []
    meeting = ["--data-parallel-address", host, "--data-parallel-rpc-port", port]
    return ["--data-parallel-size-local", str(local), *meeting, *headless, *start]


def _memory(recipe: Recipe, is_cpu: bool) -> dict[str, int | float]:
    gib, offload_gib = recipe.inference.kv_cache_gib, recipe.inference.kv_offload_gib
    offload = {} if offload_gib is None else {"kv-offloading-size": offload_gib}
    if gib is None and not is_cpu:
        return {"gpu-memory-utilization": recipe.inference.gpu_memory_utilization, **offload}
    return {"kv-cache-memory-bytes": int((gib or CPU_KV_CACHE_GIB) * 2**30), **offload}


def _adapters(recipe: Recipe) -> dict[str, int | bool]:
    if recipe.lora is None:
        return {}
    rank = min(served for served in SERVED_RANKS if served >= recipe.lora.rank)
    return {"enable-lora": True, "max-lora-rank": rank, "max-loras": 1}


def _kv_transfer(recipe: Recipe, is_prefill: bool) -> dict[str, str]:
    """Blocks that were not pulled are computed again; those to be pulled are kept while an update pauses both sides."""
    if recipe.layout.inference.prefill is None:
        return {}
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if is_prefill else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": recipe.timeouts.weight_update_s + KV_LEASE_S},
    }
    return {"kv-transfer-config": json.dumps(config)}


def _denial(name: str) -> str:
    """What is true for vLLM unless it is told otherwise has to be denied."""
    return f"--{name.removeprefix('no-')}" if name.startswith("no-") else f"--no-{name}"


def _as_flag(name: str, value: str | int | float | bool | None) -> list[str]:
    """``--name value``; a true flag stands alone; false and null leave the flag out."""
    if value is None or value is False:
        return []
    return [f"--{name}"] if value is True else [f"--{name}", str(value)]
