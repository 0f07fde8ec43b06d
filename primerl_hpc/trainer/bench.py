"""One rank of benchmark mode: ``python -m primerl_hpc.trainer.bench RUN_DIR PHASE PROCESS`` under torchrun.

The loops of rl and sft run as they are, on batches that nobody sampled and rows that nobody wrote; what they tell their
metrics file, and a `Probe` around each training step, becomes ``control/bench_result.json``.
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
import torch.distributed as dist
import transformers

from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.metrics import read_steps
from primerl_hpc.common.names import Kind, Role
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.bench import TOKEN_IDS, BenchRequest
from primerl_hpc.plan.types import PhasePlan
from primerl_hpc.trainer import rl, sft
from primerl_hpc.trainer.core import Core, StepResult, build_core
from primerl_hpc.trainer.load import has_weights
from primerl_hpc.trainer.main import main
from primerl_hpc.trainer.perf import peak_flops, peak_memory
from primerl_hpc.trainer.publish import make_publisher
from primerl_hpc.trainer.saver import Saver
from primerl_hpc.trainer.setup import World
from primerl_hpc.trainer.sft_data import SFTStream
from primerl_hpc.trainer.sft_tokens import Sample
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.transport.rollouts import MicroBatch

NUM_ROWS = 4096  # of a made-up dataset
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
    """Run the loop to its end and write the result, unless it is stopped before. Returns what a loop returns."""
    request = BenchRequest.model_validate(read_json(run.bench_request))
    recipe = phase.recipe
    core = build_core(recipe, phase.model_path, world, watchdog, may_be_random=True)
    probe = Probe(core, request)
    role = Role.SFT if recipe.kind == Kind.SFT else Role.TRAINER
    sides = sft.SIDES if role == Role.SFT else rl.SIDES
    with Saver(run, core, sides) as saver:
        if role == Role.SFT:
            rows = MadeUpRows(request, recipe.seed)
            stream = SFTStream(rows, recipe.sft, seq_len=recipe.seq_len, seed=recipe.seed)
            ended = sft.train_steps(run, core, stream, None, saver, 0)
        else:
            ended = rl.train_steps(run, core, make_publisher(run, core), saver, 0)
    memories: list = [None] * world.size
    dist.all_gather_object(memories, peak_memory(world.device))
    if world.is_leader and ended[0] == "done":
        steps = [
            {**probe.steps[step], **{part: row[name] for part, name in PARTS.items() if name in row}}
            for step, row in read_steps(run.metrics(role.value)).items()
            if request.warmup < step <= request.warmup + request.steps
        ]
        peak = request.peak_tflops and request.peak_tflops * 1e12
        result = describe(core, request) | summarize(steps, world.size, peak or peak_flops(world.device))
        memory = {name: max(each[name] for each in memories) for name in memories[0]}
        write_json(run.bench_result, result | {"peak_memory_gib": memory, "collectives_s": probe.collectives})
    return ended


class MadeUpRows:
    """Stands where the tokenizer of a dataset stands: samples of given lengths, all tokens but the first trained."""

    def __init__(self, request: BenchRequest, seed: int) -> None:
        self.lengths, self.seed = request.draw(NUM_ROWS, seed=seed), seed

    def __len__(self) -> int:
        return len(self.lengths)

    def prepare(self, indices: list[int]) -> None:
        """Nothing to do ahead of time."""

    def __getitem__(self, index: int) -> Sample:
        generator = np.random.default_rng((self.seed, index))
        ids = generator.integers(TOKEN_IDS.start, TOKEN_IDS.stop, self.lengths[index], dtype=np.int32)
        return Sample(ids, np.arange(len(ids)) > 0)


class Probe:
    """Stands around a core's `train_step`: notes what each step computed, and traces the one after the counted ones."""

    def __init__(self, core: Core, request: BenchRequest) -> None:
        self.core, self.request = core, request
        self.steps: dict[int, dict[str, float]] = {}
        self.collectives: dict[str, float] | None = None
        self._train_step = core.train_step
        core.train_step = self.train_step  # type: ignore[method-assign]

    def train_step(self, step: int, rows: list[MicroBatch], env_names: list[str]) -> StepResult:
        if self.request.trace is None or step < self.request.num_steps:
            result = self._train_step(step, rows, env_names)
        else:
            with torch.profiler.profile() as profile:
                result = self._train_step(step, rows, env_names)
            self._keep(profile, Path(self.request.trace))
        self.steps[step] = {
            "number": step,
            "tokens": result.num_tokens,
            "flops": result.flops,
            "flops_prime_rl": self.core.flops.prime_rl(result.num_tokens, self.core.recipe.seq_len),
        }
        return result

    def _keep(self, profile: torch.profiler.profile, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"rank_{self.core.world.rank}.json"))
        events = [(event.name, event.time_range.elapsed_us() / 1e6) for event in profile.events()]
        self.collectives = collective_seconds(events)


def collective_seconds(events: list[tuple[str, float]]) -> dict[str, float]:
    """(name, seconds) of a trace → seconds under way per kind of collective, computation beside it or not.

    gloo's are called ``gloo:all_gather``; NCCL's kernels ``ncclDevKernel_AllGather_RING_LL(…)``.
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


def describe(core: Core, request: BenchRequest) -> dict[str, Any]:
    recipe, world = core.recipe, core.world
    on_gpu = world.device.type == "cuda"
    return {
        "loop": recipe.kind.value,
        "model": type(core.policy.hf).__name__,
        "parameters": sum(parameter.numel() for parameter in core.policy.parameters()),
        "weights": "of the folder" if has_weights(core.folder) else "random",
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
    """Rates and parts of the counted steps, each as median, lowest and highest. ``peak``: FLOP/s of one device.

    ``training`` is forward, backward and optimizer. Tokens/s are of the whole step (data, weights and saves included) and of
    training alone; MFU is of training alone. Steps that save count in ``save`` and ``step_with_save`` only.
    """
    saving = [step for step in steps if "save" in step]
    plain = [step for step in steps if "save" not in step] or steps
    for step in steps:
        step["training"] = step["forward_backward"] + step["optimizer"]
    found: dict[str, list[float]] = {
        "tokens_per_s": [step["tokens"] / step["step"] for step in plain],
        "tokens_per_s_training": [step["tokens"] / step["training"] for step in plain],
    }
    found |= {f"{name}_per_rank": [each / ranks for each in values] for name, values in found.items()}
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
        "rates": {name: spread(values) for name, values in found.items()},
        "seconds": {name: spread(values) for name, values in seconds.items()},
        "tflops_per_rank": spread([step["flops"] / step["training"] / ranks / 1e12 for step in plain]),
        "steps": steps,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main(sys.argv[1:], bench)
