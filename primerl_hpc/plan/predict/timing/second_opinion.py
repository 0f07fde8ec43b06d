"""NVIDIA's aiconfigurator as a second opinion on engines. Optional: ``pip install 'primerl-hpc[planner]'`` (600 MB).

    opinion = second_opinion("Qwen/Qwen3-32B", gpu_spec("H100-SXM"), setup, ServingLoad(64, 1024, 1024))
    opinion.value, opinion.source                # seconds per token, and that they are not this planner's own

Nothing else in the package imports it, and no other figure depends on it. Its estimates of vLLM differ from published
measurements by 2–105 % in the median, depending on the model (`docs/measurements/planner_rows.json`), so that its
interval is wide.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.plan.predict.figure import Figure, Tier
from primerl_hpc.plan.predict.hardware import GpuSpec
from primerl_hpc.plan.predict.layouts import EngineSetup

NAME = "second_opinion.aiconfigurator.per_token"
SYSTEMS = {
    "A100-SXM-80GB": "a100_sxm",
    "H100-SXM": "h100_sxm",
    "H200-SXM": "h200_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx_pro_6000_server",
}
"""GPU types that it has measured for vLLM."""
MODELS = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B": "meta-llama/Meta-Llama-3.1-405B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
}
"""Models that it has under another name."""
GEMM = {"bfloat16": "bfloat16", "fp8": "fp8", "int4": "int4_wo", "fp4": "nvfp4"}
LOW, HIGH = 2.0, 1.3
"""Its 80 % interval here: the value / 2.0 to the value × 1.3, from the groups of rows of
docs/measurements/planner_rows.json."""


@dataclass(frozen=True)
class ServingLoad:
    """A steady load of one engine replica."""

    concurrency: int
    prompt: int
    generated: int


def second_opinion(model: str, gpu: GpuSpec, setup: EngineSetup, load: ServingLoad) -> Figure:
    """Return aiconfigurator's time per token in seconds.

    Raises ConfigError if it is not installed, and NotFoundError if it has no data for the model or GPU type. Models
    that are not in its package are refused: it would download their config.json.
    """
    try:
        # extra planner, which tests do not install
        from aiconfigurator_core.sdk import (  # pyright: ignore[reportMissingImports]
            config,
            config_builders,
            models,
            perf_database,
        )

        # of the same package
        from aiconfigurator_core.sdk.backends import factory  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            "aiconfigurator is not installed", hint="pip install 'primerl-hpc[planner]'"
        ) from None
    system = SYSTEMS.get(gpu.name)
    name = _known_model(model)
    if system is None:
        raise NotFoundError(
            f"aiconfigurator has no data for GPU type {gpu.name}", hint=f"known: {', '.join(SYSTEMS)}"
        )
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    try:
        version = perf_database.get_latest_database_version(system, "vllm")
        database = perf_database.get_database_view(system, "vllm", version, database_mode="HYBRID")
        described = models.get_model(name, _model_config(config_builders, gpu, setup), "vllm")
        batch = max(1, load.concurrency // setup.data_parallel)
        runtime = config.RuntimeConfig(batch_size=batch, isl=load.prompt, osl=load.generated)
        backend = factory.get_backend("vllm")
        summary = backend.run_agg(described, database, runtime, ctx_tokens=setup.max_num_batched_tokens)
        seconds = float(summary.get_result_dict()["tpot"]) / 1e3
    except Exception as error:  # its errors have no common base
        raise NotFoundError(
            f"aiconfigurator has no estimate for {model} on {gpu.name}: {_first_line(error)}"
        ) from error
    inputs = {"concurrency": load.concurrency, "prompt": load.prompt, "generated": load.generated}
    source = f"aiconfigurator-core, vLLM tables {version}, HYBRID mode: a second opinion, not this planner's estimate"
    return Figure(
        NAME, seconds, seconds / LOW, seconds * HIGH, "s", "its run_agg", inputs, source, Tier.TABLE
    )


def _known_model(model: str) -> str:
    """Return its name of a model whose config.json it ships. Raises NotFoundError for another one."""
    name = MODELS.get(model, model)
    for known in (name, name.removesuffix("-Instruct"), name.removesuffix("-Instruct-2507")):
        path = files("aiconfigurator_core") / "model_configs" / f"{known.replace('/', '--')}_config.json"
        if path.is_file():
            return known
    raise NotFoundError(f"aiconfigurator has no data for model {model}")


def _model_config(builders: Any, gpu: GpuSpec, setup: EngineSetup) -> Any:
    """Return its configuration of layout and data types. Experts are split by tensor parallelism or distributed."""
    experts = {"bfloat16": "bfloat16", "fp8": "fp8_block", "int4": "int4_wo"}.get(setup.dtype)
    if setup.dtype == "fp4":
        experts = "nvfp4" if gpu.architecture == "blackwell" else "w4a16_mxfp4"
    dense = GEMM[setup.dtype]
    if setup.dtype in ("fp4", "int4") and gpu.architecture != "blackwell":
        dense = "bfloat16"
    ranks = setup.tensor_parallel * setup.data_parallel
    spread = setup.expert_parallel if setup.expert_parallel > 1 else 1
    return builders.build_model_config(
        setup.tensor_parallel,
        1,
        setup.data_parallel,
        max(1, ranks // spread),
        spread,
        gemm_quant_mode=dense,
        moe_quant_mode=experts,
        kvcache_quant_mode="fp8" if setup.kv_dtype == "fp8" else "bfloat16",
        fmha_quant_mode="bfloat16",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
