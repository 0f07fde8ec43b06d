"""The trainer on one GPU compared with itself, in float32 with tiny models; tests/e2e tests the same on CPUs.

`DEVICE` is the CPU where there is no GPU: without the marks every test here runs there too.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.helpers import PATIENCE_S

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.checkpoint.checkpoint import SIDE, checkpoint_tensors  # noqa: E402
from primerl_hpc.trainer.checkpoint.saver import Saver  # noqa: E402
from primerl_hpc.trainer.optim import optimizers as optim  # noqa: E402
from primerl_hpc.trainer.perf import memory_snapshots  # noqa: E402
from primerl_hpc.trainer.train_step import Trainer  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from tests.e2e.test_parallel import Results, assert_close  # noqa: E402
from tests.support.parallel_ranks import OFFLOAD_BYTES, Case, batch, build_case, run_case, whole  # noqa: E402
from tests.support.tiny_models import FAMILIES, make_family  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"),
]
CPU = torch.device("cpu")
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else CPU

SHARE = 1e-4  # of its norm may a tensor differ: other kernels sum in another order
ADAMW = {"type": "adamw", "lr": 0.01}
OFFLOADS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer_offload": True},
    "weights": {"cpu_offload": True},
    "activations": {"activation_checkpointing": "full", "activation_offload": True},
    "all": {"activation_checkpointing": "full", "activation_offload": True, "cpu_offload": True},
}


class GpuTrainer:
    """One rank in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, Results(folder)
        self.watchdog = Watchdog(RunDir(folder / "watched"), "trainer-0", rank=0, size=1, timeout_s=600)

    def case(self, name: str, **options: Any) -> Case:
        model = self.folder / options["model"]
        if not model.is_dir():
            make_family(options["model"], model)
        return Case(**{"name": name, "ranks": 1, **options, "model": str(model)})

    def train(self, name: str, device: torch.device = DEVICE, **options: Any) -> None:
        """Train three steps; their outcome is in ``results``."""
        run_case(self.case(name, **options), 1, self.folder, self.watchdog, device)

    def build(self, case: Case) -> Trainer:
        return build_case(case, 1, self.watchdog, DEVICE)

    def assert_same(self, name: str, expected: str, share: float = SHARE) -> None:
        """Compare loss, gradient norm, first gradients and last weights, which may differ by ``share``."""
        steps = self.results.report(name)["steps"]
        for found, each in zip(steps, self.results.report(expected)["steps"], strict=True):
            for key in ("loss/mean", "optim/grad_norm") if "loss/mean" in each else each:
                assert found[key] == pytest.approx(each[key], rel=share, abs=1e-5), key
        assert_close(self.results.tensors(name), self.results.tensors(expected), share)


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuTrainer]:
    torch.set_float32_matmul_precision("highest")  # no TF32, whatever the environment sets
    monkeypatch.setattr(optim, "OFFLOAD_BYTES", OFFLOAD_BYTES)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    backend = "cpu:gloo,cuda:nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    gpu = GpuTrainer(tmp_path)
    yield gpu
    gpu.watchdog.pause()
    dist.destroy_process_group()
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("is_supervised", [True, False], ids=["sft", "rl"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_on_the_gpu_as_on_the_cpu(gpu: GpuTrainer, family: str, is_supervised: bool):
    for name, device in (("gpu", DEVICE), ("cpu", CPU)):
        gpu.train(name, device, model=family, is_supervised=is_supervised)
    gpu.assert_same("gpu", "cpu")


@pytest.mark.parametrize("place", OFFLOADS)
def test_what_lies_on_the_host_changes_neither_a_step_nor_a_resume(gpu: GpuTrainer, place: str):
    case = {"model": "qwen3_moe", "optimizer": ADAMW}
    gpu.train("device", **case)
    case["trainer"] = OFFLOADS[place]
    gpu.train("host", **case, save_to="saved")
    gpu.assert_same("host", "device")
    gpu.train("resumed", **case, resume_from="saved")  # step 3
    resumed, straight = (
        {key: value for key, value in gpu.results.tensors(name).items() if key.startswith("weight.")}
        for name in ("resumed", "host")
    )
    assert_close(resumed, straight, SHARE)


@pytest.mark.parametrize(
    ("family", "recomputed"), [("qwen3", "none"), ("qwen3", "full"), ("qwen3_moe", "none")]
)
def test_compiled_blocks_compute_what_plain_ones_do(gpu: GpuTrainer, family: str, recomputed: str):
    torch.compiler.reset()
    counters.clear()
    options: dict[str, Any] = {"activation_checkpointing": recomputed}
    share = SHARE
    if family == "qwen3_moe":  # in other types, transformers' grouped products have no gradient inside graphs
        options["param_dtype"], share = "bfloat16", 0.05
    gpu.train("plain", model=family, trainer={**options, "compile": False})
    with memory_snapshots(
        gpu.folder / "snapshot", 1000
    ):  # as every trainer on a GPU; see pytorch/pytorch#179536
        gpu.train("compiled", model=family, trainer={**options, "compile": True})
    assert counters["stats"]["unique_graphs"] > 0
    gpu.assert_same("compiled", "plain", share)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_adapters_on_experts_train_in_bfloat16(gpu: GpuTrainer, family: str):
    case = gpu.case(
        "lora", model=family, is_supervised=True, lora={"rank": 8}, optimizer=ADAMW,
        trainer={"param_dtype": "bfloat16"},
    )  # fmt: skip
    trainer, rows = gpu.build(case), batch(1, case)
    losses = [trainer.train_step(step, rows, []).metrics["loss/mean"] for step in range(1, 21)]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.9 * losses[0]
    trained = [whole(value) for name, value in trainer.policy.adapters() if ".experts." in name]
    assert trained and all(each.any() for each in trained)  # B began at zero


@pytest.mark.parametrize("place", ["device", *OFFLOADS])
def test_a_checkpoint_holds_the_bits_of_its_step_while_training_continues(gpu: GpuTrainer, place: str):
    case = gpu.case("saved", model="qwen3_moe", optimizer=ADAMW, trainer=OFFLOADS.get(place, {}))
    trainer, run = gpu.build(case), RunDir(gpu.folder / "run")
    for step in (1, 2):
        trainer.train_step(step, batch(step, case), [])
    expected = snapshot(trainer)
    saver = HeldSaver(run, trainer, ("trainer",))
    saver.save(2)
    trainer.train_step(3, batch(3, case), [])
    saver.release()
    saver.finish()
    saved: dict[str, torch.Tensor] = {}
    for path in run.checkpoint_side(2, SIDE).glob("*.safetensors"):
        saved |= load_file(path)
    assert set(saved) == set(expected)
    now = snapshot(trainer)
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name
    assert not all(torch.equal(now[name], value) for name, value in expected.items())


def snapshot(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {
        name: whole(value).cpu() for name, value in checkpoint_tensors(trainer, weights_only=False).items()
    }


class HeldSaver(Saver):
    """Writes nothing before it is released, so that training is ahead of every write."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._may_write = threading.Event()
        self.release: Callable[[], None] = self._may_write.set

    def _write(self, *arguments: Any) -> None:
        assert self._may_write.wait(PATIENCE_S)
        super()._write(*arguments)
