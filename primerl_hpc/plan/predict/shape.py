"""Shape of a model from its config.json alone: layers, parameters by kind, what the KV cache holds.

    shape = shape_of(json.loads(path.read_text()), "Qwen/Qwen3-30B-A3B")
    shape.total, shape.active                           # 30,532,122,624 and what processes a token
    shape.adapter_parameters(16, "auto")                # LoRA

Parameters are those of transformers' model, to the last one; layers for multi-token prediction, which neither trainer
nor engine load, are not counted. A family that `architectures.families` does not have, a missing key and absurd sizes
are ConfigErrors: no number is assumed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Literal

from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.plan.predict.architectures.config_reader import ConfigReader
from primerl_hpc.plan.predict.architectures.families import ARCHITECTURES
from primerl_hpc.plan.predict.architectures.parts import Layer, Matrix, WeightKind

MAX_PARAMETERS = 10**14
PACKAGE = __name__.rpartition(".")[0]
KNOWN_MODELS = "known_models"


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A model's dimensions. Layers in order; equal layers are one object."""

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    is_tied: bool
    """Embedding and head share one matrix."""
    vision: int = 0
    """Parameters of the vision tower and its projector."""
    quantization: str | None = None
    """``quant_method`` of the weights in the model's repository; None: not quantized."""

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers with their number."""
        counts = Counter(id(layer) for layer in self.layers)
        distinct = {id(layer): layer for layer in self.layers}
        return tuple((distinct[key], number) for key, number in counts.items())

    # -- parameters --------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> Mapping[WeightKind, int]:
        """Parameters by kind; a shared embedding counts as embedding."""
        found: Counter[WeightKind] = Counter(
            {WeightKind.EMBEDDING: self.vocab * self.hidden, WeightKind.NORM: self.hidden}
        )
        if not self.is_tied:
            found[WeightKind.HEAD] = self.vocab * self.hidden
        found[WeightKind.VISION] = self.vision
        for layer, number in self.groups:
            for matrix in layer.matrices:
                found[matrix.kind] += number * matrix.parameters
            for vectors in layer.vectors:
                found[vectors.kind] += number * vectors.count
        return {kind: found[kind] for kind in WeightKind if found[kind]}

    @cached_property
    def total(self) -> int:
        return sum(self.parameters.values())

    @cached_property
    def text_total(self) -> int:
        """Parameters without the vision tower."""
        return self.total - self.vision

    @cached_property
    def active(self) -> int:
        """Parameters of the text model without the routed experts that a token does not use (as in "A22B")."""
        idle = sum(number * (layer.parameters - layer.active_parameters) for layer, number in self.groups)
        return self.text_total - idle

    @cached_property
    def largest_layer(self) -> int:
        return max(layer.parameters for layer, _ in self.groups)

    @cached_property
    def num_experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        return max(
            (matrix.copies for matrix in self._matrices if matrix.kind == WeightKind.EXPERT), default=0
        )

    @cached_property
    def experts_per_token(self) -> int:
        return max(
            (matrix.active for matrix in self._matrices if matrix.kind == WeightKind.EXPERT), default=0
        )

    @property
    def is_mixture(self) -> bool:
        return self.num_experts > 0

    @cached_property
    def _matrices(self) -> tuple[Matrix, ...]:
        return tuple(matrix for layer, _ in self.groups for matrix in layer.matrices)

    # -- what a sequence needs ---------------------------------------------------------------------

    @cached_property
    def kv_elements(self) -> int:
        """Elements that the KV cache of the complete model holds per token, windows ignored."""
        return sum(
            number * layer.attention.kv_elements
            for layer, number in self.groups
            if layer.attention is not None
        )

    @cached_property
    def state_elements(self) -> int:
        """Elements of linear-attention states per sequence, of any length."""
        return sum(number * layer.state.state_elements for layer, number in self.groups if layer.state)

    @cached_property
    def conv_elements(self) -> int:
        """Elements of convolution states per sequence."""
        return sum(number * layer.state.conv_elements for layer, number in self.groups if layer.state)

    @cached_property
    def windows(self) -> Mapping[int | None, int]:
        """Number of softmax-attention layers by window (None: all earlier keys)."""
        found: Counter[int | None] = Counter()
        for layer, number in self.groups:
            if layer.attention is not None:
                found[layer.attention.window] += number
        return found

    # -- adapters ----------------------------------------------------------------------------------

    def adapter_parameters(self, rank: int, targets: tuple[str, ...] | Literal["auto"] = "auto") -> int:
        """Return the parameters of LoRA adapters: rank × (inputs + outputs) of each adapted matrix and expert.

        ``targets``: as ``lora.target_modules``, suffixes of module paths. Raises ConfigError for one that matches
        nothing.
        """
        return sum(
            number * matrix.copies * rank * (matrix.ins + matrix.outs)
            for matrix, number in self._adapted(targets)
        )

    def _adapted(self, targets: tuple[str, ...] | Literal["auto"]) -> list[tuple[Matrix, int]]:
        """Return the matrices that get an adapter, with the number of layers that have them."""
        for target in () if targets == "auto" else targets:
            if not any(matrix.is_adapted((target,)) for matrix in self._matrices):
                known = sorted({matrix.last_name for matrix in self._matrices if matrix.adapter})
                raise ConfigError(
                    f"lora.target_modules names {target}, which no block of {self.name} has",
                    hint=f"adapters can go to {', '.join(known)}",
                )
        return [
            (matrix, number)
            for layer, number in self.groups
            for matrix in layer.matrices
            if matrix.is_adapted(targets)
        ]


def shape_of(config: Mapping[str, Any], name: str) -> ModelShape:
    """Return the shape that a config.json describes. ``name``: the model's name, for errors.

    A composite model whose family is not in the table has the shape of its text model, without towers.

    Raises ConfigError for an unknown family, a missing key, or sizes that no model has.
    """
    outer = ConfigReader(config, name)
    family_name = config.get("model_type")
    if not isinstance(family_name, str):
        raise outer.error("model_type is missing", "use the config.json of the model's repository")
    text = config.get("text_config")
    own_name = text.get("model_type") if isinstance(text, Mapping) else None
    family = ARCHITECTURES.get(family_name) or ARCHITECTURES.get(str(own_name))
    if family is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise outer.error(f"the planner does not know the family {family_name}", f"known: {known}")
    reader = outer.section("text_config") if "text_config" in config else outer
    tied = outer.flag(
        "tie_word_embeddings", default=reader.flag("tie_word_embeddings", default=family.is_tied)
    )
    tower = 0
    if family.tower is not None and "vision_config" in config:
        tower = family.tower(outer.section("vision_config"), reader.hidden)
    quantization = config.get("quantization_config") or reader.config.get("quantization_config")
    shape = ModelShape(
        name,
        family_name,
        reader.hidden,
        reader.size("vocab_size"),
        family.layers(reader),
        tied,
        tower,
        quantization.get("quant_method") if isinstance(quantization, Mapping) else None,
    )
    if shape.total > MAX_PARAMETERS:
        raise outer.error(f"its sizes give {shape.total:,} parameters, more than any model has")
    return shape


# -- models whose config.json is shipped -----------------------------------------------------------


@cache
def known_models() -> tuple[str, ...]:
    """Return the names of models whose config.json is part of this package."""
    folder = resources.files(PACKAGE) / KNOWN_MODELS
    return tuple(sorted(entry.name.removesuffix(".json").replace("--", "/", 1) for entry in folder.iterdir()))


def known_config(name: str) -> dict[str, Any]:
    """Return the shipped config.json of a model, e.g. ``Qwen/Qwen3-4B``. Raises NotFoundError if there is none."""
    if name not in known_models():
        raise NotFoundError(
            f"no config.json of {name} is known here",
            hint="download the model, or give a folder with its config.json as model.name",
        )
    path = resources.files(PACKAGE) / KNOWN_MODELS / f"{name.replace('/', '--')}.json"
    return json.loads(path.read_text())


@cache
def known_shape(name: str) -> ModelShape:
    """Return the shape of a model whose config.json is shipped. Raises NotFoundError if there is none."""
    return shape_of(known_config(name), name)
