"""Models with towers for images or sound: text alone is trained, or, in the Qwen-VL family, images too.

A model is built as its checkpoint is published, so tensors have the published names. Towers that no batch needs are
then left out and not loaded; files and exports keep them.

An image's tokens have positions in time, height and width (M-RoPE) by the model's own rule, applied sample by sample.
The vision tower is in FSDP's root group, so ranks without images need no extra collective; if the tower is trained,
they run it on a blank patch with weight 0, because gradients are reduced together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from primerl_hpc.common.model_families import family_of
from primerl_hpc.trainer.batch import ImageBatch
from primerl_hpc.trainer.model.families import decoder_of
from primerl_hpc.trainer.parallel.attention import ATTENTION_NAME
from primerl_hpc.trainer.parallel.context import Packing

TOWER = "visual"


def auto_class(config: PreTrainedConfig) -> tuple[type, str | dict[str, str]]:
    """Return the auto class that builds the model, and the attention of its parts."""
    if config.get_text_config() is config or type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForCausalLM, ATTENTION_NAME
    of_towers = "sdpa" if family_of(config.model_type).has_images else "eager"  # not all of them have sdpa
    return AutoModelForImageTextToText, {
        part: ATTENTION_NAME if part == "text_config" else of_towers for part in config.sub_configs
    }


def vision_of(hf: PreTrainedModel, *, is_loaded: bool, is_trained: bool) -> Vision | None:
    """Return the vision inputs of a model whose tower is loaded; otherwise leave its towers out and return None."""
    model = hf.base_model
    if is_loaded and is_vision_language_model(model):
        return Vision(model, is_trained=is_trained)
    if hf.config.get_text_config() is not hf.config:
        leave_out_towers(hf)
    return None


def leave_out_towers(hf: PreTrainedModel) -> None:
    """Delete every module of ``hf`` that neither belongs to its decoder or head nor contains them."""
    parts = (decoder_of(hf), hf.get_output_embeddings())
    kept = {id(module) for part in parts if part is not None for module in part.modules()}

    def prune(module: nn.Module) -> None:
        for name, child in list(module.named_children()):
            if id(child) not in kept:
                if any(id(part) in kept for part in child.modules()):
                    prune(child)
                else:
                    delattr(module, name)

    prune(hf)


class VisionLanguageModel(nn.Module):
    """Declarations only: what `Vision` uses of a model of the Qwen-VL family. No model derives from this class."""

    config: PreTrainedConfig
    get_image_features: Callable[..., Any]
    get_rope_index: Callable[..., Any]


def is_vision_language_model(model: nn.Module) -> TypeGuard[VisionLanguageModel]:
    return all(hasattr(model, part) for part in (TOWER, "language_model", "get_rope_index"))


class Vision:
    def __init__(self, model: VisionLanguageModel, *, is_trained: bool) -> None:
        self.model, self.is_trained = model, is_trained
        getattr(model, TOWER).requires_grad_(is_trained)

    def inputs(self, input_ids: Tensor, packing: Packing, images: ImageBatch | None) -> dict[str, Any]:
        """Return inputs of the model's forward in addition to ids [B, N] and packing."""
        text = packing.positions[None]
        if images is None:
            return {"position_ids": text.expand(4, -1, -1)}
        positions = image_positions(self.model, input_ids.cpu(), packing.positions.cpu(), images)
        return {
            "position_ids": torch.cat([text, positions.to(text.device)]),
            "pixel_values": images.pixels,
            "image_grid_thw": images.grids.to(text.device),
        }

    def zero(self, hidden: Tensor) -> Tensor:
        """Return 0, computed so that every weight of the tower has a gradient."""
        config = self.model.config.vision_config
        merge = config.spatial_merge_size
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, merge, merge]], device=hidden.device)
        features = self.model.get_image_features(hidden.new_zeros(merge**2, width), grid, return_dict=True)
        # transformers 5.17 returns a tensor per layer of the tower, later versions one per layer and image
        parts = tree_leaves([features.pooler_output, getattr(features, "deepstack_features", None) or ()])
        return 0 * torch.stack([part.sum() for part in parts]).sum()


def image_positions(
    model: VisionLanguageModel, input_ids: Tensor, positions: Tensor, images: ImageBatch
) -> Tensor:
    """Return positions in time, height and width, [3, B, N]; for text all three are equal. On the CPU."""
    found = positions.expand(3, -1, -1).clone()
    first = 0
    for row, types in enumerate(images.token_types):
        starts = (positions[row] == 0).nonzero()[:, 0].tolist()
        for start, end in zip(starts, [*starts[1:], len(types)], strict=True):
            own = types[start:end]
            count = int((own.diff(prepend=own.new_zeros(1)) == 1).sum())
            if not count:
                continue
            found[:, row, start:end] = model.get_rope_index(
                input_ids[row, None, start:end],
                mm_token_type_ids=own[None],
                image_grid_thw=images.grids[first : first + count],
            )[0][:, 0]
            first += count
    return found
