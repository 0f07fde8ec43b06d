"""Merge an adapter into its base model: W + scale · B A, file by file of the base model.

Adapters name modules like the tensors in the base model's files, so no model is instantiated: the product is added in
float32 where there is an adapter, everything else is copied, and every tensor keeps its dtype.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.model_files import weight_files
from primerl_hpc.common.safety.decoding import decoding
from primerl_hpc.recipe.schema.training import adapter_scale
from primerl_hpc.transport.weights.filesystem import (
    ADAPTER_CONFIG,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    COPIED_SUFFIXES,
    MANIFEST,
    MANIFEST_VERSION,
    WeightWriter,
)


def is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file()


def merge_adapter(base: Path, adapter: Path, to: Path, *, version: int) -> list[dict[str, Any]]:
    """Write the merged model and its manifest to the folder ``to``; return the manifest's entries.

    Raises DataError if the adapter does not belong to this base model, or the base model's weights are quantized.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = read_json(adapter / ADAPTER_CONFIG)
    with decoding("not an adapter configuration", location=adapter / ADAPTER_CONFIG):
        scale = adapter_scale(config["lora_alpha"], config["r"], is_stabilized=bool(config.get("use_rslora")))
    files = weight_files(base)
    entries = []
    with ExitStack() as stack:
        pairs = stack.enter_context(safe_open(adapter / ADAPTER_WEIGHTS, framework="pt"))
        pending = {_base_name(key) for key in pairs.keys()}  # noqa: SIM118 (not a dict)
        for path in files:
            source = stack.enter_context(safe_open(path, framework="pt"))
            tensors = {}
            for name in source.keys():  # noqa: SIM118
                tensors[name] = source.get_tensor(name)
                if name in pending:
                    tensors[name] = _merged(tensors[name], name, pairs, scale, path)
                    pending.discard(name)
            save_file(tensors, to / path.name, metadata={"format": "pt"})
            entries.append(WeightWriter.finish_file(to / path.name))
    if pending:
        raise DataError(
            f"the adapter changes {len(pending)} tensors that the base model does not have, e.g. {min(pending)}",
            location=str(adapter),
            hint=f"check that {base} is the adapter's base model",
        )
    for source_path in sorted(base.iterdir()):
        if source_path.suffix in COPIED_SUFFIXES and source_path.name != MANIFEST and source_path.is_file():
            shutil.copyfile(source_path, to / source_path.name)
            entries.append(WeightWriter.finish_file(to / source_path.name))
    entries.sort(key=lambda entry: entry["name"])
    manifest = {"manifest_version": MANIFEST_VERSION, "policy_version": version, "files": entries}
    write_json(to / MANIFEST, manifest)
    return entries


def _base_name(key: str) -> str:
    """``base_model.model.….q_proj.lora_A.weight`` → ``….q_proj.weight``"""
    return f"{key.removeprefix(ADAPTER_PREFIX).rsplit('.', 2)[0]}.weight"


def _merged(weight: Any, name: str, pairs: Any, scale: float, path: Path) -> Any:
    module = ADAPTER_PREFIX + name.removesuffix(".weight")
    a, b = (pairs.get_tensor(f"{module}.{side}.weight").float() for side in ("lora_A", "lora_B"))
    if weight.element_size() < 2 or not weight.is_floating_point():
        raise DataError(
            f"{name} is quantized ({weight.dtype}), so an adapter cannot be merged into it",
            location=str(path),
        )
    if weight.shape != (b.shape[0], a.shape[1]):
        raise DataError(
            f"{name} has shape {list(weight.shape)}, but its adapter's product has {[b.shape[0], a.shape[1]]}",
            location=str(path),
        )
    return (weight.float() + scale * (b @ a)).to(weight.dtype)
