"""One rank of benchmark mode: ``python -m primerl_hpc.trainer.bench RUN_DIR PHASE PROCESS`` under torchrun.

The loops of rl and sft run unchanged, on synthetic batches and rows. Their metrics files, and a `Probe` around each
training step, are summarized in ``control/bench_result.json``.
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.plan.bench_plans import TOKEN_IDS, BenchRequest
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer import rl_loop as rl
from primerl_hpc.trainer import sft_loop as sft
from primerl_hpc.trainer.checkpoint.saver import Saver
from primerl_hpc.trainer.control import StepFiles
from primerl_hpc.trainer.device_turns import AlwaysOnDevice
from primerl_hpc.trainer.main import main
from primerl_hpc.trainer.model.load import has_weights
from primerl_hpc.trainer.perf import peak_flops, peak_memory
from primerl_hpc.trainer.setup import World, gather_to_rank0
from primerl_hpc.trainer.sft.stream import SFTStream
from primerl_hpc.trainer.sft.tokens import SFTSample
from primerl_hpc.trainer.train_step import StepResult, Trainer, build_trainer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.trainer.weights.publisher import make_publisher
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch, PlacedPicture

NUM_ROWS = 4096  # of the synthetic dataset
PARTS = {
    "data": "time/load_data",
    "forward_backward": "time/forward_backward",
    "optimizer": "time/optimizer",
    "weights": "time/broadcast_weights",
    "save": "time/save_ckpt",
    "step": "time/step",
}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def bench(phase: PhasePlan, run: RunDir, world: World, watchdog: Watchdog) -> tuple[str, int]:
    """Run the loop and write the result, unless the loop was stopped early. Returns the loop's result."""
    request = BenchRequest.model_validate(read_json(run.bench_request))
    recipe = phase.recipe
    trainer = build_trainer(recipe, phase.model_path, world, watchdog, may_be_random=True)
    probe = Probe(trainer, request)
    role = Role.SFT if recipe.kind == Kind.SFT else Role.TRAINER
    sides = sft.SIDES if role == Role.SFT else rl.SIDES
    with Saver(run, trainer, sides) as saver, StepFiles() as files:
        if role == Role.SFT:
            assert recipe.sft is not None  # validated with the recipe
            rows = SyntheticRows(request, recipe.seed)
            stream = SFTStream(rows, recipe.sft, seq_len=recipe.seq_len, seed=recipe.seed)
            ended = sft.train_steps(run, trainer, stream, None, sft.Outputs(saver, files, data=[]), 0)
        else:
            ended = rl.train_steps(run, make_publisher(run, trainer), saver, 0, AlwaysOnDevice(), files)
    memories = gather_to_rank0(peak_memory(world.device))
    if world.is_leader and ended[0] == "done":
        steps = [
            {**probe.steps[step], **{part: row[name] for part, name in PARTS.items() if name in row}}
            for step, row in read_steps(run.metrics(role.value)).items()
            if request.warmup < step <= request.warmup + request.steps
        ]
        peak = request.peak_tflops and request.peak_tflops * 1e12
        result = describe(trainer, request) | summarize(steps, world.size, peak or peak_flops(world.device))
        memory = {name: max(memory[name] for memory in memories) for name in memories[0]}
        write_json(run.bench_result, result | {"peak_memory_gib": memory, "collectives_s": probe.collectives})
    return ended


class SyntheticRows:
    """Replaces the tokenizer of a dataset: samples of given lengths, all tokens but the first trained."""

    def __init__(self, request: BenchRequest, seed: int) -> None:
        self.lengths, self.seed = request.draw(NUM_ROWS, seed=seed), seed

    def __len__(self) -> int:
        return len(self.lengths)

    def prepare(self, indices: list[int]) -> None:
        """Do nothing: samples are created on access."""

    def pictures_of(self, sample: SFTSample) -> list[PlacedPicture]:
        """Return none."""
        return []

    def __getitem__(self, index: int) -> SFTSample:
        generator = np.random.default_rng((self.seed, index))
        ids = generator.integers(TOKEN_IDS.start, TOKEN_IDS.stop, self.lengths[index], dtype=np.int32)
        return SFTSample(ids, np.arange(len(ids)) > 0)


class Probe:
    """Wraps a trainer's `train_step`: records what each step computed, and traces the step after the counted ones."""

    def __init__(self, trainer: Trainer, request: BenchRequest) -> None:
        self.trainer, self.request = trainer, request
        self.steps: dict[int, dict[str, float]] = {}
        self.collectives: dict[str, float] | None = None
        self._train_step = trainer.train_step
        trainer.train_step = self.train_step

    def train_step(self, step: int, rows: list[MicroBatch], env_names: list[str]) -> StepResult:
        if self.request.trace is None or step < self.request.num_steps:
            result = self._train_step(step, rows, env_names)
        else:
            with torch.profiler.profile() as profile:
                result = self._train_step(step, rows, env_names)
            self._save_trace(profile, Path(self.request.trace))
        self.steps[step] = {
            "number": step,
            "tokens": result.num_tokens,
            "flops": result.flops,
            "flops_prime_rl": self.trainer.flops.prime_rl(result.num_tokens, self.trainer.recipe.seq_len),
        }
        return result

    def _save_trace(self, profile: torch.profiler.profile, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"rank_{self.trainer.world.rank}.json"))
        traced = profile.events()
        assert traced is not None  # the profiled block has ended
        events = [(event.name, event.time_range.elapsed_us() / 1e6) for event in traced]
        self.collectives = collective_seconds(events)


def collective_seconds(events: list[tuple[str, float]]) -> dict[str, float]:
    """Return seconds per kind of collective from the (name, seconds) of a trace, overlapped by computation or not.

    gloo's names are like ``gloo:all_gather``, NCCL's kernels like ``ncclDevKernel_AllGather_RING_LL(…)``.
    """
    seconds: dict[str, float] = defaultdict(float)
    for name, duration_s in events:
        if not name.startswith(("gloo:", "ncclDevKernel")):
            continue
        plain = name.lower().replace("_", "")
        for kind in COLLECTIVES:
            if kind.replace("_", "") in plain:
                seconds[kind] += duration_s
    return dict(seconds)


def describe(trainer: Trainer, request: BenchRequest) -> dict[str, Any]:
    """Return model, machine, versions and settings of the benchmark."""
    recipe, world = trainer.recipe, trainer.world
    on_gpu = world.device.type == "cuda"
    return {
        "loop": recipe.kind.value,
        "model": type(trainer.policy.hf).__name__,
        "parameters": sum(parameter.numel() for parameter in trainer.policy.parameters()),
        "weights": "of the folder" if has_weights(trainer.folder) else "random",
        "ranks": world.size,
        "device": torch.cuda.get_device_name(world.device) if on_gpu else f"CPU ({platform.machine()})",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seq_len": recipe.seq_len,
        "layout": recipe.layout.trainer.model_dump(mode="json"),
        "trainer": recipe.trainer.model_dump(mode="json"),
        "optimizer": recipe.optimizer.type,
        "request": request.model_dump(mode="json"),
    }


def summarize(steps: list[dict[str, Any]], ranks: int, peak: float | None) -> dict[str, Any]:
    """Summarize the counted steps: median, lowest and highest of rates and durations. ``peak``: FLOP/s of one device.

    ``training`` is forward, backward and optimizer. Tokens/s are given for the complete step (with data, weights and
    saves) and for training; MFU is for training. Steps that save count only in ``save`` and ``step_with_save``.
    """
    saving = [step for step in steps if "save" in step]
    plain = [step for step in steps if "save" not in step] or steps
    for step in steps:
        step["training"] = step["forward_backward"] + step["optimizer"]
    found: dict[str, list[float]] = {
        "tokens_per_s": [step["tokens"] / step["step"] for step in plain],
        "tokens_per_s_training": [step["tokens"] / step["training"] for step in plain],
    }
    found |= {f"{name}_per_rank": [rate / ranks for rate in values] for name, values in found.items()}
    if peak is not None:
        for name in ("flops", "flops_prime_rl"):
            found[name.replace("flops", "mfu")] = [
                step[name] / step["training"] / (peak * ranks) for step in plain
            ]
    seconds = {part: [step[part] for step in plain] for part in PARTS if part in plain[0]}
    if saving:
        seconds |= {
            "save": [step["save"] for step in saving],
            "step_with_save": [step["step"] for step in saving],
        }
    return {
        "peak_tflops": None if peak is None else peak / 1e12,
        "rates": {name: value_range(values) for name, values in found.items()},
        "seconds": {name: value_range(values) for name, values in seconds.items()},
        "tflops_per_rank": value_range([step["flops"] / step["training"] / ranks / 1e12 for step in plain]),
        "steps": steps,
    }


def value_range(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main(sys.argv[1:], bench)
