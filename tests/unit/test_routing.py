"""Loads of experts, counted by hand. That layouts of ranks agree on them is in tests/e2e/test_parallel.py."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

from primerl_hpc.trainer.parallel.context import Context, make_packing  # noqa: E402
from primerl_hpc.trainer.routing import Routing  # noqa: E402


class Experts(nn.Module):
    """What the experts interface's decorator leaves on a module."""

    has_gate, is_transposed, num_experts, down_proj = True, False, 4, None

    def forward(self, hidden, index, weights):
        return hidden


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_the_busiest_expert_and_the_largest_weight_of_real_tokens():
    model = nn.ModuleList([Experts(), Experts()])
    found = Routing(model)
    found.attach(torch.device("cpu"))
    # a sample of three tokens, one of two, three pads
    found.begin_forward(make_packing(torch.tensor([[0, 1, 2, 0, 1, 0, 0, 0]]), Context(), "sdpa"))
    index = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1], [1, 0], *[[3, 2]] * 3])
    weights = torch.tensor([[0.9, 0.1], [3.0, 1.0], [0.5, 0.5], [0.6, 0.4], [0.4, 0.6], *[[1.0, 0.0]] * 3])
    for module, order in zip(model, (index, (index + 1) % 4), strict=True):
        module(torch.zeros(8, 2), order, weights)
    metrics = found.take_metrics()
    assert metrics["max_vio"] == pytest.approx(5 / (10 / 4) - 1)
    assert metrics["routing_confidence"] == pytest.approx((0.9 + 0.75 + 0.5 + 0.6 + 0.6) / 5)
    assert found.loads.sum() == 0
    assert Routing(nn.Linear(2, 2)).sizes == []
