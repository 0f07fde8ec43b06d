"""Synthetic rollouts of given lengths, packed like real ones: the trainer's input in benchmark mode."""

from __future__ import annotations

import itertools
import math

import numpy as np

from primerl_hpc.orchestrator.batches.packing import pack
from primerl_hpc.orchestrator.rollout_data import Sample, TrainSample
from primerl_hpc.plan.bench_plans import TOKEN_IDS, BenchRequest
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.rollout import Rollouts
from primerl_hpc.transport.rollouts.micro_batch import RolloutSender, StepInfo

LABEL = "synthetic"


def send_batches(sender: RolloutSender, recipe: Recipe, request: BenchRequest, *, num_ranks: int) -> None:
    """Send all batches of a benchmark, a batch of the recipe each, for ``num_ranks`` data-parallel ranks."""
    for step in range(1, request.num_steps + 1):
        generator = np.random.default_rng((recipe.seed, step))
        lengths = draw_batch(recipe.rollouts, request, seed=recipe.seed + step)
        samples = [make_sample(length, generator) for length in lengths]
        packed = pack(samples, seq_len=recipe.seq_len, num_ranks=num_ranks)
        sender.send(StepInfo(step=step, env_names=[LABEL], num_samples=len(samples)), packed.ranks)


def draw_batch(rollouts: Rollouts, request: BenchRequest, *, seed: int) -> list[int]:
    """Return the number of tokens of each sample of a batch: ``batch_size`` samples, or ``batch_tokens`` tokens."""
    if rollouts.batch_tokens is None:
        return request.draw(rollouts.batch_size, seed=seed)
    lengths = request.draw(math.ceil(rollouts.batch_tokens / 2), seed=seed)  # a sample has at least 2 tokens
    totals = itertools.accumulate(lengths)
    return lengths[: 1 + sum(total < rollouts.batch_tokens for total in totals)]


def make_sample(num_tokens: int, generator: np.random.Generator) -> TrainSample:
    """Return a sample in which all tokens but the first are trained, as if sampled uniformly from `TOKEN_IDS`."""
    is_sampled = np.arange(num_tokens) > 0
    sample = Sample(
        token_ids=generator.integers(TOKEN_IDS.start, TOKEN_IDS.stop, num_tokens, np.int32),
        loss_mask=is_sampled,
        logprobs=np.where(is_sampled, -np.log(len(TOKEN_IDS)), 0.0).astype(np.float32),
        temperature=1.0,
    )
    return TrainSample(sample, advantage=float(generator.normal()), env_id=0)
