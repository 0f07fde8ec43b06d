"""Work of a user inside SLURM jobs: `submit --here` in an allocation of `salloc`, and a shell in the job of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from primerl_hpc.common.document import dump_yaml
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.cluster_user import ClusterUser
from tests.support.helpers import PATIENCE_S, ROOT, captured, make_tiny_model
from tests.support.terminal import Terminal
from tests.support.virtual_slurm import SERVE, TRAIN, Cluster, SlurmToy, run_cli


def sft_recipe(folder: Path) -> str:
    """Write a recipe of two SFT steps with a tiny model; return its path."""
    tiny = make_tiny_model(folder / "tiny", rows=16, hidden=32, layers=1)
    recipe = {
        "kind": "sft",
        "name": "small",
        "model": {"name": str(tiny / "model"), "renderer": {"name": "chatml"}},
        "seq_len": 64,
        "max_steps": 2,
        "sft": {"data": {"path": str(tiny / "sft.jsonl")}, "batch_size": 4},
        "layout": {"trainer": {"ranks": 1}},
        "checkpoint": {"interval": None},
    }
    path = folder / "small.yaml"
    path.write_text(dump_yaml(recipe))
    return str(path)


def salloc(user: ClusterUser, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with arguments in an allocation of one node, as a user would type it there."""
    options = ["--nodes=1", "--ntasks-per-node=1", "--partition=main", "--exclusive", "--quiet"]
    return captured(
        ["salloc", *options, "bash", "-c", script, "bash", *words],
        env={**user.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=user.enter,
        stdin=subprocess.DEVNULL,
        timeout=PATIENCE_S,
    )


def test_submit_here_trains_in_the_allocation_of_this_shell_which_remains(
    cluster: Cluster, acting_user: ClusterUser, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    words = ["submit", sft_recipe(tmp_path), "-p", "virtual", "--run-dir", str(run.root), "--here"]
    acting_user.take_over(tmp_path)
    before = set(cluster.jobs_of(acting_user.name))
    outside = run_cli(*words, user=acting_user)
    assert outside.returncode == ExitCode.UNAVAILABLE and "SLURM_JOB_ID is not set" in outside.stderr
    # SLURM forgets ended jobs after some minutes
    assert not run.job.exists() and set(cluster.jobs_of(acting_user.name)) <= before
    done = salloc(
        acting_user,
        '"$@" --follow; code=$?; echo "after $code: $(squeue -h -j $SLURM_JOB_ID -o %T) $SLURM_JOB_ID"',
        *(sys.executable, "-m", "primerl_hpc", *words),
    )
    assert take_snapshot(run).state == RunState.DONE, done.stdout + done.stderr
    assert list(read_steps(run.metrics("sft"))) == [1, 2]
    job = json.loads(run.job.read_text())
    assert job["here"] is True and f"after 0: RUNNING {job['job_id']}" in done.stdout, done.stdout
    cluster.wait_until_idle()


def test_shell_opens_on_the_node_of_a_role_in_the_job_of_the_run(toy: SlurmToy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1,))
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    run, user = str(toy.run.root), toy.cluster.user
    words = ("exec", run, "--role", "trainer", "--shell", "sh")
    refused = run_cli(*words)  # its input is no terminal
    assert refused.returncode == ExitCode.USAGE and f"primerl-hpc exec {run}" in refused.stderr
    shown = json.loads(run_cli(*words, "--json").stdout)
    assert (shown["job"], shown["node"]) == (toy.job, "n2") and "--pty" in shown["command"]
    with Terminal("primerl_hpc", *words, cwd=Path("/"), user=user) as terminal:
        terminal.press("echo at=$(hostname) of=$SLURM_JOB_ID me=$(id -un) tty=$(test -t 0; echo $?)\n")
        terminal.wait_for(f"at=n2 of={toy.job} me=alice tty=0")
        terminal.press("exit 5\n")
        assert terminal.end() == 5
    assert toy.snapshot().state == RunState.RUNNING
    toy.finish()
