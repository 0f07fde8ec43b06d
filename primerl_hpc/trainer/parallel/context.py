"""Context parallelism: the ranks of ``context`` share each row; which of its tokens is whose, and back.

Every rank has the whole row's ids, runs the model on its own tokens with their true positions, and gets back every
trained token's log-probability: the loss is then the same code, and the same number, on all of them.

    N = 8, 2 ranks     ulysses: 0 1 2 3 | 4 5 6 7       ring: 0 1 6 7 | 2 3 4 5

The ring gives each rank an early and a late piece, so that causal attention costs all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.layout_schema import TrainerLayout
from primerl_hpc.trainer.parallel.mesh import World

SHORT_SAMPLE = 16
"""Mean number of tokens per sample below which one masked attention per row is quicker than one per sample."""


@dataclass(frozen=True)
class Context:
    """The ranks that share a row. ``group`` is None for one rank, which shares with nobody."""

    style: str = "ulysses"
    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    @property
    def multiple(self) -> int:
        """Rows are padded to a multiple of so many tokens."""
        return 2 * self.size if self.style == "ring" else self.size

    def tokens_of(self, rank: int, length: int, device: torch.device) -> Tensor:
        """Indices of the tokens of a row that are ``rank``'s, ascending; ``length`` is a multiple of `multiple`."""
        every = torch.arange(length, device=device)
        if self.style != "ring":
            return every.chunk(self.size)[rank]
        pieces = every.chunk(2 * self.size)
        return torch.cat([pieces[rank], pieces[2 * self.size - 1 - rank]])


def make_context(layout: TrainerLayout, config: Any, world: World) -> Context:
    """``config``: the model's text config."""
    mesh = world.context_mesh
    if mesh is None:
        return Context()
    return Context(
        choose_style(layout, config, mesh.size()), mesh.get_local_rank(), mesh.size(), mesh.get_group()
    )


def choose_style(layout: TrainerLayout, config: Any, size: int) -> str:
    """How ``size`` ranks share a row. Raises ConfigError, with the numbers, where the model cannot be shared so."""
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope in ("dynamic", "longrope"):
        raise ConfigError(
            f"layout.trainer.context_parallel is {size}, but the model's positions ({rope} rope) depend on how long the "
            "sequence is, which no rank sees",
            mend="set it to 1",
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    divides = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    if layout.context_style == "ulysses" and not divides:
        raise ConfigError(
            f"layout.trainer.context_parallel {size} does not fit ulysses: the model's {heads} attention heads and "
            f"{kv_heads} key-value heads must be shared out among {size} ranks",
            mend="set layout.trainer.context_style to ring",
        )
    if layout.context_style != "auto":
        return layout.context_style
    return "ulysses" if divides else "ring"


@dataclass
class Packing:
    """Where the samples of B rows lie, and which of their N tokens (pads included) are whose.

    It travels through the model as a keyword argument to our attention function.
    """

    context: Context
    positions: Tensor  # [B, N], restarting at 0 with each sample; a pad is a sample of its own
    inner: str = "sdpa"  # what computes attention over whole sequences: sdpa, eager, or one of flash
    made: dict[Any, Any] = field(default_factory=dict)  # once for all layers

    def __post_init__(self) -> None:
        self.documents = (self.positions == 0).cumsum(1)
        device, length = self.positions.device, self.positions.shape[1]
        self.tokens = [
            self.context.tokens_of(rank, length, device) for rank in range(self.context.size)
        ]  # of each rank

    @property
    def own(self) -> Tensor:
        return self.tokens[self.context.rank]

    def visible(self, queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
        """Which keys each query sees: its own sample's, not later ones, at most ``window`` of them. [B, n], [n] → bool [B, n, m]."""
        query_positions, key_positions = self.positions[:, queries, None], self.positions[:, None, keys]
        seen = self.documents[:, queries, None] == self.documents[:, None, keys]
        seen &= query_positions >= key_positions
        if window is not None:
            seen &= query_positions - window < key_positions
        return seen

    def sees(self, source: int, window: int | None) -> bool:
        """Whether any of this rank's queries sees a key of rank ``source``."""

        def make() -> bool:
            keys = self.tokens[source]
            nearest = torch.searchsorted(keys, self.own, right=True) - 1  # not after it: seen if any key is
            queries, keys = self.own[nearest >= 0], keys[nearest[nearest >= 0]]
            seen = self.documents[:, queries] == self.documents[:, keys]
            if window is not None:
                seen &= self.positions[:, queries] - window < self.positions[:, keys]
            return bool(seen.any())

        return self._once(("sees", source, window), make)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What whole rows add to their scores, [B, 1, N, N]; None where every row is one sample: plain causal attention."""

        def make() -> Tensor | None:
            if window is None and int(self.documents.max()) == 1:
                return None
            every = torch.arange(self.positions.shape[1], device=self.positions.device)
            seen = self.visible(every, every, window)[:, None]
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)

        return self._once(("mask", window), make)

    def lengths(self, window: int | None) -> list[int] | None:
        """Tokens of each sample, rows one after another; neighbours of one token (pads) count as one sample.

        None where samples one by one are not the quickest: rows of one sample, many short ones, a narrow window.
        """

        def make() -> list[int] | None:
            if int(self.documents.max()) == 1:
                return None
            flat = F.pad(self.positions.flatten(), (1, 1))
            alone = (flat[1:-1] == 0) & (flat[2:] == 0)
            starts = (flat[1:-1] == 0) & ~(alone & F.pad(alone, (1, 0))[:-1])
            found = F.pad(starts.nonzero()[:, 0], (0, 1), value=len(starts)).diff().tolist()
            is_narrow = window is not None and max(found) > window
            return None if is_narrow or len(starts) < SHORT_SAMPLE * len(found) else found

        return self._once(("lengths", window), make)

    def bounds(self) -> tuple[Tensor, int]:
        """Starts of the samples of all rows one after another, and their end, int32; tokens of the longest."""

        def make() -> tuple[Tensor, int]:
            starts = (self.positions.flatten() == 0).nonzero()[:, 0]
            bounds = F.pad(starts, (0, 1), value=self.positions.numel()).to(torch.int32)
            return bounds, int(bounds.diff().max())

        return self._once("bounds", make)

    def alone(self) -> Packing:
        """The same rows for a rank that has whole ones."""
        if self.context.size == 1:
            return self
        return self._once("alone", lambda: Packing(Context(), self.positions, self.inner))

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def make_packing(position_ids: Tensor, context: Context, inner: str) -> Packing:
    return Packing(context, pad(position_ids, context), inner)


def pad(rows: Tensor, context: Context) -> Tensor:
    """[B, n] → [B, N] with zeros, N a multiple of `Context.multiple`."""
    return F.pad(rows, (0, -rows.shape[1] % context.multiple))


class Share:
    """This rank's share of the T trained tokens, and how to get the others' back.

    ``predictors`` [T] index B·n, n the rows' length before padding.
    """

    def __init__(self, packing: Packing, predictors: Tensor, length: int) -> None:
        self.context = packing.context
        num_own = len(packing.own)
        owner = torch.empty(packing.positions.shape[1], dtype=torch.long, device=predictors.device)
        place = torch.empty_like(owner)
        for rank, tokens in enumerate(packing.tokens):
            owner[tokens] = rank
            place[tokens] = torch.arange(num_own, device=owner.device)
        row, column = predictors // length, predictors % length
        owners = owner[column]
        self.picks = [(owners == rank).nonzero()[:, 0] for rank in range(self.context.size)]
        self.mine = self.picks[self.context.rank]
        self.predictors = (row * num_own + place[column])[self.mine]  # index into B · own tokens

    def gather(self, values: Tensor) -> Tensor:
        """[own T, …] → [T, …] on all ranks. The gradient of each rank is that of its own tokens."""
        return _Gather.apply(values, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, share):
        ctx.share = share
        counts = [len(pick) for pick in share.picks]
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
        return grad[ctx.share.mine], None
