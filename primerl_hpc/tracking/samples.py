"""Tables of rollouts from traces/train.jsonl, and the distributions of their figures. Secrets in texts are masked.

reader = SampleReader(run.traces("train"))
reader.rows(20)           # the rows of the rollouts that were collected for batch 20
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import parse_row
from primerl_hpc.common.safety.secret_values import mask_data
from primerl_hpc.recipe.schema.run import LogExtras
from primerl_hpc.run.records import messages_of
from primerl_hpc.tracking.base import SampleTable

MAX_CHARS = 20_000
"""Longer prompts and completions are shortened: their start and end are kept."""
_DISTRIBUTIONS = {
    "reward": "reward",
    "advantage": "advantage",
    "entropy": "entropy",
    "completion_tokens": "output_tokens",
    "prompt_tokens": "input_tokens",
}
"""Name of a distribution → key of the traces."""


class SampleReader:
    """Reads the rows of one batch after another; the position in the file is kept."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def rows(self, step: int) -> list[dict[str, Any]]:
        """Return the rows of the finished rollouts of ``step``. Steps must not decrease, or the file is read again."""
        found: list[dict[str, Any]] = []
        try:
            with self.path.open("rb") as file:
                if file.seek(0, 2) < self._offset:
                    self._offset = 0  # the orchestrator removed rows of rollouts that run again
                file.seek(self._offset)
                position = self._offset
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    row = parse_row(line) or {}
                    if isinstance(row.get("step"), int) and row["step"] > step:
                        break
                    if row.get("step") == step and "reward" in row:
                        found.append(row)
                    self._offset = position
        except FileNotFoundError:
            pass
        return found

    def table(self, number: int, step: int, extras: LogExtras) -> SampleTable:
        rows = self.rows(step)
        distributions = {
            name: [float(row[key]) for row in rows if isinstance(row.get(key), int | float)]
            for name, key in _DISTRIBUTIONS.items()
        }
        chosen = rows
        if extras.sample_ratio is not None and rows:
            count = max(1, round(len(rows) * extras.sample_ratio))
            chosen = random.Random(step).sample(rows, count)
        return SampleTable(
            number,
            step,
            [mask_data(_sample(step, row)) for row in chosen] if extras.samples else [],
            {name: values for name, values in distributions.items() if values}
            if extras.distributions
            else {},
        )


def _sample(step: int, row: dict[str, Any]) -> dict[str, Any]:
    return {
        "step": step,
        "environment": row.get("env", ""),
        "task": row.get("task", ""),
        "prompt": _shortened(str(row.get("prompt", ""))),
        "completion": _shortened(str(row.get("completion", ""))),
        "reward": row.get("reward"),
        "advantage": row.get("advantage"),
        "messages": [
            message | {"content": _shortened(str(message["content"]))} for message in messages_of(row)
        ],
        "trace": row,
    }


def _shortened(text: str) -> str:
    if len(text) <= MAX_CHARS:
        return text
    half = MAX_CHARS // 2
    return f"{text[:half]}\n[{len(text) - MAX_CHARS} characters left out]\n{text[-half:]}"
