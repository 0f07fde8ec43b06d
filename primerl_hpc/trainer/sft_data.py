"""Supervised data: samples in a reproducible order, packed into rows.

`SFTStream` is a pure function of data, seed and position: sample number p of the endless stream is a row of the mixture's
order. Every rank makes the same packing and takes its share, so a batch does not depend on the number of ranks, and a
checkpoint needs one integer.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

import numpy as np

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.sft_schema import SFT
from primerl_hpc.trainer.sft_mixture import Mixture, Order, shares
from primerl_hpc.trainer.sft_tokens import Sample, Tokenizer
from primerl_hpc.transport.rollouts import MicroBatch

WINDOW_SAMPLES = 1024  # samples that the ranks make together, ahead of their use


@dataclass(frozen=True)
class Batch:
    rows: list[MicroBatch]
    """All ranks' packed rows of one step."""
    num_samples: int
    metrics: dict[str, float]
    """Share of each source in the samples and in the tokens, where there are several."""


class SFTStream:
    """The endless stream of samples, cut into batches of packed rows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: SFT,
        *,
        seq_len: int,
        seed: int,
        sizes: tuple[int, ...] | None = None,
        position: int = 0,
    ) -> None:
        """``sizes``: rows of each of the config's sources; default: all are of the one source."""
        self.tokenizer, self.config, self.seq_len = tokenizer, config, seq_len
        sizes = sizes or (len(tokenizer),)
        self._ends = list(itertools.accumulate(sizes))
        weights = [source.probability for source in config.sources if source.probability is not None]
        self.order = Order(
            Mixture(
                sizes,
                shares(weights) if weights else None,
                ends_with_last=config.stopping == "all_exhausted",
                shuffle=config.shuffle,
                seed=seed,
            )
        )
        self.position = position  # samples taken so far
        self._prepared = position  # samples before this one are made
        self._taken: list[tuple[int, int]] = []  # (source, tokens) of the batch being made

    @property
    def epoch(self) -> float:
        return self.order.epochs(self.position)

    def next_batch(self) -> Batch:
        """The packed rows of the next step."""
        self._taken = []
        if self.config.batch_unit == "samples":
            samples = [self._take() for _ in range(self.config.batch_size)]
            rows = pack_first_fit(samples, self.seq_len)
        else:
            rows = self._fill_rows()
        return Batch([make_row(row) for row in rows], sum(len(row) for row in rows), self._source_metrics())

    def _fill_rows(self) -> list[list[Sample]]:
        rows: list[list[Sample]] = [[]]
        used = 0
        while True:
            sample = self._take()
            if used + len(sample.input_ids) > self.seq_len:
                if len(rows) == self.config.batch_size:
                    self.position -= 1  # its own: those that were skipped before it may be forgotten by now
                    self._taken.pop()
                    return rows
                rows.append([])
                used = 0
            rows[-1].append(sample)
            used += len(sample.input_ids)

    def _take(self) -> Sample:
        """The next sample with a trained token. Raises DataError when a whole epoch has none."""
        for _ in range(len(self.tokenizer)):
            if self.position >= self._prepared:
                self._prepare()
            index = self.order.row(self.position)
            sample = self.tokenizer[index]
            self.position += 1
            if sample.is_trained.any():
                self._taken.append((bisect.bisect_right(self._ends, index), len(sample.input_ids)))
                return sample
        raise DataError(
            "no row has a token to train on",
            place=", ".join(source.path for source in self.config.sources),
            mend="look at sft.loss_mask and seq_len",
        )

    def _prepare(self) -> None:
        self._prepared = self.position + min(WINDOW_SAMPLES, len(self.tokenizer))
        self.tokenizer.prepare(
            [self.order.row(position) for position in range(self.position, self._prepared)]
        )

    def _source_metrics(self) -> dict[str, float]:
        if len(self.config.sources) < 2:
            return {}
        sources, tokens = np.array(self._taken).T
        metrics: dict[str, float] = {}
        for number, source in enumerate(self.config.sources):
            is_of = sources == number
            metrics[f"progress/{source.label}/ratio_samples"] = float(is_of.mean())
            metrics[f"progress/{source.label}/ratio_tokens"] = float(tokens[is_of].sum() / tokens.sum())
        return metrics


def all_rows(tokenizer: Tokenizer, seq_len: int) -> list[MicroBatch]:
    """Every trainable sample once, in order: a validation set."""
    tokenizer.prepare(list(range(len(tokenizer))))
    samples = [sample for index in range(len(tokenizer)) if (sample := tokenizer[index]).is_trained.any()]
    return [make_row(row) for row in pack_first_fit(samples, seq_len)]


def pack_first_fit(samples: list[Sample], seq_len: int) -> list[list[Sample]]:
    """First-fit decreasing: longest first, each into the first row with room."""
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda each: -len(each.input_ids)):
        length = len(sample.input_ids)
        index = next((index for index, free in enumerate(room) if free >= length), None)
        if index is None:
            rows.append([])
            room.append(seq_len)
            index = len(rows) - 1
        rows[index].append(sample)
        room[index] -= length
    return rows


def make_row(samples: list[Sample]) -> MicroBatch:
    """Samples one after another, trained by cross-entropy alone."""
    lengths = np.array([len(sample.input_ids) for sample in samples], np.int64)
    trained = np.concatenate([sample.is_trained for sample in samples])
    zeros = np.zeros(len(samples), np.float32)
    return MicroBatch(
        input_ids=np.concatenate([sample.input_ids for sample in samples], dtype=np.int32),
        loss_mask=np.zeros(len(trained), np.bool_),  # sampled by no policy: no mismatch to measure
        inference_logprobs=np.zeros(len(trained), np.float32),
        sample_lengths=lengths,
        temperatures=np.ones(len(samples), np.float32),
        advantages=zeros,
        rl_weights=zeros,
        ref_kl_weights=zeros,
        env_ids=np.zeros(len(samples), np.int32),
        ce_weights=trained.astype(np.float32),
    )
