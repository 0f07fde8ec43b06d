"""Rollouts of given lengths that nobody sampled: what benchmark mode gives the trainer, packed as real ones are."""

from __future__ import annotations

import numpy as np

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.orchestrator.packing import TrainSample, pack
from primerl_hpc.orchestrator.trajectories import Sample
from primerl_hpc.plan.bench import TOKEN_IDS, BenchRequest
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.transport.rollouts import StepInfo
from primerl_hpc.transport.rollouts_filesystem import FilesystemSender

LABEL = "made-up"


def send_batches(run: RunDir, recipe: Recipe, request: BenchRequest, *, num_ranks: int) -> None:
    """All batches of a benchmark, each of ``rollouts.batch_size`` samples, for ``num_ranks`` data-parallel ranks."""
    sender = FilesystemSender(run)
    for step in range(1, request.num_steps + 1):
        generator = np.random.default_rng((recipe.seed, step))
        lengths = request.draw(recipe.rollouts.batch_size, seed=recipe.seed + step)
        samples = [make_sample(length, generator) for length in lengths]
        packed = pack(samples, seq_len=recipe.seq_len, num_ranks=num_ranks)
        sender.send(StepInfo(step=step, env_names=[LABEL], num_samples=len(samples)), packed.ranks)


def make_sample(num_tokens: int, generator: np.random.Generator) -> TrainSample:
    """All tokens but the first are trained, as if sampled uniformly from `TOKEN_IDS`."""
    is_sampled = np.arange(num_tokens) > 0
    sample = Sample(
        token_ids=generator.integers(TOKEN_IDS.start, TOKEN_IDS.stop, num_tokens, np.int32),
        loss_mask=is_sampled,
        logprobs=np.where(is_sampled, -np.log(len(TOKEN_IDS)), 0.0).astype(np.float32),
        temperature=1.0,
    )
    return TrainSample(sample, advantage=float(generator.normal()), env_id=0)
