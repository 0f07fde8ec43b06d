"""Real runs of the tiny recipe on a virtual cluster: their recipe, and reports of their files and of SLURM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.job_watcher import JobWatcher
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import JobFact
from tests.support.helpers import ROOT, wait_for
from tests.support.virtual_slurm import Cluster

TINY = ROOT / "recipes" / "reverse_text" / "tiny.yaml"
SMALL: dict[str, Any] = {
    "base": str(TINY),
    "warmup": None,
    "max_steps": 2,
    "environments": {"train": [{"id": "reverse-text", "args": {"split": "train"}}], "eval": []},
    "rollouts": {"batch_size": 16, "group_size": 4},
    "inference": {"kv_cache_gib": 0.0625},
    "checkpoint": {"interval": None},
}


class RealRun:
    """A submitted run and its state in SLURM."""

    def __init__(self, root: Path, said: str) -> None:
        self.run, self.jobs, self.said = RunDir(root), JobWatcher(), said

    def facts(self) -> dict[str, JobFact]:
        """State of its jobs in SLURM."""
        return self.jobs.facts_of([self.run])

    @property
    def state(self) -> RunState:
        return take_snapshot(self.run, self.facts()).state

    @property
    def job(self) -> str:
        return str(take_snapshot(self.run).job["job_id"])

    def steps(self) -> dict[str, str]:
        """Step name → node list, for every step in accounting."""
        rows = ask(["sacct", "-n", "-P", "-j", self.job, "-o", "JobName,NodeList"]).splitlines()
        return dict(row.split("|") for row in rows)

    def process_of(self, cluster: Cluster, name: str, depth: int = 1) -> psutil.Process:
        """Return the process of a role (1) or its first child (2): the router, or a rank of the trainer."""
        for pid, line in cluster.processes_of(self.run).items():
            words = line.split()
            if words[:3] == [sys.executable, "-m", "primerl_hpc.runtime.steps.guard"] and words[-1] == name:
                process = psutil.Process(pid)
                for _ in range(depth):
                    process = process.children()[0]
                return process
        raise AssertionError(f"no {name} runs")

    def repeated_steps(self) -> list[int]:
        """Steps that the trainer repeated, because a fault occurred after a checkpoint."""
        steps = [row["step"] for row in read_jsonl(self.run.metrics("trainer"))]
        return [step for index, step in enumerate(steps) if step in steps[:index]]

    def words(self) -> str:
        """The last lines of its logs, for a failing test."""
        logs = sorted(self.run.root.glob("logs/**/*.*"))
        return "\n".join(
            f"== {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs if path.is_file()
        )

    def wait_for_state(self, state: RunState) -> None:
        wait_for(lambda: self.state.is_final or self.state == state, "its end", self.words)
        assert self.state == state, self.words()
