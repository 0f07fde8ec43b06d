"""Log-probabilities of samples in packed rows, by the trainer's policy, and of single samples, by transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from primerl_hpc.trainer.batch import ForwardInputs


def make_samples(lengths: Sequence[int], vocab: int = 96) -> list[Tensor]:
    """Return samples with random tokens from 4 to ``vocab``."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, vocab, (length,), generator=generator) for length in lengths]


def packed_logprobs(policy: Any, rows: Sequence[Sequence[Tensor]], width: int | None = None) -> list[Tensor]:
    """Return the log-probabilities of each sample's tokens but the first.

    ``rows``: samples of each row, which is padded to ``width`` tokens; default: those of the longest row.
    """
    width = width or max(sum(map(len, row)) for row in rows)
    ids, positions = (torch.zeros(len(rows), width, dtype=torch.long) for _ in range(2))
    places = []
    for number, row in enumerate(rows):
        start = 0
        for sample in row:
            end = start + len(sample)
            ids[number, start:end], positions[number, start:end] = sample, torch.arange(len(sample))
            places.append(number * width + torch.arange(start, end - 1))
            start = end
    predictors = torch.cat(places)
    targets = ids.flatten()[predictors + 1]
    inputs = ForwardInputs(input_ids=ids, position_ids=positions, predictors=predictors, targets=targets)
    return list(policy(inputs)[0].split([len(each) for each in places]))


def plain_logprobs(model: Any, sample: Tensor) -> Tensor:
    """Return the log-probabilities of a sample's tokens but the first that transformers computes."""
    logprobs = model(input_ids=sample[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, sample[1:, None])[:, 0]
