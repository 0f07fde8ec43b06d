"""The block ``evaluation``: the policies that a run of kind eval evaluates. Without it, only the recipe's model.

evaluation: {weights: runs/my-run/weights, steps: [10, 20, 30]}
evaluation: {external: {base_url: "https://api.example.com/v1", key_variable: EXAMPLE_KEY}}

In a run of kind sft, the block selects the steps after which the trainer's own weights are evaluated while training
continues:

evaluation: {every: 50}
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from primerl_hpc.common import env
from primerl_hpc.common.block import Block, Bool, PositiveInt
from primerl_hpc.common.errors import ConfigError

BaseUrl = Annotated[
    str, Field(pattern=r"^https?://[^\s/]\S*$"), AfterValidator(lambda address: address.rstrip("/"))
]
"""URL of an OpenAI-compatible API, usually ending in ``/v1``; a trailing slash is removed."""


TokenLimit = Literal["max_tokens", "max_completion_tokens"]


class External(Block):
    """A model behind an OpenAI-compatible server that the run does not start; requests ask for ``model.name``."""

    base_url: BaseUrl
    """URL of the server's API, usually ending in ``/v1``."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "OPENAI_API_KEY"
    """Environment variable that holds the API key when the job runs. The key itself is never written to a file."""
    token_limit: TokenLimit = "max_tokens"
    """Parameter by which requests limit the tokens of a reply (``sampling.max_tokens``). APIs of reasoning models
    refuse ``max_tokens`` and need ``max_completion_tokens``."""

    def key(self) -> str:
        """Return the API key. Raises ConfigError if the variable is not set in this process."""
        if (key := env.variable(self.key_variable)) is None:
            raise ConfigError(
                f"the environment variable {self.key_variable}, which must hold the API key of {self.base_url}, "
                "is not set",
                hint="export it where you submit (any value for a server without keys), or set key_variable to "
                "another variable",
            )
        return key


class EvaluationSettings(Block):
    """Policies that a run of kind eval evaluates, or versions of its own weights that a run of kind sft evaluates while
    it trains."""

    weights: str | None = None
    """kind eval: folder of policy versions (``step_N``), usually ``weights`` of a run directory. One set of engines
    loads the versions one after another. Default (null): no versions, only ``model.name``."""
    steps: Literal["all"] | tuple[PositiveInt, ...] = "all"
    """Policy versions to evaluate: a list of steps, or ``all``. ``all`` means every version in the folder and, with
    ``watch``, those that are written later."""
    every: PositiveInt = 1
    """With ``steps: all``: evaluate only versions whose step is a multiple of this, and the last one. kind sft needs
    either this key or ``steps``."""
    base: Bool = True
    """Also evaluate ``model.name`` itself, as version 0."""
    watch: Bool = False
    """kind eval: continue with new versions until the run that writes them has ended."""
    external: External | None = None
    """kind eval: send requests to this server; the run then starts no engines. Default (null): the run's own
    engines."""

    @field_validator("steps")
    @classmethod
    def _steps_are_named_once(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if not value:
            raise ValueError("must contain at least one step, or be all")
        return value if isinstance(value, str) else tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _there_is_something_to_evaluate(self) -> Self:
        if self.external is not None and self.weights is not None:
            raise ValueError(
                "external and weights cannot be combined: an external server does not load weights; remove one of them"
            )
        return self

    @property
    def is_of_versions(self) -> bool:
        """True if the block selects among several policy versions."""
        return self.steps != "all" or self.every != 1 or self.watch

    def versions(self, available: Sequence[int], *, is_over: bool = True) -> list[int]:
        """Return the policy versions to evaluate, ascending, if the folder holds the versions ``available``.

        ``is_over``: no more versions will be written, so the last available one is the last of the run.
        """
        base = [0] if self.base else []
        if self.weights is None:
            return base
        if self.steps != "all":
            return base + [version for version in available if version in self.steps]
        last = available[-1:] if is_over else []
        return base + [version for version in available if version % self.every == 0 or version in last]

    def while_training(self, weights: str) -> EvaluationSettings:
        """Return the block for a run that evaluates the versions that its own trainer writes into ``weights``."""
        return self.model_copy(update={"weights": weights, "watch": True})

    def versions_of_training(self, last_step: int) -> list[int]:
        """Return the versions to evaluate of a training run of ``last_step`` steps, ascending."""
        return self.while_training("weights").versions(range(1, last_step + 1))


__all__ = ["BaseUrl", "EvaluationSettings", "External"]
