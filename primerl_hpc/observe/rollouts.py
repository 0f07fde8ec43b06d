"""Sentences about the rollouts of the current attempt, from ``control/rollouts.json`` (orchestrator or evaluator).

progress_sentence(progress)   → "8 rollouts in flight (8 on the environment server), 40 finished, 12 failed"
warning_sentences(progress)   → ["30% of the rollouts of environment reverse-text failed in its last 10 batches: …"]
failure_sentences(progress)   → ["12 rollouts of reverse-text failed, last error (12 of this kind): HarnessError: …"]
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.safety.printable import last_error
from primerl_hpc.run.metrics import HighErrorRate
from primerl_hpc.run.rundir import RunDir


def read_progress(run: RunDir) -> dict[str, Any]:
    """Return {} before the first rollout of an attempt, and for runs without rollouts."""
    progress = read_json_or_none(run.rollout_progress)
    return progress if isinstance(progress, dict) else {}


def progress_sentence(progress: dict[str, Any]) -> str:
    dropped = progress.get("dropped_batches", 0)
    waiting = progress.get("waiting", 0)
    return ", ".join(
        [
            f"{_count(progress.get('in_flight', 0), 'rollout')} in flight{_on_servers(progress)}",
            f"{progress.get('finished', 0)} finished",
            *([f"{waiting} of them waiting for a batch"] if waiting else []),
            f"{progress.get('failed', 0)} failed",
            *([f"{_count(dropped, 'batch', 'batches')} dropped without signal"] if dropped else []),
        ]
    )


def _on_servers(progress: dict[str, Any]) -> str:
    """Return the number of episodes at the environment servers, in parentheses; empty where it is unknown."""
    episodes = progress.get("episodes") or {}
    if len(episodes) > 1:
        return f" (up to {max(episodes.values())} on each of {len(episodes)} environment servers)"
    return "".join(f" ({number} on the environment server)" for number in episodes.values())


def failure_sentences(progress: dict[str, Any]) -> list[str]:
    """Return one sentence for each environment with failed rollouts."""
    return [
        f"{_count(failures['count'], 'rollout')} of {name} failed, {last_error(failures['last'], failures['of_kind'])}"
        for name, failures in progress.get("failures", {}).items()
    ]


def warning_sentences(progress: dict[str, Any]) -> list[str]:
    """Return one sentence for each environment whose rollouts fail in many consecutive batches."""
    return [HighErrorRate(**rate).sentence for rate in progress.get("high_error_rates") or ()]


def limit_sentence(progress: dict[str, Any]) -> str | None:
    """Return the limit on concurrent episodes; None if no environment starts processes for each episode."""
    limit = progress.get("process_limit")
    if not limit:
        return None
    names = ", ".join(limit["environments"])
    return (
        f"at most {limit['episodes']} episodes of {names} run at a time because each episode starts its own processes "
        f"(see the log of the environment server)"
    )


def _count(number: int, noun: str, plural: str = "") -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
