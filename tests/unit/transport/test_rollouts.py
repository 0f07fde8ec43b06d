"""Rollouts and weights in the run directory."""

import json
import shutil
import threading
from dataclasses import fields

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import is_there
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.transport.rollouts.filesystem import FilesystemReceiver, FilesystemSender, rank_file
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch, StepInfo
from primerl_hpc.transport.weights.filesystem import FilesystemWeightReader, WeightWriter, prune_weights
from tests.support.checksums import verify_checksums
from tests.support.helpers import PATIENCE_S, random_row


def batch(seed: int, ranks: int = 2, rows: int = 3) -> list[list[MicroBatch]]:
    rng = np.random.default_rng(seed)
    return [[random_row(rng, rng.integers(1, 9, 4).tolist()) for _ in range(rows)] for _ in range(ranks)]


def assert_equal(one: MicroBatch, other: MicroBatch) -> None:
    for each in fields(MicroBatch):
        mine, theirs = getattr(one, each.name), getattr(other, each.name)
        if each.name == "images":
            assert [(one.picture.key, one.start) for one in mine] == [
                (one.picture.key, one.start) for one in theirs
            ]
            continue
        if theirs is None:  # zeros where another row of the rank has the stream
            assert mine is None or not mine.any()
            continue
        assert mine.dtype == theirs.dtype or each.name == "routed_experts"  # as wide as the widest row's
        np.testing.assert_array_equal(mine, theirs)


def test_every_rank_receives_its_rows_bit_for_bit(tmp_path):
    run, ranks = RunDir(tmp_path), batch(0)
    distilled = ranks[0][1]
    distilled.ce_weights = np.linspace(0, 1, distilled.num_tokens, dtype=np.float32)
    distilled.ref_logprobs = -distilled.ce_weights
    routed = np.random.default_rng(1).integers(0, 9, (distilled.num_tokens, 3, 2))
    distilled.routed_experts = routed.astype(np.uint8)
    ranks[0][2].routed_experts = np.full((ranks[0][2].num_tokens, 3, 2), 300, np.uint16)
    info = StepInfo(step=3, env_names=["a", "é"], policy_version_min=1, num_samples=24, metrics={"x": 0.5})
    FilesystemSender(run).send(info, ranks)
    for rank, rows in enumerate(ranks):
        found_info, found = FilesystemReceiver(run, world_size=2).receive(3, rank, timeout_s=0)
        assert found_info == info
        for one, other in zip(found, rows, strict=True):
            assert_equal(one, other)
        assert (found[0].ce_weights is None) == (rank == 1)  # a stream that no row has is not stored
        assert (found[0].routed_experts is None) == (rank == 1)
        if rank == 0:
            assert isinstance(found[1].routed_experts.base, np.memmap)


def test_receiver_waits_for_a_batch_that_comes_later_and_gives_up_in_time(tmp_path):
    run = RunDir(tmp_path)
    assert FilesystemReceiver(run).receive(1, 0, timeout_s=0.05) is None
    sender = threading.Thread(target=FilesystemSender(run).send, args=(StepInfo(step=1), batch(1)))
    sender.start()
    assert FilesystemReceiver(run).receive(1, 1, timeout_s=PATIENCE_S) is not None
    sender.join()


def test_a_complete_batch_is_not_replaced_an_incomplete_one_is(tmp_path):
    run, sender = RunDir(tmp_path), FilesystemSender(RunDir(tmp_path))
    sender.send(StepInfo(step=1), batch(1))
    sender.send(StepInfo(step=1), batch(2))
    assert_equal(FilesystemReceiver(run).receive(1, 0, timeout_s=0)[1][0], batch(1)[0][0])
    (run.rollouts_step(1) / STABLE).unlink()
    sender.send(StepInfo(step=1), batch(2))
    assert_equal(FilesystemReceiver(run).receive(1, 0, timeout_s=0)[1][0], batch(2)[0][0])


def test_another_schema_version_is_refused(tmp_path):
    run = RunDir(tmp_path)
    FilesystemSender(run).send(StepInfo(step=1), batch(1))
    path = rank_file(run.rollouts_step(1), 0)
    save_file(load_file(path), path, metadata={"schema_version": "0"})
    with pytest.raises(DataError, match=r"rank_0\.safetensors: the rollouts have schema version 0"):
        FilesystemReceiver(run).receive(1, 0, timeout_s=0)


def test_a_truncated_file_and_a_batch_for_other_ranks_are_refused(tmp_path):
    run = RunDir(tmp_path)
    FilesystemSender(run).send(StepInfo(step=1), batch(1))
    with pytest.raises(DataError, match="split over 2 data-parallel trainer ranks, but there are 4"):
        FilesystemReceiver(run, world_size=4).receive(1, 0, timeout_s=0)
    path = rank_file(run.rollouts_step(1), 0)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DataError, match="incomplete or damaged rollout file"):
        FilesystemReceiver(run).receive(1, 0, timeout_s=0)


def test_ranks_with_different_numbers_of_rows_are_refused(tmp_path):
    ranks = batch(1)
    ranks[1].pop()
    with pytest.raises(ValueError, match="must be equal"):
        FilesystemSender(RunDir(tmp_path)).send(StepInfo(step=1), ranks)


def test_forget_deletes_this_batch_and_older_ones_only(tmp_path):
    run = RunDir(tmp_path)
    for step in (1, 2, 3):
        FilesystemSender(run).send(StepInfo(step=step), batch(step))
    FilesystemReceiver(run).forget(2)
    assert run.list_steps(run.rollouts, STABLE) == [3]
    assert not run.rollouts_step(1).exists()


# -- weights ---------------------------------------------------------------------------------------


def write_version(run: RunDir, version: int) -> None:
    base = run.root / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(
        '{"model_type": "qwen3", "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}'
    )
    (base / "tokenizer.json").write_text("{}")
    (base / "model.safetensors").write_bytes(b"weights of the base model")
    (base / "model.safetensors.index.json").write_text("{}")
    writer = WeightWriter(run, version)
    writer.begin()
    path = writer.shard_path(1, of=1)
    save_file({"w": np.full(8, version, np.float32)}, path)
    entries = [writer.finish_file(path), *writer.copy_model_files(base, dtype="float32")]
    assert not is_there(run.weights_step(version) / STABLE)
    writer.commit([*entries, writer.write_index({"w": path.name}, total_bytes=32)])


def test_a_committed_version_is_a_checked_model_folder(tmp_path):
    run = RunDir(tmp_path)
    reader = FilesystemWeightReader(run)
    assert reader.newest() is None
    write_version(run, 1)
    assert reader.newest() == 1
    folder = reader.open(1, "engine-0")
    assert run.has_lease(folder)
    verify_checksums(folder)
    assert json.loads((folder / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "float32"}
    assert not (folder / "model.safetensors").exists()
    reader.close(1, "engine-0")
    assert not run.has_lease(folder)


def test_files_of_the_model_are_written_once_for_all_versions(tmp_path):
    run = RunDir(tmp_path)
    for version in (1, 2, 3):
        write_version(run, version)
    tokenizers = [run.weights_step(version) / "tokenizer.json" for version in (1, 2, 3)]
    assert len({path.stat().st_ino for path in tokenizers}) == 1
    run.delete_step(run.weights_step(1), STABLE)
    verify_checksums(run.weights_step(2))


@pytest.mark.parametrize("fault", ["damaged", "no links", "incomplete"])
def test_files_of_the_model_are_copied_where_the_previous_version_cannot_be_used(
    tmp_path, monkeypatch, fault
):
    run = RunDir(tmp_path)
    write_version(run, 1)
    first = run.weights_step(1) / "tokenizer.json"
    if fault == "damaged":
        first.write_text("[]")
    elif fault == "no links":
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(PermissionError()))
    else:
        (run.weights_step(1) / "manifest.json").write_text("{")
    write_version(run, 2)
    second = run.weights_step(2) / "tokenizer.json"
    verify_checksums(run.weights_step(2))
    assert second.read_text() == "{}" and second.stat().st_ino != first.stat().st_ino


def test_another_tokenizer_folder_replaces_the_models_tokenizer(tmp_path):
    base, other = tmp_path / "base", tmp_path / "other"
    for folder, names in (
        (base, ("config.json", "generation_config.json", "code.py", "tokenizer.json", "chat_template.jinja")),
        (other, ("config.json", "tokenizer.json", "merges.txt", "model.safetensors")),
    ):
        folder.mkdir()
        for name in names:
            (folder / name).write_text(f'{{"of": "{folder.name}"}}')
    writer = WeightWriter(RunDir(tmp_path / "run"), 1)
    writer.begin()
    entries = writer.copy_model_files(base, dtype="float32", tokenizer_folder=other)
    found = {entry["name"]: (writer.temporary / entry["name"]).read_text() for entry in entries}
    assert {name for name, text in found.items() if "base" in text} == {
        "config.json",
        "generation_config.json",
        "code.py",
    }
    assert {name for name, text in found.items() if "other" in text} == {"tokenizer.json", "merges.txt"}


@pytest.mark.parametrize("fault", ["missing", "short"])
def test_a_damaged_version_is_refused_with_both_names_and_without_a_lease(tmp_path, fault):
    run = RunDir(tmp_path)
    write_version(run, 1)
    path = run.weights_step(1) / "model-00001-of-00001.safetensors"
    path.unlink() if fault == "missing" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"STABLE exists, but model-00001-of-00001\.safetensors"):
        FilesystemWeightReader(run, lag_s=0).open(1, "engine-0")
    assert not run.has_lease(run.weights_step(1))


def test_a_file_that_lags_behind_its_marker_is_awaited(tmp_path):
    run = RunDir(tmp_path)
    write_version(run, 1)
    path = run.weights_step(1) / "tokenizer.json"
    path.rename(tmp_path / "late")
    opened = []
    thread = threading.Thread(target=lambda: opened.append(FilesystemWeightReader(run).open(1, "engine-0")))
    thread.start()
    wait_until(lambda: run.has_lease(run.weights_step(1)), what="the reader", timeout_s=PATIENCE_S)
    (tmp_path / "late").rename(path)
    thread.join(PATIENCE_S)
    assert opened == [run.weights_step(1)]


def test_a_changed_byte_is_detected_by_its_checksum(tmp_path):
    run = RunDir(tmp_path)
    write_version(run, 1)
    path = run.weights_step(1) / "tokenizer.json"
    path.write_text("[]")
    with pytest.raises(DataError, match="CRC-32"):
        verify_checksums(run.weights_step(1))


def test_pruning_keeps_the_newest_the_kept_and_the_leased(tmp_path):
    run = RunDir(tmp_path)
    for version in range(1, 7):
        write_version(run, version)
    run.lease(run.weights_step(3), "engine-1")
    assert prune_weights(run, keep_last=2, keep={1}) == [2, 4]
    assert run.stable_weights() == [1, 3, 5, 6]


def test_a_version_that_was_dropped_while_it_was_read_is_replaced_or_pruned_later(tmp_path, monkeypatch):
    """Recovery in place: the trainer writes step 5 again and, because of another interval, never step 6."""
    run = RunDir(tmp_path)
    for version in (4, 5, 6):
        write_version(run, version)
    (run.weights_step(5) / "of the lost future").touch()
    leases = [run.lease(run.weights_step(version), "engine-0") for version in (5, 6)]
    run.delete_after(4)
    assert run.stable_weights() == [4] and FilesystemWeightReader(run).newest() == 4
    remove = shutil.rmtree
    with monkeypatch.context() as patch:  # on a network filesystem a file that is open elsewhere remains
        patch.setattr("shutil.rmtree", lambda path, **_: "tmp" in path.name and remove(path, **_))
        write_version(run, 5)
    assert FilesystemWeightReader(run).open(5, "engine-1") == run.weights_step(5)
    assert not (run.weights_step(5) / "of the lost future").exists()
    write_version(run, 7)
    prune_weights(run, keep_last=9, keep=set())
    assert run.weights_step(6).exists()
    for lease in leases:
        lease.unlink()
    prune_weights(run, keep_last=9, keep=set())
    assert not run.weights_step(6).exists() and run.stable_weights() == [4, 5, 7]
