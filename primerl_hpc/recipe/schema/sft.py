"""The block ``sft``: where demonstrations come from, which of their tokens are trained, and how they are batched."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Discriminator, Tag, model_validator

from primerl_hpc.common.block import Block, Bool, PositiveFloat, PositiveInt


class SFTData(Block):
    """A source of rows with the column ``messages``, or ``prompt`` and ``completion`` (text or messages); ``messages``
    takes precedence. Optional columns: ``system`` (or ``system_prompt``), ``tools`` (or ``tool_defs``, ``functions``)
    and ``chat_template_kwargs``."""

    path: str
    """A .jsonl or .parquet file, a folder of such files, a folder saved by package ``datasets``, or a hub dataset id.
    Relative paths are resolved against the folder in which you submit."""
    subset: str | None = None
    """Configuration of a hub dataset. Default (null): its only or default configuration."""
    split: str | None = None
    """Split of a dataset that has several splits. In a folder of files, names of files and folders state the split, by
    the rules of package ``datasets``. Default (null): ``train`` of a hub dataset or a folder saved by ``datasets``. A
    folder with files of several splits needs it."""
    num_rows: PositiveInt | None = None
    """Use only this many rows, the first ones. Default: all rows."""
    probability: PositiveFloat | None = None
    """Share of the samples that come from this source, relative to the probabilities of the other sources. Set it for
    all sources or for none. Default (null for all): proportional to the number of rows."""
    name: str | None = None
    """Name in metrics. Default: the subset, or the last part of the path."""

    @property
    def named_split(self) -> str:
        """Split of a dataset whose splits have names: on the hub, or saved by ``datasets``."""
        return self.split or "train"

    @property
    def label(self) -> str:
        return self.name or self.subset or PurePosixPath(self.path).stem


# The tags only appear in pydantic's error locations; they are not keys of the recipe.
Sources = Annotated[
    Annotated[SFTData, Tag("one source")] | Annotated[tuple[SFTData, ...], Tag("several sources")],
    Discriminator(lambda value: "several sources" if isinstance(value, list | tuple) else "one source"),
]


class LossMask(Block):
    """Roles whose tokens are trained."""

    assistant: Bool = True
    """Train on the assistant's messages."""
    system: Bool = False
    """Train on system messages."""
    user: Bool = False
    """Train on user messages."""
    tool: Bool = False
    """Train on tool results."""


class SFTValidation(Block):
    """Measure the loss on rows that are not trained on."""

    data: SFTData
    """Source of the validation rows."""
    interval: PositiveInt = 50
    """Training steps between validations."""
    at_start: Bool = False
    """Also validate before the first step, as metric val/initial_loss."""


class SFT(Block):
    data: Sources
    """One source of rows, or a list of sources."""
    stopping: Literal["all_exhausted", "first_exhausted"] = "all_exhausted"
    """When an epoch ends if sources have probabilities.
    ``all_exhausted``: when every source has been used completely; the others start over meanwhile.
    ``first_exhausted``: when the first source has been used completely."""
    batch_size: PositiveInt = 64
    """Batch size of one training step, in the unit of ``batch_unit``."""
    batch_unit: Literal["rows", "samples"] = "rows"
    """Unit of ``batch_size``.
    ``rows``: packed rows of ``seq_len`` tokens.
    ``samples``: rows of the dataset."""
    loss_mask: LossMask = LossMask()
    ignored_keys: tuple[str, ...] = ()
    """Keys of messages, or columns, that are not meant for the model, such as ids or times. A row with another key that
    the renderer does not render is refused."""
    model_dropout: Bool = False
    """Train with the dropout rates of the model's config.json. Default: all dropout is 0, as always in kind rl."""
    shuffle: Bool = True
    """Shuffle rows in every epoch, with ``seed`` and the epoch as the random seed."""
    validation: SFTValidation | None = None
    """Validation on rows that are not trained on. Default (null): no validation."""

    @property
    def sources(self) -> tuple[SFTData, ...]:
        return self.data if isinstance(self.data, tuple) else (self.data,)

    @model_validator(mode="after")
    def _sources_fit_together(self) -> Self:
        if not self.sources:
            raise ValueError("data must contain at least one source")
        given = [source.probability is not None for source in self.sources]
        if any(given) and not all(given):
            raise ValueError(
                "data: some sources have no probability; give every source a probability, or none"
            )
        labels = [source.label for source in self.sources]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"data: two sources are called '{max(labels, key=labels.count)}'; give one of them another name"
            )
        return self
