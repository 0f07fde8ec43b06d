"""Runs in the tasks of a job array: SLURM lists them under other numbers than their own, and one number means all."""

from __future__ import annotations

import sys
from collections.abc import Callable

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.job_chain import jobs_of
from primerl_hpc.slurm.jobs import find_facts, is_job_over
from tests.support.helpers import ROOT, wait_for
from tests.support.virtual_slurm import SERVE, TRAIN, SlurmToy, run_cli

SWEEP = """#!/bin/bash
#SBATCH --array=0-1 --nodes=1 --ntasks=1 --partition=main --exclusive --output=/dev/null --open-mode=append
export PYTHONPATH={root}
{python} -m primerl_hpc resume {folder}/task-$SLURM_ARRAY_TASK_ID --here || exit
while [ ! -e {folder}/over ]; do sleep 0.1; done
"""


def test_each_task_of_a_job_array_is_a_run_of_its_own(new_toy: Callable[..., SlurmToy]) -> None:
    """Their jobs were taken for ended ones: a second supervisor broke the lock of the first."""
    toys = [new_toy(f"task-{number}") for number in range(2)]
    for toy in toys:
        toy.add(Role.INFERENCE, SERVE, OnExit.RESTART)
        toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE)
        toy.prepare()
    folder = toys[0].run.root.parent
    script = folder / "sweep.sbatch"
    script.write_text(SWEEP.format(root=ROOT, python=sys.executable, folder=folder))
    array = toys[0].ask("sbatch", "--parsable", str(script)).strip()
    for toy in toys:
        toy.wait_until_ready("inference-0", "trainer-0")
    jobs = [toy.job for toy in toys]
    assert array in jobs and len(set(jobs)) == 2  # the last task has the number of the array
    assert {job: fact.state for job, fact in find_facts(jobs).items()} == dict.fromkeys(jobs, "RUNNING")
    assert not any(map(is_job_over, jobs))
    for toy in toys:
        assert toy.snapshot().state == RunState.RUNNING and jobs_of(read_json(toy.run.job)) == (toy.job,)
        refused = run_cli("resume", str(toy.run.root))
        assert refused.returncode == ExitCode.OCCUPIED and "this run is running" in refused.stderr
        host = run_cli("exec", str(toy.run.root), "--", "hostname").stdout.strip()
        assert host == toy.fact().nodes  # a step in its own job
    first = next(toy for toy in toys if toy.job == array)
    other = next(toy for toy in toys if toy.job != array)
    assert run_cli("cancel", str(first.run.root), "--wait").returncode == 0
    assert first.snapshot().state == RunState.STOPPED
    assert other.fact().state == "RUNNING" and other.snapshot().state == RunState.RUNNING
    (other.run.root / "enough").touch()
    other.wait_for_state(RunState.DONE)
    (folder / "over").touch()
    for toy in toys:
        wait_for(lambda toy=toy: is_job_over(toy.job), "the end of its job", tell=toy.words)
        toy.assert_nothing_is_left()
