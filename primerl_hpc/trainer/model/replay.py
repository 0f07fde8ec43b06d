"""Router replay: a mixture's tokens are sent to the experts that the engine chose for them (arXiv 2510.11370).

Only the choice is the engine's. The weight of each expert is computed by the trainer's own router from its own logits
of those experts, with gradients. transformers' routers all end in one ``topk`` over the scores of all experts: while a
block of experts runs, that one call returns the forced ids instead of the largest. No model code is copied.

    replay = Replay(blocks)                          # raises ConfigError for a dense model
    replay.begin_forward(routed_experts, packing)    # before each forward; None: the routers choose
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.trainer.model.families import mixture_of
from primerl_hpc.trainer.parallel.context import Packing
from primerl_hpc.trainer.parallel.expert import expert_modules

TOPK = (torch.topk, torch.Tensor.topk)


class Replay:
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.num_layers = len(blocks)
        self._ids: Tensor | None = None
        self._is_known: Tensor | None = None
        num_mixtures = 0
        for layer, block in enumerate(blocks):
            for experts in expert_modules(block):
                mixture = mixture_of(block, experts)
                mixture.forward = partial(
                    self._run,  # pyright: ignore[reportAttributeAccessIssue]  torch declares `disable` for functions
                    mixture.forward,
                    layer,
                    experts.num_experts,
                )
                num_mixtures += 1
        if not num_mixtures:
            raise ConfigError(
                "trainer.router_replay is set, but the model is not a mixture of experts", hint="remove it"
            )

    def begin_forward(self, routed: Tensor | None, packing: Packing) -> None:
        """Set the choices of the next forward: ``routed`` [B, n, layers, k] of full rows.

        A token whose values are all zero is unknown: its router chooses. Raises DataError if the number of layers
        differs from the model's.
        """
        self._ids = None
        if routed is None:
            return
        if routed.shape[2] != self.num_layers:
            raise DataError(
                f"rollouts have routed experts of {routed.shape[2]} layers, the model has {self.num_layers}"
            )
        length = packing.positions.shape[1]  # a multiple of the ranks that share a row
        padded = routed.new_zeros(len(routed), length, *routed.shape[2:])
        padded[:, : routed.shape[1]] = routed
        self._ids = padded[:, packing.residual].flatten(0, 1)
        self._is_known = (self._ids != 0).flatten(1).any(1, keepdim=True)

    @torch.compiler.disable
    def _run(self, forward: Any, layer: int, num_experts: int, *args: Any, **kwargs: Any) -> Any:
        if self._ids is None or self._is_known is None:
            return forward(*args, **kwargs)
        with ForcedChoice(self._ids[:, layer].long(), self._is_known, num_experts) as choice:
            output = forward(*args, **kwargs)
        if choice.num_calls != 1:
            raise ConfigError(
                "trainer.router_replay does not support this model: its router made "
                f"{choice.num_calls} choices among all "
                "experts, not one",
                hint="remove it",
            )
        return output


class ForcedChoice(TorchFunctionMode):
    """Make ``topk`` over [N, num_experts] return ``ids`` [N, k] with their scores where ``is_known`` [N, 1]."""

    def __init__(self, ids: Tensor, is_known: Tensor, num_experts: int) -> None:
        super().__init__()
        self.ids, self.is_known = ids, is_known
        self.shape = torch.Size((len(ids), num_experts))
        self.num_calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func not in TOPK or args[0].shape != self.shape or out.indices.shape != self.ids.shape:
            return out
        self.num_calls += 1
        chosen = torch.where(self.is_known, self.ids, out.indices)
        return torch.return_types.topk((args[0].gather(-1, chosen), chosen))
