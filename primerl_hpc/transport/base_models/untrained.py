"""Tensors in a model's files that the trainer does not load: multi-token prediction, and towers that it leaves out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LAYER = re.compile(r"^(?:language_model\.)?model\.(?:language_model\.)?layers\.(\d+)\.")
_MODULE = re.compile(r"^(?:model\.)?mtp[._]")
_TOWER = re.compile(
    r"^(?:model\.)?(?:visual|(?:vision|audio)_(?:tower|model)|multi_modal_projector|mm_projector|embed_(?:vision|audio))\."
)


def is_prediction_tensor(name: str, config: Mapping[str, Any]) -> bool:
    """True if a tensor is in a module of its own (Qwen3-Next), or after the last layer (DeepSeek-V3, GLM-4.5).

    ``config``: the content of config.json.

    >>> is_prediction_tensor("model.layers.61.eh_proj.weight", {"num_hidden_layers": 61})
    True
    """
    num_layers = (config.get("text_config") or config).get("num_hidden_layers")
    match = _LAYER.match(name)
    is_after = match is not None and isinstance(num_layers, int) and int(match[1]) >= num_layers
    return is_after or _MODULE.match(name) is not None


def is_tower_tensor(name: str) -> bool:
    """True for a tensor of a tower for images or sound, or of what projects its output.

    >>> is_tower_tensor("model.visual.blocks.0.norm1.weight"), is_tower_tensor("model.language_model.norm.weight")
    (True, False)
    """
    return _TOWER.match(name) is not None
