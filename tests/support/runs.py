"""Complete runs on this machine, as a user starts them: commands, processes of a run, and content of its files."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.jobs import JobFact
from tests.support.forked_commands import run_command
from tests.support.helpers import PATIENCE_S, ROOT, is_alive, wait_for

TINY = ROOT / "recipes" / "reverse_text" / "tiny.yaml"
# engines and environment servers take most of a minute on two cores, minutes on a busy machine
RL_RECIPE = """\
base: {tiny}
name: e2e
warmup: null
max_steps: 16
environments:
  eval:
    - {{id: reverse-text, name: held-out, args: {{split: test}}, interval: 16, samples: 2, num_tasks: 32}}
checkpoint: {{interval: 4, keep_last: 2}}
"""

SFT_RECIPE = """\
base: {tiny}
kind: sft
name: warm
warmup: null
layout: {{trainer: {{ranks: 1}}}}
max_steps: 300
sft:
  data: {{path: {data}}}
  batch_unit: samples
  batch_size: 64
optimizer: {{type: adamw, lr: 2.0e-3, weight_decay: 0.01, betas: [0.9, 0.98]}}
scheduler: {{type: linear, warmup_steps: 20, decay_steps: 90, min_lr_ratio: 0.1}}
checkpoint: {{interval: 100}}
weights: {{interval: 100}}
"""


def command(
    *words: str, cwd: Path, timeout_s: float = PATIENCE_S, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run ``primerl-hpc …`` as a user types it."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = run_command(*words, cwd=cwd, environ=environ, timeout_s=timeout_s)
    assert not check or done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def processes_of(root: Path) -> list[psutil.Process]:
    """Return supervisor and guards of a run, and all processes below them.

    Engines and environment servers overwrite their command line and environment, so the process tree is used.
    """
    found: dict[int, psutil.Process] = {}
    psutil.process_iter.cache_clear()  # it may hold an ended process of an earlier test whose pid is used again
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            is_ours = any(word.startswith("primerl_hpc.runtime.") for word in words) and str(root) in words
            for each in [process, *process.children(recursive=True)] if is_ours else []:
                found[each.pid] = each
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found.values() if is_alive(process)]


def kill_processes_of(root: Path) -> None:
    for process in processes_of(root):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            process.kill()


def find_process(root: Path, name: str, depth: int = 1) -> psutil.Process | None:
    """Return the process of a role (depth 1) or its first child (depth 2: a rank of the trainer), None without one.

    The first child is the oldest: pids start again at 1, and a guard inherits orphans.
    """
    for process in processes_of(root):
        words = process.cmdline()
        if "primerl_hpc.runtime.steps.guard" not in words or words[-1] != name:
            continue
        found: psutil.Process | None = process
        for _ in range(depth):
            children = filter(is_alive, found.children() if found else ())
            found = min(children, key=psutil.Process.create_time, default=None)
        if found is not None:
            return found
    return None


def process_of(root: Path, name: str, depth: int = 1) -> psutil.Process:
    """Return the process that `find_process` finds; raise AssertionError if there is none."""
    process = find_process(root, name, depth)
    assert process is not None, f"no process of {name} at depth {depth}"
    return process


def events(run: RunDir, name: str) -> list[dict]:
    return [row for row in read_jsonl(run.events) if row["event"] == name]


def versions_served(run: RunDir) -> list[int]:
    """Policy versions that the engine loaded while it served, in order."""
    log = run.attempt_logs(1) / "inference" / "0.log"
    said = log.read_text(errors="replace") if log.exists() else ""
    return [int(version) for version in re.findall(r"serving policy version (\d+) from", said)]


def last_step(run: RunDir) -> int:
    return max(read_steps(run.metrics("trainer")), default=0)


def wait_in_run(
    run: RunDir,
    condition: Callable[[], object],
    what: str,
    jobs: Callable[[], Mapping[str, JobFact] | None] = lambda: None,
) -> None:
    """Wait until ``condition`` holds. Raises AssertionError at once if the run ends before that.

    ``jobs``: returns the state of its jobs in SLURM.
    """

    def is_so() -> bool:
        # asked in this order: what a run's last moment brings is there when the run is seen to have ended
        state = take_snapshot(run, jobs()).state
        if condition():
            return True
        assert not state.is_final, f"{run.root.name} is {state} before {what}: {told(run)}"
        return False

    wait_for(is_so, what, lambda: told(run))


def told(run: RunDir) -> str:
    """The run's last events, for a failing test."""
    return run.events.read_text()[-2000:] if run.events.exists() else "no event yet"


def wait_for_end(run: RunDir) -> RunState:
    wait_for(lambda: take_snapshot(run).state.is_final, f"{run.root.name} to end", lambda: told(run))
    return take_snapshot(run).state
