"""Supervised data: samples in a reproducible order, packed into rows.

`SFTStream` is a pure function of data, seed and position: sample number p of the endless stream is a row in the
mixture's order. Every rank computes the same packing and uses its share, so a batch does not depend on the number of
ranks, and a checkpoint needs one integer besides its counts.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.schema.sft import SFT
from primerl_hpc.trainer.sft.mixture import ORDER_VERSION, Mixture, Order, shares
from primerl_hpc.trainer.sft.tokens import Samples, SFTSample
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch, PlacedPicture

NOTHING_TRAINED = "no row has a token to train on"
TRAIN_SOMETHING = "check sft.loss_mask, seq_len, and the weights of messages and rows"
WINDOW_SAMPLES = 1024  # samples that the ranks prepare together in advance


@dataclass(frozen=True)
class SFTBatch:
    rows: list[list[SFTSample]]
    """The samples of all ranks' rows of one step."""
    num_samples: int
    metrics: dict[str, float]
    """Truncated and skipped rows; share of each source in samples and tokens, if there are several."""


@dataclass
class RowCounts:
    """Truncated and skipped rows, counted over the run."""

    num_cut: int = 0
    """Trained rows truncated at seq_len."""
    num_skipped: int = 0
    """Rows without a trained token: none is selected, or all are beyond seq_len."""
    first_cut: str = ""
    first_skipped: str = ""
    """Locations, for messages; unknown after a resume."""

    def add(self, sample: SFTSample) -> None:
        if not sample.is_trained.any():
            self.num_skipped += 1
            self.first_skipped = self.first_skipped or sample.location
        elif sample.num_cut:
            self.num_cut += 1
            self.first_cut = self.first_cut or sample.location

    def summary(self, rows: str) -> str:
        """Return one line about ``rows``, e.g. "12 rows"; empty if none was truncated or skipped."""
        parts = [
            f"{count:,} {outcome}{f' (first: {first})' if first else ''}"
            for count, outcome, first in (
                (self.num_cut, "cut at seq_len", self.first_cut),
                (self.num_skipped, "skipped without a trained token", self.first_skipped),
            )
            if count
        ]
        return f"of {rows}, {' and '.join(parts)}" if parts else ""


class SFTStream:
    """The endless stream of samples, cut into batches of packed rows."""

    def __init__(
        self,
        tokenizer: Samples,
        config: SFT,
        *,
        seq_len: int,
        seed: int,
        sizes: tuple[int, ...] | None = None,
        blocks: tuple[tuple[int, ...], ...] = (),
        position: int = 0,
    ) -> None:
        """``sizes``: rows of each of the config's sources; default: all rows belong to one source. ``blocks``: of each
        source, the rows of its blocks, see `Mixture`."""
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
                blocks=blocks,
            )
        )
        self.position = position  # samples taken so far
        self.row_counts = RowCounts()
        self._prepared = position  # samples before this position are prepared
        self._taken: list[tuple[int, int]] = []  # (source, tokens) of the current batch

    @property
    def epoch(self) -> float:
        return self.order.epochs(self.position)

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Continue from `progress` of a checkpoint, in the order of its version; from the beginning if it is empty."""
        self.position = self._prepared = progress.get("position", 0)
        self.row_counts = RowCounts(progress.get("num_cut", 0), progress.get("num_skipped", 0))
        version = progress.get("order", 1) if progress else ORDER_VERSION
        self.order = Order(dataclasses.replace(self.order.mixture, version=version))

    @property
    def progress(self) -> dict[str, int]:
        """State of the stream for a checkpoint."""
        return {
            "order": self.order.mixture.version,
            "position": self.position,
            "num_cut": self.row_counts.num_cut,
            "num_skipped": self.row_counts.num_skipped,
        }

    def next_batch(self) -> SFTBatch:
        """Return the packed rows of the next step."""
        self._taken = []
        before = dataclasses.replace(self.row_counts)
        if self.config.batch_unit == "samples":
            samples = [self._take() for _ in range(self.config.batch_size)]
            rows = pack_first_fit(samples, self.seq_len)
        else:
            rows = self._fill_rows()
        metrics = self._source_metrics() | self._count_metrics(before)
        return SFTBatch(rows, sum(len(row) for row in rows), metrics)

    def _fill_rows(self) -> list[list[SFTSample]]:
        rows: list[list[SFTSample]] = [[]]
        used = 0
        while True:
            sample = self._take()
            if used + len(sample.input_ids) > self.seq_len:
                if len(rows) == self.config.batch_size:
                    self.position -= 1  # only this sample: skipped samples before it may have been evicted
                    self._taken.pop()
                    self.row_counts.num_cut -= sample.num_cut > 0
                    return rows
                rows.append([])
                used = 0
            rows[-1].append(sample)
            used += len(sample.input_ids)

    def _take(self) -> SFTSample:
        """Return the next sample with a trained token. Raises DataError if a complete epoch has none."""
        for _ in range(2 * len(self.tokenizer)):  # they contain an epoch, wherever they begin
            if self.position >= self._prepared:
                self._prepare()
            index = self.order.row(self.position)
            sample = self.tokenizer[index]
            self.position += 1
            self.row_counts.add(sample)
            if sample.is_trained.any():
                self._taken.append((bisect.bisect_right(self._ends, index), len(sample.input_ids)))
                return sample
        raise DataError(
            NOTHING_TRAINED,
            location=", ".join(source.path for source in self.config.sources),
            hint=TRAIN_SOMETHING,
        )

    def _prepare(self) -> None:
        self._prepared = self.position + min(WINDOW_SAMPLES, len(self.tokenizer))
        self.tokenizer.prepare(
            [self.order.row(position) for position in range(self.position, self._prepared)]
        )

    def _count_metrics(self, before: RowCounts) -> dict[str, float]:
        row_counts = self.row_counts
        return {
            "progress/num_cut": row_counts.num_cut - before.num_cut,
            "progress/num_skipped": row_counts.num_skipped - before.num_skipped,
            "progress/total_cut": row_counts.num_cut,
            "progress/total_skipped": row_counts.num_skipped,
        }

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


def all_rows(tokenizer: Samples, seq_len: int, location: str) -> tuple[list[list[SFTSample]], RowCounts]:
    """Pack every trainable sample once, in order: a validation set. Raises DataError if there is none.

    ``location``: source of the rows, for messages.
    """
    tokenizer.prepare(list(range(len(tokenizer))))
    row_counts, samples = RowCounts(), []
    for index in range(len(tokenizer)):
        row_counts.add(sample := tokenizer[index])
        if sample.is_trained.any():
            samples.append(sample)
    if not samples:
        raise DataError(
            NOTHING_TRAINED,
            location=location,
            hint=TRAIN_SOMETHING,
        )
    return pack_first_fit(samples, seq_len), row_counts


def pack_first_fit(samples: list[SFTSample], seq_len: int) -> list[list[SFTSample]]:
    """Pack by first-fit decreasing: longest first, each into the first row with enough room."""
    rows: list[list[SFTSample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: -len(sample.input_ids)):
        length = len(sample.input_ids)
        index = next((index for index, free in enumerate(room) if free >= length), None)
        if index is None:
            rows.append([])
            room.append(seq_len)
            index = len(rows) - 1
        rows[index].append(sample)
        room[index] -= length
    return rows


def make_row(
    samples: list[SFTSample], pictures_of: Callable[[SFTSample], list[PlacedPicture]] = lambda _: []
) -> MicroBatch:
    """Concatenate samples into a row trained only by cross-entropy. ``pictures_of``: see `Samples`."""
    lengths = np.array([len(sample.input_ids) for sample in samples], np.int64)
    trained = np.concatenate([sample.is_trained for sample in samples])
    zeros = np.zeros(len(samples), np.float32)
    return MicroBatch(
        input_ids=np.concatenate([sample.input_ids for sample in samples], dtype=np.int32),
        # not sampled by a policy, so there is no mismatch to measure
        loss_mask=np.zeros(len(trained), np.bool_),
        inference_logprobs=np.zeros(len(trained), np.float32),
        sample_lengths=lengths,
        temperatures=np.ones(len(samples), np.float32),
        advantages=zeros,
        rl_weights=zeros,
        ref_kl_weights=zeros,
        env_ids=np.zeros(len(samples), np.int32),
        ce_weights=trained.astype(np.float32),
        images=tuple(
            dataclasses.replace(placed, start=start + placed.start)
            for sample, start in zip(samples, (np.cumsum(lengths) - lengths).tolist(), strict=True)
            for placed in pictures_of(sample)
        ),
    )
