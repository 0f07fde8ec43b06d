"""Weights sent to a group: received tensors, membership, and time limits when a member fails."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.files import read_json
from primerl_hpc.orchestrator.engines.broadcast_groups import BroadcastGroups
from primerl_hpc.run.access.keys import RunKeys, run_keys
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.broadcast import (
    BroadcastWeightReader,
    publish_group,
    publish_offer,
    read_group,
    read_offer,
)
from primerl_hpc.transport.weights.sources import BroadcastOffer, RankAssignment, from_body, to_body
from tests.support.helpers import PATIENCE_S
from tests.unit.orchestrator.test_fleet import serving
from tests.unit.transport.test_weights_delta import write_full

torch = pytest.importorskip("torch")

from primerl_hpc.transport.store import SecureStore, serve_store  # noqa: E402
from primerl_hpc.transport.weights import broadcast_group  # noqa: E402
from primerl_hpc.transport.weights.broadcast_group import BroadcastGroup, connect_store  # noqa: E402

CPU = torch.device("cpu")
ONE = BroadcastOffer(1, "127.0.0.1", 5, "a")


# -- the group: members are threads ----------------------------------------------------------------


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
        except Exception as error:  # noqa: BLE001 (the test reads it)
            self.error = error

    def get(self) -> Any:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        if self.error is not None:
            raise self.error
        return self.result


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return run_keys(RunDir(tmp_path))


def join(keys: RunKeys, store: SecureStore, name: str, rank: int, size: int) -> BroadcastGroup:
    member = connect_store(keys, store.host, store.port)
    return BroadcastGroup.join(member, name, rank=rank, size=size, device=CPU)


@pytest.mark.parametrize("bucket_bytes", [32, 96, 1 << 20])
def test_every_member_receives_every_tensor_bit_for_bit_version_after_version(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    """Also tensors larger than a bucket, which arrive in pieces."""
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", bucket_bytes)
    generator = torch.Generator().manual_seed(0)
    store = serve_store(keys, "weights", "127.0.0.1")

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
        group = join(keys, store, "x", rank, 3)
        return [dict(group.receive()) for _ in range(2)]

    members = [Member(lambda rank=rank: receive_twice(rank)) for rank in (1, 2)]
    group = BroadcastGroup.join(store, "x", rank=0, size=3, device=CPU)
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


@given(
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=12), bucket_bytes=st.sampled_from([16, 48, 160])
)
def test_no_bucket_is_larger_than_the_bound_and_no_byte_is_missing(
    sizes: list[int], bucket_bytes: int
) -> None:
    tensors = {str(number): torch.arange(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcast_group, "BUCKET_BYTES", bucket_bytes)
        buckets = list(broadcast_group.cut_into_buckets(tensors))
    for bucket in buckets:
        aligned = sum(-(-piece.num_bytes // 16) * 16 for piece in bucket)
        assert aligned <= bucket_bytes
    pieces = [piece for bucket in buckets for piece in bucket]
    for name, tensor in tensors.items():
        own = [piece for piece in pieces if piece.name == name]
        assert own and torch.equal(torch.cat([piece.data() for piece in own]), tensor)


def test_a_member_needs_memory_for_two_buckets_and_one_tensor(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer of 64 buckets: the bytes that are alive at once on the receiving side."""
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", 1 << 14)
    store = serve_store(keys, "weights", "127.0.0.1")
    tensors = {str(number): torch.full((3 << 12,), number, dtype=torch.uint8) for number in range(85)}
    alive: list[weakref.ref] = []
    peak = 0

    def receive() -> int:
        nonlocal peak
        group = join(keys, store, "x", 1, 2)
        start = group._start_receiving
        group._start_receiving = lambda *sizes: noted(start(*sizes))  # type: ignore[method-assign]
        total = 0
        for _, value in group.receive():
            total += int(value[0])
            del value  # it is a view of its bucket
        return total

    def noted(started: tuple) -> tuple:
        nonlocal peak
        alive.append(weakref.ref(started[0]))
        peak = max(peak, sum(message() is not None for message in alive))
        return started

    member = Member(receive)
    group = BroadcastGroup.join(store, "x", rank=0, size=2, device=CPU)
    group.send(tensors)
    group.send_end()
    assert member.get() == sum(range(85))
    assert len(alive) == 64 and peak <= 3  # gloo itself keeps the last finished operation for a while


def test_a_missing_member_is_awaited_no_longer_than_the_time_limit(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast_group, "JOIN_S", 5.0)
    store = serve_store(keys, "weights", "127.0.0.1")
    member = Member(lambda: join(keys, store, "x", 1, 3))
    with pytest.raises(RoleError, match="not all members joined group x"):
        BroadcastGroup.join(store, "x", rank=0, size=3, device=CPU)
    with pytest.raises(RoleError, match="not all members joined group x"):
        member.get()


def test_a_trainer_that_does_not_respond_is_named(keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_group, "JOIN_S", 5.0)
    store = serve_store(keys, "weights", "127.0.0.1")
    assert store.server is not None
    store.server.close()
    with pytest.raises(RoleError, match=f"127.0.0.1:{store.port}"):
        connect_store(keys, "127.0.0.1", store.port)


def test_members_of_a_silent_sender_stop_waiting(keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcast_group, "SILENCE_S", 5.0)
    store = serve_store(keys, "weights", "127.0.0.1")
    member = Member(lambda: dict(join(keys, store, "x", 1, 2).receive()))
    group = BroadcastGroup.join(store, "x", rank=0, size=2, device=CPU)
    group.send({"a": torch.ones(3)})
    with pytest.raises(RuntimeError):
        member.get()


def test_a_sender_stops_when_a_member_fails_between_buckets(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast_group, "SILENCE_S", 5.0)
    monkeypatch.setattr(broadcast_group, "BUCKET_BYTES", 1 << 12)
    store = serve_store(keys, "weights", "127.0.0.1")
    received: list[str] = []

    def receive_one() -> None:
        for name, _ in join(keys, store, "x", 1, 2).receive():
            received.append(name)
            raise ValueError("a tensor that does not fit")

    member = Member(receive_one)
    group = BroadcastGroup.join(store, "x", rank=0, size=2, device=CPU)
    with pytest.raises(RuntimeError):
        group.send({str(number): torch.ones(1 << 10) for number in range(64)})
    with pytest.raises(ValueError, match="does not fit"):
        member.get()
    assert received == ["0"]


def test_an_nccl_group_waits_on_the_host_without_torchs_watchdog(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait without a limit only orders streams, and torch's watchdog ends the process instead of the group."""
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
        BroadcastGroup.join(
            serve_store(keys, "weights", "127.0.0.1"), "x", rank=0, size=1, device=torch.device("cuda")
        )
        assert os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == before
    assert made == [("1", timedelta(seconds=broadcast_group.SILENCE_S))] * 2


def test_every_operation_has_the_time_limit() -> None:
    waits: list[tuple] = []
    work = SimpleNamespace(wait=lambda *limit: waits.append(limit))
    group = BroadcastGroup("x", SimpleNamespace(broadcast=lambda value, root: work), CPU)  # type: ignore[arg-type]
    group.send({"a": torch.ones(3)})
    group.send_end()
    assert waits == [(timedelta(seconds=broadcast_group.SILENCE_S),)] * 3  # sizes, bucket, end


# -- membership ------------------------------------------------------------------------------------


def test_a_group_is_used_again_until_a_member_changes_or_an_operation_fails(tmp_path: Path) -> None:
    run, groups = RunDir(tmp_path), BroadcastGroups(RunDir(tmp_path), workers_per_engine=2)
    names = []
    for engines, is_broken in (("ab", False), ("ab", False), ("a", False), ("a", True), ("a", False)):
        publish_offer(run, ONE, is_open=True)
        seats = groups.assign_ranks(ONE, list(engines))
        assert seats is not None
        assert [seat.first_rank for seat in seats] == [1, 3][: len(engines)]
        assert {seat.size for seat in seats} == {1 + 2 * len(engines)}
        assert read_group(run, ONE) == {
            "version": 1,
            "store_id": "a",
            "group": seats[0].group,
            "size": seats[0].size,
        }
        names.append(seats[0].group)
        if is_broken:
            groups.discard()
    assert names[0] == names[1] and names[2] == names[3] and len({*names}) == 3


def test_no_group_is_formed_for_an_offer_that_is_closed(tmp_path: Path) -> None:
    run, groups = RunDir(tmp_path), BroadcastGroups(RunDir(tmp_path), workers_per_engine=1)
    assert groups.assign_ranks(ONE, ["a"]) is None
    publish_offer(run, ONE, is_open=False)
    assert groups.assign_ranks(ONE, ["a"]) is None
    publish_offer(run, BroadcastOffer(1, "127.0.0.1", 6, "b"), is_open=True)
    assert groups.assign_ranks(ONE, ["a"]) is None
    assert read_group(run, ONE) is None


def test_an_empty_group_is_published_to_the_trainer(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish_offer(run, ONE, is_open=True)
    assert BroadcastGroups(run, workers_per_engine=2).assign_ranks(ONE, []) == []
    answered = read_group(run, ONE)
    assert answered is not None and answered["size"] == 1


def test_a_group_for_another_offer_is_ignored(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    publish_group(run, ONE, "g", 2)
    assert read_group(run, ONE) is not None
    assert read_group(run, BroadcastOffer(2, "127.0.0.1", 5, "a")) is None
    assert read_group(run, BroadcastOffer(1, "127.0.0.1", 5, "b")) is None


def test_a_folder_takes_precedence_over_an_offer_of_the_same_version(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    reader = BroadcastWeightReader(run)
    assert reader.newest() is None and read_offer(run) is None
    write_full(run, 1)
    two = BroadcastOffer(2, "127.0.0.1", 5, "a")
    publish_offer(run, two, is_open=True)
    assert reader.newest() == 2 and reader.has(2) and reader.open(2, "me") == two
    assert from_body(to_body(RankAssignment("h", 5, "g", 1, 2), 2)) == (RankAssignment("h", 5, "g", 1, 2), 2)
    reader.give_up(2, two)
    assert reader.newest() == 1 and not reader.has(2)
    publish_offer(run, two, is_open=False)
    write_full(run, 2)
    assert reader.newest() == 2 and reader.open(2, "me") == run.weights_step(2)


def test_engines_that_can_be_paused_receive_together_and_one_that_cannot_is_restarted(tmp_path: Path) -> None:
    async def check() -> None:
        async with serving(tmp_path, "inference-0", "inference-1") as (run, fleet, engines):
            publish_endpoint(run, "inference-2", "http://127.0.0.1:1")
            publish_offer(run, ONE, is_open=True)
            report = await fleet.update(ONE, 1)
            assert report.updated == ("inference-0", "inference-1") and set(report.failed) == {"inference-2"}
            assert run.restart_request("inference-2").exists()
            assert read_json(run.broadcast_group)["size"] == 3
            for engine in engines:
                assert [call[0] for call in engine.engine.calls] == [
                    "pause",
                    "primerl_prepare_update",
                    "primerl_update_weights",
                    "resume",
                ]
            run.endpoint("inference-2").unlink()
            publish_offer(run, ONE, is_open=False)
            report = await fleet.update(ONE, 1)
            assert report.is_refused and not report.updated
            assert not any(engine.state.paused for engine in engines)
            report = await fleet.reconcile(ONE, 1)
            assert not report.is_refused and report.updated == ("inference-0", "inference-1")
            engines[0].state.version = 0
            report = await fleet.reconcile(ONE, 1)
            assert report.is_refused and report.updated == ("inference-1",) and not report.failed

    asyncio.run(check())
