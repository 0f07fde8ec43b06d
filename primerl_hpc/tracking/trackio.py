"""Trackio: ``tracking.trackio``. Its step is the number of the row; the rows have ``<source>/step``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.recipe.schema.run import Trackio
from primerl_hpc.tracking.base import (
    Item,
    MetricRow,
    Outcome,
    TargetContext,
    TargetUnavailableError,
    missing_package,
)


class TrackioTarget:
    def __init__(self, context: TargetContext, settings: Trackio) -> None:
        try:
            trackio: Any = import_module("trackio")
        except ImportError:
            raise missing_package("trackio", "trackio") from None
        self._trackio = trackio
        try:
            trackio.init(
                project=settings.project,
                name=settings.run_name or context.run.root.name,
                space_id=settings.space_id,
                resume="allow",
            )
        except Exception as error:  # Trackio raises errors of several libraries
            raise TargetUnavailableError(f"Trackio failed to start: {describe_error(error)}") from error

    @property
    def position(self) -> int | None:
        return None

    def send(self, item: Item) -> None:
        if isinstance(item, MetricRow):
            self._trackio.log(dict(item.values), step=item.number)

    def finish(self, outcome: Outcome | None, summary: dict[str, float]) -> None:
        self._trackio.finish()
