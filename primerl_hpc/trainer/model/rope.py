"""Rotary embeddings whose frequencies depend on a length: longrope and dynamic NTK.

transformers chooses the frequencies by the longest position of a forward, so documents packed into one batch would
affect each other. The trainer follows vLLM instead:

    longrope    one set of factors for every position: the long ones if `Recipe.max_model_len` exceeds the model's
                original length, else the short ones (vLLM's Phi3LongRoPEScaledRotaryEmbedding)
    dynamic     up to max_position_embeddings plain rope, in vLLM as in transformers. Beyond it vLLM has no such rope:
                kind rl is refused, and kind sft uses the frequencies of each document's own length

`families.check_rope` runs before the model is built, `fix_rope` after its buffers are filled.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.trainer.model.families import is_scaled, rope_type

log = logging.getLogger("primerl_hpc.trainer")

FIXED = "chosen by primerl_hpc"
"""Rope type of a module whose frequencies transformers no longer changes."""


class RotaryEmbedding(nn.Module):
    """Declarations only: what `fix_rope` reads and sets on a module that computes cos and sin."""

    config: PreTrainedConfig
    rope_type: str
    inv_freq: Tensor


def has_rope_type(module: nn.Module, kind: str) -> TypeGuard[RotaryEmbedding]:
    return getattr(module, "rope_type", None) == kind


@torch.no_grad()
def fix_rope(hf: PreTrainedModel, recipe: Recipe) -> None:
    """Choose the frequencies once, or for each document. Raises ConfigError if the model's own code computes them."""
    config = hf.config.get_text_config()
    kind = rope_type(config)
    if kind == "default":
        return
    modules = [module for module in hf.modules() if has_rope_type(module, kind)]
    if not modules:
        raise ConfigError(
            f"model {recipe.model.name} computes its {kind} rope with its own code, which this "
            "version does not train"
        )
    for module in modules:
        if kind == "longrope":
            original = config.rope_parameters["original_max_position_embeddings"]
            is_long = recipe.max_model_len > original
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
                config, module.inv_freq.device, seq_len=original + 1 if is_long else original
            )
            module.inv_freq.copy_(frequencies)
            log.info(
                "longrope uses the %s factors for all positions, like engines with max_model_len "
                "%d (original length %d)",
                "long" if is_long else "short",
                recipe.max_model_len,
                original,
            )
        elif is_scaled(config, recipe.seq_len):
            module.forward = partial(rotate_by_document, module, module.forward)
        module.rope_type = FIXED


@torch.no_grad()
def rotate_by_document(
    module: RotaryEmbedding, forward: Any, hidden: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cos, sin [B, N, D]; ``position_ids`` [B, N] restart at 0 with each document.

    Documents of one length share a call of the module's own ``forward``; few are longer than the model's length.
    """
    cos, sin = forward(hidden, position_ids)
    lengths = document_lengths(position_ids)
    plain = module.inv_freq
    for length in lengths[lengths > module.config.max_position_embeddings].unique().tolist():
        module.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](module.config, plain.device, seq_len=length)
        own_cos, own_sin = forward(hidden, position_ids)
        is_own = (lengths == length)[..., None]
        cos, sin = torch.where(is_own, own_cos, cos), torch.where(is_own, own_sin, sin)
    module.inv_freq = plain
    return cos, sin


def document_lengths(position_ids: Tensor) -> Tensor:
    """Return the length of each token's document. [B, N] → [B, N]."""
    documents = (position_ids == 0).cumsum(1)
    counts = torch.zeros(
        len(position_ids), position_ids.shape[1] + 1, dtype=torch.long, device=documents.device
    )
    return counts.scatter_add_(1, documents, torch.ones_like(documents)).gather(1, documents)
