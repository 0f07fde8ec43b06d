"""Roles as SLURM steps: where they run, what SLURM reports about them, how they end, and that no process remains."""

from __future__ import annotations

import os
import signal

import pytest

from primerl_hpc.common.files import read_json, read_json_or_none, write_json
from primerl_hpc.common.names import Role, RunState, process_name
from primerl_hpc.plan.plan import OnExit
from primerl_hpc.slurm.commands import ask
from primerl_hpc.slurm.jobs import parse_squeue, squeue_command
from tests.support.helpers import wait_for
from tests.support.virtual_slurm import SAY, SAY_BESIDE_ENGINE, SERVE, TRAIN, SlurmToy

SHOW_GPUS = SAY + "print('gpus', os.environ.get('CUDA_VISIBLE_DEVICES', 'none'), flush=True)\n"


def test_roles_run_as_named_steps_on_their_nodes_and_completion_releases_all(toy: SlurmToy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(Role.TRAINER, SAY_BESIDE_ENGINE, OnExit.ENDS_PHASE, nodes=(1, 2))
    toy.add(Role.ORCHESTRATOR, SAY, OnExit.ENDS_PHASE, nodes=(3,))
    toy.submit()
    toy.wait_for_state(RunState.DONE)
    toy.assert_nothing_is_left()
    assert toy.fact().state == "COMPLETED"
    toy.wait_for_words("on n1 node 0", "inference-0")
    toy.wait_for_words("on n2 node 0", "trainer-0_0")
    toy.wait_for_words("on n3 node 1", "trainer-0_1")
    toy.wait_for_words("on n4", "orchestrator-0")
    wait_for(lambda: {"inference-0", "trainer-0", "orchestrator-0"} <= set(toy.steps()), "accounting")


def test_a_crash_names_the_node_and_the_code_and_releases_all(toy: SlurmToy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(0,))
    toy.add(
        Role.TRAINER, SAY + "raise SystemExit('error: the loss is a teapot')", OnExit.ENDS_PHASE, nodes=(2,)
    )
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    failure = read_json(toy.run.failure)
    assert (failure["process"], failure["node"], failure["exit_code"]) == ("trainer-0", "n3", 1)
    assert "teapot" in failure["message"]
    assert toy.fact().state == "FAILED"


def test_a_crash_on_one_of_two_nodes_ends_the_peer_and_its_exit_code_is_reported(toy: SlurmToy) -> None:
    code = SAY + "if os.environ['SLURM_NODEID'] == '1': sys.exit(7)\ntime.sleep(900)\n"
    toy.add(Role.TRAINER, code, OnExit.ENDS_PHASE, nodes=(1, 2))
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    failure = read_json(toy.run.failure)
    assert (failure["node"], failure["exit_code"], failure["signal"]) == ("n3", 7, None)
    assert failure["log"].endswith("trainer-0_1.log")


@pytest.mark.parametrize("role", [Role.TRAINER, Role.ORCHESTRATOR, Role.SFT, Role.EVALUATOR])
def test_a_killed_role_is_reported_with_its_signal(toy: SlurmToy, role: Role) -> None:
    name = process_name(role, 0)
    toy.add(role, TRAIN, OnExit.ENDS_PHASE, nodes=(1,))
    toy.submit()
    toy.wait_until_ready(name)
    toy.cluster.on("n2", "kill", "-9", str(toy.endpoint(name)["pid"]))
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    failure = read_json(toy.run.failure)
    assert (failure["process"], failure["node"], failure["signal"]) == (name, "n2", "SIGKILL")


def test_killed_requested_late_servers_and_a_killed_srun_are_restarted(toy: SlurmToy) -> None:
    toy.add(Role.INFERENCE, SERVE, OnExit.RESTART, nodes=(1,))
    toy.add(Role.TEACHER, SERVE, OnExit.RESTART, nodes=(1,))
    toy.add(Role.ROUTER, SERVE, OnExit.RESTART, nodes=(0,))
    late = SAY + "time.sleep(900 if os.environ['PRIMERL_INCARNATION'] == '0' else 0)\n" + SERVE
    toy.add(Role.ENV_SERVER, late, OnExit.RESTART, nodes=(0,), ready_timeout_s=30)
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, nodes=(1,))
    toy.submit()
    toy.wait_until_ready("inference-0", "teacher-0", "router-0")

    def kill(node: str, process: str) -> None:
        toy.cluster.on(node, "kill", "-9", str(toy.endpoint(process)["pid"]))

    kill("n2", "inference-0")
    kill("n1", "router-0")
    request = toy.run.restart_request("teacher-0")
    toy.as_user(lambda: write_json(request, {"reason": "it cannot be updated"}))

    def is_in_life(process: str, number: int) -> bool:
        return toy.run.endpoint(process).exists() and toy.endpoint(process)["incarnation"] == number

    for process in ("inference-0", "teacher-0", "router-0", "env_server-0"):
        wait_for(lambda process=process: is_in_life(process, 1), f"second life of {process}")
    kill("n1", "env_server-0")
    kill("n2", "teacher-0")
    left = toy.endpoint("router-0")["pid"]
    lines = toy.cluster.processes_of(toy.run).items()
    sruns = [pid for pid, line in lines if "srun --overlap --job-name=router-0 " in line]
    assert sruns
    for pid in sruns:  # with its helper process; the step runs without them
        os.kill(pid, signal.SIGKILL)
    for process in ("router-0", "env_server-0", "teacher-0"):
        wait_for(lambda process=process: is_in_life(process, 2), f"third life of {process}", tell=toy.words)
    assert not toy.cluster.on("n1", "ps", "-o", "pid=", "-p", str(left), check=False)
    toy.finish()


def test_roles_that_share_a_node_see_only_their_own_gpus(toy: SlurmToy) -> None:
    toy.plan_changes = {"accelerator": "gpu", "accelerators_per_node": 8}
    everything = tuple(range(8))
    for index, devices in enumerate([(0, 1), (2, 3, 4, 5), everything, ()]):
        toy.add(Role.TRAINER, SHOW_GPUS, OnExit.ENDS_PHASE, index=index)
        toy.processes[-1] = toy.processes[-1].model_copy(update={"accelerators": devices})
    toy.submit()
    toy.wait_for_state(RunState.DONE)
    for index in range(4):
        toy.wait_for_words("gpus ", f"trainer-{index}")
    seen = [toy.log(f"trainer-{index}").split("gpus ")[1].strip() for index in range(4)]
    assert seen == ["0,1", "2,3,4,5", "0,1,2,3,4,5,6,7", "none"]


def test_a_role_that_cannot_start_fails_the_run_with_the_message_of_srun(toy: SlurmToy) -> None:
    toy.add(Role.TRAINER, SAY, OnExit.ENDS_PHASE)
    toy.processes[-1] = toy.processes[-1].model_copy(update={"srun_args": ("--gres=gpu:99",)})
    toy.submit()
    toy.wait_for_state(RunState.FAILED)
    toy.assert_nothing_is_left()
    assert "srun: error" in read_json(toy.run.failure)["message"]


def test_a_second_job_on_the_run_directory_is_refused_and_the_first_continues(toy: SlurmToy) -> None:
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE)
    toy.submit()
    toy.wait_until_ready("trainer-0")
    script = str(toy.run.launch / "job.sbatch")
    second = toy.ask("sbatch", "--parsable", script).strip()
    wait_for(lambda: parse_squeue(ask(squeue_command([second])))[second].state == "FAILED", "its refusal")
    assert "another supervisor" in (toy.run.root / "logs" / f"slurm-{second}.out").read_text()
    (toy.run.root / "enough").touch()
    toy.wait_for_state(RunState.DONE)
    assert toy.snapshot().attempt == 1


def test_the_script_runs_the_same_job_when_submitted_manually(toy: SlurmToy) -> None:
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE)
    toy.prepare()
    (toy.run.root / "enough").touch()
    toy.ask("sbatch", str(toy.run.launch / "job.sbatch"))
    wait_for(lambda: (read_json_or_none(toy.run.state) or {}).get("state") == RunState.DONE, "its end")
    toy.cluster.wait_until_idle()
    assert toy.run.latest_checkpoint() == 1 and not toy.cluster.processes_of(toy.run)
