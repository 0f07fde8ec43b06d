"""Write traces/{train,eval}.jsonl: one line per finished rollout, for users and `report`; training never reads it.

Rows are collected and written together off the event loop: an append can take milliseconds on a network filesystem.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from primerl_hpc.common.files import append_line, parse_row
from primerl_hpc.orchestrator.rollout_data import Rollout

DECIMALS = 4


class TraceWriter:
    """Appends to one traces file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size_bytes = path.stat().st_size if path.exists() else 0
        """Size of the file, including the rows that are not written yet."""
        self._lines: list[str] = []

    def rewind(self, size_bytes: int) -> None:
        """Drop the rows beyond ``size_bytes``, written by an earlier incarnation; their rollouts run again."""
        if self.size_bytes > size_bytes:
            os.truncate(self.path, size_bytes)
            self.size_bytes = size_bytes

    def keep(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Keep only the rows for which ``is_kept`` is true, like `keep_rows`."""
        keep_rows(self.path, is_kept)
        self.size_bytes = self.path.stat().st_size if self.path.exists() else 0

    def add(
        self,
        rollout: Rollout,
        *,
        env: str,
        task: str,
        version: int,
        advantages: Sequence[float] | None = None,
        **more: Any,
    ) -> None:
        """Add a finished rollout.

        ``version`` is the policy version at its start, ``last_version`` in the row at its end; ``advantages`` are those
        of its traces. ``messages`` of the row has each message without its content, whose characters are in ``prompt``
        (joined by line ends) and ``completion``.
        """
        prompt, completion = rollout.text[:-1], rollout.text[-1:]
        rewards = [trace.reward for trace in rollout.traces]
        columns = [rollout.traces, rewards, *([] if advantages is None else [advantages])]
        self._append(
            {
                "env": env,
                "task": task,
                "version": version,
                "last_version": rollout.last_version,
                **more,
                "reward": round(rollout.reward, DECIMALS),
                "advantage": None if advantages is None else round(float(np.mean(advantages)), DECIMALS),
                "rewards": _rounded(rollout.rewards),
                "metrics": _rounded(rollout.metrics),
                "entropy": _entropy(rollout),
                "agents": [
                    [trace.agent, *(round(float(value), DECIMALS) for value in values)]
                    for trace, *values in zip(*columns, strict=True)
                ],
                "turns": rollout.num_turns,
                "branches": len(rollout.samples),
                "input_tokens": rollout.input_tokens,
                "output_tokens": rollout.output_tokens,
                "truncated": rollout.is_truncated,
                "seconds": round(rollout.seconds, DECIMALS),
                "messages": [_without_content(message) for message in rollout.text],
                "prompt": "\n".join(message["content"] for message in prompt),
                "completion": completion[0]["content"] if completion else "",
            }
        )

    def add_failure(self, *, env: str, task: str, version: int, error: str) -> None:
        """Add a rollout that ended without a reward, also if it is retried."""
        self._append({"env": env, "task": task, "version": version, "error": error})

    def flush(self) -> None:
        """Append the collected rows in one write; after an OSError they are kept for the next call."""
        lines, self._lines = self._lines, []
        try:
            if lines:
                append_line(self.path, "\n".join(lines))
        except OSError:
            self._lines[:0] = lines
            raise

    def _append(self, row: dict[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":"))
        self._lines.append(line)
        self.size_bytes += len(line.encode()) + 1


def keep_rows(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Replace a traces file by those of its rows for which ``is_kept`` is true, dropping damaged lines.

    Atomic; a missing file is ignored.
    """
    is_unchanged, temporary = True, path.with_name(f"{path.name}.tmp")
    try:
        with path.open("rb") as rows, temporary.open("wb") as kept:
            for line in rows:
                row = parse_row(line)  # None: truncated when its writer was killed
                keeps_row = row is not None and is_kept(row)
                is_unchanged &= keeps_row
                if keeps_row:
                    kept.write(line)
    except FileNotFoundError:
        return
    if is_unchanged:
        temporary.unlink()
    else:
        os.replace(temporary, path)


def _entropy(rollout: Rollout) -> float | None:
    """Return the mean of -log μ over the sampled tokens, an estimate of the policy's entropy; None without tokens."""
    sampled = [sample.logprobs[sample.loss_mask] for sample in rollout.samples]
    count = sum(map(len, sampled))
    return round(-float(sum(map(np.sum, sampled))) / count, DECIMALS) if count else None


def _without_content(message: dict[str, Any]) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key != "content"}
    return rest | {"chars": len(message["content"])}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, DECIMALS) for name, value in values.items()}
