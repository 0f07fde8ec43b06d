"""control/events.jsonl: one line per thing that happened, written by the supervisor alone."""

from __future__ import annotations

import time
from typing import Any

from primerl_hpc.common.files import append_json
from primerl_hpc.common.rundir import RunDir


def record_event(run_dir: RunDir, event: str, **details: Any) -> dict[str, Any]:
    """Append ``{"time", "event", **details}``. ``event`` is a short snake_case word, e.g. ``role_started``."""
    row = {"time": round(time.time(), 3), "event": event, **details}
    append_json(run_dir.events, row)
    return row
