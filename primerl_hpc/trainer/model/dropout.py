"""Removes dropout, so that the trainer's log-probabilities are those of the model that engines serve.

Families keep rates in their configuration, as numbers read at run time, and in modules. All are set to 0, like other
noise of a forward in training mode (stochastic depth, router jitter). Adapters have a separate rate, ``lora.dropout``;
`sft.model_dropout` keeps the model's.

    remove_dropout_from_config(config)       # before the model is built
    remove_dropout_from_modules(hf)          # rates that its code does not read from the config
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

NAMES = ("dropout", "pdrop", "layerdrop", "drop_path", "droppath", "drop_rate", "drop_prob", "jitter")


def rates(holder: Any) -> Iterator[str]:
    """Yield the names of ``holder``'s attributes that are nonzero rates."""
    for name, value in vars(holder).items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and value and any(part in name for part in NAMES):
            yield name


def remove_dropout_from_config(config: PreTrainedConfig) -> None:
    """Set rates to 0 in the config and the configs in it."""
    for name in list(rates(config)):
        setattr(config, name, type(getattr(config, name))(0))
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            remove_dropout_from_config(value)


def remove_dropout_from_modules(hf: nn.Module) -> None:
    for module in hf.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in list(rates(module)):
            setattr(module, name, 0.0)
