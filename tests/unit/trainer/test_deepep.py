"""The DeepEP dispatcher equals all-to-all: forward, backward, and on a rank that receives no token."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.trainer.parallel import deepep  # noqa: E402
from primerl_hpc.trainer.parallel.deepep import DeepEPDispatcher  # noqa: E402
from primerl_hpc.trainer.parallel.dispatch import ExpertDispatcher, TorchDispatcher  # noqa: E402
from tests.support import deep_ep_on_gloo  # noqa: E402
from tests.support.helpers import ROOT, captured  # noqa: E402
from tests.support.spawned_ranks import spawn_ranks  # noqa: E402

NUM_LOCAL = 4
NAMES = ["received", "experts", "weights", "output", "gradient of hidden", "gradient of weights"]


def pass_through(dispatcher: ExpertDispatcher, chosen: Tensor, seed: int) -> list[Tensor]:
    """Dispatch small integers, whose sums are exact in bfloat16. Each expert multiplies by its number."""
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
            # a row that belongs to no expert
            assert found[0].shape == (1, 16) and (found[1] == NUM_LOCAL).all()
        else:
            assert all(value.any() for value in expected)
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(differing))
    dist.barrier()
    dist.destroy_process_group()


def test_deepep_carries_what_all_to_all_carries_also_to_a_rank_that_gets_no_token(tmp_path):
    spawn_ranks(compare_dispatchers, 2, 2, str(tmp_path))
    for rank in range(2):
        assert json.loads((tmp_path / f"rank_{rank}.json").read_text()) == {"all ranks": [], "one rank": []}


# -- installation ----------------------------------------------------------------------------------

INSTALL = ROOT / "tools" / "install-deepep"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def check_of(
    tmp_path: Path, *, cuda: str = "13.0", toolkit: str = "13.0", nvshmem: str = ""
) -> tuple[int, str]:
    """Run the check with an interpreter whose torch is a build for ``cuda``, and a toolkit."""
    python = program(tmp_path / "python", f'case "$1" in -c) echo {cuda} ;; -) echo {nvshmem} ;; esac')
    if toolkit:
        program(tmp_path / "cuda/bin/nvcc", f"echo Cuda compilation tools, release {toolkit}, V1")
    env = {"PATH": os.environ["PATH"], "PYTHON": str(python), "CUDA_HOME": str(tmp_path / "cuda")}
    done = captured([INSTALL, "--check"], env=env)
    return done.returncode, done.stderr


def test_the_installer_names_what_is_missing(tmp_path: Path):
    assert check_of(tmp_path / "a", cuda="none")[0] == 1
    assert "is a CPU build" in check_of(tmp_path / "a", cuda="none")[1]
    assert "there is no nvcc" in check_of(tmp_path / "b", toolkit="")[1]
    assert "is of CUDA 12.8, and torch of CUDA 13.0" in check_of(tmp_path / "c", toolkit="12.8")[1]
    assert "pip install nvidia-nvshmem-cu13" in check_of(tmp_path / "d")[1]
    assert "has no include/nvshmem.h" in check_of(tmp_path / "e", nvshmem=str(tmp_path))[1]
    (tmp_path / "include").mkdir()
    (tmp_path / "include/nvshmem.h").touch()
    assert check_of(tmp_path / "f", nvshmem=str(tmp_path))[0] == 0


def test_a_package_of_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="is not installed") as caught:
        deepep.import_deep_ep()
    assert "tools/install-deepep" in caught.value.hint
    (tmp_path / "deep_ep.py").write_text("raise ImportError('libnvshmem_host.so.3: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be imported \(libnvshmem_host.so.3"):
        deepep.import_deep_ep()
    (tmp_path / "deep_ep.py").write_text("")
    importlib.invalidate_caches()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    monkeypatch.delitem(sys.modules, "deep_ep", raising=False)
    with pytest.raises(ConfigError, match="has no class Buffer"):
        deepep.import_deep_ep()
    monkeypatch.delitem(sys.modules, "deep_ep")


def test_a_number_of_ranks_without_settings_is_refused_when_the_model_is_built(
    one_rank: Any, monkeypatch: pytest.MonkeyPatch
):
    class Few(deep_ep_on_gloo.Buffer):
        @staticmethod
        def get_dispatch_config(num_ranks: int) -> deep_ep_on_gloo.Config:
            assert num_ranks in (2, 4), f"Unsupported number of EP ranks: {num_ranks}"
            return deep_ep_on_gloo.Config()

    class Module:
        Buffer = Few

    monkeypatch.setattr(deepep, "import_deep_ep", lambda: Module)
    with pytest.raises(ConfigError, match=r"over 1 ranks .Unsupported number of EP ranks: 1") as caught:
        deepep.DeepEPDispatcher(torch.distributed.group.WORLD, 8)
    assert "layout.trainer.expert_parallel" in caught.value.hint
