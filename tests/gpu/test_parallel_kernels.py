"""GPU-only parts of the trainer's parallelism: flash kernels in the attention function, DeepEP in the dispatcher."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from primerl_hpc.trainer.parallel import flash  # noqa: E402
from primerl_hpc.trainer.parallel.attention import full_rows  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing  # noqa: E402
from primerl_hpc.trainer.parallel.deepep import DeepEPDispatcher  # noqa: E402
from primerl_hpc.trainer.parallel.dispatch import TorchDispatcher  # noqa: E402
from primerl_hpc.trainer.parallel.flash import FLASH_PACKAGES, States  # noqa: E402
from primerl_hpc.trainer.parallel.ring import MatrixBlocks  # noqa: E402
from primerl_hpc.trainer.parallel.ring_flash import FlashBlocks  # noqa: E402
from tests.support.spawned_ranks import spawn_ranks  # noqa: E402
from tests.unit.trainer.test_flash import results_of_ring  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def is_installed(module: str) -> bool:
    """True if the module itself can be found: flash-attn-4 fills the folder flash_attn too."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture(params=["FlashAttention-2", "FlashAttention-4"])
def kernels(request, monkeypatch):
    """Kernels of `varlen` attention."""
    monkeypatch.setattr(flash, "KERNELS", flash.Kernels())
    if request.param == "FlashAttention-2":
        return
    if not flash.choose_kernels(torch.device("cuda"), 8, 2, 64).startswith(request.param):
        pytest.skip("needs flash-attn-4 and a Hopper or Blackwell GPU")


@pytest.mark.parametrize("inner", ["sdpa", "eager", "varlen", "flash_attention_2"])
@pytest.mark.parametrize("window", [None, 7])
def test_every_kernel_keeps_samples_of_a_row_apart(inner, window):
    """Two packed rows in bfloat16 against plain matrices in float32."""
    if inner.startswith("flash") and not is_installed(FLASH_PACKAGES[inner]):
        pytest.skip("needs flash-attn")
    torch.manual_seed(0)
    lengths = [[100, 28], [1, 60, 67]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]).cuda()
    shapes = [(2, heads, 128, 64) for heads in (8, 2, 2)]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], device="cuda")

    def run(kind: str, dtype: torch.dtype) -> list[torch.Tensor]:
        packing = Packing(Context(), positions, kind)
        out = full_rows(States(*(each.to(dtype) for each in inputs)), packing, 0.125, 0.0, window, None)
        return [out, *torch.autograd.grad((out.float() * weights).sum(), inputs)]

    for found, expected in zip(run(inner, torch.bfloat16), run("eager", torch.float32), strict=True):
        # rounding to bfloat16 (2⁻⁸ of a term) is relative to the terms of a sum, not to their sum
        assert (found.float() - expected).norm() < 2**-7 * expected.norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_flash_attention_computes_sinks_and_their_gradient(window, has_sinks):
    torch.manual_seed(0)
    positions = torch.cat([torch.arange(100), torch.arange(28)])[None].cuda()
    shapes = [(1, 8, 128, 64), (1, 2, 128, 64), (1, 2, 128, 48), (8,)][: 4 if has_sinks else 3]
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    results = []
    for kind, dtype in (("varlen", torch.bfloat16), ("eager", torch.float32)):
        query, key, value, *sinks = (each.to(dtype) for each in inputs)
        states, packing = States(query, key, value), Packing(Context(), positions, kind)
        out = full_rows(states, packing, 0.125, 0.0, window, sinks[0] if has_sinks else None)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    for found, expected in zip(*results, strict=True):
        assert (found.float() - expected.float()).norm() < 0.02 * expected.float().norm()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("window", [None, 5, 40])
def test_flash_blocks_of_a_ring_compute_what_plain_matrices_compute(window):
    """Three ranks, one after the other. Samples start just before the ends of pieces, where windows are cut."""
    torch.manual_seed(0)
    lengths = [47, 60, 2, 83]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in (lengths, lengths[::-1])])
    positions = positions.cuda()
    shapes = [(2, heads, 192, 64) for heads in (8, 2, 2)]
    states = States(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes))
    grad_out = torch.randn(shapes[0], device="cuda", dtype=torch.bfloat16)
    is_read = torch.ones_like(positions, dtype=torch.bool)
    for rank in range(3):
        packing = Packing(Context("ring", rank, 3), positions)
        found, expected = (
            results_of_ring(kind(packing, 0.125, window), states, grad_out, is_read)
            for kind in (FlashBlocks, MatrixBlocks)
        )
        for one, other in zip(found, expected, strict=True):
            assert (one - other).norm() <= 0.02 * other.norm()


@pytest.mark.skipif(find_spec("deep_ep") is None, reason="needs DeepEP")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_deepep_carries_what_all_to_all_carries(tmp_path):
    spawn_ranks(compare_dispatchers, 2, str(tmp_path / "store"))


def compare_dispatchers(rank: int, store: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", store=dist.FileStore(str(Path(store)), 2), rank=rank, world_size=2)
    torch.manual_seed(rank)
    hidden = torch.randn(50, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    index = torch.stack([torch.randperm(8, device="cuda")[:2] for _ in range(50)])
    weights = torch.rand(50, 2, device="cuda", requires_grad=True)
    results = []
    for kind in (TorchDispatcher, DeepEPDispatcher):
        dispatcher = kind(dist.group.WORLD, 4)
        received = dispatcher.dispatch(hidden, index, weights)
        scale = (received.weights * (received.index + 1)).sum(1, keepdim=True)
        out = dispatcher.combine((received.hidden * scale).to(hidden.dtype), received)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (hidden, weights))])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found.float(), expected.float(), rtol=5e-2, atol=5e-2)
    dist.destroy_process_group()
