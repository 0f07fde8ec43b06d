"""Supervised data: rows of a file → tokens with a loss mask → packed rows, reproducibly.

`SFTStream` is a pure function of data, seed and position: sample number p of the endless stream is row
``permutation(seed + p // n)[p % n]``. Every rank makes the same packing and takes its share, so a batch does not depend
on the number of ranks, and a checkpoint needs one integer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import DataError
from primerl_hpc.recipe.sft_rows import Row, row_messages
from primerl_hpc.recipe.training_schema import SFT, LossMask
from primerl_hpc.transport.rollouts import MicroBatch

WINDOW_SAMPLES = 1024  # samples that the ranks make together, ahead of their use


@dataclass
class Sample:
    input_ids: NDArray[np.int64]
    is_trained: NDArray[np.bool_]


@dataclass(frozen=True)
class Peers:
    """Ranks that share the work of making samples. ``gather``: every rank's list, in order of ranks."""

    rank: int = 0
    size: int = 1
    gather: Callable[[list], list[list]] = lambda mine: [mine]


class Tokenizer:
    """Rows → samples, each made once, by one of the peers. Token ownership is the renderer's, not guessed from text."""

    def __init__(
        self, rows: list[Row], renderer: Any, mask: LossMask, seq_len: int, peers: Peers | None = None
    ) -> None:
        self.rows, self.renderer, self.seq_len, self.peers = rows, renderer, seq_len, peers or Peers()
        self.trains_assistant = mask.assistant
        self.body_roles = {role for role in ("system", "user", "tool") if getattr(mask, role)}
        self._samples: dict[int, Sample] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def prepare(self, indices: list[int]) -> None:
        """Make the samples of these rows, shared out among the peers. All peers ask for the same rows."""
        missing = [index for index in dict.fromkeys(indices) if index not in self._samples]
        if not missing:
            return
        mine = [self._make(self.rows[index]) for index in missing[self.peers.rank :: self.peers.size]]
        for rank, samples in enumerate(self.peers.gather(mine)):
            self._samples.update(zip(missing[rank :: self.peers.size], samples, strict=True))

    def _make(self, row: Row) -> Sample:
        from renderers.base import build_training_sample

        messages = row_messages(row)
        rendered = build_training_sample(
            self.renderer,
            messages,
            role_to_mask=lambda message: message["role"] == "assistant" and self.trains_assistant,
            content_sft_roles=self.body_roles,
            tools=row.values.get("tools"),
            ensure_final_stop=True,
        )
        ids = np.array(rendered.token_ids[: self.seq_len], np.int64)
        is_trained = np.array(rendered.loss_mask[: self.seq_len], np.bool_)
        is_trained[:1] = False  # nothing predicts the first token
        return Sample(ids, is_trained)


class SFTStream:
    """The endless stream of samples, cut into batches of packed rows."""

    def __init__(
        self, tokenizer: Tokenizer, config: SFT, *, seq_len: int, seed: int, position: int = 0
    ) -> None:
        self.tokenizer, self.config, self.seq_len, self.seed = tokenizer, config, seq_len, seed
        self.position = position  # samples taken so far
        self._epoch, self._order = -1, np.arange(0)
        self._prepared = position  # samples before this one are made

    @property
    def epoch(self) -> float:
        return self.position / len(self.tokenizer)

    def next_batch(self) -> tuple[list[MicroBatch], int]:
        """All ranks' packed rows of the next step, and how many samples they hold."""
        if self.config.batch_unit == "samples":
            samples = [self._take() for _ in range(self.config.batch_size)]
            rows = pack_best_fit(samples, self.seq_len)
        else:
            rows = self._fill_rows()
        return [make_row(row) for row in rows], sum(len(row) for row in rows)

    def _fill_rows(self) -> list[list[Sample]]:
        rows: list[list[Sample]] = [[]]
        used = 0
        while True:
            before = self.position
            sample = self._take()
            if used + len(sample.input_ids) > self.seq_len:
                if len(rows) == self.config.batch_size:
                    self.position = before
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
            sample = self.tokenizer[self._index(self.position)]
            self.position += 1
            if sample.is_trained.any():
                return sample
        raise DataError(
            "no row has a token to train on",
            place=self.config.data.path,
            mend="look at sft.loss_mask and seq_len",
        )

    def _prepare(self) -> None:
        self._prepared = self.position + min(WINDOW_SAMPLES, len(self.tokenizer))
        self.tokenizer.prepare([self._index(position) for position in range(self.position, self._prepared)])

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self.tokenizer))
        if not self.config.shuffle:
            return offset
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng(self.seed + epoch).permutation(len(self.tokenizer))
        return int(self._order[offset])


def all_rows(tokenizer: Tokenizer, seq_len: int) -> list[MicroBatch]:
    """Every trainable sample once, in order: a validation set."""
    tokenizer.prepare(list(range(len(tokenizer))))
    samples = [sample for index in range(len(tokenizer)) if (sample := tokenizer[index]).is_trained.any()]
    return [make_row(row) for row in pack_best_fit(samples, seq_len)]


def pack_best_fit(samples: list[Sample], seq_len: int) -> list[list[Sample]]:
    """Longest first, each into the first row with room (first-fit decreasing)."""
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
    zeros = np.zeros(len(trained), np.float32)
    return MicroBatch(
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        position_ids=np.concatenate([np.arange(length) for length in lengths]),
        loss_mask=np.zeros(len(trained), np.bool_),  # sampled by no policy: no mismatch to measure
        advantages=zeros,
        inference_logprobs=zeros,
        temperatures=np.ones(len(trained), np.float32),
        rl_weights=zeros,
        ce_weights=trained.astype(np.float32),
        ref_kl_weights=zeros,
        ref_logprobs=zeros,
        env_ids=np.zeros(len(trained), np.int32),
        sample_lengths=lengths,
    )
