"""Ends and restarts under SLURM: cancels, walltime, preemption, lost nodes, killed supervisors, a restarted controller.

The trainer of these runs saves checkpoint 1 at once and another one on a stop request.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.slurm.commands import ask
from tests.support.helpers import PATIENCE_S, ROOT, wait_for
from tests.support.virtual_slurm import (
    SAY,
    SERVE,
    TRAIN,
    SlurmToy,
    call_down,
    resume_nodes,
    run_cli,
    start_cli,
)


def add_roles(toy: SlurmToy, *, trainer_nodes: tuple[int, ...] = (1,)) -> SlurmToy:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=trainer_nodes)
    return toy


def warn_of_walltime(toy: SlurmToy) -> None:
    """Send the signal that SLURM sends before the time limit (`--signal=B:USR2@…`), without the wait for it."""
    subprocess.run(["scancel", "--batch", "--signal=USR2", toy.job], check=True)


def test_cancel_saves_and_stops_and_resume_continues(toy: SlurmToy) -> None:
    add_roles(toy).submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    look_inside(toy)
    done = run_cli("cancel", str(toy.run.root), "--wait")
    assert done.returncode == 0 and "stopped" in done.stdout, done.stderr
    toy.assert_nothing_is_left()
    assert toy.run.latest_checkpoint() == 2 and toy.fact().state == "FAILED"  # exit code 75
    wait_for(lambda: (fact := toy.accounted()) is not None and fact.exit_code == 75, "its code in accounting")
    toy.submit()
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.wait_for_words("goes on after 2", "trainer-0", attempt=2)
    toy.finish()


def test_a_run_starts_in_an_existing_allocation_and_leaves_it_to_the_user(toy: SlurmToy) -> None:
    add_roles(toy, trainer_nodes=(1, 2)).prepare()
    outside = run_cli("resume", str(toy.run.root), "--here")
    assert outside.returncode == ExitCode.UNAVAILABLE and "salloc --nodes=3" in outside.stderr
    command = [sys.executable, "-m", "primerl_hpc", "resume", str(toy.run.root), "--here"]

    user = toy.cluster.user
    assert user is not None

    def salloc(nodes: int) -> subprocess.Popen[str]:
        options = [f"--nodes={nodes}", "--ntasks-per-node=1", "--partition=main", "--exclusive", "--quiet"]
        words = ["bash", "-c", '"$@" && read -r _', "bash", *command]
        return subprocess.Popen(
            ["salloc", *options, *words],
            env={**user.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=user.enter,  # noqa: PLW1509
        )

    small = salloc(2)
    assert "has 2" in small.communicate()[1] and not toy.run.job.exists()
    with salloc(3) as shell:
        toy.wait_until_ready("inference-0", "trainer-0")
        assert toy.fact().state == "RUNNING" and toy.snapshot().state == RunState.RUNNING
        toy.wait_for_words("on n3 node 1", "trainer-0_1")
        assert run_cli("cancel", str(toy.run.root), "--wait").returncode == 0
        assert toy.fact().state == "RUNNING" and toy.snapshot().state == RunState.STOPPED
        assert shell.poll() is None and shell.stdin is not None
        shell.stdin.write("\n")
    toy.wait_for_job("COMPLETED")
    toy.submit()
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.finish()


def look_inside(toy: SlurmToy) -> None:
    """`exec` and `stacks` start steps in the job, on the nodes of a role or on all nodes."""
    run = str(toy.run.root)
    assert run_cli("exec", run, "--role", "trainer", "--", "hostname").stdout.split() == ["n2"]
    done = run_cli("exec", run, "--node", "n1", "--json", "--", "sh", "-c", "echo $SLURM_JOB_ID; exit 3")
    (step,) = json.loads(done.stdout)["steps"]
    assert (done.returncode, step["stdout"].strip(), step["nodes"]) == (3, toy.job, ["n1"]), done.stderr
    assert "n1, n2" in run_cli("exec", run, "--node", "n9", "--", "true").stderr
    done = run_cli("stacks", run, "--json")
    report = json.loads(done.stdout)
    places = {(process["process"], process["node"]) for process in report["processes"]}
    assert {("supervisor", "n1"), ("inference-0", "n1"), ("trainer-0", "n2")} <= places, done.stdout
    assert done.returncode == 0 and report["problems"] == [], done.stdout


def test_a_module_that_cannot_be_loaded_ends_the_job_before_its_first_process_unless_it_is_optional(
    new_toy: Callable[..., SlurmToy],
) -> None:
    toy = add_roles(new_toy("needs"))
    change_software(toy, modules=["nccl/2.99"], setup=["source /nonexistent/site.sh"])
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    wait_for(lambda: (fact := toy.accounted()) is not None and fact.exit_code == 78, "its code in accounting")
    assert not toy.events("role_started")
    status, diagnosis = (run_cli(word, str(toy.run.root)).stdout for word in ("status", "diagnose"))
    for said in (status, diagnosis):
        words = "failed with exit status 127: module load nccl/2.99: module: command not found"
        assert words in " ".join(said.split()), said
    change_software(
        toy, modules=[{"name": "nccl/2.99", "optional": True}], setup=["[ -d /nonexistent ] && source /x"]
    )
    toy.prepare()
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0", attempt=2)
    assert "warning: an optional setup line failed with exit status 127" in toy.words()
    toy.finish()


def change_software(toy: SlurmToy, **changes: object) -> None:
    values = toy.profile.model_dump()
    values["software"] |= changes
    toy.profile = Profile.model_validate(values)


def test_a_queued_run_reports_why_it_waits_and_is_cancelled_in_the_queue(
    new_toy: Callable[..., SlurmToy],
) -> None:
    first = add_roles(new_toy("first"), trainer_nodes=(1, 2, 3))
    first.submit()
    first.wait_until_ready("inference-0")
    toy = add_roles(new_toy("second"))
    toy.submit()
    wait_for(lambda: "Resources" in (toy.snapshot().message or ""), "SLURM's reason")
    assert toy.snapshot().state == RunState.PENDING
    assert run_cli("cancel", str(toy.run.root)).returncode == 0
    toy.wait_for_job("CANCELLED")
    assert toy.snapshot().state == RunState.CANCELLED
    first.finish()


def test_scancel_saves_if_a_save_is_quick(toy: SlurmToy) -> None:
    add_roles(toy).submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    subprocess.run(["scancel", toy.job], check=True)
    toy.wait_for_state(RunState.STOPPED)
    toy.assert_nothing_is_left()
    assert toy.run.latest_checkpoint() == 2 and toy.fact().state == "CANCELLED"


def test_a_killed_supervisor_leaves_no_process_and_resume_continues(toy: SlurmToy) -> None:
    add_roles(toy).submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    owner = read_json(toy.run.supervisor_lock)
    toy.cluster.on(owner["host"], "kill", "-9", str(owner["pid"]))
    toy.wait_for_state(RunState.FAILED)
    toy.cluster.wait_until_idle()
    wait_for(lambda: not toy.cluster.processes_of(toy.run), "the end of every process")
    toy.submit()  # at once: SLURM vouches that the old owner is over
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.finish()


def test_a_walltime_reached_twice_loses_no_step_and_the_run_continues_automatically(toy: SlurmToy) -> None:
    """A follower of its log sees all three attempts, and accounting counts them all."""
    add_roles(toy).submit()
    follower = start_cli("logs", str(toy.run.root), "trainer", "--follow")
    for attempt in (1, 2):
        toy.wait_until_ready("inference-0", "trainer-0", attempt=attempt)
        saved = toy.run.latest_checkpoint()
        assert saved is not None
        warn_of_walltime(toy)
        toy.wait_for_job("PENDING")
        assert toy.snapshot().state == RunState.PENDING and "requeued" in (toy.snapshot().message or "")
        assert toy.run.latest_checkpoint() == saved + 1
    margin_s = toy.profile.scheduler.signal_margin_s  # the limit is five times as far away
    assert all(row["left_s"] <= margin_s for row in toy.events("stop_requested"))
    toy.wait_until_ready("trainer-0", attempt=3)
    toy.wait_for_words("goes on after 3", "trainer-0", attempt=3)
    toy.finish()
    said, _ = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0 and re.findall(r"goes on after (\d)", said) == ["0", "2", "3"], said
    used = json.loads(run_cli("status", str(toy.run.root), "--json").stdout)["usage"]
    assert (used["source"], used["attempts"]) == ("sacct", 3) and used["node_hours"] > 0


def test_a_real_walltime_is_noticed_by_signal_or_clock_in_every_attempt(
    new_toy: Callable[..., SlurmToy],
) -> None:
    """SLURM may warn up to a minute early; if that is before the job's start, some versions send no warning."""
    toy = add_roles(new_toy(time="00:02:00", signal_margin_s=100))
    # the warning may come before the trainer looks for the first time: its first step is done all the same
    first_a_step = ("run.stop_request.exists()", "run.latest_checkpoint() and run.stop_request.exists()")
    toy.processes[1] = toy.processes[1].model_copy(
        update={"argv": tuple(word.replace(*first_a_step) for word in toy.processes[1].argv)}
    )
    toy.submit()
    for life in (1, 2):
        toy.wait_until_ready("inference-0", "trainer-0", attempt=life)
        wait_for(
            lambda life=life: len(toy.events("run_requeued")) == life,
            "the warning and the requeue",
            tell=toy.words,
        )
        assert [row["reason"] for row in toy.events("stop_requested")] == ["walltime"] * life
        assert toy.run.latest_checkpoint() == life + 1
    toy.finish()


# a step takes 3 s, a save 20 s: after the first step, and when asked to stop
SLOW = (
    SAY
    + """
from primerl_hpc.run.metrics import MetricsWriter
step, is_stop = run.latest_checkpoint() or 0, False
print("goes on after", step, flush=True)
publish_endpoint(run, name, "http://x:1")
while not is_stop and not (run.root / "enough").exists():
    time.sleep(3)
    step, is_stop, seconds = step + 1, run.stop_request.exists(), {"time/step": 3.0}
    if is_stop or step == 1:
        time.sleep(20)
        run.finish_checkpoint_side(step, "trainer", ("trainer",))
        seconds = {"time/step": 23.0, "time/save_ckpt": 20.0}
    MetricsWriter(run.metrics("trainer")).write(step, seconds)
sys.exit(75 if is_stop else 0)
"""
)


@pytest.mark.slow
def test_a_job_without_a_warning_signal_saves_in_time_by_its_measured_durations(
    new_toy: Callable[..., SlurmToy],
) -> None:
    toy = new_toy(time="00:02:00", signal_margin_s=2)
    toy.add(Role.TRAINER, SLOW, OnExit.ENDS_PHASE)
    toy.prepare()
    script = toy.run.job_script
    script.write_text(re.sub("#SBATCH --signal=.*\n", "", script.read_text()))
    toy.submit()
    wait_for(lambda: toy.events("run_requeued"), "the end of its first life", tell=toy.words)
    (asked,) = toy.events("stop_requested")
    assert asked["reason"] == "walltime" and asked["save_s"] >= 20 and asked["left_s"] >= 2 * asked["save_s"]
    steps = list(read_steps(toy.run.metrics("trainer")))
    assert len(steps) > 1 and toy.run.latest_checkpoint() == steps[-1]  # no step is lost
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.wait_for_words(f"goes on after {steps[-1]}", "trainer-0", attempt=2)
    toy.finish()


def test_a_walltime_without_a_new_checkpoint_ends_the_chain_with_the_reason(toy: SlurmToy) -> None:
    toy.add(Role.TRAINER, TRAIN.replace("step += 1", "sys.exit(75)"), OnExit.ENDS_PHASE)
    toy.processes[0] = toy.processes[0].model_copy(
        update={"argv": tuple(word.replace("or step == 0", "") for word in toy.processes[0].argv)}
    )
    toy.submit()
    toy.wait_until_ready("trainer-0")
    warn_of_walltime(toy)
    toy.wait_for_state(RunState.STOPPED)
    assert "before a new checkpoint" in (toy.snapshot().message or "")
    toy.assert_nothing_is_left()


def test_no_requeue_is_respected(new_toy: Callable[..., SlurmToy]) -> None:
    toy = add_roles(new_toy(requeue=False))
    toy.submit()
    toy.wait_until_ready("trainer-0")
    warn_of_walltime(toy)
    toy.wait_for_state(RunState.STOPPED)
    assert "refused to requeue" in (toy.snapshot().message or "")
    toy.assert_nothing_is_left()


def test_a_preempted_run_saves_in_the_grace_time_and_is_requeued(new_toy: Callable[..., SlurmToy]) -> None:
    toy = add_roles(new_toy(partition="preemptible"), trainer_nodes=(1, 2, 3))
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    urgent = ask(
        ["sbatch", "--parsable", "-N4", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"]
    ).strip()
    toy.wait_for_job("PENDING")
    assert toy.run.latest_checkpoint() == 2
    subprocess.run(["scancel", urgent], check=True)
    toy.wait_until_ready("trainer-0", attempt=2)
    toy.finish()


def test_a_restarted_controller_does_not_disturb_the_run(toy: SlurmToy) -> None:
    add_roles(toy).submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    toy.cluster.wait_until_saved(toy.job)
    toy.cluster.tool("kill-controller")
    subprocess.run(["scontrol", "ping"], check=False, capture_output=True)
    assert toy.snapshot().state == RunState.RUNNING  # its own files know
    toy.cluster.tool("return-controller")
    toy.finish()


def test_a_restarted_slurmd_disturbs_no_role_and_starts_the_next_one(toy: SlurmToy) -> None:
    toy.add(Role.ROUTER, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(1,))
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1,))
    toy.submit()
    toy.wait_until_ready("router-0", "inference-0", "trainer-0")
    toy.cluster.on("n2", "sh", "-c", "kill -9 $(cat /run/slurmd.pid)")
    state = ["sinfo", "--noheader", "--nodes=n2", "--partition=main", "--format=%T"]
    wait_for(lambda: ask(state).strip().endswith("*"), "the controller to miss it", tell=toy.words)
    toy.cluster.on("n2", "slurmd")
    wait_for(lambda: not ask(state).strip().endswith("*"), "its return", tell=toy.words)
    assert toy.snapshot().restarts == {} and toy.snapshot().attempt == 1
    before = toy.endpoint("inference-0")
    toy.cluster.on("n2", "kill", "-9", str(before["pid"]))
    again = lambda: toy.run.endpoint("inference-0").exists() and toy.endpoint("inference-0")  # noqa: E731
    wait_for(lambda: (now := again()) and now["incarnation"] == 1, "its next life", tell=toy.words)
    assert toy.endpoint("inference-0")["host"] == "n2"
    wait_for(
        lambda: toy.snapshot().restarts == {"inference-0": 1}, "its restart in the state", tell=toy.words
    )
    toy.finish()


def test_runs_on_lost_nodes_are_requeued_and_continue_on_others(new_toy: Callable[..., SlurmToy]) -> None:
    """One run loses its trainer's node, the other its head node, at the same time; the two remaining nodes are enough
    for one of them."""
    first, second = add_roles(new_toy("first")), add_roles(new_toy("second"))
    for toy in (first, second):
        toy.submit()
        toy.wait_until_ready("inference-0", "trainer-0")
    lost = (first.endpoint("trainer-0")["host"], second.endpoint("inference-0")["host"])

    def is_again() -> bool:
        first.hurry()
        second.hurry()
        return 2 in (first.snapshot().attempt, second.snapshot().attempt)

    def is_requeued(toy: SlurmToy) -> bool:
        return toy.snapshot().state == RunState.PENDING or toy.snapshot().attempt == 2

    with first.cluster.without_power(*lost):
        wait_for(lambda: is_requeued(first) and is_requeued(second), "requeue")
        wait_for(is_again, "a second attempt", first.words)
    for toy in (first, second):
        toy.wait_until_ready("inference-0", "trainer-0", attempt=2)
    first.wait_for_words("goes on after 1", "trainer-0", attempt=2)
    # SLURM signals a trainer whose head node is lost, and the trainer saves
    second.wait_for_words("goes on after 2", "trainer-0", attempt=2)
    (first.run.root / "enough").touch()
    second.finish()
    first.finish()


def test_a_lost_node_without_requeue_fails_the_run_and_names_it(new_toy: Callable[..., SlurmToy]) -> None:
    toy = add_roles(new_toy(requeue=False))
    toy.submit()
    toy.wait_until_ready("inference-0", "trainer-0")
    call_down("n2")
    wait_for(lambda: toy.snapshot().state.is_final, "its end", tell=toy.words)
    toy.wait_for_job("NODE_FAIL")
    toy.wait_for_state(RunState.FAILED)  # never done, for any exit code of srun
    assert "NODE_FAIL" in (toy.snapshot().message or "")
    resume_nodes("n2")
    toy.assert_nothing_is_left()
