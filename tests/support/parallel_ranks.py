"""Train tiny models with many layouts, on ranks that are forked from one process with all imports.

    python -m tests.support.parallel_ranks FOLDER      # FOLDER/cases.json → FOLDER/<case>.safetensors and <case>.json

Cases are groups of ranks in the order of the file. `Case` has their fields.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections import Counter
from contextlib import ExitStack, nullcontext
from functools import partial, partialmethod
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM  # noqa: F401 imported once, before the forks

from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.recipe.load import parse_recipe
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.checkpoint.checkpoint import load_checkpoint
from primerl_hpc.trainer.checkpoint.saver import Saver
from primerl_hpc.trainer.losses import LossInputs, TokenLoss
from primerl_hpc.trainer.model import head
from primerl_hpc.trainer.optim import optimizers as optim
from primerl_hpc.trainer.parallel import deepep
from primerl_hpc.trainer.parallel.mesh import make_world
from primerl_hpc.trainer.train_step import Trainer, build_trainer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.trainer.weights.filesystem import publish_policy
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch, Picture, PlacedPicture
from tests.support import deep_ep_on_gloo
from tests.support.helpers import random_row
from tests.support.tiny_models import IMAGE_TOKEN, VISION_START

STEPS, ROWS, SEQ_LEN = 3, 8, 64
SAVED_STEP = 2
OFFLOAD_BYTES = 1 << 15  # an offloaded optimizer of a tiny model has several parts too


class Case(TypedDict, total=False):
    name: str
    model: str
    ranks: int
    layout: dict[str, Any]  # layout.trainer
    trainer: dict[str, Any]
    loss: dict[str, Any]
    optimizer: dict[str, Any]
    lora: dict[str, Any]
    seq_len: int  # 4096: every row is a forward of its own
    is_supervised: bool
    is_large: bool  # as if gradients were too large to stay unsharded
    is_counted: bool  # count collectives of the last step
    is_exported: bool
    has_deep_ep: bool  # one that works without GPUs
    compiler: str  # torch.compile's backend; its own takes a minute here to make C++ of a graph
    save_to: str  # a run directory that gets a checkpoint of step 2
    resume_from: str  # train step 3 alone, from that checkpoint


def reinforce(x: LossInputs, scale: float) -> TokenLoss:
    """A custom loss over complete samples, with a metric."""
    return TokenLoss(-scale * x.advantages * x.sequence_mean(x.logprobs), {"longing": x.advantages.abs()})


def batch(step: int, case: Case) -> list[MicroBatch]:
    """Return packed rows of random samples, equal for all layouts. Some tokens of RL are also distilled, most of them
    in the first row."""
    rng = np.random.default_rng(step)
    rows = [random_row(rng, rng.integers(3, 22, 3).tolist()) for _ in range(ROWS)]
    for number, row in enumerate(rows):
        if case["model"].endswith("qwen3_vl"):
            show_images(row, rng, share=number % 2)
        if case.get("is_supervised"):
            row.ce_weights, row.rl_weights[:] = row.loss_mask.astype(np.float32), 0
            continue
        share = 0.8 / (number + 1)
        is_in = row.loss_mask & (rng.random(row.num_tokens) < share)
        row.ce_weights = np.where(is_in, 0.3, 0).astype(np.float32)
        is_in = rng.random(len(row.sample_lengths)) < share
        row.ref_kl_weights = np.where(is_in, 0.3, 0).astype(np.float32)
        row.ref_logprobs = -rng.uniform(2, 6, row.num_tokens).astype(np.float32)
        if recipe_of(case).replays_routers and number:
            # all but a fifth of the tokens by two of the 8 experts in each of two layers
            chosen = rng.random((row.num_tokens, 2, 8)).argsort(-1)[..., :2]
            row.routed_experts = (chosen * (rng.random((row.num_tokens, 1, 1)) < 0.8)).astype(np.uint8)
    return rows


def show_images(row: MicroBatch, rng: np.random.Generator, share: float) -> None:
    """Replace the tokens after the first by those of an image, in a ``share`` of the samples with room for it."""
    row.input_ids = np.minimum(row.input_ids, VISION_START - 2)  # no token of an image by chance
    starts = np.cumsum(row.sample_lengths) - row.sample_lengths
    for start, length in zip(starts.tolist(), row.sample_lengths.tolist(), strict=True):
        if length > 6 and rng.random() < share:
            row.input_ids[start + 1 : start + 5] = IMAGE_TOKEN
            row.loss_mask[start + 1 : start + 5] = False
            picture = Picture(str(rng.random()), rng.normal(size=(16, 96)).astype(np.float32), (1, 4, 4))
            row.images += (PlacedPicture(picture, start + 1, 4),)


def recipe_of(case: Case) -> Recipe:
    return parse_recipe(
        {
            "kind": "rl",
            "name": "parallel",
            "model": {"name": case["model"], "dtype": "float32"},
            "seq_len": case.get("seq_len", SEQ_LEN),
            "max_steps": STEPS,
            "environments": {"train": [{"id": "reverse-text"}]},
            "rollouts": {"sampling": {"max_tokens": 12}},
            "optimizer": case.get("optimizer", {"type": "sgd", "lr": 0.5, "max_norm": 1.0}),
            "layout": {"trainer": case.get("layout", {})},
            "loss": case.get("loss", {"type": "dppo"}),
            "lora": case.get("lora"),
            "trainer": {
                "param_dtype": "float32",
                "activation_checkpointing": "none",
                "reshard_after_forward": True,  # as a large model
            }
            | case.get("trainer", {}),
        }
    )


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone().contiguous()


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation created. Views of a mapped file are not created
    tensors."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if all(each.alias_info is None for each in func._schema.returns):
            made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
            made = [own(each) for each in made if not each.is_meta]
            self.numel = max([self.numel, *(each.numel() for each in made)])
        return out


class Collectives(TorchDispatchMode):
    """Calls of each collective by c10d's names."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


class Collections:
    """Number of garbage collections since this object was created."""

    def __init__(self) -> None:
        self.count = 0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        self.count += phase == "start"


def build_case(case: Case, ranks: int, watchdog: Watchdog, device: torch.device) -> Trainer:
    recipe = recipe_of(case)
    world = make_world(recipe.layout.trainer, device, local_rank=dist.get_rank(), local_size=ranks)
    return build_trainer(recipe, case["model"], world, watchdog)


def run_case(
    case: Case, ranks: int, folder: Path, watchdog: Watchdog, device: torch.device = torch.device("cpu")
) -> None:
    with ExitStack() as stand_ins, LargestTensor() as loaded:
        if case.get("has_deep_ep"):
            stand_ins.enter_context(patch.object(deepep, "import_deep_ep", lambda: deep_ep_on_gloo))
        if "compiler" in case:
            compile_with = partialmethod(nn.Module.compile, backend=case["compiler"])
            stand_ins.enter_context(patch.object(nn.Module, "compile", compile_with))
            compile_head = partial(head.compile_head, backend=case["compiler"])
            stand_ins.enter_context(patch.object(head, "compile_head", compile_head))
        trainer = build_case(case, ranks, watchdog, device)
    world = trainer.world
    trainer.small = trainer.small and not case.get("is_large")
    gradients: dict[str, Tensor] = {}

    def keep_first_gradients(*_) -> None:
        if not gradients:
            named = [
                (name, each) for name, each in trainer.policy.hf.named_parameters() if each.grad is not None
            ]
            gradients.update({f"gradient.{name}": whole(each.grad) for name, each in named})

    trainer.optimizer.parts[0].register_step_pre_hook(keep_first_gradients)
    start = 0
    if "resume_from" in case:
        start = SAVED_STEP
        load_checkpoint(RunDir(folder / case["resume_from"]), trainer, start)
    steps, counts, collected = [], {}, []
    garbage = Collections()
    for step in range(start + 1, STEPS + 1):
        rows = batch(step, case)[world.data_rank :: world.data_size]
        with Collectives() if case.get("is_counted") else nullcontext() as collectives:
            steps.append(trainer.train_step(step, rows, []).metrics)
        collected.append(garbage.count)
        if collectives:
            counts = collectives.counts
        if "save_to" in case and step == SAVED_STEP:
            saver = Saver(RunDir(folder / case["save_to"]), trainer, ("trainer",))
            saver.save(step)  # on its way while step 3 is trained
    gc.callbacks.remove(garbage)
    everyones: list = [None] * ranks
    dist.all_gather_object(everyones, collected)
    if "save_to" in case:
        saver.finish()
    if case.get("is_supervised"):
        rows = batch(9, case)[world.data_rank :: world.data_size]
        steps.append({"val/loss": trainer.evaluate(rows)[0]})
    weights = {f"weight.{name}": whole(value) for name, value in trainer.policy.hf.named_parameters()}
    if case.get("is_exported"):
        run = RunDir(folder / f"{case['name']}-run")
        publish_policy(run, trainer, STEPS)
    if world.is_leader:
        save_file(gradients | weights, folder / f"{case['name']}.safetensors")
        report = {
            "steps": steps,
            "collectives": counts,
            "collections": everyones,
            "largest_loaded": loaded.numel,
            "largest_own": max(own(value).numel() for value in trainer.policy.parameters()),
        }
        (folder / f"{case['name']}.json").write_text(json.dumps(report))


def run_rank(rank: int, ranks: int, cases: list[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    optim.OFFLOAD_BYTES = OFFLOAD_BYTES
    store = dist.FileStore(str(folder / f"store-{cases[0]['name']}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    watchdog = Watchdog(RunDir(folder / cases[0]["name"]), "trainer-0", rank=rank, size=ranks, timeout_s=600)
    for case in cases:
        try:
            run_case(case, ranks, folder, watchdog)
        except PrimerlError as error:
            if rank == 0:
                (folder / f"{case['name']}.json").write_text(json.dumps({"refused": str(error)}))
    watchdog.pause()
    dist.barrier()
    dist.destroy_process_group()


def run_guarded(rank: int, ranks: int, cases: list[Case], folder: Path) -> None:
    try:
        run_rank(rank, ranks, cases, folder)
    except BaseException:  # noqa: BLE001 the process ends here
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # peers in a collective see the connection close


def main(folder: Path) -> int:
    warnings.simplefilter("ignore")
    context = multiprocessing.get_context("fork")
    for ranks, group in groupby(json.loads((folder / "cases.json").read_text()), lambda case: case["ranks"]):
        arguments = (ranks, list(group), folder)
        children = [context.Process(target=run_guarded, args=(rank, *arguments)) for rank in range(ranks)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        if any(child.exitcode for child in children):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
