"""Watchers of control files: what they report, and how many operations they cause on a shared filesystem."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.roles.router import POLL_S
from primerl_hpc.run import endpoints
from primerl_hpc.run.endpoints import (
    CALM_S,
    VERIFY_S,
    ControlWatch,
    EndpointWatch,
    PublishedEngines,
    forget_endpoints,
    publish_endpoint,
    request_restart,
)
from primerl_hpc.run.rundir import RunDir


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(endpoints, "time", clock)
    return clock


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Operations of the watchers. A listing is an open, an fstat and two reads of entries; a read is two."""
    counted: Counter[str] = Counter()

    def count(name: str, call: Callable[..., Any], cost: int) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            counted[name] += cost
            return call(*arguments, **options)

        return counting

    monkeypatch.setattr(endpoints.os, "scandir", count("listings", os.scandir, 4))
    monkeypatch.setattr(endpoints.os, "stat", count("stats", os.stat, 1))
    monkeypatch.setattr(endpoints, "read_json_or_none", count("reads", endpoints.read_json_or_none, 2))
    return counted


def publish(run: RunDir, count: int) -> None:
    for index in range(count):
        publish_endpoint(run, f"inference-{index}", f"https://h:{index}")


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the filesystem one without hard links."""

    def link(*paths: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links")

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("count", [2, 64])
@pytest.mark.parametrize("has_links", [True, False])
def test_an_idle_router_causes_at_most_two_operations_a_second_for_any_number_of_engines(
    tmp_path: Path,
    clock: Clock,
    operations: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    has_links: bool,
) -> None:
    run = RunDir(tmp_path)
    if not has_links:
        refuse_links(monkeypatch)
    publish(run, count)
    engines = PublishedEngines(run, "inference")

    def look_for(seconds: float) -> None:
        for _ in range(round(seconds / POLL_S)):
            clock.now += POLL_S
            assert len(engines.urls()) == count

    look_for(CALM_S + VERIFY_S)
    reads = 0 if has_links else 2 * 2 * count
    assert operations["reads"] == reads, "without links each file is read once, and once more to verify it"
    operations.clear()
    look_for(60.0)
    assert 0 < operations.total() <= 2 * 60.0 and not operations["reads"], operations


def test_looks_become_rarer_with_the_time_without_a_change(
    tmp_path: Path, clock: Clock, operations: Counter[str]
) -> None:
    run = RunDir(tmp_path)
    publish(run, 1)
    watch = EndpointWatch(run, calm_s=2.5, idle_s=10.0)
    watch.all()
    listings = []
    for _ in range(20):
        operations.clear()
        for _ in range(100):
            clock.now += 1.0
            watch.all()
        listings.append(operations["listings"] // 4)
    assert listings[0] >= 40 and listings[-1] == 10 and listings == sorted(listings, reverse=True), listings
    publish(run, 2)
    watch.hurry()
    assert len(watch.all()) == 2


@pytest.mark.parametrize("has_links", [True, False])
def test_a_published_replaced_or_withdrawn_endpoint_is_reported(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    run = RunDir(tmp_path)
    if not has_links:
        refuse_links(monkeypatch)
    watch = EndpointWatch(run)
    assert watch.all() == {}, "the folder does not exist yet"
    clock.now += 1
    publish(run, 11)
    assert list(watch.of_role("inference"))[:2] == ["inference-0", "inference-1"] and len(watch.all()) == 11
    publish_endpoint(run, "inference-1", "https://other:1")
    clock.now += VERIFY_S + CALM_S
    endpoint = watch.get("inference-1")
    assert endpoint is not None and endpoint["url"] == "https://other:1"
    forget_endpoints(run, "inference-1")
    clock.now += VERIFY_S
    assert watch.get("inference-1") is None and len(watch.all()) == 10


def test_a_successor_with_the_inode_of_its_predecessor_is_read(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filesystem may reuse the inode of the file that was deleted between two looks."""
    run = RunDir(tmp_path)
    publish(run, 1)
    watch = EndpointWatch(run)
    monkeypatch.setattr(watch, "look", lambda: frozenset({("inference-0.json", 7)}))
    for _ in range(2):
        clock.now += VERIFY_S + CALM_S
        assert watch.all()["inference-0"]["url"] == "https://h:0"
    publish_endpoint(run, "inference-0", "https://h:9")
    for _ in range(2):
        clock.now += VERIFY_S
        watch.all()
    assert watch.all()["inference-0"]["url"] == "https://h:9"


PHASES = ("imports and arguments", "model", "compile", "graph capture", "engine", "first token")


def test_a_listing_contains_the_endpoint_of_an_engine_as_its_file_does(
    tmp_path: Path, operations: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    monkeypatch.setattr(endpoints.socket, "gethostname", lambda: "nid001234.hsn.cluster.example.org")
    phases = {name: 10.07 + 13 * index for index, name in enumerate(PHASES)}
    details = {"model": "Qwen/Qwen3-30B-A3B-Thinking-2507", "version": 1234, "admin": True, "phases": phases}
    publish_endpoint(run, "inference-255", "https://172.30.255.254:49876", **details)
    publish_endpoint(run, "router-0", "https://h:1", model="".join(map(chr, range(1000, 1300))))
    watch = EndpointWatch(run)
    assert watch.all() == {name: read_json(run.endpoint(name)) for name in ("inference-255", "router-0")}
    assert operations["reads"] == 2, "the content of the router's does not fit into a name"


def test_a_second_name_is_ignored_unless_it_belongs_to_the_current_file(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    publish(run, 2)
    (first, *_) = sorted(name for name in os.listdir(run.endpoints) if name.startswith(".inference-0~"))
    write_json(run.endpoint("inference-0"), {"url": "https://successor:1"})
    (run.endpoints / f"{first[:20]}AAAA").touch()
    watch = EndpointWatch(run)
    assert [endpoint["url"] for endpoint in watch.all().values()] == ["https://successor:1", "https://h:1"]
    found = watch.look()
    monkeypatch.setattr(watch, "look", lambda: frozenset((name, 7) for name, _ in found))
    clock.now += VERIFY_S + CALM_S
    urls = [endpoint["url"] for endpoint in watch.all().values()]
    assert urls == ["https://successor:1", "https://h:1"], (
        "this filesystem has one inode number for all files"
    )
    forget_endpoints(run, "inference-0")
    assert not [name for name in os.listdir(run.endpoints) if "inference-0" in name]


def test_requests_are_found_with_one_listing_of_the_control_folder(
    tmp_path: Path, clock: Clock, operations: Counter[str]
) -> None:
    run = RunDir(tmp_path)
    run.control.mkdir()
    watch = ControlWatch(run)
    assert not watch.is_stop_requested() and watch.restarts() == set()
    assert operations == {"listings": 4}
    request_restart(run, "inference-0", 0, "it hangs")
    write_json(run.stop_request, {})
    clock.now += 1
    assert watch.restarts() == {"inference-0"} and watch.is_stop_requested()


def test_an_expected_change_is_looked_for_at_once(tmp_path: Path, clock: Clock) -> None:
    run = RunDir(tmp_path)
    run.control.mkdir()
    watch = ControlWatch(run)
    for _ in range(100):
        clock.now += 1.0
        watch.is_stop_requested()
    write_json(run.stop_request, {})
    assert not watch.is_stop_requested(), "the next look is due later"
    watch.hurry()
    assert watch.is_stop_requested()
