"""One row of a ledger: a predicted figure, its measured value, and what the difference may depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Source = Literal["run", "calibrate"]


@dataclass(frozen=True)
class LedgerRow:
    figure: str
    """Name of the predicted figure, e.g. ``time.trainer.step``."""
    measured: float
    unit: str
    gpu: str
    """GPU type of the profile; ``cpu`` for rows that were measured on CPUs."""
    predicted: float | None = None
    """None: measured without a prediction, e.g. on an unknown GPU."""
    family: str = ""
    """Architecture of the model, e.g. ``qwen3``; empty for figures of the hardware."""
    layout: str = ""
    """Layout of the prediction, e.g. ``16 ranks, context 2, seq 32768``."""
    software: Mapping[str, str] = field(default_factory=dict)
    """Library → version."""
    time: float = 0.0
    """Seconds since the epoch."""
    source: Source = "run"
    run: str = ""
    """Name of the run, or of the profile that was calibrated."""
    attempt: int = 0

    @property
    def log_ratio(self) -> float | None:
        """ln(measured / predicted); None unless both are positive."""
        if self.predicted is None or self.predicted <= 0 or self.measured <= 0:
            return None
        return math.log(self.measured / self.predicted)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


_TEXTS = ("figure", "unit", "gpu", "family", "layout", "run")


def parse_ledger_row(value: Mapping[str, Any]) -> LedgerRow:
    """Parse a row. Unknown keys are ignored: a newer version may have written them.

    Raises ValueError for a missing key or a value of another type.
    """
    texts = {name: value.get(name, "") for name in _TEXTS}
    numbers = {"measured": value.get("measured"), "time": value.get("time", 0.0)}
    software = value.get("software", {})
    predicted = value.get("predicted")
    for name, text in texts.items():
        if not isinstance(text, str) or (not text and name in ("figure", "gpu")):
            raise ValueError(f"{name} must be text")
    for name, number in {**numbers, "predicted": 0.0 if predicted is None else predicted}.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise ValueError(f"{name} must be a finite number")
    if not isinstance(software, dict) or not all(isinstance(version, str) for version in software.values()):
        raise ValueError("software must map libraries to versions")
    source: Source = "calibrate" if value.get("source") == "calibrate" else "run"
    attempt = value.get("attempt", 0)
    return LedgerRow(
        **texts,
        **numbers,
        predicted=predicted,
        software=software,
        source=source,
        attempt=attempt if isinstance(attempt, int) else 0,
    )
