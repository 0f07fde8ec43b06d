"""Deltas: what is encoded comes back bit for bit, chains stay whole, and what is broken is found before it is served."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.inference.mirror import Mirror
from primerl_hpc.transport import delta_codec
from primerl_hpc.transport.delta_codec import apply, encode
from primerl_hpc.transport.weights import from_body, to_body
from primerl_hpc.transport.weights_delta import DeltaWeightReader, LinkWriter, prune_chains
from primerl_hpc.transport.weights_filesystem import MANIFEST, WeightWriter

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


# -- the codec ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(0, 5000),
    share=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    word_bytes=st.sampled_from([1, 2, 4, 8]),
    piece=st.sampled_from([64, 1024, 1 << 22]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_delta_makes_the_new_file_of_the_old_one(
    size: int, share: float, word_bytes: int, piece: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, size, np.uint8)
    new = np.where(rng.random(size) < share, rng.integers(0, 256, size, np.uint8), old)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_codec, "PIECE_BYTES", piece)
        delta = encode(old, new, word_bytes=word_bytes)
        found = old.copy()
        apply(found, delta)
    np.testing.assert_array_equal(found, new)


def test_what_hardly_changed_is_small_whatever_the_words() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal(1 << 20).astype(np.float32)
    new = old.copy()
    new[rng.random(len(new)) < 0.02] *= np.float32(1 + 2**-20)
    delta = encode(old.view(np.uint8), new.view(np.uint8), word_bytes=4)
    assert len(delta) < 0.03 * old.nbytes
    assert len(encode(old.view(np.uint8), old.view(np.uint8), word_bytes=4)) < 100


@settings(max_examples=100, deadline=None)
@given(cut=st.integers(0, 400), seed=st.integers(0, 1000))
def test_a_delta_that_is_cut_off_is_refused(cut: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, new = rng.integers(0, 256, (2, 300), np.uint8)
    delta = encode(old, new, word_bytes=2)
    if cut < len(delta):
        with pytest.raises(DataError):
            apply(old.copy(), delta[:cut])


def test_a_delta_for_another_file_is_refused() -> None:
    with pytest.raises(DataError, match="of 8 bytes"):
        apply(np.zeros(9, np.uint8), encode(np.zeros(8, np.uint8), np.ones(8, np.uint8), word_bytes=2))


# -- versions ----------------------------------------------------------------------------------------------------------


def contents(version: int) -> dict[str, bytes]:
    """What the shards of a version hold; the second one changes at even versions only."""
    fixed = np.random.default_rng(0).integers(0, 256, 4000, np.uint8)
    first, second = fixed.copy(), fixed[::-1].copy()
    first[version::50] = version
    second[version // 2 :: 70] = version // 2
    return {SHARDS[0]: first.tobytes(), SHARDS[1]: second.tobytes()}


def write_whole(run: RunDir, version: int) -> None:
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
            name,
            encode(np.frombuffer(old[name], np.uint8), np.frombuffer(new[name], np.uint8), word_bytes=2),
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
    """Versions 1 to 6; 1 and 4 are whole, and 4 has a link too."""
    run = RunDir(tmp_path / "run")
    for version in (1, 4):
        write_whole(run, version)
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


def test_a_version_opens_as_its_newest_whole_ancestor_and_all_links(run: RunDir) -> None:
    reader = DeltaWeightReader(run)
    assert reader.newest() == 6 and reader.has(3) and not reader.has(7)
    chain = reader.open(6, "me")
    assert (chain.path, chain.base) == (str(run.weights_step(4)), 4)
    assert [version for version, _ in chain.links] == [2, 3, 4, 5, 6]
    assert reader.open(3, "me").base == 1
    assert from_body(to_body(chain, 6)) == (chain, 6)


def test_leases_hold_the_chain_and_closing_one_version_spares_what_another_needs(run: RunDir) -> None:
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
    write_whole(run, 7)
    write_link(run, 7)
    prune_chains(run, keep_last=2, keep=set())
    assert run.stable_weights() == [4, 7] and run.list_steps(run.deltas, STABLE) == [5, 6, 7]
    write_link(run, 8)
    prune_chains(run, keep_last=2, keep={4})
    # who is still at 6 needs the link to 7
    assert run.stable_weights() == [4, 7] and run.list_steps(run.deltas, STABLE) == [7, 8]


def test_pruning_without_links_is_that_of_folders(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for version in range(1, 7):
        write_whole(run, version)
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


def test_renewing_touches_all_leases_of_a_version_and_makes_none(run: RunDir) -> None:
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


def test_a_link_without_what_it_links_to_is_no_version(run: RunDir) -> None:
    run.delete_step(run.delta_step(5), STABLE)
    reader = DeltaWeightReader(run)
    assert reader.newest() == 4 and not reader.has(6)
    with pytest.raises(DataError, match="policy version 6 has neither"):
        reader.open(6, "me")


def test_a_version_that_nobody_could_load_counts_again_when_it_is_written_whole(run: RunDir) -> None:
    reader = DeltaWeightReader(run)
    reader.give_up(5, reader.open(5, "me"))
    assert reader.newest() == 4
    assert reader.ask_for_whole() and run.full_weights_request.exists()
    write_whole(run, 5)
    assert reader.newest() == 6 and reader.open(6, "me").base == 5


# -- the engine's side -------------------------------------------------------------------------------------------------


def test_an_engine_follows_the_links_and_reads_a_whole_version_once(run: RunDir, mirror: Mirror) -> None:
    reader = DeltaWeightReader(run)
    for version in (1, 2, 3):
        assert_serves(mirror.bring_to(reader.open(version, "me"), version), version)
    for version in (1, 4):  # whole versions are of no more use to it
        for shard in SHARDS:
            (run.weights_step(version) / shard).write_bytes(bytes(4000))
    for version in (4, 6):
        assert_serves(mirror.bring_to(reader.open(version, "me"), version), version)


def test_an_engine_that_joins_late_begins_with_the_nearest_whole_version(run: RunDir, mirror: Mirror) -> None:
    (run.delta_step(3) / f"{SHARDS[0]}.delta").unlink()  # a link before it
    assert_serves(mirror.bring_to(DeltaWeightReader(run).open(6, "me"), 6), 6)


def test_one_that_comes_back_to_an_older_version_copies_it(run: RunDir, mirror: Mirror) -> None:
    reader = DeltaWeightReader(run)
    mirror.bring_to(reader.open(6, "me"), 6)
    assert_serves(mirror.bring_to(reader.open(2, "me"), 2), 2)


@pytest.mark.parametrize("fault", ["a bit flipped", "cut off", "gone", "no manifest", "wrong result"])
def test_a_broken_link_is_found_and_the_whole_version_after_it_serves(
    run: RunDir, mirror: Mirror, fault: str
) -> None:
    reader = DeltaWeightReader(run)
    mirror.bring_to(reader.open(4, "me"), 4)
    break_link(run.delta_step(5), fault)
    with pytest.raises(DataError):
        mirror.bring_to(reader.open(6, "me"), 6)
    assert mirror.version == (None if fault == "wrong result" else 4)
    write_whole(run, 6)
    assert_serves(mirror.bring_to(reader.open(6, "me"), 6), 6)


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
    else:  # e.g. a trainer that did not have what the engine has
        text = (folder / MANIFEST).read_text()
        crc32 = {entry["name"]: entry["crc32"] for entry in read_json(folder / MANIFEST)["result"]}[SHARDS[0]]
        (folder / MANIFEST).write_text(text.replace(str(crc32), str(crc32 ^ 1)))


def test_a_mirror_that_was_damaged_is_copied_anew(run: RunDir, mirror: Mirror) -> None:
    reader = DeltaWeightReader(run)
    shard = mirror.bring_to(reader.open(4, "me"), 4) / SHARDS[0]
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    assert_serves(mirror.bring_to(reader.open(5, "me"), 5), 5)


def test_a_whole_version_that_is_damaged_is_not_served(run: RunDir, mirror: Mirror) -> None:
    chain = DeltaWeightReader(run).open(5, "me")
    shard = run.weights_step(4) / SHARDS[1]
    shard.write_bytes(b"\0" + shard.read_bytes()[1:])
    with pytest.raises(DataError, match="CRC-32"):
        mirror.bring_to(chain, 5)
