"""Data that targets receive, and the protocol that they implement.

A target is sent one item at a time, in the order of their numbers. The numbers count all items of a target from 0, over
all attempts, so that a target can recognize an item that it already has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Literal, Protocol

from primerl_hpc.common.errors import ConfigError, ExitCode, PrimerlError
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.rundir import RunDir

SAMPLE_COLUMNS = ("step", "environment", "task", "prompt", "completion", "reward", "advantage")


class TargetUnavailableError(PrimerlError):
    """A target does not accept rows now; they are sent again later."""

    exit_code = ExitCode.UNAVAILABLE


@dataclass(frozen=True)
class MetricRow:
    """One row of a metrics file. NaN and infinities are left out."""

    number: int
    source: str  # trainer, orchestrator, …
    step: int
    time_s: float
    values: dict[str, float]  # names start with the source: trainer/loss/mean


@dataclass(frozen=True)
class SampleTable:
    """Rollouts that were collected for the batch of a step."""

    number: int
    step: int
    rows: list[dict[str, Any]]  # keys: SAMPLE_COLUMNS, "messages", and the row of the traces as "trace"
    distributions: dict[str, list[float]] = field(default_factory=dict)


Item = MetricRow | SampleTable
Outcome = Literal["completed", "failed"]


@dataclass(frozen=True)
class TargetContext:
    """The run that a target describes, and how it remembers facts."""

    run: RunDir
    recipe: Recipe
    sources: tuple[str, ...]
    memory: dict[str, Any]  # what the target remembers over attempts, such as the id of the run
    remember: Callable[[], None]  # write `memory` to the run directory
    ended: Event  # the process was asked to end: do not wait


class Target(Protocol):
    @property
    def position(self) -> int | None:
        """Number of the first item that the target does not have; None if it cannot tell."""

    def send(self, item: Item) -> None:
        """Send one item. Raises TargetUnavailableError if it is to be sent again later."""

    def finish(self, outcome: Outcome | None, summary: dict[str, float]) -> None:
        """End the connection. ``outcome``: how the run ended; None if it continues later. ``summary``: the last
        values of all metrics."""


def missing_package(target: str, package: str) -> ConfigError:
    """Return the error of a target whose package is not installed."""
    return ConfigError(
        f"tracking.{target} is set, but {target} is not installed", hint=f"pip install '{package}'"
    )
