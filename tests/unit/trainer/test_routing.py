"""Loads of experts compared with manual counts; tests/e2e/test_parallel.py compares layouts of ranks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.trainer.model.routing import Routing  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, make_packing  # noqa: E402


class Experts(nn.Module):
    """A module with the attributes that the decorator of the experts interface sets."""

    has_gate, is_transposed, num_experts, down_proj = True, False, 4, None

    def forward(self, hidden, index, weights):
        return hidden


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


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Buffer(torch.zeros(4))


@pytest.mark.usefixtures("one_rank")
def test_biases_of_experts_with_fewer_tokens_than_the_mean_rise_by_the_rate():
    """b += rate · sign(mean load - load); a layer whose router has no bias is left out."""
    layers = [nn.ModuleDict({"gate": Router(), "experts": Experts()}), nn.ModuleDict({"experts": Experts()})]
    found = Routing(nn.ModuleList(layers))
    found.attach(torch.device("cpu"), bias_rate=0.25)
    bias = torch.full((4,), 0.5)
    layers[0]["gate"].e_score_correction_bias = bias  # as when memory is allocated after sharding
    for _ in range(2):
        found.begin_forward(make_packing(torch.tensor([[0, 1, 2, 3]]), Context(), "sdpa"))
        layers[0]["experts"](
            torch.zeros(4, 2), torch.tensor([[0, 1], [0, 1], [0, 2], [0, 2]]), torch.ones(4, 2)
        )
        found.take_metrics(0.25)
    assert bias.tolist() == [0.0, 0.5, 0.5, 1.0]
    found.take_metrics()
    assert bias.tolist() == [0.0, 0.5, 0.5, 1.0]
    with pytest.raises(
        ConfigError, match=r"trainer\.router_bias_rate changes the routers' e_score_correction_bias"
    ):
        Routing(nn.ModuleList([layers[1]])).attach(torch.device("cpu"), bias_rate=0.25)
