"""A weights folder is checked by headers and sizes before an engine loads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from primerl_hpc.common.errors import DataError, RoleError
from primerl_hpc.common.model_files import INDEX
from primerl_hpc.inference.checkpoint import check_same_model, read_headers
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.transport.weights.filesystem import WeightWriter

SHAPES = {"model.embed.weight": (8, 4), "model.layer.weight": (4, 4), "lm_head.weight": (8, 4)}


def write_folder(folder: Path, shapes: dict[str, tuple[int, ...]] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ones(shape, np.float32) for name, shape in (shapes or SHAPES).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_complete_folder_gives_every_name_and_shape(tmp_path: Path) -> None:
    tensors = read_headers(write_folder(tmp_path / "w"))
    assert {name: info.shape for name, info in tensors.items()} == SHAPES


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = write_folder(tmp_path / "w") / "model.safetensors"
    whole = file.read_bytes()
    for size_bytes in (0, 4, 40, len(whole) - 1):
        file.write_bytes(whole[:size_bytes])
        with pytest.raises(DataError, match=r"model\.safetensors"):
            read_headers(tmp_path / "w")


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="weights folder does not exist"):
        read_headers(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no \*\.safetensors"):
        read_headers(tmp_path / "empty")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "w")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"model-2\.safetensors"):
        read_headers(folder)


def test_a_file_of_another_size_than_its_manifest_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "w")
    size_bytes = (folder / "model.safetensors").stat().st_size
    manifest = {"files": [{"name": "model.safetensors", "size_bytes": size_bytes, "crc32": 0}]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert read_headers(folder)
    manifest["files"][0]["size_bytes"] += 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="manifest"):
        read_headers(folder)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    """Mistral's folders also contain the weights under other names, and under the same ones."""
    folder = write_folder(tmp_path)
    names = list(read_headers(folder))
    (file,) = folder.glob("*.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, file.name)}))
    shutil.copy(file, folder / "consolidated.safetensors")
    save_file({"layers.0.attention.wq.weight": np.zeros((2, 2), np.float32)}, folder / "other.safetensors")
    assert list(read_headers(folder)) == names
    assert {info.file for info in read_headers(folder).values()} == {file}


def test_layers_for_multi_token_prediction_are_no_part_of_the_comparison(tmp_path: Path) -> None:
    """DeepSeek-V3 and GLM-4.5 store them after the last layer; the trainer does not write them."""
    served, update = {"model.layers.0.mlp.weight": (2, 2)}, {"model.layers.0.mlp.weight": (2, 2)}
    base = write_folder(tmp_path / "base", served | {"model.layers.1.mlp.experts.0.up_proj.weight": (2, 2)})
    (base / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "num_nextn_predict_layers": 1}))
    new = write_folder(tmp_path / "new", update)
    for one, other in ((base, new), (new, base)):
        check_same_model(read_headers(one), read_headers(other), is_tied=False, location="here")


def test_an_update_contains_all_towers_or_none(tmp_path: Path) -> None:
    text, tower = {"model.language_model.norm.weight": (2,)}, {"model.visual.a": (2,), "model.visual.b": (2,)}
    served = read_headers(write_folder(tmp_path / "base", text | tower))
    for number, shapes in enumerate((text, text | tower)):
        new = read_headers(write_folder(tmp_path / str(number), shapes))
        check_same_model(new, served, is_tied=False, location="w")
    with pytest.raises(DataError, match=r"the first is model\.visual\.b"):
        check_same_model(
            {name: served[name] for name in (*text, "model.visual.a")}, served, is_tied=False, location="w"
        )


def test_another_model_is_refused_with_the_tensor_that_differs(tmp_path: Path) -> None:
    reference = read_headers(write_folder(tmp_path / "a"))
    cases = {
        "model.layer.weight": {**SHAPES, "model.layer.weight": (4, 5)},
        "model.extra.weight": {**SHAPES, "model.extra.weight": (1,)},
        "lm_head.weight": {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"},
    }
    for number, (name, shapes) in enumerate(cases.items()):
        new = read_headers(write_folder(tmp_path / f"b{number}", shapes))
        with pytest.raises(DataError, match=name.replace(".", r"\.")):
            check_same_model(new, reference, is_tied=False, location="w")


def test_a_tied_head_may_be_present_or_absent(tmp_path: Path) -> None:
    with_head = read_headers(write_folder(tmp_path / "a"))
    shapes = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    without = read_headers(write_folder(tmp_path / "b", shapes))
    check_same_model(without, with_head, is_tied=True, location="w")
    check_same_model(with_head, without, is_tied=True, location="w")


def test_an_engine_starts_from_the_newest_complete_version(tmp_path: Path) -> None:
    from primerl_hpc.inference.server import choose_start_weights

    run = RunDir(tmp_path)
    assert choose_start_weights(run, "base", "inference-0").version == 0
    for step in (1, 2, 3):
        write_folder(run.weights_step(step))
    for step in (1, 2):
        (run.weights_step(step) / STABLE).touch()
    chosen = choose_start_weights(run, "base", "inference-0")
    assert (chosen.version, chosen.path) == (2, str(run.weights_step(2)))
    assert run.has_lease(run.weights_step(2)) and chosen.lease.thread.is_alive()  # for as long as it loads
    chosen.release()
    assert not run.has_lease(run.weights_step(2))


def write_version(run: RunDir, fill: float) -> None:
    """Write version 1 in two files, filled with ``fill``, as each incarnation of a trainer does."""
    writer = WeightWriter(run, 1)
    writer.begin()
    entries = []
    for number, (name, shape) in enumerate(SHAPES.items(), start=1):
        path = writer.shard_path(number, of=len(SHAPES))
        save_file({name: np.full(shape, fill, np.float32)}, path)
        entries.append(writer.finish_file(path))
    writer.commit(entries)


def test_a_version_that_is_written_again_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    """A leased folder that was moved away is kept until the lease is released."""
    pytest.importorskip("torch")
    from primerl_hpc.inference.worker.extension import open_folder

    run = RunDir(tmp_path)
    write_version(run, 1.0)
    lease = run.lease(run.weights_step(1), "inference-0")
    _, stream = open_folder(run.weights_step(1), lambda _: None)
    found = dict([next(stream)])
    run.delete_after(0)
    write_version(run, 2.0)
    moved = list(run.weights.glob("*.tmp"))
    run.delete_dropped(run.weights)
    assert list(run.weights.glob("*.tmp")) == moved and len(moved) == 1
    lease.unlink()
    run.delete_dropped(run.weights)
    assert not list(run.weights.glob("*.tmp"))
    found |= dict(stream)
    assert {name: tuple(value.shape) for name, value in found.items()} == SHAPES
    assert all((value == 1).all() for value in found.values())
    assert all((value == 2).all() for _, value in open_folder(run.weights_step(1), lambda _: None)[1])


def test_a_version_that_is_written_again_while_it_is_opened_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from primerl_hpc.inference.worker.extension import open_folder

    run = RunDir(tmp_path)
    write_version(run, 1.0)
    with pytest.raises(DataError, match="step_1: the folder was replaced while it was opened"):
        open_folder(run.weights_step(1), lambda _: write_version(run, 2.0))


def test_an_engine_that_loaded_while_its_version_was_written_again_does_not_serve_it(tmp_path: Path) -> None:
    from primerl_hpc.inference.server import choose_start_weights

    run = RunDir(tmp_path)
    write_version(run, 1.0)
    chosen = choose_start_weights(run, "base", "inference-0")
    chosen.check()
    write_version(run, 2.0)
    with pytest.raises(RoleError, match="replaced while the engine loaded them"):
        chosen.check()
    chosen.release()


def test_an_adapter_engine_starts_from_the_base_model_and_the_newest_adapter(tmp_path: Path) -> None:
    from primerl_hpc.inference.server import choose_start_weights

    run = RunDir(tmp_path)
    none = choose_start_weights(run, "base", "inference-0", has_adapters=True)
    assert (none.version, none.path, none.adapter) == (-1, "base", None)
    for step in (0, 1):
        (write_folder(run.weights_step(step)) / STABLE).touch()
    chosen = choose_start_weights(run, "base", "inference-0", has_adapters=True)
    assert (chosen.version, chosen.path, chosen.adapter) == (1, "base", run.weights_step(1))


def test_an_engine_skips_a_damaged_version(tmp_path: Path) -> None:
    from primerl_hpc.inference.server import choose_start_weights

    run = RunDir(tmp_path)
    for step in (1, 2):
        (write_folder(run.weights_step(step)) / STABLE).touch()
    (run.weights_step(2) / "model.safetensors").write_bytes(b"torn")
    assert choose_start_weights(run, "base", "inference-0").version == 1
    (run.weights_step(1) / "model.safetensors").unlink()
    chosen = choose_start_weights(run, "base", "inference-0")
    assert (chosen.version, chosen.path) == (0, "base")
