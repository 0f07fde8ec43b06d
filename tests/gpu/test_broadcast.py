"""Weight broadcast from one GPU to another by NCCL; tests/unit/transport/test_broadcast.py tests it with gloo."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.run.access.keys import RunKeys, run_keys  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.transport.store import serve_store  # noqa: E402
from primerl_hpc.transport.weights import broadcast_group  # noqa: E402
from primerl_hpc.transport.weights.broadcast_group import BroadcastGroup, connect_store  # noqa: E402
from tests.support.helpers import PATIENCE_S, wait_for  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
VERSIONS = 2
WATCHDOG = "pt_nccl_watchdg"
"""Name of the thread that ends the process when an operation takes longer than its time limit."""


def digest(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: f"{value.dtype} {tuple(value.shape)} "
        + hashlib.sha1(value.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }


def receive(keys: RunKeys, port: int, answers: Any) -> None:
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    group = BroadcastGroup.join(connect_store(keys, "127.0.0.1", port), "x", rank=1, size=2, device=device)
    for _ in range(VERSIONS):
        answers.put(digest(dict(group.receive())))


def test_a_member_on_another_gpu_receives_every_tensor_bit_for_bit_version_after_version(tmp_path: Path):
    keys = run_keys(RunDir(tmp_path))
    store, device = serve_store(keys, "weights", "127.0.0.1"), torch.device("cuda", 0)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    member = context.Process(target=receive, args=(keys, store.port, answers), daemon=True)
    member.start()
    group = BroadcastGroup.join(store, "x", rank=0, size=2, device=device)
    for version in range(VERSIONS):
        torch.manual_seed(version)
        tensors = {
            "matrix": torch.randn(1024, 3000, device=device).bfloat16(),
            "vector": torch.randn(7, device=device),
            "count": torch.tensor(version, device=device),
        }
        group.send(tensors)
        group.send_end()
        assert answers.get(timeout=PATIENCE_S) == digest(tensors)
    member.join(PATIENCE_S)
    assert member.exitcode == 0


def thread_names() -> set[str]:
    """Return the names of all threads of this process, also of those that C++ code started."""
    return {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}


def test_the_watchdog_of_a_process_group_that_does_not_wait_on_the_host_is_found_by_its_name():
    """Without this, a new name of the thread would hide a watchdog from the test below."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    group = torch.distributed.ProcessGroupNCCL(store, 0, 1, torch.distributed.ProcessGroupNCCL.Options())
    try:
        wait_for(lambda: WATCHDOG in thread_names(), "torch's watchdog")
    finally:
        group.shutdown()
    wait_for(lambda: WATCHDOG not in thread_names(), "the watchdog to end")


def receive_once(keys: RunKeys, port: int, answers: Any) -> None:
    device = torch.device("cuda", 1)
    torch.cuda.set_device(device)
    group = BroadcastGroup.join(connect_store(keys, "127.0.0.1", port), "x", rank=1, size=2, device=device)
    answers.put(len(dict(group.receive())))
    time.sleep(600)


def test_a_sender_leaves_a_hanging_member_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast_group, "SILENCE_S", 5.0)
    keys = run_keys(RunDir(tmp_path))
    store, device = serve_store(keys, "weights", "127.0.0.1"), torch.device("cuda", 0)
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    member = context.Process(target=receive_once, args=(keys, store.port, answers), daemon=True)
    member.start()
    try:
        group = BroadcastGroup.join(store, "x", rank=0, size=2, device=device)
        group.send({"a": torch.ones(7, device=device)})
        group.send_end()
        assert answers.get(timeout=PATIENCE_S) == 1
        with pytest.raises(RuntimeError):
            group.send({"a": torch.ones(1 << 26, device=device)})  # more than NCCL's own buffers hold
        assert WATCHDOG not in thread_names()  # it would end this process
        assert torch.ones(3, device=device).sum().item() == 3
    finally:
        member.kill()
