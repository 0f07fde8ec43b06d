"""Vision-language models of the Qwen-VL family: what their forward takes beside packed text.

An image's tokens have positions in time, height and width (M-RoPE) by the model's own rule, applied sample by sample. The
vision tower is in FSDP's root group, so ranks without images need no collective of their own; where the tower is trained
they run it on a blank patch that counts for nothing, because gradients are reduced together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.batch import ImageBatch
from primerl_hpc.trainer.parallel.attention import ATTENTION_NAME
from primerl_hpc.trainer.parallel.context import Packing

TOWER = "visual"


def takes_images(config: PreTrainedConfig) -> bool:
    is_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not is_text


def auto_class(config: PreTrainedConfig) -> tuple[type, str | dict[str, str]]:
    """What builds the model, and the attention of its parts."""
    if takes_images(config):
        return AutoModelForImageTextToText, {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}
    return AutoModelForCausalLM, ATTENTION_NAME


def vision_of(hf: nn.Module, name: str, *, is_trained: bool) -> Vision | None:
    """None for a model of text alone. Raises ConfigError for one that takes images in another way."""
    if not takes_images(hf.config):
        return None
    if not all(hasattr(hf.base_model, part) for part in (TOWER, "language_model", "get_rope_index")):
        raise ConfigError(
            f"model {name} takes images in a way that this version does not know",
            mend="take a model of the Qwen-VL family",
        )
    return Vision(hf.base_model, is_trained=is_trained)


class Vision:
    def __init__(self, model: nn.Module, *, is_trained: bool) -> None:
        self.model, self.is_trained = model, is_trained
        getattr(model, TOWER).requires_grad_(is_trained)

    def inputs(self, input_ids: Tensor, packing: Packing, images: ImageBatch | None) -> dict[str, Any]:
        """Of the model's forward, beside ids [B, N] and packing."""
        text = packing.positions[None]
        if images is None:
            return {"position_ids": text.expand(4, -1, -1)}
        positions = image_positions(self.model, input_ids.cpu(), packing.positions.cpu(), images)
        return {
            "position_ids": torch.cat([text, positions.to(text.device)]),
            "pixel_values": images.pixels,
            "image_grid_thw": images.grids.to(text.device),
        }

    def nothing(self, hidden: Tensor) -> Tensor:
        """0, of which every weight of the tower has a gradient."""
        config = self.model.config.vision_config
        merge = config.spatial_merge_size
        width = config.in_channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, merge, merge]], device=hidden.device)
        made = self.model.get_image_features(hidden.new_zeros(merge**2, width), grid, return_dict=True)
        parts = [*made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
        return 0 * sum(part.sum() for part in parts)


def image_positions(model: nn.Module, input_ids: Tensor, positions: Tensor, images: ImageBatch) -> Tensor:
    """In time, height and width, [3, B, N]; of text all three are its position. On the CPU."""
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
