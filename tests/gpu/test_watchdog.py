"""Hang reports with NCCL; tests/unit/trainer/test_watchdog.py tests them with gloo."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from primerl_hpc.trainer.watchdog import Collective, last_collectives, record_collectives  # noqa: E402
from tests.support.spawned_ranks import spawn_ranks  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"),
]


def test_a_collective_that_waits_on_the_gpu_is_named_with_its_number():
    spawn_ranks(wait_in_one, 1)


def wait_in_one(rank: int) -> None:
    record_collectives()
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    ones = torch.ones(8, device="cuda")
    dist.broadcast(ones, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000_000)  # cycles: the device stands still, and the next two wait behind it
    dist.all_reduce(ones)
    dist.broadcast(ones, 0)
    assert last_collectives()["nccl 0"] == Collective("all_reduce", 2, is_done=False)
    dist.barrier(device_ids=[0])
    dist.destroy_process_group()
