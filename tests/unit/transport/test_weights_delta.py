"""Deltas: complete chains of versions, and detection of damage before a version is served."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.common.files import read_json
from primerl_hpc.inference.worker.mirror import Mirror
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.transport.weights.delta import DeltaWeightReader, LinkWriter, prune_chains
from primerl_hpc.transport.weights.delta_codec import encode
from primerl_hpc.transport.weights.filesystem import MANIFEST, WeightWriter
from primerl_hpc.transport.weights.sources import from_body, to_body

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


# -- versions --------------------------------------------------------------------------------------


def contents(version: int) -> dict[str, bytes]:
    """Return the contents of a version's shards; the second shard changes at even versions only."""
    fixed = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    first, second = fixed.copy(), fixed[::-1].copy()
    first[version::50] = version
    second[version // 2 :: 70] = version // 2
    return {SHARDS[0]: first.tobytes(), SHARDS[1]: second.tobytes()}


def write_full(run: RunDir, version: int) -> None:
    writer = WeightWriter(run, version)
    writer.begin()
    for name, data in contents(version).items():
        (writer.temporary / name).write_bytes(data)
    (writer.temporary / "config.json").write_text("{}")
    writer.commit([writer.finish_file(path) for path in sorted(writer.temporary.iterdir())])


def write_link(run: RunDir, version: int) -> None:
    link = LinkWriter(run, version)
    link.begin()
    old, new = contents(version - 1), contents(version)
    entries = [
        link.write(
            name, encode(np.frombuffer(old[name], np.uint8), np.frombuffer(new[name], np.uint8), word_bytes=2)
        )
        for name in SHARDS
        if old[name] != new[name]
    ]
    result = [
        {"name": name, "size_bytes": len(data), "crc32": zlib.crc32(data)} for name, data in new.items()
    ]
    link.commit(entries, result)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Versions 1 to 6; 1 and 4 are full, and 4 also has a link."""
    run = RunDir(tmp_path / "run")
    for version in (1, 4):
        write_full(run, version)
    for version in (2, 3, 4, 5, 6):
        write_link(run, version)
    return run


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    (tmp_path / "node").mkdir()
    return Mirror(tmp_path / "node")


def assert_serves(folder: Path, version: int) -> None:
    assert {name: (folder / name).read_bytes() for name in SHARDS} == contents(version)
    assert (folder / "config.json").read_text() == "{}"


def test_a_version_opens_as_its_newest_full_ancestor_and_all_links(run: RunDir) -> None:
    reader = DeltaWeightReader(run)
    assert reader.newest() == 6 and reader.has(3) and not reader.has(7)
    chain = reader.open(6, "me")
    assert (chain.path, chain.base) == (str(run.weights_step(4)), 4)
    assert [version for version, _ in chain.links] == [2, 3, 4, 5, 6]
    assert reader.open(3, "me").base == 1
    assert from_body(to_body(chain, 6)) == (chain, 6)


def test_leases_hold_the_chain_and_closing_one_version_keeps_shared_leases(run: RunDir) -> None:
    reader = DeltaWeightReader(run)
    reader.open(5, "me")
    reader.open(6, "me")
    reader.close(5, "me")
    held = [run.weights_step(4), run.delta_step(5), run.delta_step(6)]
    assert all(run.has_lease(folder) for folder in held)
    prune_chains(run, keep_last=1, keep=set())
    assert reader.open(6, "other").base == 4
    reader.close(6, "other")
    reader.close(6, "me")
    assert not any(run.has_lease(folder) for folder in held)


def test_pruning_keeps_what_the_newest_versions_are_linked_to(run: RunDir) -> None:
    prune_chains(run, keep_last=2, keep=set())
    assert run.stable_weights() == [4] and run.list_steps(run.deltas, STABLE) == [5, 6]
    write_full(run, 7)
    write_link(run, 7)
    prune_chains(run, keep_last=2, keep=set())
    assert run.stable_weights() == [4, 7] and run.list_steps(run.deltas, STABLE) == [5, 6, 7]
    write_link(run, 8)
    prune_chains(run, keep_last=2, keep={4})
    # an engine that is still at 6 needs the link to 7
    assert run.stable_weights() == [4, 7] and run.list_steps(run.deltas, STABLE) == [7, 8]


def test_pruning_without_links_prunes_folders(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for version in range(1, 7):
        write_full(run, version)
    run.lease(run.weights_step(3), "engine-1")
    prune_chains(run, keep_last=2, keep={1})
    assert run.stable_weights() == [1, 3, 5, 6]


def test_links_that_were_dropped_while_they_were_read_are_pruned_later_and_written_again(run: RunDir) -> None:
    reader = DeltaWeightReader(run)
    reader.open(6, "me")
    run.delete_after(4)
    assert reader.newest() == 4
    write_link(run, 5)
    prune_chains(run, keep_last=9, keep=set())
    assert reader.newest() == 5 and run.delta_step(6).exists()
    reader.close(6, "me")
    prune_chains(run, keep_last=9, keep=set())
    assert reader.newest() == 5 and not run.delta_step(6).exists()


def test_renewing_touches_all_leases_of_a_version_and_creates_none(run: RunDir) -> None:
    reader = DeltaWeightReader(run)
    reader.open(5, "me")
    leases = [*run.weights.glob(".leases/*"), *run.deltas.glob(".leases/*")]
    for lease in leases:
        os.utime(lease, (0, 0))
    reader.renew(5, "me")
    assert len(leases) == 5 and all(lease.stat().st_mtime > 0 for lease in leases)
    reader.close(5, "me")
    reader.renew(5, "me")
    assert not any(lease.exists() for lease in leases)


def test_a_link_without_its_previous_version_cannot_be_opened(run: RunDir) -> None:
    run.delete_step(run.delta_step(5), STABLE)
    reader = DeltaWeightReader(run)
    assert reader.newest() == 4 and not reader.has(6)
    with pytest.raises(DataError, match="policy version 6 is neither"):
        reader.open(6, "me")


def test_a_version_that_failed_to_load_can_be_opened_once_it_is_written_in_full(run: RunDir) -> None:
    reader = DeltaWeightReader(run)
    reader.give_up(5, reader.open(5, "me"))
    assert reader.newest() == 4
    assert reader.request_full() and run.full_weights_request.exists()
    write_full(run, 5)
    assert reader.newest() == 6 and reader.open(6, "me").base == 5


# -- the engine's side -----------------------------------------------------------------------------


def test_an_engine_follows_the_links_and_reads_a_full_version_once(run: RunDir, mirror: Mirror) -> None:
    reader = DeltaWeightReader(run)
    for version in (1, 2, 3):
        assert_serves(mirror.update_to(reader.open(version, "me"), version), version)
    for version in (1, 4):  # the engine no longer needs the full versions
        for shard in SHARDS:
            (run.weights_step(version) / shard).write_bytes(bytes(4000))
    for version in (4, 6):
        assert_serves(mirror.update_to(reader.open(version, "me"), version), version)


def test_an_engine_that_joins_late_begins_with_the_nearest_full_version(run: RunDir, mirror: Mirror) -> None:
    (run.delta_step(3) / f"{SHARDS[0]}.delta").unlink()  # a link before the full version
    assert_serves(mirror.update_to(DeltaWeightReader(run).open(6, "me"), 6), 6)


@pytest.mark.usefixtures("no_locks")
def test_a_mirror_on_a_filesystem_without_locks_is_refused(run: RunDir, mirror: Mirror) -> None:
    with pytest.raises(ConfigError, match="without file locks, which the workers of an engine need"):
        mirror.update_to(DeltaWeightReader(run).open(1, "me"), 1)


def test_a_mirror_copies_an_older_version(run: RunDir, mirror: Mirror) -> None:
    reader = DeltaWeightReader(run)
    mirror.update_to(reader.open(6, "me"), 6)
    assert_serves(mirror.update_to(reader.open(2, "me"), 2), 2)


@pytest.mark.parametrize("fault", ["a bit flipped", "cut off", "gone", "no manifest", "wrong result"])
def test_a_broken_link_is_detected_and_the_full_version_after_it_is_served(
    run: RunDir, mirror: Mirror, fault: str
) -> None:
    reader = DeltaWeightReader(run)
    mirror.update_to(reader.open(4, "me"), 4)
    break_link(run.delta_step(5), fault)
    with pytest.raises(DataError):
        mirror.update_to(reader.open(6, "me"), 6)
    assert mirror.version == (None if fault == "wrong result" else 4)
    write_full(run, 6)
    assert_serves(mirror.update_to(reader.open(6, "me"), 6), 6)


def break_link(folder: Path, fault: str) -> None:
    path = folder / f"{SHARDS[0]}.delta"
    data = path.read_bytes()
    if fault == "a bit flipped":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif fault == "cut off":
        path.write_bytes(data[:-5])
    elif fault == "gone":
        path.unlink()
    elif fault == "no manifest":
        (folder / MANIFEST).unlink()
    else:  # for example after a trainer without the engine's version
        text = (folder / MANIFEST).read_text()
        crc32 = {entry["name"]: entry["crc32"] for entry in read_json(folder / MANIFEST)["result"]}[SHARDS[0]]
        (folder / MANIFEST).write_text(text.replace(str(crc32), str(crc32 ^ 1)))


def test_a_damaged_mirror_is_copied_again(run: RunDir, mirror: Mirror) -> None:
    reader = DeltaWeightReader(run)
    shard = mirror.update_to(reader.open(4, "me"), 4) / SHARDS[0]
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    assert_serves(mirror.update_to(reader.open(5, "me"), 5), 5)


def test_a_damaged_full_version_is_not_served(run: RunDir, mirror: Mirror) -> None:
    chain = DeltaWeightReader(run).open(5, "me")
    shard = run.weights_step(4) / SHARDS[1]
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    with pytest.raises(DataError, match="CRC-32"):
        mirror.update_to(chain, 5)
