"""Times of a vLLM worker's start, from the numbers that vLLM logs.

    record_start_times()            # in the worker, before it loads the model
    read_start_times()              # in the API server, when the engine is ready: {"model": 2.0, "compile": 8.1}

vLLM has no other interface for them. A test starts an engine, so a version with other messages is noticed.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from primerl_hpc.common import env

_MESSAGES = (
    ("model", "Model loading took ", -1),
    ("weights", "Loading weights took ", 0),
    ("compile", "torch.compile took ", -1),
    ("graph capture", "Graph capturing finished in ", 0),
)
"""Phase, a part of the message, and which of its values is the time in seconds. vLLM 0.32 has a prefix for compile."""
_PREFIX = "start-times-"


class StartTimes(logging.Handler):
    """Writes the times of this process to a file in the engine's node-local folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.INFO)
        self.path = folder / f"{_PREFIX}{os.getpid()}.json"
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        for phase, part, index in _MESSAGES:
            if isinstance(record.msg, str) and part in record.msg and isinstance(record.args, tuple):
                try:
                    self.seconds[phase] = self.seconds.get(phase, 0.0) + float(str(record.args[index]))
                    self.path.write_text(json.dumps(self.seconds))
                except (IndexError, ValueError, OSError):
                    self.handleError(record)


def record_start_times() -> None:
    """Record the times that this process logs from now on."""
    if (folder := env.mirror_or_none()) is not None:
        logging.getLogger("vllm").addHandler(StartTimes(folder))


def read_start_times() -> dict[str, float]:
    """Return the times of the slowest worker of this node by phase; the model includes its weights."""
    slowest: dict[str, float] = {}
    for path in sorted(env.mirror().glob(f"{_PREFIX}*.json")):
        try:
            found: dict[str, float] = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        for phase, seconds in found.items():
            slowest[phase] = max(seconds, slowest.get(phase, 0.0))
    weights = slowest.pop("weights", None)
    if weights is not None:
        slowest = {"model": max(weights, slowest.get("model", 0.0))} | slowest
    return {phase: slowest[phase] for phase in ("model", "compile", "graph capture") if phase in slowest}
