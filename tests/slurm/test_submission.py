"""SLURM receives exactly what a profile requests: all spellings, hostile environments, communication faults, refusals.

The faults come from a `sbatch` of the test that calls the real one and then prints something else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import ExitCode, SchedulerError
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.command_lines import shares_command
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import ENDED
from primerl_hpc.slurm.sbatch import UnansweredError
from tests.support.helpers import PATIENCE_S, ROOT, unusable_sft_recipe, wait_for
from tests.support.virtual_slurm import SAY, Cluster, SlurmToy, run_cli

DEVICES = SAY + "print('devices', os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))\n"


def job_facts(job: str) -> dict[str, str]:
    """The lines of ``scontrol show job`` whose values may contain spaces, and its other fields."""
    facts = {}
    for line in ask(["scontrol", "show", "job", job]).splitlines():
        name, _, value = line.strip().partition("=")
        facts[name] = value
        facts |= dict(word.split("=", 1) for word in line.split() if "=" in word and name not in ("Comment",))
    return facts


@pytest.mark.parametrize(
    "request_of_gpus",
    [
        {"gpu_request": "gres", "gpu_type": "h100", "memory_per_cpu": "1000"},
        {"gpu_request": "gpus-per-node", "memory_per_gpu": "10G"},
        {"gpu_request": "gpus-per-task"},
    ],
    ids=str,
)
def test_steps_with_and_without_gpus_start_in_every_spelling_of_the_request(
    new_toy: Callable[..., SlurmToy], request_of_gpus: dict[str, Any]
) -> None:
    toy = new_toy(**{"memory": None, "gres": (), **request_of_gpus})
    toy.profile = toy.profile.model_copy(
        update={"node": toy.profile.node.model_copy(update={"gpus": 8, "cores": 8})}
    )
    toy.plan_changes = {"accelerator": "gpu", "accelerators_per_node": 8}
    toy.add(Role.ORCHESTRATOR, DEVICES, OnExit.ENDS_PHASE, accelerators=0)
    toy.add(Role.TRAINER, DEVICES, OnExit.ENDS_PHASE, nodes=(0, 1), accelerators=8)
    toy.submit()
    toy.wait_for_state(RunState.DONE)
    toy.wait_for_words("devices none", "orchestrator-0")
    for node in (0, 1):
        toy.wait_for_words("devices 0,1,2,3,4,5,6,7", f"trainer-0_{node}")


def test_texts_of_the_profile_reach_slurm_byte_for_byte(new_toy: Callable[..., SlurmToy]) -> None:
    comment = """it's "quoted" \\ $(touch /tmp/x) `id` ; # %j ü"""
    toy = new_toy(
        comment=comment, mail_type=("END", "FAIL"), mail_user="a@b.example", nice=7, begin="now+1hour"
    )
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    toy.submit()
    facts = job_facts(toy.job)
    assert facts["Comment"].rstrip() == comment
    assert (facts["MailUser"], facts["MailType"], facts["Nice"]) == ("a@b.example", "END,FAIL", "7")
    assert facts["JobState"] == "PENDING" and facts["Reason"] == "BeginTime"


def facts_of_new_job(toy: SlurmToy) -> dict[str, str]:
    toy.submit()
    return job_facts(toy.job)


def test_variables_of_the_submitting_shell_or_job_do_not_override_the_script(
    new_toy: Callable[..., SlurmToy], monkeypatch: pytest.MonkeyPatch
) -> None:
    around = {
        "SBATCH_PARTITION": "preemptible",
        "SBATCH_JOB_NAME": "other",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_EXPORT": "NONE",
        "SBATCH_WCKEY": "*mine",
        "SLURM_JOB_ID": "999",
        "SLURM_NTASKS": "7",
        "SLURM_MEM_PER_CPU": "7",
        "SLURM_GPUS_PER_TASK": "3",
        "SLURM_HINT": "nomultithread",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_PARTITION": "preemptible",
        "SACCT_FORMAT": "JobID",
    }
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    toy = new_toy()
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE, nodes=(0, 1))
    facts = facts_of_new_job(toy)
    assert (facts["Partition"], facts["JobName"], facts["Requeue"]) == ("main", "toy", "1")
    assert (facts["TimeLimit"], facts["NumTasks"]) == ("00:10:00", "2")
    toy.wait_for_state(RunState.DONE)


@pytest.fixture
def faulty_sbatch(tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Install a `sbatch` whose body may call `real "$@"` and count with `call`; return the file with one line per
    call."""

    def make(body: str) -> Path:
        calls, command = tmp_path / "calls", tmp_path / "bin" / "sbatch"
        command.parent.mkdir()
        command.write_text(
            "#!/bin/bash\n"
            f'real() {{ {cluster.folder}/bin/sbatch "$@"; }}\n'
            'timed_out() { echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1; }\n'  # noqa: E501
            f'echo "$@" >>{calls}; call=$(wc -l <{calls})\n{body}\n'
        )
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
        return calls

    return make


def jobs_of(toy: SlurmToy) -> dict[str, str]:
    """Job id → state of every job that was submitted for this run and has not ended."""
    rows = [row.split("|") for row in ask(["squeue", "-h", "-t", "all", "-o", "%i|%T|%o"]).splitlines()]
    return {
        job: state for job, state, command in rows if f"{toy.run.root}/" in command and state not in ENDED
    }


@pytest.mark.parametrize(
    "body, calls, says",
    [
        ('real "$@" >/dev/null; timed_out', 1, "in the queue nevertheless"),
        ('[ $call = 1 ] && timed_out; real "$@"', 2, "checking whether"),
        # the first try's request reached SLURM after everybody had looked
        ('[ $call = 1 ] && timed_out; real "$@" >/dev/null; real "$@"', 2, "an earlier sbatch had succeeded"),
    ],
    ids=["taken", "not taken", "taken late"],
)
def test_a_submission_that_appears_to_time_out_creates_exactly_one_job(
    new_toy: Callable[..., SlurmToy],
    faulty_sbatch: Callable[[str], Path],
    capfd: pytest.CaptureFixture[str],
    body: str,
    calls: int,
    says: str,
) -> None:
    called = faulty_sbatch(body)
    toy = new_toy(begin="now+1hour")
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    job = toy.submit()
    assert jobs_of(toy) == {job: "PENDING"} and toy.job == job
    assert len(called.read_text().splitlines()) == calls
    assert says in capfd.readouterr().err


def test_a_submission_with_unknown_result_is_found_by_resume(
    new_toy: Callable[..., SlurmToy], faulty_sbatch: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM accepts the job and then stops answering; the run directory remains, and resume finds its job."""
    called = faulty_sbatch('real "$@" >/dev/null; timed_out')
    monkeypatch.setattr("primerl_hpc.launch.queue.SBATCH_PATIENCE_S", 0.5)
    toy = new_toy(begin="now+1hour")
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    with pytest.raises(UnansweredError, match="resume"):
        toy.submit()
    assert not toy.run.job.exists() and len(jobs_of(toy)) == 1
    assert {toy.submit(): "PENDING"} == jobs_of(toy)
    assert len(called.read_text().splitlines()) == 1


def test_a_temporarily_unavailable_controller_gets_the_job_once(
    new_toy: Callable[..., SlurmToy], tmp_path: Path
) -> None:
    before, toy = new_toy("before", begin="now+1hour"), new_toy("toy", begin="now+1hour")
    for each in (before, toy):
        each.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    toy.prepare()
    before.submit()
    toy.cluster.wait_until_saved(before.job)
    toy.cluster.tool("kill-controller")
    said, user = tmp_path / "said", toy.cluster.user
    assert user is not None
    with said.open("w") as file:
        command = [sys.executable, "-m", "primerl_hpc", "resume", str(toy.run.root)]
        waiting = subprocess.Popen(
            command,
            env={**user.environ, "PYTHONPATH": str(ROOT)},
            stdout=file,
            stderr=subprocess.STDOUT,
            preexec_fn=user.enter,  # noqa: PLW1509 (it calls the system only)
        )
    try:
        wait_for(lambda: "checking whether" in said.read_text(), "its first try", tell=said.read_text)
    finally:
        toy.cluster.tool("return-controller")
    assert waiting.wait(PATIENCE_S) == 0, said.read_text()
    assert jobs_of(toy) == {toy.job: "PENDING"}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"partition": "gpu"}, ["partition gpu does not exist", "--partition", "sinfo"]),
        ({"qos": "urgent"}, ["QOS urgent", "--qos"]),
        ({"account": "physics"}, ["account physics", "--account"]),
        (
            {"time": "2-00:00:00"},
            ["at most 4:00:00", "requests 1 node for 2-00:00:00", "lower scheduler.time"],
        ),
        ({"constraint": "a100"}, ["features a100", "sinfo"]),
        ({"gres": ("gpu:tpu:8",)}, ["doctor"]),
        ({"reservation": "class"}, ["reservation class"]),
        ({"licenses": ("matlab",)}, ["licenses matlab"]),
        ({"extra": ("--no-such-option",)}, ["scheduler.extra", "--no-such-option"]),
    ],
    ids=str,
)
def test_a_refusal_is_one_sentence_with_a_hint_and_no_job_is_queued(
    new_toy: Callable[..., SlurmToy], changes: dict[str, Any], words: list[str]
) -> None:
    toy = new_toy(**changes)
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    with pytest.raises(SchedulerError) as caught:
        toy.submit()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value) and jobs_of(toy) == {}


def test_the_limit_of_jobs_in_the_queue_is_named(new_toy: Callable[..., SlurmToy]) -> None:
    first, second = new_toy("first", begin="now+1hour"), new_toy("second")
    for toy in (first, second):
        toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    ask(["sacctmgr", "-i", "modify", "user", "alice", "set", "MaxSubmitJobs=1"])
    try:
        first.submit()
        with pytest.raises(SchedulerError, match="limit of queued jobs"):
            second.submit()
    finally:
        ask(["sacctmgr", "-i", "modify", "user", "alice", "set", "MaxSubmitJobs=-1"])


@pytest.mark.usefixtures("acting_user")
def test_plan_shows_when_slurm_would_start_the_job(tmp_path: Path) -> None:
    recipe = unusable_sft_recipe(tmp_path)
    done = run_cli("plan", recipe, "--profile", "virtual", "--json")
    estimate = json.loads(done.stdout)["estimate"]
    assert estimate["partition"] == "main" and estimate["nodes"].startswith("n"), done.stderr
    assert datetime.fromisoformat(estimate["start"])
    assert "could start" in run_cli("plan", recipe, "--profile", "virtual").stdout
    refused = run_cli("plan", recipe, "--profile", "virtual", "--partition", "gpu")
    assert refused.returncode == 0 and "partition gpu does not exist" in refused.stdout
    assert ask(["squeue", "--noheader"]) == ""


@pytest.mark.usefixtures("acting_user")
def test_plan_shows_the_gpu_hours_that_are_left_for_the_account(tmp_path: Path) -> None:
    recipe = unusable_sft_recipe(tmp_path)
    words = ("plan", recipe, "--profile", "virtual")
    assert json.loads(run_cli(*words, "--json").stdout)["budget"] is None
    ask(["sacctmgr", "-i", "modify", "account", "lab", "set", "GrpTRESMins=gres/gpu=6000"])
    try:
        wait_for(lambda: "gres/gpu=6000" in ask(shares_command()), "the limit")
        budget = json.loads(run_cli(*words, "--json").stdout)["budget"]
        assert (budget["account"], budget["holder"], budget["limit_hours"]) == ("lab", "lab", 100.0)
        assert budget["remaining_hours"] == 100.0 - budget["used_hours"]
        assert "of 100 GPU-hours left for lab" in run_cli(*words).stdout
    finally:
        ask(["sacctmgr", "-i", "modify", "account", "lab", "set", "GrpTRESMins=gres/gpu=-1"])


@pytest.mark.usefixtures("acting_user")
def test_overwrite_replaces_a_run_once_its_job_has_left_the_queue(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    words = ("submit", unusable_sft_recipe(tmp_path), "-p", "virtual", "--run-dir", str(run.root), "--json")
    words += ("--profile-set", "scheduler.begin=now+1hour", "--overwrite", "--yes")
    first = json.loads(run_cli(*words).stdout)["job_id"]
    try:
        (run.root / "weights").mkdir()
        refused = run_cli(*words)
        assert refused.returncode == ExitCode.OCCUPIED and f"job {first} of this run waits" in refused.stderr
        assert (run.root / "weights").exists()
        subprocess.run(["scancel", first], check=True)
        wait_for(lambda: first not in ask(["squeue", "--noheader", "--format=%i"]), "its end")
        done = run_cli(*words)
        assert "an earlier run, " in done.stderr and not (run.root / "weights").exists()
        second = json.loads(done.stdout)["job_id"]
        assert second != first and read_json(run.job)["job_id"] == second
    finally:
        subprocess.run(["scancel", read_json(run.job)["job_id"]], check=True)
