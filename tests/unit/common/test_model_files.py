"""Files of a model: what is incomplete or contradicts itself is found from headers and sizes, by file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.model_files import INDEX, check_pointers, read_weights, tensor_files

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
ONE = np.ones((2, 3), np.float32)
SHARDS = {"a.safetensors": ("x",), "b.safetensors": ("y", "lm_head.weight")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, tensors in SHARDS.items():
        save_file(dict.fromkeys(tensors, ONE), tmp_path / name)
    weight_map = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_tensors_are_found_with_and_without_an_index(folder: Path) -> None:
    expected = {tensor: folder / name for name, tensors in SHARDS.items() for tensor in tensors}
    assert (
        tensor_files(folder) == {name: info.file for name, info in read_weights(folder).items()} == expected
    )
    (folder / INDEX).unlink()
    assert tensor_files(folder) == expected and read_weights(folder)["x"].shape == (2, 3)


def test_a_tensor_that_the_index_assigns_to_another_file_is_refused(folder: Path) -> None:
    """The trainer would read one, the engine the other."""
    save_file(dict.fromkeys(("x", "lm_head.weight"), ONE), folder / "a.safetensors")
    with pytest.raises(
        DataError, match=r"a\.safetensors: contains tensor lm_head\.weight, but .* to b\.safetensors"
    ):
        read_weights(folder)


def test_a_tensor_that_the_index_does_not_list_is_refused(folder: Path) -> None:
    save_file(dict.fromkeys(("x", "x_scale"), ONE), folder / "a.safetensors")
    with pytest.raises(DataError, match=r"a\.safetensors: contains tensor x_scale, but .* does not list it"):
        read_weights(folder)


def test_a_tensor_that_a_shard_lacks_is_named(folder: Path) -> None:
    save_file({"y": ONE}, folder / "b.safetensors")
    with pytest.raises(DataError, match=r"b\.safetensors: has no tensor lm_head\.weight"):
        read_weights(folder)


@pytest.mark.parametrize("size", [0, 7, 60, -1])
def test_a_file_that_ends_early_is_named(folder: Path, size: int) -> None:
    file = folder / "b.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(DataError, match=r"b\.safetensors: not a complete safetensors file"):
        read_weights(folder)


def test_a_file_that_git_lfs_did_not_download_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"tokenizer\.json: is a pointer of Git LFS.*git lfs pull"):
        check_pointers(folder)
    (folder / "tokenizer.json").write_text("{}")
    check_pointers(folder)
    (folder / "b.safetensors").write_bytes(POINTER)
    with pytest.raises(DataError, match=r"b\.safetensors: is a pointer of Git LFS"):
        read_weights(folder)
