"""Supervised fine-tuning in a recipe: where demonstrations come from, which of their tokens are trained, how they are batched."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Tag, model_validator

from primerl_hpc.common.block import Block, Bool, PositiveFloat, PositiveInt


class SFTData(Block):
    """Rows with ``messages``, or ``prompt`` and ``completion`` (text or messages); ``messages`` wins. Optional columns: ``tools`` (or ``tool_defs``) and ``chat_template_kwargs``."""

    path: str
    """A .jsonl or .parquet file, a folder of them, a folder that ``datasets`` saved, or a hub dataset id. Relative paths are seen from where you submit."""
    subset: str | None = None
    """Configuration of a hub dataset; null: its only or default one."""
    split: str = "train"
    """Split of a dataset that has several."""
    num_rows: PositiveInt | None = None
    """Use the first so many rows."""
    probability: PositiveFloat | None = None
    """Share of this source among the samples, relative to the others'; null for all: as many as it has rows."""
    name: str | None = None
    """What metrics call it; default: the subset, or the last part of the path."""

    @property
    def label(self) -> str:
        return self.name or self.subset or PurePosixPath(self.path).stem


# The tags are what an error message shows of the branch: not a key of the recipe.
Sources = Annotated[
    Annotated[SFTData, Tag("one source")] | Annotated[tuple[SFTData, ...], Tag("several sources")],
    Discriminator(lambda value: "several sources" if isinstance(value, list | tuple) else "one source"),
]


class LossMask(Block):
    """Which roles' tokens are trained."""

    assistant: Bool = True
    """What the model is to say."""
    system: Bool = False
    """The system prompt."""
    user: Bool = False
    """Messages of users."""
    tool: Bool = False
    """Replies of tools."""


class SFTValidation(Block):
    """Loss on rows that are not trained on."""

    data: SFTData
    """Its rows."""
    interval: PositiveInt = 50
    """Steps between two of them."""
    at_start: Bool = False
    """Also before the first step, as val/initial_loss."""


class SFT(Block):
    data: Sources
    """One source, or a list of them."""
    stopping: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """Where sources have probabilities, an epoch ends with the last one that is given whole (the others begin again), or with the first."""
    batch_size: PositiveInt = 64
    """Packed rows of seq_len tokens per step (batch_unit rows), or dataset rows per step (batch_unit samples)."""
    batch_unit: Literal["rows", "samples"] = "rows"
    """What batch_size counts: packed rows, or rows of the dataset."""
    loss_mask: LossMask = LossMask()
    shuffle: Bool = True
    """Reshuffled in every epoch from seed + epoch."""
    validation: SFTValidation | None = None
    """Loss on rows that are not trained on; null: none."""

    @property
    def sources(self) -> tuple[SFTData, ...]:
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @model_validator(mode="after")
    def _sources_fit_together(self) -> Self:
        if not self.sources:
            raise ValueError("data needs at least one source")
        given = [source.probability is not None for source in self.sources]
        if any(given) and not all(given):
            raise ValueError("data: give every source a probability, or none")
        labels = [source.label for source in self.sources]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"data: two sources are called '{max(labels, key=labels.count)}'; give them names"
            )
        return self
