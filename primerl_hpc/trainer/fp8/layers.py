"""The modules that compute in FP8: linear layers and fused experts of the decoder's blocks.

Embeddings, head, norms and routers do not, nor do matrices whose rows or columns are no multiples of the format's tile.
The model decides this, not the layout: a layout whose ranks would have other parts of such a matrix is refused.
Parameters keep their names and types: master weights, checkpoints and exports are those of a run without FP8.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.cross_checks import ROUTER_MODULES
from primerl_hpc.trainer.fp8.formats import FORMATS, MXFP8, Fp8Format
from primerl_hpc.trainer.fp8.gpu import check_gpu
from primerl_hpc.trainer.fp8.products import linear

log = logging.getLogger("primerl_hpc.trainer")


@runtime_checkable
class HasOwnShape(Protocol):
    """A linear layer that tensor parallelism has divided (`parallel.tensor.layers.DividedLinear`)."""

    def own_shape(self) -> tuple[int, int]: ...


class Fp8Linear(nn.Linear):
    """A linear layer turned into an FP8 one by `apply_fp8`."""

    fp8: Fp8Format

    def forward(self, input: Tensor) -> Tensor:
        return linear(self, input, self.weight, self.bias)


def apply_fp8(
    blocks: Sequence[nn.Module], experts: Iterable[nn.Module], mode: str, device: torch.device
) -> None:
    """Let the linear layers of ``blocks`` and the fused ``experts`` compute in FP8. ``mode``: ``trainer.fp8``.

    Call after layers and experts are divided among ranks, and before `fully_shard`. Raises ConfigError if no layer can
    be, or if the GPU cannot compute in the format.
    """
    if mode == "none":
        return
    form = FORMATS[mode]
    linears: list[Any] = [
        module for block in blocks for path, module in block.named_modules() if is_candidate(path, module)
    ]
    stacks: list[Any] = list(experts)
    chosen = [linear for linear in linears if fits((linear.out_features, linear.in_features), form)]
    chosen_stacks = [stack for stack in stacks if all(fits(shape, form) for shape in expert_shapes(stack))]
    if not chosen and not chosen_stacks:
        raise ConfigError(
            f"trainer.fp8: {mode} needs matrices whose rows and columns are multiples of {form.tile}, and no layer of "
            "this model has them",
            hint="set it to none"
            if form == MXFP8
            else f"set it to mxfp8 (multiples of {MXFP8.tile}), or none",
        )
    if odd := [shape for linear in chosen if not fits(shape := own_shape(linear), form)]:
        raise ConfigError(
            f"trainer.fp8: {mode} needs matrices whose rows and columns are multiples of {form.tile}, but "
            f"layout.trainer.tensor_parallel gives a rank parts of {odd[0][0]} × {odd[0][1]}",
            hint="lower tensor_parallel"
            if form == MXFP8
            else f"lower tensor_parallel, or set trainer.fp8 to mxfp8 (multiples of {MXFP8.tile})",
        )
    if device.type == "cuda":
        check_gpu(form, device, has_experts=bool(chosen_stacks))
    else:
        log.warning("trainer.fp8: %s is emulated on CPUs, which is slower than bfloat16", mode)
    for module in (*chosen, *chosen_stacks):
        module.fp8 = form
        if type(module) is nn.Linear:
            module.__class__ = Fp8Linear
    log.info(
        "FP8 (%s): %d of %d linear layers, and the experts of %d of %d layers; the others stay in bfloat16, because "
        "their rows or columns are not multiples of %d",
        *(mode, len(chosen), len(linears), len(chosen_stacks), len(stacks), form.tile),
    )


def is_candidate(path: str, module: nn.Module) -> bool:
    """True for a plain or divided linear layer that is no router."""
    is_linear = type(module) is nn.Linear or isinstance(module, HasOwnShape)
    return is_linear and not set(path.split(".")) & set(ROUTER_MODULES)


def fits(shape: Sequence[int], form: Fp8Format) -> bool:
    return all(size % form.tile == 0 for size in shape)


def own_shape(linear: nn.Linear) -> tuple[int, int]:
    """Return the rows and columns that this rank multiplies."""
    return (
        linear.own_shape() if isinstance(linear, HasOwnShape) else (linear.out_features, linear.in_features)
    )


def expert_shapes(stack: nn.Module) -> list[torch.Size]:
    """Return rows and columns of each matrix of an expert."""
    return [matrix.shape[1:] for matrix in stack.parameters(recurse=False) if matrix.ndim == 3]
