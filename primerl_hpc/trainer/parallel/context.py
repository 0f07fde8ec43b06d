"""Context parallelism: the ranks of ``context`` share each row; which tokens belong to which rank.

Every rank has the full row's ids, runs the model on its own tokens with their true positions, and receives the
log-probability of every trained token: the loss is then the same code, and the same number, on all of them.

    N = 8, 2 ranks     ulysses: 0 1 2 3 | 4 5 6 7       ring: 0 1 6 7 | 2 3 4 5

The ring assigns each rank an early and a late piece, so that causal attention costs the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.layout import TrainerLayout
from primerl_hpc.trainer.batch import to_device
from primerl_hpc.trainer.parallel.flash import Segments
from primerl_hpc.trainer.parallel.mesh import World
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup

SHORT_SAMPLE = 16
"""Mean number of tokens per sample below which one masked attention per row is faster than one per sample."""


@dataclass(frozen=True)
class Context:
    """The ranks that share a row. ``group`` is None for a single rank."""

    style: str = "ulysses"
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    tensor: TensorGroup = field(default_factory=TensorGroup)
    """The ranks that divide matrices, and between these the tokens of a rank of ``context``."""

    @property
    def multiple(self) -> int:
        """Number of tokens to a multiple of which rows are padded."""
        return (2 * self.size if self.style == "ring" else self.size) * self.tensor.size

    def tokens_of(self, rank: int, length: int, device: torch.device) -> Tensor:
        """Return the indices of a row's tokens of ``rank``, ascending; ``length`` is a multiple of `multiple`."""
        tokens = torch.arange(length, device=device)
        if self.style != "ring":
            return tokens.chunk(self.size)[rank]
        pieces = tokens.chunk(2 * self.size)
        return torch.cat([pieces[rank], pieces[2 * self.size - 1 - rank]])

    def host_tokens_of(self, rank: int, length: int) -> NDArray[np.int64]:
        """Return `tokens_of` on the CPU."""
        return np.concatenate(
            [np.arange(piece.start, piece.stop) for _, piece in self.pieces_of(rank, length)]
        )

    def pieces_of(self, rank: int, length: int) -> list[tuple[int, range]]:
        """Return the pieces of a row that ``rank`` holds: place among the rank's tokens, and the tokens of the row."""
        if self.style != "ring":
            width = length // self.size
            return [(0, range(rank * width, (rank + 1) * width))]
        width = length // (2 * self.size)
        return [
            (place * width, range(piece * width, (piece + 1) * width))
            for place, piece in enumerate((rank, 2 * self.size - 1 - rank))
        ]


def make_context(layout: TrainerLayout, config: Any, world: World, tensor: TensorGroup) -> Context:
    """Return the ranks that share this rank's rows. ``config``: the model's text configuration."""
    mesh = world.context_mesh
    if mesh is None:
        return Context(tensor=tensor)
    style = choose_style(layout, config, mesh.size(), tensor.size)
    return Context(style, mesh.get_local_rank(), mesh.size(), mesh.get_group(), tensor)


def choose_style(layout: TrainerLayout, config: Any, size: int, tensor: int = 1) -> str:
    """Return the style in which ``size`` ranks share a row. Raises ConfigError if the model does not allow it."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope == "dynamic":
        raise ConfigError(
            f"layout.trainer.context_parallel is {size}, but the model's positions (dynamic rope) "
            "depend on the length of "
            "each document, and a rank has only a part of it",
            hint="set it to 1",
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    heads, kv_heads = heads // tensor, max(1, kv_heads // tensor)  # of one rank
    divides = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    if layout.context_style == "ulysses" and not divides:
        raise ConfigError(
            f"layout.trainer.context_parallel {size} does not fit ulysses: the model's {heads} "
            "attention heads and "
            f"{kv_heads} key-value heads must be divided among {size} ranks",
            hint="set layout.trainer.context_style to ring",
        )
    if layout.context_style != "auto":
        return layout.context_style
    return "ulysses" if divides else "ring"


@dataclass
class Packing:
    """Positions of the samples in B rows, and the rank of each of their N tokens (padding included).

    Models pass it as a keyword argument to `packed_attention`.
    """

    context: Context
    positions: Tensor  # [B, N], restarting at 0 with each sample; each padding token is a separate sample
    inner: str = "sdpa"  # attention over full sequences: sdpa, eager, varlen, or a flash implementation
    host_positions: NDArray[np.int64] | None = None  # the same on the CPU; None: copied from the device
    cache: dict[Any, Any] = field(default_factory=dict)  # shared by all layers
    samples: tuple[Tensor, Tensor] | None = None
    """Bounds of the samples, and the tokens of the longest one as a tensor on the host: what compiled blocks read.
    None if their attention is not one operator: ranks share rows or matrices, or it is not ``varlen``."""

    def __post_init__(self) -> None:
        self.documents = (self.positions == 0).cumsum(1)
        if self.host_positions is None:
            self.host_positions = self.positions.cpu().numpy()
        device, length = self.positions.device, self.positions.shape[1]
        # of each rank
        self.tokens = [self.context.tokens_of(rank, length, device) for rank in range(self.context.size)]

    @property
    def own(self) -> Tensor:
        """This rank's tokens in attention."""
        return self.tokens[self.context.rank]

    @property
    def residual(self) -> Tensor:
        """This rank's tokens outside of divided matrices; the same as in attention without tensor parallelism."""
        tensor = self.context.tensor
        return self.own[tensor.part_of(len(self.own))]

    def visible(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """Return which keys each query sees: of its own sample, not later ones, at most ``window``.

        [B, n], [n] → bool [B, n, m].
        """
        query_positions, key_positions = self.positions[:, queries, None], self.positions[:, None, keys]
        seen = self.documents[:, queries, None] == self.documents[:, None, keys]
        seen &= query_positions >= key_positions
        if window is not None:
            seen &= query_positions - window < key_positions
        return seen

    def sees(self, source: int, window: int | None) -> bool:
        """True if any of this rank's queries sees a key of rank ``source``."""

        def make() -> bool:
            positions = self.on_host()
            documents = (positions == 0).cumsum(1)
            own, keys = (
                self.context.host_tokens_of(rank, positions.shape[1]) for rank in (self.context.rank, source)
            )
            # the latest key not after the query: it is visible if any is
            nearest = np.searchsorted(keys, own, side="right") - 1
            queries, keys = own[nearest >= 0], keys[nearest[nearest >= 0]]
            seen = documents[:, queries] == documents[:, keys]
            if window is not None:
                seen &= positions[:, queries] - window < positions[:, keys]
            return bool(seen.any())

        return self.once(("sees", source, window), make)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the mask to add to the scores of full rows, [B, 1, N, N].

        None if every row is one sample: plain causal attention.
        """

        def make() -> Tensor | None:
            if window is None and self._is_unpacked():
                return None
            tokens = torch.arange(self.positions.shape[1], device=self.positions.device)
            seen = self.visible(tokens, tokens, window)[:, None]
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)

        return self.once(("mask", window), make)

    def lengths(self, window: int | None) -> list[int] | None:
        """Return the tokens of each sample in concatenated rows; adjacent samples of one token (padding) count as one.

        None if attention sample by sample is not the fastest: one sample per row, many short samples, a narrow window.
        """

        def make() -> list[int] | None:
            if self._is_unpacked():
                return None
            found = self.sample_lengths()
            is_narrow = window is not None and max(found) > window
            return None if is_narrow or self.positions.numel() < SHORT_SAMPLE * len(found) else found

        return self.once(("lengths", window), make)

    def sample_lengths(self) -> list[int]:
        """Return the tokens of each sample in concatenated rows; adjacent samples of one token (padding) count as one.

        Computed on the CPU.
        """

        def make() -> list[int]:
            starts = self.on_host() == 0
            return np.diff(segment_bounds(starts.flatten(), self._alone_on_host().flatten())).tolist()

        return self.once("sample_lengths", make)

    def segments(self, window: int | None = None) -> Segments:
        """Return the samples of concatenated rows as segments of causal attention. One copy to the device."""

        def make() -> tuple[Tensor, int]:
            lengths = self.sample_lengths()
            bounds = np.cumsum([0, *lengths], dtype=np.int32)
            return to_device({"bounds": bounds}, self.positions.device)["bounds"], max(lengths)

        bounds, longest = self.once("segments", make)
        return Segments(bounds, bounds, longest, longest, window=window)

    def pieces_of(self, rank: int) -> list[tuple[int, range]]:
        """Return the pieces of a row that ``rank`` holds, see `Context.pieces_of`."""
        return self.context.pieces_of(rank, self.positions.shape[1])

    def own_segments(self, window: int | None) -> Segments:
        """Return causal attention of this rank's tokens within each of its pieces, sample by sample."""

        def make() -> tuple[Tensor, int]:
            own = self.context.host_tokens_of(self.context.rank, self.positions.shape[1])
            starts = self.on_host()[:, own] == 0
            starts[:, [place for place, _ in self.pieces_of(self.context.rank)]] = True
            alone = self._alone_on_host()[:, own]
            bounds = segment_bounds(starts.flatten(), alone.flatten()).astype(np.int32)
            moved = to_device({"bounds": bounds}, self.positions.device)["bounds"]
            return moved, int(np.diff(bounds).max())

        bounds, longest = self.once("own_segments", make)
        return Segments(bounds, bounds, longest, longest, window=window)

    def _is_unpacked(self) -> bool:
        """True if every row is one sample."""
        return self.once("is_unpacked", lambda: int((self.on_host() == 0).sum(1).max()) == 1)

    def _alone_on_host(self) -> NDArray[np.bool_]:
        """Return which tokens are samples of one token: all padding is."""
        starts = self.on_host() == 0
        return starts & np.pad(starts[:, 1:], ((0, 0), (0, 1)), constant_values=True)

    def on_host(self) -> NDArray[np.int64]:
        """Return the positions [B, N] on the CPU."""
        assert self.host_positions is not None  # set by __post_init__
        return self.host_positions

    def alone(self) -> Packing:
        """Return the packing of the same rows for a rank that has full rows."""
        if self.context.size == 1:
            return self
        return self.once("alone", lambda: Packing(Context(), self.positions, self.inner, self.host_positions))

    def chunked(self, tokens: int) -> Packing:
        """Return the packing in which every ``tokens`` tokens of a sample are a sample: chunked attention."""

        def make() -> Packing:
            return Packing(self.context, self.positions % tokens, self.inner, self.on_host() % tokens)

        return self.once(("chunked", tokens), make)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned at the first call with ``key``: all layers share it."""
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]


def segment_bounds(starts: NDArray[np.bool_], alone: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the first token of each segment, and the number of tokens. Adjacent samples of one token share a segment.

    ``starts`` and ``alone`` [T]: where a segment starts, and which tokens are samples of one token.
    """
    return np.append(np.flatnonzero(starts & ~(alone & np.insert(alone[:-1], 0, False))), len(starts))


def make_packing(
    position_ids: Tensor, context: Context, inner: str, host_positions: NDArray[np.int64] | None = None
) -> Packing:
    host = host_positions
    if host is not None:
        host = np.pad(host, ((0, 0), (0, -host.shape[1] % context.multiple)))
    packing = Packing(context, pad(position_ids, context), inner, host)
    if inner == "varlen" and context.size == context.tensor.size == 1:
        segments = packing.segments()
        packing.samples = segments.query_bounds, torch.tensor(segments.longest_query)
    return packing


def pad(rows: Tensor, context: Context) -> Tensor:
    """Pad rows with zeros: [B, n] → [B, N], N a multiple of `Context.multiple`."""
    return F.pad(rows, (0, -rows.shape[1] % context.multiple))


class Share:
    """This rank's share of the T trained tokens, and how to gather the other ranks' shares.

    ``predictors`` [T] index B·n, n the length of the rows before padding.
    """

    def __init__(self, packing: Packing, predictors: NDArray[np.int64], length: int) -> None:
        """``predictors`` on the CPU, so that no rank waits for the device to know how many tokens each rank has."""
        self.context = packing.context
        width = packing.positions.shape[1]
        num_own = width // self.context.size
        owner, offset = np.empty(width, np.int64), np.empty(width, np.int64)
        for rank in range(self.context.size):
            tokens = self.context.host_tokens_of(rank, width)
            owner[tokens], offset[tokens] = rank, np.arange(num_own)
        row, column = predictors // length, predictors % length
        owners = owner[column]
        picks = [np.flatnonzero(owners == rank) for rank in range(self.context.size)]
        own = picks[self.context.rank]
        self.counts = [len(pick) for pick in picks]
        moved = to_device(
            {
                "picks": np.concatenate(picks),
                "predictors": (row * num_own + offset[column])[own],  # index into B · own tokens
            },
            packing.positions.device,
        )
        self.predictors = moved["predictors"]
        self.picks = list(moved["picks"].split(self.counts))
        self.own = self.picks[self.context.rank]

    def gather(self, values: Tensor) -> Tensor:
        """Gather [own T, …] → [T, …] on all ranks. The gradient of each rank is that of its own tokens."""
        return _Gather.apply(values, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, share):
        ctx.share = share
        counts = share.counts
        out = values.new_empty(sum(counts), *values.shape[1:])
        most = max(counts)
        padded = values.new_zeros(most, *values.shape[1:])
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded, group=share.context.group)
        for pick, part in zip(share.picks, gathered, strict=True):
            out[pick] = part[: len(pick)]
        return out

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.share.own], None
