"""Helpers of the benchmarks: description of the machine, shape of a model, tables, exit codes, comparison with a
required figure, peak memory.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QWEN3_600M = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def describe_machine() -> dict[str, Any]:
    return {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}


def peak_of(profile: Any) -> int:
    """Return the peak of live allocations in bytes, from a `torch.profiler` run with ``profile_memory``."""
    alive = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def is_met(what: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> bool:
    """Print a figure and the required one. Return True if it is met."""
    asked = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
    met = value >= at_least if at_least is not None else value <= at_most
    print(f"{what}: {value:.4g}; asked: {asked}: {'met' if met else 'MISSED'}")
    return met


def show(what: str, rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    """Print a table with one column per key; with ``as_json`` one JSON document only."""
    machine = describe_machine()
    if as_json:
        print(json.dumps({"what": what, **machine, "rows": list(rows)}, indent=1))
        return
    print(f"{what}\n{machine['machine']}, {machine['cores']} cores, Python {machine['python']}\n")
    names = list(rows[0]) if rows else []
    widths = [max(len(name), *(len(_text(row[name])) for row in rows)) for name in names]
    print("  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for row in rows:
        print("  ".join(f"{_text(row[name]):>{width}}" for name, width in zip(names, widths, strict=True)))


def conclude(what: str, rows: Sequence[dict[str, Any]], wrong: Sequence[str], *, as_json: bool) -> int:
    """Print the table and the errors found. Return the exit code."""
    if as_json:
        print(
            json.dumps(
                {"what": what, **describe_machine(), "rows": list(rows), "wrong": list(wrong)}, indent=1
            )
        )
    else:
        show(what, rows, as_json=False)
        print("\nwrong: " + ("; ".join(wrong) or "nothing"))
    return 1 if wrong else 0


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
