"""Values of a config.json, checked. A missing or absurd value is a ConfigError with the key and the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from primerl_hpc.common.errors import ConfigError

MAX_SIZE = 10_000_000
"""Bound of every width, count and vocabulary; the largest published vocabulary has 262,400 entries."""
MAX_LAYERS = 2_000


class ConfigReader:
    """A mapping of config.json and the model's name for errors."""

    def __init__(self, config: Mapping[str, Any], name: str, part: str = "config.json") -> None:
        """``part``: where the mapping is, e.g. ``config.json, text_config``."""
        self.config, self.name, self.part = config, name, part

    def error(self, cause: str, hint: str = "") -> ConfigError:
        return ConfigError(f"model {self.name}: {cause}", location=self.part, hint=hint)

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def size(self, *keys: str, default: int | None = None, least: int = 1, most: int = MAX_SIZE) -> int:
        """Return the integer under the first of ``keys`` that is present.

        Raises ConfigError if it is missing without ``default``, no integer, or out of bounds.
        """
        key = next((key for key in keys if self.has(key)), None)
        if key is None:
            if default is not None:
                return default
            raise self.error(
                f"{' or '.join(keys)} is missing", "use the config.json of the model's repository"
            )
        value = self.config[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{key} is {value!r}, not an integer")
        if not least <= value <= most:
            raise self.error(f"{key} is {value}, not between {least} and {most:,}")
        return value

    def optional_size(self, key: str) -> int | None:
        return self.size(key) if self.has(key) else None

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{key} is {value!r}, not true or false")
        return value

    def names(self, key: str, length: int | None = None) -> tuple[str, ...]:
        """Return a list of names, e.g. ``layer_types``, which must have ``length`` entries."""
        value = self.config.get(key)
        if not isinstance(value, Sequence) or not all(isinstance(entry, str) for entry in value):
            raise self.error(f"{key} is not a list of names")
        if length is not None and len(value) != length:
            raise self.error(f"{key} has {len(value)} entries for {length} layers")
        return tuple(value)

    def indices(self, key: str) -> frozenset[int]:
        """Return a list of layer indices as a set; empty if the key is missing."""
        value = self.config.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, Sequence) or not all(isinstance(entry, int) for entry in value):
            raise self.error(f"{key} is not a list of layer numbers")
        return frozenset(value)

    def section(self, key: str) -> ConfigReader:
        value = self.config.get(key)
        if not isinstance(value, Mapping):
            raise self.error(f"{key} is missing", "use the config.json of the model's repository")
        return ConfigReader(value, self.name, f"{self.part}, {key}")

    # -- values that most families have ------------------------------------------------------------

    @property
    def hidden(self) -> int:
        return self.size("hidden_size")

    @property
    def num_layers(self) -> int:
        return self.size("num_hidden_layers", most=MAX_LAYERS)

    @property
    def heads(self) -> int:
        return self.size("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        heads, kv_heads = self.heads, self.size("num_key_value_heads", default=self.heads)
        if heads % kv_heads:
            raise self.error(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        return kv_heads

    @property
    def head_dim(self) -> int:
        if self.has("head_dim"):
            return self.size("head_dim")
        if self.hidden % self.heads:
            raise self.error(
                f"head_dim is missing, and hidden_size {self.hidden} is no multiple of {self.heads} heads"
            )
        return self.hidden // self.heads
