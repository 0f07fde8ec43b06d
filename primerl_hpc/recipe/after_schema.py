"""``after``: jobs that start when the training job is done, each with resources of its own.

after:
  export: {to: /models/my-run}
  evaluation: {profile: {scheduler: {time: "00:30:00"}}}
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from primerl_hpc.common.block import Block, Bool, PositiveInt
from primerl_hpc.recipe.rollout_schema import EvalEnvironment, check_labels


class AfterJob(Block):
    profile: dict[str, Any] = Field(default_factory=dict)
    """What of the cluster profile is different for this job: ``{scheduler: {partition: cpu, time: "00:30:00"}}``."""


class ExportAfter(AfterJob):
    """A model folder for transformers, vLLM and the hub."""

    to: str
    """Folder to make; must be empty or not exist yet. A relative one is seen from where you submit."""
    step: Literal["last"] | PositiveInt = "last"
    """Which policy version."""
    merge: Bool = False
    """Of an adapter and its base model make one model; for recipes with lora."""

    @field_validator("to")
    @classmethod
    def _to_is_a_path(cls, value: str) -> str:
        if not value.strip() or any(ord(char) < 32 for char in value):
            raise ValueError("must be a path without control characters")
        return value


class EvaluationAfter(AfterJob):
    """A run of kind eval on the last weights, in a run directory of its own beside the training run's."""

    steps: Literal["last", "all"] | tuple[PositiveInt, ...] = "last"
    """Which policy versions; all: those that the run kept (``weights.keep_last``, ``weights.interval``)."""
    base: Bool = False
    """Also policy v0."""
    environments: tuple[EvalEnvironment, ...] = ()
    """Default: the recipe's ``environments.eval``."""
    replicas: PositiveInt | None = None
    """Engines; default: the recipe's ``layout.inference``."""

    @field_validator("environments")
    @classmethod
    def _environments_have_names(cls, value: tuple[EvalEnvironment, ...]) -> tuple[EvalEnvironment, ...]:
        check_labels(value)
        return value


class After(Block):
    """Jobs that start when the training job is done."""

    export: ExportAfter | None = None
    """Make a model folder; null: none."""
    evaluation: EvaluationAfter | None = None
    """Evaluate the last weights, or more of them; null: none."""


__all__ = ["After", "AfterJob", "EvaluationAfter", "ExportAfter"]
