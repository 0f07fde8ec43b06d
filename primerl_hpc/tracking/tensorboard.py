"""TensorBoard: ``tracking.tensorboard``. An attempt writes one event file; TensorBoard shows all of a folder."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from primerl_hpc.recipe.schema.run import Tensorboard
from primerl_hpc.tracking.base import Item, MetricRow, Outcome, TargetContext, missing_package


class TensorboardTarget:
    def __init__(self, context: TargetContext, settings: Tensorboard) -> None:
        try:
            self._event: Any = import_module("tensorboard.compat.proto.event_pb2").Event
            self._summary: Any = import_module("tensorboard.compat.proto.summary_pb2").Summary
            files: Any = import_module("tensorboard.summary.writer.event_file_writer")
        except ImportError:
            raise missing_package("tensorboard", "tensorboard") from None
        folder = (
            Path(settings.dir).expanduser() if settings.dir is not None else context.run.root / "tensorboard"
        )
        self._writer: Any = files.EventFileWriter(str(folder))

    @property
    def position(self) -> int | None:
        return None

    def send(self, item: Item) -> None:
        if not isinstance(item, MetricRow):
            return
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in item.values.items()
            if name != f"{item.source}/step"
        ]
        self._writer.add_event(
            self._event(step=item.step, wall_time=item.time_s, summary=self._summary(value=values))
        )
        self._writer.flush()

    def finish(self, outcome: Outcome | None, summary: dict[str, float]) -> None:
        self._writer.close()
