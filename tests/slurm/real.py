"""Real runs of the tiny recipe on a virtual cluster: their recipe, and what their files and SLURM say of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.slurm import JobFact, ask
from primerl_hpc.observe.slurm import JobWatcher
from primerl_hpc.observe.snapshot import take_snapshot
from tests.slurm.virtual import Cluster, wait_for
from tests.support import ROOT

READY_S = 420  # cold engines on a busy machine
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
    """A submitted run and what SLURM says of it."""

    def __init__(self, root: Path, said: str) -> None:
        self.run, self.jobs, self.said = RunDir(root), JobWatcher(), said

    def facts(self) -> dict[str, JobFact]:
        """What SLURM says of its jobs."""
        return self.jobs.facts_of([self.run])

    @property
    def state(self) -> RunState:
        return take_snapshot(self.run, self.facts()).state

    @property
    def job(self) -> str:
        return str(take_snapshot(self.run).job["job_id"])

    def steps(self) -> dict[str, str]:
        """Node list by name of every step that accounting knows."""
        rows = ask(["sacct", "-n", "-P", "-j", self.job, "-o", "JobName,NodeList"]).splitlines()
        return dict(row.split("|") for row in rows)

    def process_of(self, cluster: Cluster, name: str, depth: int = 1) -> psutil.Process:
        """The process of a role (1), or its first child (2): the router itself, or a rank of the trainer."""
        for pid, line in cluster.processes_of(self.run).items():
            words = line.split()
            if words[:3] == [sys.executable, "-m", "primerl_hpc.runtime.guard"] and words[-1] == name:
                process = psutil.Process(pid)
                for _ in range(depth):
                    process = process.children()[0]
                return process
        raise AssertionError(f"no {name} runs")

    def repeated_steps(self) -> list[int]:
        """Steps that the trainer made more than once, because a fault took what came after a checkpoint."""
        steps = [row["step"] for row in read_jsonl(self.run.metrics("trainer"))]
        return [step for index, step in enumerate(steps) if step in steps[:index]]

    def words(self) -> str:
        """The ends of its logs, for a failing test."""
        logs = sorted(self.run.root.glob("logs/**/*.*"))
        return "\n".join(
            f"== {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs if path.is_file()
        )

    def wait_for_state(self, state: RunState, timeout_s: float = 600) -> None:
        wait_for(lambda: self.state.is_final or self.state == state, "its end", timeout_s, self.words)
        assert self.state == state, self.words()
