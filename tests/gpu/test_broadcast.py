"""Weights from one GPU to another by NCCL: what tests/unit/test_broadcast.py shows with gloo."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.transport import broadcast_group  # noqa: E402
from primerl_hpc.transport.broadcast_group import Group, connect_store, open_store  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
VERSIONS = 2


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: f"{value.dtype} {tuple(value.shape)} "
        + hashlib.sha1(value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }


def receive(port: int, answers: Any) -> None:
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    group = Group.join(connect_store("127.0.0.1", port), "x", rank=1, size=2, device=device)
    for _ in range(VERSIONS):
        answers.put(digest(dict(group.receive())))


def test_a_member_on_another_gpu_receives_every_tensor_bit_for_bit_version_after_version():
    store, device = open_store("127.0.0.1"), torch.device("cuda", 0)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    member = context.Process(target=receive, args=(store.port, answers), daemon=True)
    member.start()
    group = Group.join(store, "x", rank=0, size=2, device=device)
    for version in range(VERSIONS):
        torch.manual_seed(version)
        tensors = {
            "matrix": torch.randn(1024, 3000, device=device).bfloat16(),
            "vector": torch.randn(7, device=device),
            "count": torch.tensor(version, device=device),
        }
        group.send(tensors)
        group.send_end()
        assert answers.get(timeout=120) == digest(tensors)
    member.join(60)
    assert member.exitcode == 0


def receive_once(port: int, answers: Any) -> None:
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    group = Group.join(connect_store("127.0.0.1", port), "x", rank=1, size=2, device=device)
    answers.put(len(dict(group.receive())))
    time.sleep(600)


def test_a_sender_leaves_a_member_that_hangs_and_lives_on(monkeypatch):
    monkeypatch.setattr(broadcast_group, "SILENCE_S", 5.0)
    store, device = open_store("127.0.0.1"), torch.device("cuda", 0)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    member = context.Process(target=receive_once, args=(store.port, answers), daemon=True)
    member.start()
    try:
        group = Group.join(store, "x", rank=0, size=2, device=device)
        group.send({"a": torch.ones(7, device=device)})
        group.send_end()
        assert answers.get(timeout=120) == 1
        with pytest.raises(RuntimeError):
            group.send({"a": torch.ones(1 << 26, device=device)})  # more than NCCL's own buffers hold
        time.sleep(10)  # in which torch's watchdog, were there one, would end this process
        assert torch.ones(3, device=device).sum().item() == 3
    finally:
        member.kill()
