"""Published memory measurements as cases of the planner's formulas: trainers and KV caches. Used by planner_rows.py.

Trainers of others differ from ours in few points, which are described once for each software below. Constants marked
"fitted" were fitted on the rows of that software; `held_out` fits them again without one model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from planner_times import Case

from primerl_hpc.plan.predict.figure import Figure
from primerl_hpc.plan.predict.layouts import EngineSetup, TrainerSetup, TrainerSoftware
from primerl_hpc.plan.predict.memory_engine import engine_memory
from primerl_hpc.plan.predict.memory_trainer import TrainerMemory, trainer_memory
from primerl_hpc.plan.predict.shape import known_models, known_shape

GIB = 2**30

PRIME_RL = TrainerSoftware(
    name="prime-rl of 2026-01",
    frozen_bytes=4,  # frozen weights stay float32
    adapters=4,  # max_concurrent_runs of its benchmark
    chunk_bytes=4,  # fused head: float32 logits of a chunk
    chunk_backward_bytes=4,
    chunk_gradient_bytes=6,
    block_gradient_bytes=6,
    expert_copies=1.94,  # fitted: its experts multiply scores in float32
    gathered_layers=1.45,  # fitted: the prefetched layer is not always gathered at the peak
    collective_bytes=0.8 * GIB,  # fitted
    reserve_factor=1.26,  # fitted
    source="prime-rl 559b447, benchmarks/baselines; constants fitted on these rows",
)
TITAN = TrainerSoftware(
    name="torchtitan of 2024-12",
    has_chunked_head=False,
    keeps_products=True,
    block_gradient_bytes=6,
    collective_bytes=0.5 * GIB,
    reserve_factor=1.0,  # expandable segments
    source="torchtitan b5bcd76, benchmarks; bytes were counted, and compared with these rows; none was fitted",
)
TITAN_COMPILED_LOSS = replace(
    TITAN,
    name="torchtitan of 2025-06",
    logit_bytes=6,  # fitted: the loss is compiled, which keeps logits and gradient in bf16
)
"""Software by the beginning of the column ``software``."""
SOFTWARE = {
    "prime-rl": PRIME_RL,
    "torchtitan 9dec370": TITAN,
    "torchtitan 820504e": TITAN_COMPILED_LOSS,
    "torchtitan e7c0cae": TITAN_COMPILED_LOSS,
}
PRIME_RL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODELS = {"Llama 3.1 8B": "8B", "Llama 3.1 70B": "70B", "Llama 3.1 405B": "405B"}
GPU_GIB = {
    "NVIDIA RTX A6000": 47.5,
    "NVIDIA H100 80GB HBM3": 79.18,  # in an error message of these rows
    "NVIDIA H200": 139.8,
    "NVIDIA B200": 178.36,  # in an error message of these rows
    "H100 96GB HBM2e 500W": 94.5,
    "H200": 139.8,
    "A100-80GB": 79.15,
}


@dataclass(frozen=True)
class MemoryCase:
    """One published row of a trainer."""

    id: str
    model: str
    software: str
    setup: TrainerSetup
    memory: TrainerMemory
    capacity: float
    """Bytes of the GPU."""
    measured: float | None
    """Reserved bytes; None if the run ended for lack of memory."""
    is_same_revision: bool
    """False for rows that were measured with another revision than the others of the software."""

    @property
    def fits(self) -> bool:
        return self.memory.fits(self.capacity)

    @property
    def predicted(self) -> Figure:
        """Reserved memory: what the allocator would like, or what a nearly full GPU leaves to it."""
        figure = self.memory.reserved
        most = self.capacity - self.memory.context.value
        if figure.value <= most or not self.fits:
            return figure
        return replace(
            figure, value=most, low=min(figure.low, most), high=max(most, self.memory.allocated.high)
        )

    def as_case(self) -> Case:
        assert self.measured is not None
        group = (
            f"{self.software} {self.model}" if self.is_same_revision else f"{self.software}, later revision"
        )
        return Case(self.id, "memory", group, self.measured, self.predicted, self.software != TITAN.name)


def refusals(cases: Iterable[MemoryCase]) -> list[str]:
    """Return what is decided wrongly: a run without enough memory that would be admitted, or a run that fits."""
    return [
        f"{case.id}: "
        + ("ran, but would be refused" if case.measured else "ended for lack of memory, but would fit")
        for case in cases
        if case.fits == (case.measured is None)
    ]


def memory_cases(
    rows: Iterable[Mapping[str, str]], software: Mapping[str, TrainerSoftware] = SOFTWARE
) -> Iterator[MemoryCase]:
    """Yield a case for every row with a peak or an out-of-memory error that `not_predicted` does not name."""
    for row in rows:
        if row["kind"] not in ("train", "oom") or (row["kind"] == "train" and not row["peak_mem_gib"]):
            continue
        if not_predicted(row):
            continue
        described = next(value for key, value in software.items() if row["software"].startswith(key))
        setup = setup_of(row)
        if setup.loss == "sft":
            described = replace(described, has_chunked_head=False)
        model = f"meta-llama/Llama-3.1-{MODELS[row['model']]}" if row["model"] in MODELS else row["model"]
        shape = known_shape(model)
        if setup.lora_rank and shape.is_mixture:
            setup = replace(setup, lora_targets="auto")
        yield MemoryCase(
            row["id"],
            model,
            described.name,
            setup,
            trainer_memory(shape, setup, described),
            GPU_GIB[row["hardware"]] * GIB,
            float(row["peak_mem_gib"]) * GIB if row["peak_mem_gib"] else None,
            "later revision" not in row["notes"],
        )


FITTED_CONSTANTS = ("reserve_factor", "expert_copies", "gathered_layers", "collective_bytes")
"""Constants of `PRIME_RL` that were fitted."""
UNFITTED = replace(
    PRIME_RL, reserve_factor=1.1, expert_copies=1.0, gathered_layers=2.0, collective_bytes=0.5 * GIB
)
"""Where a fit starts: the values that the code of a trainer suggests."""
POWER = 1.5
"""The fit minimizes the sum of |ln(predicted / measured)| to this power: large errors count less than in squares."""


def held_out(rows: Iterable[Mapping[str, str]]) -> Iterator[Case]:
    """Yield the cases of each model of prime-rl, predicted with constants fitted on the rows of all other models."""
    fitted = [
        row
        for row in rows
        if row["software"].startswith("prime-rl")
        and row["peak_mem_gib"]
        and "later revision" not in row["notes"]
    ]
    for model in sorted({row["model"] for row in fitted}):
        software = fit([row for row in fitted if row["model"] != model])
        for case in memory_cases([row for row in fitted if row["model"] == model], {"prime-rl": software}):
            yield replace(case.as_case(), kind="memory refitted", group=f"without {model}", is_fitted=False)


def fit(rows: list[Mapping[str, str]]) -> TrainerSoftware:
    """Return the software with `FITTED_CONSTANTS` that predict the rows best, by coordinate descent."""
    best = UNFITTED
    error = _error(best, rows)
    steps = {name: 0.2 * getattr(best, name) for name in FITTED_CONSTANTS}
    for _ in range(25):
        is_better = False
        for name, sign in ((name, sign) for name in FITTED_CONSTANTS for sign in (1, -1)):
            least = 1.0 if name == "reserve_factor" else 0.0
            value = max(getattr(best, name) + sign * steps[name], least)
            candidate = replace(best, **{name: value})
            if (found := _error(candidate, rows)) < error:
                best, error, is_better = candidate, found, True
        if not is_better:
            steps = {name: step / 2 for name, step in steps.items()}
    return best


def _error(software: TrainerSoftware, rows: list[Mapping[str, str]]) -> float:
    cases = [case.as_case() for case in memory_cases(rows, {"prime-rl": software})]
    return sum(abs(math.log(case.ratio)) ** POWER for case in cases)


KV_MODELS = {"Llama2-7B": "meta-llama/Llama-2-7b-hf", "Qwen3 (30B-A3B by its size)": "Qwen/Qwen3-30B-A3B"}
OLD_KV = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "enforce_eager": True}
"""Settings of vLLM 0.2: its limit of tokens is the model's length, and graphs are captured after the cache is sized."""


def kv_cases(rows: Iterable[Mapping[str, str]]) -> Iterator[Case]:
    """Yield a case for each row with the weights of a GPU, or with the blocks of a KV cache."""
    for row in rows:
        model = KV_MODELS.get(row["model"], row["model"])
        if row["kind"] != "kv" or model not in known_models():
            continue
        tensor = int(found[1]) if (found := re.search(r"TP(\d+)", row["layout"])) else 1
        setup = EngineSetup(gpus=tensor, tensor_parallel=tensor, max_model_len=8192)
        if "0.2" in row["software"]:
            setup = replace(setup, **OLD_KV)
        if found := re.search(r"loading took ([\d.]+) GiB", row["other"]):
            figure = engine_memory(known_shape(model), setup, 80 * GIB).weights
            yield Case(row["id"], "kv", "weights", float(found[1]) * GIB, figure, is_fitted=False)
        if found := re.search(r"(\d+) GPU blocks of (\d+) tokens at ([\d.]+)", row["other"]):
            setup = replace(setup, block_size=int(found[2]), gpu_memory_utilization=float(found[3]))
            figure = engine_memory(known_shape(model), setup, GPU_GIB[row["hardware"]] * GIB).kv_tokens
            measured = float(found[1]) * setup.block_size
            yield Case(row["id"], "kv", "tokens", measured, figure, is_fitted=False)


def not_predicted(row: Mapping[str, str]) -> str:
    """Return why a memory row is not predicted, or an empty string."""
    if "PP" in row["layout"]:
        return "pipeline parallelism, which this package's trainer does not have"
    if not any(row["software"].startswith(key) for key in SOFTWARE):
        return f"the layout or the model ({row['model']}) is not known"
    return ""


def setup_of(row: Mapping[str, str]) -> TrainerSetup:
    gpus, layout, batch = int(row["gpus"]), row["layout"], row["batch"]
    tensor = int(found[1]) if (found := re.search(r"TP(\d+)", layout)) else 1
    context = int(found[1]) if (found := re.search(r"CP ?(\d+)", layout, re.I)) else 1
    expert = int(found[1]) if (found := re.search(r"EP ?(\d+)", layout, re.I)) else 1
    is_titan = row["software"].startswith("torchtitan")
    rows = int(found[1]) if (found := re.search(r"(?:mbs|local batch) (\d+)", batch)) else 1
    checkpointing = "full"
    if is_titan and "full AC" not in batch:
        checkpointing = "selective"
    return TrainerSetup(
        ranks=gpus,
        ranks_per_node=min(gpus, 8),
        seq_len=int(row["seq_in"]),
        shard=gpus // tensor,
        context_parallel=context,
        expert_parallel=expert,
        tensor_parallel=tensor,
        micro_rows=rows,
        micro_batches=2,
        checkpointing=checkpointing,
        activation_offload="AC=Offload" in layout,
        reshard_after_forward=True,
        lora_rank=16 if "LoRA r16" in row["mode"] else None,
        lora_targets=PRIME_RL_TARGETS,
        loss="sft" if row["mode"].startswith(("sft", "pretrain")) else "rl",
        head_chunk_tokens=2048,
        is_compiled=True,
    )
