"""traces/{train,eval}.jsonl: one line per finished rollout, for people and for `report`; training never reads it.

Rows are gathered and written together off the event loop: an append can take milliseconds on a network filesystem.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from primerl_hpc.common.files import append_line
from primerl_hpc.orchestrator.trajectories import Rollout

DECIMALS = 4


class TraceWriter:
    def __init__(self, path: Path) -> None:
        """``size_bytes``: of the file, with the rows that are not written yet."""
        self.path, self.size_bytes = path, path.stat().st_size if path.exists() else 0
        self._lines: list[str] = []

    def rewind(self, size_bytes: int) -> None:
        """Drop the rows beyond ``size_bytes``, which an earlier life wrote: their rollouts are lost and run again."""
        if self.size_bytes > size_bytes:
            os.truncate(self.path, size_bytes)
            self.size_bytes = size_bytes

    def keep(self, is_kept: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other rows of the file, as `keep_rows` does."""
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
        """``version``: live when the rollout started; ``last_version`` when it ended. ``advantages``: of its traces."""
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
                "prompt": "\n".join(message["content"] for message in prompt),
                "completion": completion[0]["content"] if completion else "",
            }
        )

    def add_failure(self, *, env: str, task: str, version: int, error: str) -> None:
        """One that ended without a reward, whether it is tried again or not."""
        self._append({"env": env, "task": task, "version": version, "error": error})

    def flush(self) -> None:
        """Append what was gathered, in one write; what raises OSError is kept for the next call."""
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
    """Drop the other rows of a file of traces, and what is none, in one piece; a missing file has no rows."""
    is_whole, temporary = True, path.with_name(f"{path.name}.tmp")
    try:
        with path.open("rb") as rows, temporary.open("wb") as kept:
            for line in rows:
                try:
                    is_good = is_kept(json.loads(line))
                except ValueError:  # torn by whoever was killed while it wrote
                    is_good = False
                is_whole &= is_good
                if is_good:
                    kept.write(line)
    except FileNotFoundError:
        return
    if is_whole:
        temporary.unlink()
    else:
        os.replace(temporary, path)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, DECIMALS) for name, value in values.items()}
