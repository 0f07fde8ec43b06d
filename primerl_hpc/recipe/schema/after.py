"""The block ``after``: follow-up jobs that start when the training job is done, each with its own resources.

after:
  export: {to: /models/my-run}
  evaluation: {profile: {scheduler: {time: "00:30:00"}}}
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from primerl_hpc.common.block import Block, Bool, PositiveInt
from primerl_hpc.recipe.schema.rollout import EvalEnvironment, check_labels


class AfterJob(Block):
    profile: dict[str, Any] = Field(default_factory=dict)
    """Keys of the cluster profile that differ for this job, for example
    ``{scheduler: {partition: cpu, time: "00:30:00"}}``. Default: the training job's profile."""


class ExportAfter(AfterJob):
    """Export a model folder that transformers, vLLM and the Hugging Face Hub can load."""

    to: str
    """Folder to create; it must be empty or not exist. Relative paths are resolved against the folder in which you
    submit."""
    step: Literal["last"] | PositiveInt = "last"
    """Policy version to export: a step number, or ``last`` for the version after the last step."""
    merge: Bool = False
    """Merge the adapter into its base model and export the result; only for recipes with ``lora``. Default: export the
    adapter alone."""

    @field_validator("to")
    @classmethod
    def _to_is_a_path(cls, value: str) -> str:
        if not value.strip() or any(ord(char) < 32 for char in value):
            raise ValueError("must be a path without control characters")
        return value


class EvaluationAfter(AfterJob):
    """Evaluate the trained weights in a run of kind eval with its own run directory next to the training run's."""

    steps: Literal["last", "all"] | tuple[PositiveInt, ...] = "last"
    """Policy versions to evaluate: a list of steps, ``last``, or ``all``. ``all`` means every version that the run kept
    on disk (see ``weights.keep_last`` and ``weights.interval``)."""
    base: Bool = False
    """Also evaluate policy v0, the model before training."""
    environments: tuple[EvalEnvironment, ...] = ()
    """Environments to evaluate on. Default: the recipe's ``environments.eval``."""
    replicas: PositiveInt | None = None
    """Number of engines. Default: the recipe's ``layout.inference``."""

    @field_validator("environments")
    @classmethod
    def _environments_have_names(cls, value: tuple[EvalEnvironment, ...]) -> tuple[EvalEnvironment, ...]:
        check_labels(value)
        return value


class After(Block):
    """Follow-up jobs that start when the training job is done."""

    export: ExportAfter | None = None
    """Export a model folder. Default (null): no export."""
    evaluation: EvaluationAfter | None = None
    """Evaluate the last weights, or several policy versions. Default (null): no evaluation."""


__all__ = ["After", "AfterJob", "EvaluationAfter", "ExportAfter"]
