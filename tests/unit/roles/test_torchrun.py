"""Command line and environment of the trainer's ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.errors import TimeoutWaitingError
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.recipe.schema.training import TrainerConfig
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer import torchrun
from primerl_hpc.trainer.torchrun import num_rank_threads
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan


@pytest.mark.parametrize(
    ("cpu_offload", "ranks", "threads"), [(False, 8, 1), (True, 8, 12), (True, 1, 96), (True, 128, 1)]
)
def test_ranks_whose_optimizer_steps_on_the_host_share_the_nodes_cores(
    monkeypatch: pytest.MonkeyPatch, cpu_offload: bool, ranks: int, threads: int
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(96)))
    process = process_plan(Role.TRAINER, accelerators=ranks, nodes=2)
    assert num_rank_threads(TrainerConfig(cpu_offload=cpu_offload), process) == threads


def test_a_trainer_on_few_cores_starts_after_the_environment_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = RunDir(tmp_path)
    processes = [process_plan(Role.ENV_SERVER, index) for index in range(2)]
    make_plan(run.root, TOY_RECIPE, processes=[*processes, process_plan(Role.TRAINER)])
    polled: list[bool] = []

    def wait_until(poll: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        polled.append(poll())
        for process in processes:
            publish_endpoint(run, process.name, "tcp://h:1")
            polled.append(poll())
        raise TimeoutWaitingError(what)  # the trainer starts also if a server does not

    monkeypatch.setattr(torchrun, "wait_until", wait_until)
    torchrun.wait_for_environments(run, load_plan(run).phase("main"))
    assert polled == [False, False, True]
