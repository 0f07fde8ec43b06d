"""The verdict on hang reports, and two real ranks of which one does not enter a collective."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.watchdog import (  # noqa: E402
    Collective,
    HangReport,
    Watchdog,
    last_collectives,
    record_collectives,
    verdict,
)
from tests.support.spawned_ranks import spawn_ranks  # noqa: E402


def report(
    rank: int, *collectives: tuple[str, int, bool], location: str = "sft_data.py:7 (next)"
) -> HangReport:
    return HangReport(
        rank, "step 1", location, {str(index): Collective(*each) for index, each in enumerate(collectives)}
    )


@pytest.mark.parametrize(
    ("reports", "silent", "expected"),
    [
        (
            [report(0, ("all_reduce", 9, False)), report(1, ("all_reduce", 8, True))],
            [],
            "rank 0 waited in all_reduce (number 9), without rank 1 at sft_data.py:7 (next)",
        ),
        (
            [report(rank, ("all_gather", 4, False)) for rank in (0, 2)],
            [1],
            "ranks 0, 2 waited in all_gather (number 4), without rank 1, which did not respond",
        ),
        (
            [*(report(rank, ("broadcast", 4, False)) for rank in (0, 1)), report(2, ("barrier", 4, False))],
            [],
            "ranks 0, 1 waited in broadcast (number 4), without rank 2 in barrier (number 4)",
        ),
        (
            [report(rank, ("all_reduce", 4, False)) for rank in (0, 1)],
            [],
            "ranks 0, 1 waited in all_reduce (number 4), and no rank is missing",
        ),
        ([report(0, ("all_reduce", 3, True))], [1], "rank 0 at sft_data.py:7 (next); rank 1 did not respond"),
    ],
    ids=["absent", "silent", "other-collective", "all-inside", "none-inside"],
)
def test_verdict_names_ranks_and_collective(reports, silent, expected):
    assert verdict({each.rank: each for each in reports}, silent) == expected


def recorded(name: str, number: int, *, is_done: bool) -> dict:
    return {
        "profiling_name": f"nccl:{name}",
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "is_p2p": False,
        "retired": is_done,
        "state": "completed" if is_done else "scheduled",
    }


def test_of_collectives_entered_ahead_on_a_gpu_the_first_that_is_not_done_is_named(monkeypatch, tmp_path):
    """A CPU build of torch lacks NCCL's recorder: the test supplies its output in addition to gloo's."""
    entries = [
        recorded("all_reduce", 3, is_done=True),
        recorded("_all_gather_base", 4, is_done=False),
        recorded("_reduce_scatter_base", 5, is_done=False),
    ]

    def dump(includeCollectives: bool, onlyActive: bool) -> bytes:
        return json.dumps({"entries": entries}).encode()

    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", dump, raising=False)
    record_collectives()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.barrier()
        found = last_collectives()
    finally:
        dist.destroy_process_group()
    assert found["nccl 0"] == Collective("_all_gather_base", 4, is_done=False)
    assert found["gloo 0"].name == "barrier"


def run_rank(rank: int, folder: str) -> None:
    record_collectives()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    dist.barrier()
    over = threading.Event()

    def end(sentence: str) -> None:
        Path(folder, f"end_{rank}").write_text(sentence)
        over.set()
        threading.Event().wait()

    watchdog = Watchdog(RunDir(Path(folder)), "trainer-0", rank=rank, size=2, timeout_s=10, end=end)
    watchdog.heartbeat("step 7")
    if rank == 1:
        over.wait()
        dist.all_reduce(torch.ones(1))
    else:
        dist.all_reduce(torch.ones(1))
        over.wait()
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_agree_on_who_did_not_come(tmp_path):
    spawn_ranks(run_rank, 2, str(tmp_path))
    sentences = [(tmp_path / f"end_{rank}").read_text() for rank in (0, 1)]
    for sentence in sentences:
        assert "of step 7: rank 0 waited in all_reduce (number 2), without rank 1 at test_watchdog.py:" in (
            sentence.replace("threading.py", "test_watchdog.py")
        )
    stacks = (RunDir(tmp_path).hangs("trainer-0") / "rank_1.json").read_text()
    assert "over.wait()" in stacks
