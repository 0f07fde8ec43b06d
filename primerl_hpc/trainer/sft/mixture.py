"""The order of training rows: a pure function of sizes, seed and position, so that a checkpoint stores one integer.

Rows that are decoded together, those of a Parquet row group, are a block. An epoch of a source with blocks takes its
blocks in random order and shuffles the rows of a few at a time, so that each block is decoded about once.

Rows of several sources are numbered consecutively. Without probabilities an epoch contains every row once. With them,
each sample's source is drawn at random, and an epoch ends when the first source, or the last one, is exhausted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 2
"""Version of the order of rows, which a checkpoint stores. Positions of checkpoints without it are of version 1, whose
epoch e with seed s had the order of epoch e - 1 with seed s + 1."""
WINDOW_ROWS = 16_384
WINDOW_BLOCKS = 2
"""The rows of at least so many blocks are shuffled together; of more, until they have `WINDOW_ROWS` rows."""
FIRST_DRAWS = 1024  # size of the first draw of sources; each further draw doubles their number


@dataclass(frozen=True)
class Mixture:
    sizes: tuple[int, ...]
    """Rows of each source."""
    probabilities: tuple[float, ...] | None = None
    """Share of each source among the samples; sums to 1. None: proportional to its rows."""
    ends_with_last: bool = True
    """``all_exhausted``: smaller sources restart until the last is exhausted. False: the first one ends the epoch."""
    shuffle: bool = True
    seed: int = 0
    version: int = ORDER_VERSION
    blocks: tuple[tuple[int, ...], ...] = ()
    """Rows of each block of each source; of a source without blocks, and for all sources by default, empty."""

    def order(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers of one epoch; epochs count from 0."""
        generator = np.random.default_rng([self.seed, epoch] if self.version > 1 else self.seed + epoch)
        if self.probabilities is None:
            total = sum(self.sizes)
            if not (self.shuffle and self._has_blocks):
                return generator.permutation(total) if self.shuffle else np.arange(total)
            sources = generator.permutation(np.repeat(np.arange(len(self.sizes)), self.sizes))
        else:
            sources = self._draw_sources(generator, np.asarray(self.probabilities))
        starts = np.concatenate([[0], np.cumsum(self.sizes)])
        rows = np.empty(len(sources), np.int64)
        for source in range(len(self.sizes)):
            places = np.flatnonzero(sources == source)
            rows[places] = starts[source] + self._rows_of(source, len(places), generator)
        return rows

    @property
    def _has_blocks(self) -> bool:
        return self.version > 1 and any(self.blocks)

    def _draw_sources(
        self, generator: np.random.Generator, probabilities: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """Draw sources until the epoch ends: with the sample that completes the first, or the last, source."""
        drawn = np.empty(0, np.int64)
        while True:
            more = generator.choice(len(self.sizes), max(FIRST_DRAWS, len(drawn)), p=probabilities)
            drawn = np.concatenate([drawn, more])
            ends = [
                places[size - 1] if len(places := np.flatnonzero(drawn == source)) >= size else None
                for source, size in enumerate(self.sizes)
            ]
            known_ends = [end for end in ends if end is not None]
            if len(known_ends) == len(ends) if self.ends_with_last else known_ends:
                return drawn[: (max if self.ends_with_last else min)(known_ends) + 1]

    def _rows_of(self, source: int, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """Return ``count`` rows of a source, in a new order each time it restarts."""
        size = self.sizes[source]
        blocks = self.blocks[source] if self._has_blocks else ()
        rounds = []
        for _ in range(-(-count // size)):
            if not self.shuffle:
                rounds.append(np.arange(size))
            else:
                rounds.append(shuffle_blocks(blocks, generator) if blocks else generator.permutation(size))
        return np.concatenate([np.empty(0, np.int64), *rounds])[:count]


def shuffle_blocks(blocks: Sequence[int], generator: np.random.Generator) -> NDArray[np.int64]:
    """Return the rows of all blocks once: blocks in random order, the rows of a window of blocks shuffled."""
    starts = np.concatenate([[0], np.cumsum(blocks)])
    windows: list[list[NDArray[np.int64]]] = [[]]
    num_rows = 0
    for block in generator.permutation(len(blocks)):
        if len(windows[-1]) >= WINDOW_BLOCKS and num_rows >= WINDOW_ROWS:
            windows.append([])
            num_rows = 0
        windows[-1].append(np.arange(starts[block], starts[block + 1]))
        num_rows += blocks[block]
    return np.concatenate([generator.permutation(np.concatenate(window)) for window in windows])


class Order:
    """Maps a position in the endless stream to a row. Epochs may differ in length."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self._starts = [0]  # position at which each known epoch begins
        self._epoch, self._rows = -1, np.empty(0, np.int64)

    def row(self, position: int) -> int:
        epoch = self._epoch_of(position)
        self._load(epoch)
        return int(self._rows[position - self._starts[epoch]])

    def epochs(self, position: int) -> float:
        """Return the number of epochs before ``position``."""
        epoch = self._epoch_of(position)
        self._load(epoch)
        return epoch + (position - self._starts[epoch]) / len(self._rows)

    def _epoch_of(self, position: int) -> int:
        if self.mixture.probabilities is None:
            total = sum(self.mixture.sizes)
            while len(self._starts) <= position // total:
                self._starts.append(self._starts[-1] + total)
            return position // total
        while True:
            epoch = int(np.searchsorted(self._starts, position, side="right")) - 1
            if epoch < len(self._starts) - 1:
                return epoch
            self._load(epoch)
            if position < self._starts[epoch] + len(self._rows):
                return epoch
            self._starts.append(self._starts[epoch] + len(self._rows))

    def _load(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch, self._rows = epoch, self.mixture.order(epoch)


def shares(weights: Sequence[float]) -> tuple[float, ...]:
    """Scale weights to sum to 1."""
    return tuple(float(weight / sum(weights)) for weight in weights)
