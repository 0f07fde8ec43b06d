"""What a profile asks for is what SLURM gets, in every spelling, and every step of the run starts under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from primerl_hpc.common.names import Role, RunState
from primerl_hpc.common.slurm import ask
from primerl_hpc.plan.types import OnExit
from tests.slurm.virtual import SAY, SlurmToy

DEVICES = SAY + "print('devices', os.environ.get('CUDA_VISIBLE_DEVICES', 'none'))\n"


def job_facts(job: str) -> dict[str, str]:
    """The lines of ``scontrol show job`` whose values may hold blanks, and its words."""
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
    assert "devices none" in toy.log("orchestrator-0")
    for node in (0, 1):
        assert "devices 0,1,2,3,4,5,6,7" in toy.log(f"trainer-0_{node}")


def test_words_of_the_profile_reach_slurm_byte_for_byte(new_toy: Callable[..., SlurmToy]) -> None:
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
