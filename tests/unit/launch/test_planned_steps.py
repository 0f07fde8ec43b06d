"""How the supervisor will start roles, as `plan --scripts --steps` shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.launch.compose import interpreter, make_scripts
from primerl_hpc.launch.planned_steps import planned_steps
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.allocation import read_allocation
from primerl_hpc.runtime.step import Launch
from primerl_hpc.runtime.steps.srun import srun_command
from tests.support.helpers import captured, small_rl

IMAGE = "{python: /opt/image/bin/python, container: {kind: %s, image: /images/x.sqsh}}"
RECIPE = small_rl(Path("/models/small"), layout={"inference": {"replicas": 2}, "trainer": {"ranks": 8}})
HOST, INSIDE = "/shared/env/bin/python", "/opt/image/bin/python"


def test_the_shown_command_is_the_one_that_the_supervisor_executes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = load_profile("h100x64", overrides=["env.MINE=a b"])
    plan = compile_plan(RECIPE, profile.profile, run_dir=str(tmp_path), python=interpreter(profile))
    hosts = [f"node{node.index}" for node in plan.nodes]
    monkeypatch.setattr("submitit.slurm.slurm.SlurmJobEnvironment.hostnames", hosts)
    allocation = read_allocation(plan, {"SLURM_JOB_ID": "7", "SLURM_JOB_CPUS_PER_NODE": f"96(x{len(hosts)})"})
    phase = plan.phases[0]
    for step in planned_steps(plan, profile.profile, interpreter(profile)):
        launch = Launch(phase.process(step.name), RunDir(tmp_path), phase.name, 1, 0)
        assert step.command == srun_command(launch, allocation) and step.env["MINE"] == "a b"
        lines = step.text.splitlines()
        first = next(number for number, line in enumerate(lines) if line.startswith("srun "))
        script = " ".join(["printf '%s\\n'", *(line.removesuffix("\\") for line in lines[first:])])
        said = captured(["bash", "-c", script], check=True).stdout
        assert said.splitlines() == step.command and "MINE='a b'" in lines[:first]


@pytest.mark.parametrize(
    ("kind", "host", "guard"),
    [
        ("pyxis", HOST, INSIDE),  # the guard of the step is in the container, too
        ("apptainer", HOST, HOST),
        ("uenv", INSIDE, INSIDE),  # mounted for the batch script
    ],
)
def test_the_batch_script_starts_the_supervisor_outside_of_the_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, host: str, guard: str
) -> None:
    monkeypatch.setattr("sys.executable", HOST)
    profile = load_profile("h100x64", overrides=[f"software.default={IMAGE % kind}"])
    plan = compile_plan(RECIPE, profile.profile, run_dir=str(tmp_path), python=interpreter(profile))
    script = make_scripts(plan, profile, None)["job.sbatch"]
    assert script.splitlines()[-1].startswith(f"exec {host} -m primerl_hpc.runtime.supervisor {tmp_path}")
    for step in planned_steps(plan, profile.profile, interpreter(profile)):
        place = step.command.index("primerl_hpc.runtime.steps.guard")
        assert step.command[place - 2] == guard
        assert step.command[step.command.index("--", place) :].count(INSIDE) == 1
