"""Multi-token prediction and towers in exports: copied from the base model, because the trainer does not load them.

    names = untrained_tensors(base, trained)     # by the files' names; empty for most models
    add_tensors(names, folder)                    # a file of their own, in the index and the manifest of ``folder``

Their bytes are copied as they are, so torch is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import crc32_of_file, read_json, write_json
from primerl_hpc.common.model_files import INDEX, TensorEntry, file_header, tensor_files
from primerl_hpc.transport.base_models.quantized import quantization_of
from primerl_hpc.transport.base_models.untrained import is_prediction_tensor, is_tower_tensor
from primerl_hpc.transport.weights.filesystem import MANIFEST, WeightWriter, manifest_files

FILE = "model-untrained.safetensors"
CHUNK_BYTES = 1 << 22


def untrained_tensors(base: Path, trained: Iterable[str]) -> dict[str, Path]:
    """Map tensors of the folder ``base`` that the trainer does not load to their files, unless they are ``trained``.

    Empty for a quantized base model, whose bytes an export in another type cannot hold.
    """
    config = read_json(base / "config.json")
    if quantization_of(config) is not None:
        return {}
    stored, known = tensor_files(base), set(trained)
    return {
        name: path
        for name, path in stored.items()
        if name not in known and (is_prediction_tensor(name, config) or is_tower_tensor(name))
    }


def add_tensors(names: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """Copy the tensors ``names`` into a file of the exported ``folder``. Returns its manifest's new entries."""
    headers = {path: file_header(path) for path in set(names.values())}
    entries = {name: (path, headers[path][name]) for name, path in names.items()}
    num_bytes = _write(folder / FILE, entries)
    index = read_json(folder / INDEX)
    index["weight_map"] = dict(sorted((index["weight_map"] | dict.fromkeys(entries, FILE)).items()))
    index["metadata"]["total_size"] += num_bytes
    manifest = read_json(folder / MANIFEST)
    kept = [entry for entry in manifest_files(folder) if entry["name"] != INDEX]
    (folder / INDEX).unlink()  # it may be a hard link to the version's own
    write_json(folder / INDEX, index)
    files = [
        *kept,
        *(WeightWriter.entry(folder / name, crc32_of_file(folder / name)) for name in (INDEX, FILE)),
    ]
    manifest["files"] = sorted(files, key=lambda entry: entry["name"])
    (folder / MANIFEST).unlink()
    write_json(folder / MANIFEST, manifest)
    return manifest["files"]


def _write(target: Path, entries: dict[str, tuple[Path, TensorEntry]]) -> int:
    """Write a safetensors file of copied tensors and fsync it. Returns the bytes of their data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (_, entry) in entries.items():
        end = offset + entry.end - entry.start
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("xb") as writer:
        writer.write(len(text).to_bytes(8, "little") + text)
        for path, entry in entries.values():
            with path.open("rb") as reader:
                reader.seek(entry.start)
                for start in range(entry.start, entry.end, CHUNK_BYTES):
                    writer.write(reader.read(min(CHUNK_BYTES, entry.end - start)))
        writer.flush()
        os.fsync(writer.fileno())
    return offset
