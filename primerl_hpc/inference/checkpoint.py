"""Check a folder of safetensors before loading: is it complete, and does it hold the model that the engine serves?

Only headers and file sizes are read, which takes milliseconds for a model of any size. An engine that fails while it
loads a damaged folder has lost its weights, so the checks run before the first tensor is replaced.
"""

from __future__ import annotations

from pathlib import Path

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.model_files import TensorInfo, read_weights
from primerl_hpc.transport.base_models.untrained import is_prediction_tensor, is_tower_tensor
from primerl_hpc.transport.weights.filesystem import MANIFEST, manifest_fault


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Return the tensors in the folder's safetensors files by name, without layers for multi-token prediction.

    Neither the trainer nor the served model has these layers, so an update does not contain them.

    Raises DataError naming the file if the folder is missing, a file listed in the manifest is missing or has another
    size, and as `read_weights`.
    """
    if not folder.is_dir():
        raise DataError("the weights folder does not exist", location=str(folder))
    if (folder / MANIFEST).is_file() and (fault := manifest_fault(folder)):
        raise DataError(fault, location=str(folder))
    tensors = read_weights(folder)
    config = read_json_or_none(folder / "config.json") or {}
    return {name: info for name, info in tensors.items() if not is_prediction_tensor(name, config)}


def check_same_model(
    new: dict[str, TensorInfo], reference: dict[str, TensorInfo], *, is_tied: bool, location: str
) -> None:
    """Raise DataError naming the first tensor that is missing, unknown, or has another shape. Towers may be missing.

    ``is_tied``: the LM head shares the embedding, so ``lm_head.weight`` may be present or absent on either side.
    """
    optional = {"lm_head.weight"} if is_tied else set()
    if not any(map(is_tower_tensor, new)):  # the trainer left the towers out
        optional |= set(filter(is_tower_tensor, reference))
    if missing := sorted(reference.keys() - new.keys() - optional):
        raise DataError(f"{len(missing)} tensors are missing, the first is {missing[0]}", location=location)
    if unknown := sorted(new.keys() - reference.keys() - optional):
        raise DataError(
            f"{len(unknown)} tensors do not belong to the model, the first is {unknown[0]}", location=location
        )
    for name in sorted(new.keys() & reference.keys()):
        if new[name].shape != reference[name].shape:
            raise DataError(
                f"tensor {name} has shape {list(new[name].shape)}, but the model has {list(reference[name].shape)}",
                location=location,
            )
