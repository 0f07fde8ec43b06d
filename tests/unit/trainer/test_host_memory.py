"""Host memory of the trainer's state: tensors share slabs, so that rounding to powers of two costs little."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer import host_slabs as host_memory  # noqa: E402
from primerl_hpc.trainer.checkpoint.saver import Saver  # noqa: E402
from primerl_hpc.trainer.host_slabs import HostSlabs  # noqa: E402
from primerl_hpc.trainer.model.memory import HostTraffic  # noqa: E402
from primerl_hpc.trainer.optim.optimizers import Optimizers  # noqa: E402
from primerl_hpc.trainer.setup import use_deterministic_algorithms  # noqa: E402
from primerl_hpc.trainer.train_step import build_trainer  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from primerl_hpc.trainer.weights.filesystem import ArrivingTensors, HostCopies  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402


def test_tensors_of_odd_sizes_share_slabs_of_a_power_of_two_and_no_memory():
    slabs = HostSlabs(is_pinned=False)
    mebi = 1 << 20
    shapes = [(33, mebi // 4), (65, mebi // 4), (130, mebi // 4), (300, mebi // 4), (3,), (), (0, 7)]
    taken = [slabs.take(shape, torch.float32) for shape in shapes]
    assert [tuple(tensor.shape) for tensor in taken] == shapes
    needed = sum(tensor.nbytes for tensor in taken)
    assert all(len(slab.memory) & (len(slab.memory) - 1) == 0 for slab in slabs.slabs)
    one_by_one = sum(1 << (tensor.nbytes - 1).bit_length() for tensor in taken if tensor.nbytes)
    assert needed < slabs.num_bytes == (256 + 512) * mebi < one_by_one == (64 + 128 + 256 + 512) * mebi + 20
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in taken if len(tensor.shape)
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_released_slabs_are_used_again():
    slabs = HostSlabs(is_pinned=False)
    first = slabs.take((1000,), torch.bfloat16)
    slabs.release()
    assert slabs.take((500,), torch.float32).data_ptr() == first.data_ptr()
    assert slabs.num_bytes == host_memory.SLAB_BYTES


def test_every_save_and_every_offloaded_step_uses_the_memory_of_the_first(
    tmp_path: Path, one_rank: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_memory, "SLAB_BYTES", 1 << 16)
    model = make_family("qwen3", tmp_path / "model")
    watchdog = Watchdog(RunDir(tmp_path), "trainer-0", rank=0, size=1, timeout_s=600)
    trainer = build_trainer(small_sft(model), str(model), one_rank, watchdog)
    saver = Saver(RunDir(tmp_path), trainer, ("trainer",))
    tensors = dict(trainer.policy.tensors())
    first = saver._copy(tensors)
    addresses = {name: value.data_ptr() for name, value in first.items()}
    assert {name: value.data_ptr() for name, value in saver._copy(tensors).items()} == addresses
    assert all(torch.equal(first[name], value) for name, value in tensors.items())
    assert saver._slabs.num_bytes <= sum(value.nbytes for value in tensors.values()) + 2 * (1 << 16)
    watchdog.pause()
    gc.unfreeze()
    gc.enable()


def test_an_offloaded_optimizer_keeps_its_places_and_its_steps():
    def moments(*, on_host: bool) -> tuple[list[torch.Tensor], set[int]]:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = Optimizers(torch.optim.AdamW(layer.parameters(), lr=0.1), on_host=on_host)
        places = set()
        for _ in range(3):
            layer(torch.ones(2, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            places |= {optimizer.state[parameter]["exp_avg"].data_ptr() for parameter in layer.parameters()}
        return [*layer.parameters()], places

    plain, _ = moments(on_host=False)
    offloaded, places = moments(on_host=True)
    assert all(torch.equal(*pair) for pair in zip(plain, offloaded, strict=True))
    assert len(places) == 2  # weight and bias


def test_offloaded_inputs_of_a_micro_batch_replace_those_of_the_previous_one():
    traffic = HostTraffic({"use_reentrant": False})
    blocks = [nn.Linear(4, 4) for _ in range(3)]
    for _ in range(3):
        hidden = torch.ones(2, 4, requires_grad=True)
        for block in blocks:
            hidden = traffic.run(block, hidden, is_first=block is blocks[0])
        hidden.sum().backward()
    assert [slab.used for slab in traffic.slabs.slabs] == [3 * host_memory.ALIGNMENT]


def test_deterministic_training_does_not_fill_memory_that_is_written_anyway():
    before = torch.utils.deterministic.fill_uninitialized_memory
    try:
        use_deterministic_algorithms()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before


class RecordedEvent:
    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def synchronize(self) -> None:
        self.waited.append(self.number)


class RecordedStream:
    """A CUDA stream whose copies end when they are issued, which records the events for which the host waits."""

    def __init__(self, *_: Any) -> None:
        self.waited: list[int] = []
        self.num_events = 0

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self) -> RecordedEvent:
        self.num_events += 1
        return RecordedEvent(self.num_events, self.waited)


def test_gathering_continues_while_tensors_are_copied_to_the_host(monkeypatch: pytest.MonkeyPatch):
    """The host waits for a copy only when two later ones are on the way, and the thread that writes for the last."""
    plain = torch.empty

    def unpinned(*shape: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return plain(*shape, **more)

    monkeypatch.setattr(torch.cuda, "Stream", RecordedStream)
    monkeypatch.setattr(torch.cuda, "current_stream", RecordedStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch, "empty", unpinned)
    copies = HostCopies(torch.device("cuda"))
    gathered = ArrivingTensors()
    waited = []
    for number in range(5):
        gathered[str(number)] = copies.copy(torch.full((3,), float(number)))
        waited.append(list(copies.stream.waited))
    assert waited == [[], [], [1], [1, 2], [1, 2, 3]]
    gathered.copied = copies.last
    gathered.wait()
    assert copies.stream.waited[-1] == 5
    assert [value.tolist() for value in gathered.values()] == [[float(number)] * 3 for number in range(5)]
