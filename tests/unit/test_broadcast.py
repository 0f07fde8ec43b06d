"""Weights sent to a group: what arrives, who is in it, and that nobody waits long for who is gone."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.files import read_json
from primerl_hpc.common.rundir import RunDir, publish_endpoint
from primerl_hpc.orchestrator.groups import Groups
from primerl_hpc.transport.weights import Announcement, Seats, from_body, to_body
from primerl_hpc.transport.weights_broadcast import (
    BroadcastWeightReader,
    announce,
    answer,
    read_announcement,
    read_answer,
)
from tests.unit.test_fleet import serving
from tests.unit.test_weights_delta import write_whole

torch = pytest.importorskip("torch")

from primerl_hpc.transport import broadcast_group  # noqa: E402
from primerl_hpc.transport.broadcast_group import Group, connect_store, open_store  # noqa: E402

CPU = torch.device("cpu")
ONE = Announcement(1, "127.0.0.1", 5, "a")


# -- the group: its members are threads here ---------------------------------------------------------------------------


def as_bytes(value: torch.Tensor) -> list[int]:
    return value.contiguous().reshape(-1).view(torch.uint8).tolist()


class Member:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self.thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self.result = work()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self.error = error

    def get(self) -> Any:
        self.thread.join(60)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


def join(port: int, name: str, rank: int, size: int) -> Group:
    return Group.join(connect_store("127.0.0.1", port), name, rank=rank, size=size, device=CPU)


def test_every_member_receives_every_tensor_bit_for_bit_version_after_version() -> None:
    generator = torch.Generator().manual_seed(0)
    store = open_store("127.0.0.1")

    def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        numbers = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=generator)
        return numbers.to(torch.uint8).view(dtype).view(shape)

    buckets = [
        {"a": tensor(torch.bfloat16, 3, 5), "b": tensor(torch.float32, 7), "c": tensor(torch.int64)},
        {"d": tensor(torch.uint8, 13), "e": tensor(torch.float16, 2, 1, 9), "f": tensor(torch.float32, 0, 4)},
        {"g": tensor(torch.float32, 6, 4).t()},
    ]
    expected = {name: value for bucket in buckets for name, value in bucket.items()}

    def receive_twice(rank: int) -> list[dict[str, torch.Tensor]]:
        group = join(store.port, "x", rank, 3)
        return [dict(group.receive()) for _ in range(2)]

    members = [Member(lambda rank=rank: receive_twice(rank)) for rank in (1, 2)]
    group = Group.join(store, "x", rank=0, size=3, device=CPU)
    for _ in range(2):
        for bucket in buckets:
            group.send(bucket)
        group.send_end()
    for member in members:
        for found in member.get():
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                assert found[name].dtype == value.dtype and found[name].shape == value.shape
                assert as_bytes(found[name]) == as_bytes(value)


def test_a_member_that_does_not_come_is_waited_for_no_longer_than_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast_group, "JOIN_S", 0.5)
    store = open_store("127.0.0.1")
    member = Member(lambda: join(store.port, "x", 1, 3))
    with pytest.raises(RoleError, match="group x did not come together"):
        Group.join(store, "x", rank=0, size=3, device=CPU)
    with pytest.raises(RoleError, match="group x did not come together"):
        member.get()


def test_a_trainer_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_group, "JOIN_S", 0.5)
    store = open_store("127.0.0.1")
    port = store.port
    del store
    with pytest.raises(RoleError, match=f"127.0.0.1:{port}"):
        connect_store("127.0.0.1", port)


def test_members_of_a_sender_that_falls_silent_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_group, "SILENCE_S", 1.0)
    store = open_store("127.0.0.1")
    member = Member(lambda: dict(join(store.port, "x", 1, 2).receive()))
    group = Group.join(store, "x", rank=0, size=2, device=CPU)
    group.send({"a": torch.ones(3)})
    with pytest.raises(RuntimeError):
        member.get()


def test_an_nccl_group_is_waited_for_on_the_host_without_torchs_watchdog(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wait without a limit only orders streams, and torch's watchdog ends the whole process instead of the group."""
    made: list[tuple[str | None, timedelta]] = []

    class NCCL:
        class Options:
            _timeout = timedelta(0)

        def __new__(cls, store, rank, size, options):
            made.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), options._timeout))
            return torch.distributed.ProcessGroupGloo(store, rank, size, options._timeout)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NCCL, raising=False)
    for before in (None, "0"):
        if before is not None:
            monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", before)
        Group.join(open_store("127.0.0.1"), "x", rank=0, size=1, device=torch.device("cuda"))
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert made == [("1", timedelta(seconds=broadcast_group.SILENCE_S))] * 2


def test_every_operation_is_waited_for_no_longer_than_said() -> None:
    waits: list[tuple] = []
    work = SimpleNamespace(wait=lambda *limit: waits.append(limit))
    group = Group("x", SimpleNamespace(broadcast=lambda value, root: work), CPU)  # type: ignore[arg-type]
    group.send({"a": torch.ones(3)})
    group.send_end()
    assert waits == [(timedelta(seconds=broadcast_group.SILENCE_S),)] * 4


# -- who is in it ------------------------------------------------------------------------------------------------------


def test_a_group_is_used_again_until_somebody_changes_or_something_breaks(tmp_path: Path) -> None:
    run, groups = RunDir(tmp_path), Groups(RunDir(tmp_path), workers_per_engine=2)
    names = []
    for engines, is_broken in (("ab", False), ("ab", False), ("a", False), ("a", True), ("a", False)):
        announce(run, ONE, is_open=True)
        seats = groups.seat(ONE, list(engines))
        assert seats is not None
        assert [seat.first_rank for seat in seats] == [1, 3][: len(engines)]
        assert {seat.size for seat in seats} == {1 + 2 * len(engines)}
        assert read_answer(run, ONE) == {
            "version": 1,
            "life": "a",
            "group": seats[0].group,
            "size": seats[0].size,
        }
        names.append(seats[0].group)
        if is_broken:
            groups.forget()
    assert names[0] == names[1] and names[2] == names[3] and len({*names}) == 3


def test_nobody_is_seated_for_what_is_sent_no_more(tmp_path: Path) -> None:
    run, groups = RunDir(tmp_path), Groups(RunDir(tmp_path), workers_per_engine=1)
    assert groups.seat(ONE, ["a"]) is None
    announce(run, ONE, is_open=False)
    assert groups.seat(ONE, ["a"]) is None
    announce(run, Announcement(1, "127.0.0.1", 6, "b"), is_open=True)
    assert groups.seat(ONE, ["a"]) is None
    assert read_answer(run, ONE) is None


def test_a_trainer_hears_that_no_engine_is_there(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    announce(run, ONE, is_open=True)
    assert Groups(run, workers_per_engine=2).seat(ONE, []) == []
    answered = read_answer(run, ONE)
    assert answered is not None and answered["size"] == 1


def test_an_answer_to_another_announcement_is_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    answer(run, ONE, "g", 2)
    assert read_answer(run, ONE) is not None
    assert read_answer(run, Announcement(2, "127.0.0.1", 5, "a")) is None
    assert read_answer(run, Announcement(1, "127.0.0.1", 5, "b")) is None


def test_a_folder_goes_before_an_announcement_of_the_same_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reader = BroadcastWeightReader(run)
    assert reader.newest() is None and read_announcement(run) is None
    write_whole(run, 1)
    two = Announcement(2, "127.0.0.1", 5, "a")
    announce(run, two, is_open=True)
    assert reader.newest() == 2 and reader.has(2) and reader.open(2, "me") == two
    assert from_body(to_body(Seats("h", 5, "g", 1, 2), 2)) == (Seats("h", 5, "g", 1, 2), 2)
    reader.give_up(2, two)
    assert reader.newest() == 1 and not reader.has(2)
    announce(run, two, is_open=False)
    write_whole(run, 2)
    assert reader.newest() == 2 and reader.open(2, "me") == run.weights_step(2)


def test_engines_that_can_be_paused_receive_together_and_one_that_cannot_is_restarted(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1") as (run, fleet, engines):
            publish_endpoint(run, "inference-2", "http://127.0.0.1:1")
            announce(run, ONE, is_open=True)
            report = await fleet.update(ONE, 1)
            assert report.updated == ("inference-0", "inference-1") and set(report.failed) == {"inference-2"}
            assert run.restart_request("inference-2").exists()
            assert read_json(run.broadcast_group)["size"] == 3
            for engine in engines:
                assert [call[0] for call in engine.engine.calls] == [
                    "pause",
                    "primerl_update_weights",
                    "resume",
                ]
            run.endpoint("inference-2").unlink()
            announce(run, ONE, is_open=False)
            report = await fleet.update(ONE, 1)
            assert report.is_refused and not report.updated
            assert not any(engine.state.paused for engine in engines)
            engines[0].state.version = 0
            report = await fleet.reconcile(ONE, 1)
            assert report.is_refused and report.updated == ("inference-1",) and not report.failed

    asyncio.run(check())
