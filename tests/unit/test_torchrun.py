"""What the trainer's ranks are started with."""

from __future__ import annotations

import os

import pytest

from primerl_hpc.common.names import Role
from primerl_hpc.recipe.training_schema import Trainer
from primerl_hpc.roles.torchrun import threads_of_rank
from tests.support import process_plan


@pytest.mark.parametrize(
    ("cpu_offload", "ranks", "threads"), [(False, 8, 1), (True, 8, 12), (True, 1, 96), (True, 128, 1)]
)
def test_ranks_whose_optimizer_steps_on_the_host_share_the_nodes_cores(
    monkeypatch: pytest.MonkeyPatch, cpu_offload: bool, ranks: int, threads: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    process = process_plan(Role.TRAINER, accelerators=ranks, nodes=2)
    assert threads_of_rank(Trainer(cpu_offload=cpu_offload), process) == threads
