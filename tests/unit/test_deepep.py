"""The dispatcher on DeepEP carries what all-to-all carries: forward, backward, and where nobody sends a rank a token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from primerl_hpc.trainer.parallel import deepep  # noqa: E402
from primerl_hpc.trainer.parallel.deepep import DeepEPDispatcher  # noqa: E402
from primerl_hpc.trainer.parallel.dispatch import Dispatcher, TorchDispatcher  # noqa: E402
from tests import deep_ep_on_gloo  # noqa: E402

NUM_LOCAL = 4
NAMES = ["received", "experts", "weights", "output", "gradient of hidden", "gradient of weights"]


def pass_through(dispatcher: Dispatcher, chosen: Tensor, seed: int) -> list[Tensor]:
    """Small whole numbers all the way, of which sums are exact in bfloat16. Each expert multiplies by its number."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(-2, 3, shape, generator=generator).to(dtype)

    hidden = draw(len(chosen), 16, dtype=torch.bfloat16).requires_grad_()
    weights = draw(*chosen.shape, dtype=torch.float32).requires_grad_()
    received = dispatcher.dispatch(hidden, chosen, weights)
    scale = (received.weights * (received.index + 1)).sum(1, keepdim=True)
    output = dispatcher.combine((received.hidden * scale).to(hidden.dtype), received)
    loss = (output * draw(*output.shape, dtype=torch.bfloat16)).sum()
    gradients = torch.autograd.grad(loss, (hidden, weights))
    assert received.num_pairs == (received.index < NUM_LOCAL).sum()
    return [received.hidden, received.index, received.weights, output, *gradients]


def compare_dispatchers(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    deepep.import_deep_ep = lambda: deep_ep_on_gloo  # this process is the test's own
    generator = torch.Generator().manual_seed(rank)
    differing = {}
    for case, num_experts in (("all ranks", NUM_LOCAL * size), ("one rank", NUM_LOCAL)):
        chosen = torch.rand(20 + rank, num_experts, generator=generator).argsort(1)[:, :3]
        found, expected = (
            pass_through(kind(dist.group.WORLD, NUM_LOCAL), chosen.contiguous(), rank)
            for kind in (DeepEPDispatcher, TorchDispatcher)
        )
        pairs = zip(NAMES, found, expected, strict=True)
        differing[case] = [name for name, one, other in pairs if not torch.equal(one, other)]
        differing[case] += [name for name, value in zip(NAMES, expected, strict=True) if not len(value)]
        if case == "one rank" and rank:
            assert found[0].shape == (1, 16) and (found[1] == NUM_LOCAL).all()  # a row for nobody
        else:
            assert all(value.any() for value in expected)
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(differing))
    dist.barrier()
    dist.destroy_process_group()


def test_deepep_carries_what_all_to_all_carries_also_to_a_rank_that_gets_no_token(tmp_path):
    torch.multiprocessing.spawn(compare_dispatchers, (2, str(tmp_path)), nprocs=2)
    for rank in range(2):
        assert json.loads((tmp_path / f"rank_{rank}.json").read_text()) == {"all ranks": [], "one rank": []}
