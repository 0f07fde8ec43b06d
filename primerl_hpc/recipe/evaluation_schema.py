"""``evaluation``: which policies a run of kind eval looks at; without the block it is the recipe's model alone.

evaluation: {weights: runs/my-run/weights, steps: [10, 20, 30]}
evaluation: {external: {base_url: "https://api.example.com/v1", key_variable: EXAMPLE_KEY}}
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
"""Address of an OpenAI-compatible API, usually ending in ``/v1``; kept without a slash at its end."""


class External(Block):
    """A model behind an OpenAI-compatible server that somebody else runs; ``model.name`` is what it is asked for."""

    base_url: BaseUrl
    """Address of its API, usually ending in ``/v1``."""
    key_variable: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "OPENAI_API_KEY"
    """Environment variable that holds the API key when the job runs; the key itself is written nowhere."""

    def key(self) -> str:
        """Raises ConfigError when the variable is not set here."""
        if (key := env.variable(self.key_variable)) is None:
            raise ConfigError(
                f"the environment variable {self.key_variable}, which is to hold the key of {self.base_url}, is not set",
                mend="export it where you submit (any word for a server without keys), or name another: key_variable",
            )
        return key


class Evaluation(Block):
    """Which policies a run of kind eval looks at."""

    weights: str | None = None
    """Folder of policy versions (``step_N``), usually ``weights`` of a run. One set of engines is updated from version to version."""
    steps: Literal["all"] | tuple[PositiveInt, ...] = "all"
    """Which of them; ``all``: those that are there, and with ``watch`` those that come."""
    every: PositiveInt = 1
    """Of all of them, those whose step is a multiple of this, and the last."""
    base: Bool = True
    """Also ``model.name`` itself, as version 0."""
    watch: Bool = False
    """Go on with new versions until the run that makes them has ended."""
    external: External | None = None
    """Ask this server; the run starts no engines."""

    @field_validator("steps")
    @classmethod
    def _steps_are_named_once(cls, value: str | tuple[int, ...]) -> str | tuple[int, ...]:
        if not value:
            raise ValueError("must name at least one step, or be all")
        return value if isinstance(value, str) else tuple(sorted(set(value)))

    @model_validator(mode="after")
    def _there_is_something_to_evaluate(self) -> Self:
        if self.external is not None and self.weights is not None:
            raise ValueError("external and weights exclude each other: a server elsewhere loads no weights")
        if self.weights is None:
            if self.steps != "all" or self.every != 1 or self.watch:
                raise ValueError("steps, every and watch are about the versions in weights: name that folder")
            if not self.base:
                raise ValueError("without weights and with base: false there is nothing to evaluate")
        return self

    def versions(self, there: Sequence[int], *, is_over: bool = True) -> list[int]:
        """Which policy versions to evaluate, ascending, when the folder has those of ``there``.

        ``is_over``: no more will come, so the last is the last.
        """
        base = [0] if self.base else []
        if self.weights is None:
            return base
        if self.steps != "all":
            return base + [version for version in there if version in self.steps]
        last = there[-1:] if is_over else []
        return base + [version for version in there if version % self.every == 0 or version in last]


__all__ = ["BaseUrl", "Evaluation", "External"]
