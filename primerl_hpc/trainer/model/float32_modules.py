"""Modules that compute in float32 while the rest of the model computes in `TrainerConfig.param_dtype`.

    modules = float32_modules(hf, blocks, recipe)     # before frozen parameters are cast
    compute_in_float32(modules, dtype)                # after tensor parallelism has set the modules' classes

Their weights are not rounded: `fsdp.apply_fsdp` gathers them as float32. A norm and the table that is also the head
return the type of the rest; a router returns float32, from which the experts compute their weighted sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.trainer.model.families import decoder_of, mixture_of
from primerl_hpc.trainer.parallel.expert import expert_modules

ROUTERS = ("gate", "router")
"""Names of a mixture's child that chooses experts, over all families."""


def float32_modules(
    hf: PreTrainedModel, blocks: Sequence[nn.Module], recipe: Recipe
) -> dict[str, list[nn.Module]]:
    """Map each name of ``trainer.float32`` to its modules. Raises ConfigError for a router that the model lacks."""
    found: dict[str, list[nn.Module]] = {}
    for name in recipe.trainer.float32 if recipe.trainer.param_dtype != "float32" else ():
        if name == "head":
            found[name] = head_modules(hf)
        elif name == "norm":
            found[name] = [module for module in text_modules(hf) if is_norm(module)]
        else:
            found[name] = [router for block in blocks for router in routers_of(block)]
        if not found[name]:
            raise ConfigError(
                f"trainer.float32 names {name}, but model {recipe.model.name} has none", hint="remove it"
            )
    return found


def text_modules(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of the decoder, without a vision tower."""
    return list(decoder_of(hf).modules())


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not list(module.children())


def routers_of(block: nn.Module) -> list[nn.Module]:
    mixtures = [mixture_of(block, experts) for experts in expert_modules(block)]
    return [child for mixture in mixtures for name, child in mixture.named_children() if name in ROUTERS]


def head_modules(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the head, and the embeddings if they are the same weight."""
    head, table = hf.get_output_embeddings(), hf.get_input_embeddings()
    assert head is not None  # `families.check_head` has refused a model without a head
    return [head, table] if head.weight is table.weight else [head]


def compute_in_float32(modules: dict[str, list[nn.Module]], dtype: torch.dtype) -> None:
    """Make the modules compute in float32. ``dtype``: that of the rest of the model.

    The head itself is not called: `Policy.forward` uses its weight.
    """
    for name, members in modules.items():
        returned = None if name == "router" else dtype
        for module in members:
            setattr(module, "forward", partial(run_in_float32, module.forward, returned))  # noqa: B010


def run_in_float32(forward: Any, returned: torch.dtype | None, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` with float32 instead of other floating types; round its result to ``returned`` unless None."""
    args, kwargs = tree_map(partial(cast_floating, torch.float32), (args, kwargs))
    result = forward(*args, **kwargs)
    return result if returned is None else tree_map(partial(cast_floating, returned), result)


def cast_floating(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
