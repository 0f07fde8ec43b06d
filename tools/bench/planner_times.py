"""Published durations as cases of the planner's formulas: engines, trainers, weight updates. Used by planner_rows.py.

A case is a row's measured seconds and the predicted figure. Rows that lack what a formula needs are not cases.
"""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from primerl_hpc.plan.predict.figure import Figure
from primerl_hpc.plan.predict.hardware import gpu_spec, spec_of_device
from primerl_hpc.plan.predict.layouts import Dtype, EngineSetup, TrainerSetup
from primerl_hpc.plan.predict.shape import known_models, known_shape
from primerl_hpc.plan.predict.timing.curves import weight_bytes
from primerl_hpc.plan.predict.timing.layers import LayerSplit, layers_of
from primerl_hpc.plan.predict.timing.time_engine import EngineTimes
from primerl_hpc.plan.predict.timing.time_trainer import TrainerConstants, TrainerTimes
from primerl_hpc.plan.predict.timing.time_transfer import (
    StorageRates,
    broadcast_update,
    delta_update,
    weight_bytes_of,
    write,
)

SYSTEMS = {"h100_sxm": "H100-SXM", "h200_sxm": "H200-SXM", "b200_sxm": "B200"}
DTYPES: dict[str, Dtype] = {"fp8": "fp8", "fp4": "fp4", "int4": "int4"}
ENGINE_SHARE, ENGINE_OTHER = 0.9, 4 * 2**30
"""vLLM's default share of the memory, and what weights and KV cache do not get."""
FITTED = ("MiniMaxAI/MiniMax-M2.5", "Qwen/Qwen3-32B", "moonshotai/Kimi-K2.5", "openai/gpt-oss-120b")
"""Models whose decode rows `EngineConstants` was fitted on: every second one in alphabetical order."""


@dataclass(frozen=True)
class Case:
    """One published row."""

    id: str
    kind: str
    group: str
    measured: float
    predicted: Figure
    is_fitted: bool
    """True if the constants of the formula were fitted on rows of this model."""

    @property
    def ratio(self) -> float:
        return self.predicted.value / self.measured


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# -- engines ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """A measured engine: time per token at a number of concurrent sequences."""

    id: str
    model: str
    system: str
    precision: str
    tensor: int
    data: int
    expert: int
    concurrency: int
    prompt: int
    generated: int
    measured: float

    @property
    def group(self) -> str:
        return f"{self.system} {self.model} {self.precision}"

    @property
    def setup(self) -> EngineSetup:
        return EngineSetup(
            gpus=self.tensor * self.data,
            tensor_parallel=self.tensor,
            data_parallel=self.data,
            expert_parallel=max(1, self.expert),
            max_model_len=self.prompt + self.generated,
            dtype=DTYPES.get(self.precision, "bfloat16"),
        )

    @property
    def case(self) -> Case:
        """The planner's figure. The KV cache bounds the sequences that run at once."""
        times = EngineTimes(known_shape(self.model), gpu_spec(SYSTEMS[self.system]), self.setup)
        fitting = self.data * kv_tokens(times) / (self.prompt + self.generated / 2)
        running = min(self.concurrency, max(1.0, fitting))
        figure = times.time_per_token(running, self.prompt, self.generated)
        return Case(self.id, "decode", self.group, self.measured, figure, self.model in FITTED)


def decode_rows(rows: Iterable[Mapping[str, str]]) -> Iterator[Serving]:
    """Yield every decode row of planner_rows.csv."""
    for row in rows:
        if row["kind"] != "decode":
            continue
        layout = re.match(r"TP(\d+) EP(\d+)", row["layout"])
        assert layout is not None, row["layout"]
        tensor, expert = int(layout[1]), int(layout[2])
        data = int(row["gpus"]) // tensor
        load = (int(row["batch"]), int(row["seq_in"]), int(row["seq_out"]))
        what = (row["id"], row["model"], row["hardware"], row["precision"])
        yield Serving(*what, tensor, data, expert, *load, float(row["tpot_ms"]) / 1e3)


MOST_FOR_FIRST_TOKEN = 8
"""Concurrent sequences of the rows whose time to the first token is compared: with more, prompts wait for others."""


def first_token_rows(rows: Iterable[Mapping[str, str]]) -> Iterator[Case]:
    """Yield a case for the time to the first token of each decode row with few sequences."""
    times = {row["id"]: row["ttft_ms"] for row in rows}
    for engine in decode_rows(rows):
        if engine.concurrency > MOST_FOR_FIRST_TOKEN or not times[engine.id]:
            continue
        found = EngineTimes(known_shape(engine.model), gpu_spec(SYSTEMS[engine.system]), engine.setup)
        figure = found.first_token(engine.prompt, max(1.0, engine.concurrency / engine.data))
        yield Case(
            engine.id, "first token", engine.group, float(times[engine.id]) / 1e3, figure, is_fitted=True
        )


def serving_rows(path: Path) -> Iterator[Serving]:
    """Yield every configuration of vLLM in aiconfigurator's silicon_sample.csv; repeated ones are one, the median."""
    found: dict[tuple[str, ...], list[float]] = {}
    keys = ("model_path", "system", "precision", "tp_size", "attention_dp_size", "moe_ep_size")
    keys += ("batch_size", "isl", "osl", "backend_version")
    for row in read(path):
        if row["backend"] == "vllm" and row["mode"] == "agg" and row["system"] in SYSTEMS:
            found.setdefault(tuple(row[key] for key in keys), []).append(float(row["silicon_tpot_ms"]))
    for key, times in found.items():
        model, system, precision, *numbers = key[:-1]
        sizes = [int(number or 1) for number in numbers]
        tensor, data, expert, *load = sizes
        concurrency, prompt, generated = load
        yield Serving(
            id="/".join(key),
            model=model,
            system=system,
            precision=precision,
            tensor=tensor,
            data=data,
            expert=expert,
            concurrency=concurrency,
            prompt=prompt,
            generated=generated,
            measured=statistics.median(times) / 1e3,
        )


def after_three(cases: Iterable[Case]) -> list[float]:
    """Return errors after a factor was learned from three measured rows of the same group, for the other rows."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.group, []).append(case)
    errors = []
    for found in groups.values():
        ordered = sorted(found, key=lambda case: case.id)
        step = max(1, len(ordered) // 3)
        measured = ordered[::step][:3]
        factor = statistics.median(case.ratio for case in measured)
        errors += [abs(case.ratio / factor - 1) for case in ordered if case not in measured]
    return errors


def regime_held_out(cases: Iterable[Case]) -> tuple[int, float]:
    """Return the number of engine rows, and the share within an interval made of the rows of all other models alone:
    the 10th and 90th percentile of measured / predicted in the same regime, of a new row (see `percentiles`)."""
    found = [(case, regime_of(case)) for case in cases]
    covered = 0
    for model in {model_of(case) for case, _ in found}:
        ends: dict[str, tuple[float, float]] = {}
        for regime in {regime for _, regime in found}:
            others = sorted(1 / c.ratio for c, name in found if name == regime and model_of(c) != model)
            if others:
                low, high = percentiles(others, 0.1)
                ends[regime] = min(1.0, low), max(1.0, high)
        for case, regime in found:
            if model_of(case) == model and regime in ends:
                covered += ends[regime][0] <= 1 / case.ratio <= ends[regime][1]
    return len(found), covered / max(1, len(found))


def percentiles(ordered: list[float], share: float) -> tuple[float, float]:
    """Return values that a further row is below with probability ``share``, and above with the same.

    One of n + 1 rows is equally likely at each place, so these are places (n + 1) · share: percentiles of the n known
    rows alone are too narrow for few rows (split conformal prediction, arXiv 1604.04173, §2.2).
    """
    number = len(ordered)
    below, above = math.floor((number + 1) * share) - 1, math.ceil((number + 1) * (1 - share)) - 1
    return ordered[max(0, below)], ordered[min(number - 1, above)]


def model_of(case: Case) -> str:
    return case.group.split()[1]


def regime_of(case: Case) -> str:
    correction = case.predicted.find("time.engine.correction")
    assert correction is not None
    return str(correction.inputs["regime"])


def kv_tokens(times: EngineTimes) -> float:
    """Return roughly how many tokens the KV cache of a data-parallel rank holds: what weights and 4 GiB leave."""
    shape, split = times.shape, times.split
    experts = sum(n * layer.expert_parameters for layer, n in shape.groups)
    weights = (shape.total - experts) * weight_bytes(split.dtype) / split.tensor
    weights += experts * weight_bytes(split.expert_dtype) / max(split.tensor, split.expert)
    free = times.gpu.memory_bytes * ENGINE_SHARE - weights - ENGINE_OTHER
    far = 2.0**20
    bytes_per_token = sum(
        n * work.kv_bytes(far) / far for work, n in layers_of(shape, LayerSplit(split.tensor))
    )
    return max(1.0, free / bytes_per_token)


# -- trainers --------------------------------------------------------------------------------------


def trainer_cases(rows: Iterable[Mapping[str, str]]) -> Iterator[Case]:
    """Yield a case for the trainer rows of prime-rl (its RL trainer multiplied the head in float32), and for the row of
    torchtitan in bfloat16 with FSDP alone. Mixtures on B200 are a group of their own: PyTorch had no grouped product
    for that chip."""
    for row in rows:
        if row["kind"] != "train":
            continue
        if row["source"].endswith("/prime-rl"):
            yield prime_rl_case(row)
        elif row["source"].endswith("/torchtitan") and row["layout"] == "FSDP128 FSDP":
            yield torchtitan_case(row)


def prime_rl_case(row: Mapping[str, str]) -> Case:
    gpu = spec_of_device(row["hardware"])
    assert gpu is not None, row["hardware"]
    shape = known_shape(row["model"])
    ranks, is_rl = int(row["gpus"]), row["mode"].startswith("rl")
    setup = TrainerSetup(
        ranks=ranks,
        ranks_per_node=8,
        shard=ranks,
        seq_len=int(row["seq_in"]),
        micro_batches=2,
        lora_rank=4 * 16 if "LoRA" in row["mode"] else None,
        activation_offload="AC=Offload" in row["layout"],
        loss="rl" if is_rl else "sft",
        is_compiled=True,
    )
    kernel = re.search(r"flash_attention_\d", row["layout"])
    assert kernel is not None, row["layout"]
    constants = replace(
        TrainerConstants(), head_dtype="float32" if is_rl else "bfloat16", attention_kernel=kernel[0]
    )
    figure = TrainerTimes(shape, gpu, setup, constants).step()
    group = "B200, mixtures" if gpu.name == "B200" and shape.is_mixture else f"{gpu.name} {row['model']}"
    return Case(row["id"], "trainer", group, float(row["step_s"]), figure, gpu.name.startswith("H"))


def torchtitan_case(row: Mapping[str, str]) -> Case:
    """Return the case of Llama 3.1 8B on 128 GPUs, two rows of 8,192 tokens each, selective checkpointing."""
    ranks, number = int(row["gpus"]), 2
    setup = TrainerSetup(
        ranks=ranks,
        ranks_per_node=8,
        shard=ranks,
        seq_len=int(row["seq_in"]),
        micro_rows=number,
        checkpointing="selective",
        loss="sft",
    )
    measured = number * setup.seq_len / float(row["tok_s_per_gpu"])
    figure = TrainerTimes(known_shape("meta-llama/Llama-3.1-8B"), gpu_spec("H100-SXM-96GB"), setup).step()
    return Case(row["id"], "trainer", "torchtitan Llama 3.1 8B", measured, figure, is_fitted=False)


# -- weight updates --------------------------------------------------------------------------------


def transfer_cases(rows: Iterable[Mapping[str, str]]) -> Iterator[Case]:
    """Yield cases of files written by one rank (prime-rl: the time outside the step), and of verl's updates."""
    for row in rows:
        outside = re.search(r"time outside the step: ([\d.]+) s", row["other"])
        if row["source"].endswith("/prime-rl") and row["mode"].startswith("rl full") and outside:
            if float(outside[1]) >= 0.5:
                figure = write(size_of(row["model"]), 1, StorageRates(), "time.weights.write")
                yield Case(
                    row["id"], "transfer", "files, one writer", float(outside[1]), figure, is_fitted=True
                )
        elif row["kind"] == "weight_sync" and (model := known(row["model"])):
            size, gpu = size_of(model), gpu_spec(UPDATED.get(row["hardware"], row["hardware"]))
            seconds = float(row["step_s"].split("-")[0])
            yield Case(
                row["id"], "transfer", "broadcast", seconds, broadcast_update(size, gpu), is_fitted=True
            )
            if delta := re.search(r"delta ([\d.]+)", row["other"]):
                figure = delta_update(size, 0.02, 1, StorageRates())
                yield Case(row["id"], "transfer", "delta", float(delta[1]), figure, is_fitted=True)


UPDATED = {"A100/A800 80GB": "A800-SXM-80GB"}
"""GPU types of weight updates by the name that the page has."""


def size_of(model: str) -> Figure:
    return weight_bytes_of(known_shape(model), TrainerSetup(ranks=1, ranks_per_node=1, shard=1, seq_len=1))


def known(name: str) -> str:
    """Return the name of the shipped shape of a Qwen model; empty if there is none."""
    full = f"Qwen/{name}"
    return full if full in known_models() else ""


# -- statistics ------------------------------------------------------------------------------------


def summary(cases: Iterable[Case]) -> dict[str, float]:
    """Return the number of rows, median and mean error, bias, the shares within 10 and 20 %, and the coverage of the
    80 % intervals."""
    found = list(cases)
    if not found:
        return {"rows": 0}
    errors = [abs(case.ratio - 1) for case in found]
    covered = [case.predicted.low <= case.measured <= case.predicted.high for case in found]
    return {
        "rows": len(found),
        "median": round(statistics.median(errors), 4),
        "mean": round(statistics.fmean(errors), 4),
        "bias": round(statistics.median(case.ratio - 1 for case in found), 4),
        "within_10": round(statistics.fmean(error <= 0.1 for error in errors), 4),
        "within_20": round(statistics.fmean(error <= 0.2 for error in errors), 4),
        "coverage_80": round(statistics.fmean(covered), 4),
    }
