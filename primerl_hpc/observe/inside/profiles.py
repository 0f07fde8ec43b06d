"""Request traces of the next steps of a running trainer; its ranks write them (`trainer/perf.py`).

traces = request_profile(run, steps=3, ranks=[0])
missing_traces(run, traces)             # [] when all are written; None if the run has ended before
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import write_json
from primerl_hpc.observe.log_files import LogFiles
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import TRAINER_ROLE, take_snapshot
from primerl_hpc.run.access.ownership import check_may_change
from primerl_hpc.run.rundir import RunDir


def request_profile(run: RunDir, *, steps: int, ranks: Sequence[int]) -> list[Path]:
    """Write the request; return the files in which the ranks will write their traces.

    Raises NotFoundError if no trainer is running or it has no such rank, OccupiedError for another user's run.
    """
    check_may_change(run, hint="only its owner can trace it")
    snapshot = take_snapshot(run, JobWatcher().facts_of([run]))
    trainers = [
        process
        for process in LogFiles(run).processes.values()
        if process["role"] in TRAINER_ROLE.values() and process["name"] in snapshot.processes
    ]
    if not snapshot.state.is_alive or not trainers:
        raise NotFoundError(
            f"this run is {snapshot.state.value} and has no running trainer",
            hint=f"primerl-hpc status {shlex.quote(run.root.name)}",
        )
    size = max(len(process["nodes"]) * len(process["accelerators"]) for process in trainers)
    if unknown := [rank for rank in ranks if not 0 <= rank < size]:
        raise NotFoundError(
            f"rank {unknown[0]} does not exist", hint=f"ranks of the trainer: 0 to {size - 1}"
        )
    name = time.strftime("%Y%m%d-%H%M%S")
    write_json(run.profile_request, {"id": name, "steps": steps, "ranks": list(ranks)})
    return [run.profile_trace(name, rank) for rank in ranks]


def missing_traces(run: RunDir, traces: Sequence[Path]) -> list[Path] | None:
    """Return the traces that are not written yet; None if they never will be, because the run has ended."""
    is_over = not take_snapshot(run, JobWatcher().facts_of([run])).state.is_alive
    missing = [path for path in traces if not path.is_file()]
    return None if missing and is_over else missing
