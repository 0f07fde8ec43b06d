"""Delete what a run no longer needs: policy versions and batches by policy, and on request traces and old logs.

    chosen = choose(run, PrunePolicy(keep_weights=2))     # nothing is deleted
    chosen.size_bytes, chosen.paths
    delete(chosen)

What a resume needs is never chosen: checkpoints, the versions of their steps, and the deltas that lead to a kept
version. Nor are versions that the recipe keeps permanently (``weights.interval``, ``weights.keep_best``), unless
``permanent`` is set.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from primerl_hpc.common.names import MAIN_PHASE
from primerl_hpc.launch.storage.usage import check_is_mine, sizes_of
from primerl_hpc.launch.submit import check_not_running
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.access.elsewhere import files_below, homes_of
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE, all_steps


@dataclass(frozen=True)
class PrunePolicy:
    keep_weights: int = 1
    """Number of the newest policy versions to keep; at least 1."""
    permanent: bool = False
    """Also choose versions that the recipe keeps permanently."""
    traces: bool = False
    """Also choose the rollouts in ``traces/``, which `samples` and `report` read."""
    superseded: bool = False
    """Also choose what ``resume --step`` moved away."""
    old_logs: bool = False
    """Also choose the logs of all attempts but the last."""


@dataclass(frozen=True)
class Chosen:
    paths: tuple[Path, ...]
    size_bytes: int
    num_files: int


def choose(run: RunDir, policy: PrunePolicy) -> Chosen:
    """Return what ``policy`` deletes. Raises OccupiedError for the run of another user, and one that is in use."""
    check_is_mine(run)
    check_not_running(run)
    paths = [path for path in (*_weights(run, policy), *_others(run, policy)) if os.path.lexists(path)]
    files = (file for path in paths for file in (files_below(path) if _is_folder(path) else (path,)))
    sizes = [size_bytes for _, size_bytes in sizes_of(files)]
    return Chosen(tuple(paths), sum(sizes), len(sizes))


def delete(chosen: Chosen) -> None:
    """Delete the chosen files and folders; a step directory loses its marker first. Raises OSError."""
    for path in chosen.paths:
        if _is_folder(path):
            (path / STABLE).unlink(missing_ok=True)
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _is_folder(path: Path) -> bool:
    """False for a symbolic link: what it names is not part of the run, so only the link is deleted."""
    return path.is_dir() and not path.is_symlink()


def _weights(run: RunDir, policy: PrunePolicy) -> list[Path]:
    """Return the step directories of versions and deltas that no checkpoint and no kept version needs."""
    folders, links = run.stable_weights(), run.list_steps(run.deltas, STABLE)
    versions = sorted({*folders, *links})
    kept = {*versions[-max(1, policy.keep_weights) :], *all_steps(run.checkpoints)}
    if not policy.permanent:
        kept |= _permanent(run, folders)
    bases = {base for version in kept if (base := _base_of(version, folders)) is not None}
    needed_links = {link for link in links if any(link <= version for version in kept & set(links))}
    needed_links = {link for link in needed_links if link > min(bases, default=0)}
    unused = [run.weights_step(step) for step in folders if step not in kept | bases]
    unused += [run.delta_step(step) for step in links if step not in needed_links]
    return [path for path in unused if not run.has_lease(path)]


def _base_of(version: int, folders: list[int]) -> int | None:
    """Return the newest full version at or before ``version``."""
    return max((step for step in folders if step <= version), default=None)


def _permanent(run: RunDir, versions: list[int]) -> set[int]:
    weights = load_plan(run).phase(MAIN_PHASE).recipe.weights
    if weights.keep_best is not None:
        return set(versions)  # which ones are the best was decided when they were measured
    return {version for version in versions if weights.interval and version % weights.interval == 0}


def _others(run: RunDir, policy: PrunePolicy) -> list[Path]:
    # a resumed trainer starts after its last checkpoint, and batches after that are collected again
    paths = [run.rollouts_step(step) for step in all_steps(run.rollouts)]
    if policy.traces:
        paths += [run.traces(split) for split in ("train", "eval")]
    if policy.superseded:
        paths += [run.root / "superseded", *(home / "superseded" for home in homes_of(run))]
    if policy.old_logs:
        latest = run.latest_logs.resolve().name
        logs = run.latest_logs.parent
        paths += [path for path in sorted(logs.glob("attempt_*")) if path.name != latest]
    return paths
