"""Export a policy version of a run as a model folder for transformers, vLLM and the hub: copy, verify, rename.

weights/step_N already is an HF folder (sharded safetensors, config, generation config, tokenizer, chat template), so
torch is not needed here. Every file is read once and its CRC-32 compared with the manifest, which is copied too. If the
run trains adapters the folder is in PEFT's format, unless it is merged into the base model (`merge`).
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal import isal_zlib

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError, OccupiedError
from primerl_hpc.common.files import crc32_of_file, fsync_dir, listed_file
from primerl_hpc.common.model_files import shards_of_index
from primerl_hpc.common.names import MAIN_PHASE, Kind
from primerl_hpc.export.merge import is_adapter, merge_adapter
from primerl_hpc.export.untrained_tensors import add_tensors, untrained_tensors
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.leases import HeldLease, lease_path
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.base_models.snapshots import base_folder, local_snapshot
from primerl_hpc.transport.weights.filesystem import MANIFEST, FilesystemWeightReader, manifest_files

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Exported:
    folder: Path
    step: int
    num_files: int
    num_bytes: int
    num_copied: int = 0  # tensors that the trainer does not load, unchanged from the base model


def export_model(
    run: RunDir, to: Path, *, step: int | None = None, link: bool = False, merge: bool = False
) -> Exported:
    """Export policy version ``step`` (default: the last complete one) to ``to``. ``link``: hard links, no copies.

    ``merge``: merge an adapter into its base model. Raises NotFoundError (no such version), OccupiedError (``to`` is
    not empty), DataError (a checksum differs), ConfigError (nothing to merge); ``to`` is not created then.
    """
    version = choose_version(run, step)
    if merge and not is_adapter(run.weights_step(version)):
        raise ConfigError(
            "--merge is only for runs that train adapters; the weights of this run are full models",
            location=str(run.weights_step(version)),
            hint="remove --merge",
        )
    to = to.expanduser().absolute()
    check_target(to)
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    name = f"export-{os.getpid()}"
    source = FilesystemWeightReader(run).open(version, name)
    held = HeldLease(lease_path(source, name))
    try:
        temporary.mkdir(parents=True)
        num_bytes, files = 0, manifest_files(source)
        for entry in files:
            name = entry["name"]
            _transfer(listed_file(source, name), listed_file(temporary, name), entry["crc32"], link=link)
            num_bytes += entry["size_bytes"]
        shutil.copyfile(source / MANIFEST, temporary / MANIFEST)
        copied = {} if is_adapter(source) else _untrained_tensors(run, source)
        if copied:
            files = add_tensors(copied, temporary)
            num_bytes = sum(entry["size_bytes"] for entry in files)
        if merge:
            files = _merge_in_place(run, temporary, version)
            num_bytes = sum(entry["size_bytes"] for entry in files)
        fsync_dir(temporary)
        _rename(temporary, to)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        held.release()
    return Exported(to, version, len(files), num_bytes, len(copied))


def _untrained_tensors(run: RunDir, version: Path) -> dict[str, Path]:
    """Return the base model's tensors that were not trained; empty if the model is not on this machine."""
    base = local_snapshot(load_plan(run).phase(MAIN_PHASE).recipe.model.name)
    return {} if base is None else untrained_tensors(base, shards_of_index(version))


def _merge_in_place(run: RunDir, folder: Path, version: int) -> list[dict[str, Any]]:
    """Replace the verified adapter in ``folder`` by the merged model; return its manifest entries."""
    adapter = folder.with_name(f"{folder.name}.adapter")
    os.rename(folder, adapter)
    try:
        folder.mkdir()
        base = base_folder(load_plan(run).phase(MAIN_PHASE).model_path)
        return merge_adapter(base, adapter, folder, version=version)
    finally:
        shutil.rmtree(adapter)


def choose_version(run: RunDir, step: int | None) -> int:
    """Return ``step`` if its weights exist, default: the last complete version."""
    kind = load_plan(run).kind
    if kind not in (Kind.RL, Kind.SFT):
        raise ConfigError(f"a run of kind {kind.value} trains no weights to export")
    versions = run.stable_weights()
    if not versions:
        raise NotFoundError(
            "this run has no complete policy version yet",
            location=str(run.weights),
            hint=f"primerl-hpc status {shlex.quote(run.root.name)}",
        )
    if step is None:
        return versions[-1]
    if step in versions:
        return step
    kept = ", ".join(map(str, versions))
    if step in run.complete_checkpoints():
        cause = f"step {step} has a trainer checkpoint, but its weights were deleted"
    else:
        cause = f"there are no weights of step {step}"
    raise NotFoundError(
        cause,
        location=str(run.weights),
        hint=f"existing steps: {kept}; weights.keep_last and checkpoint.keep_interval define which are kept",
    )


def check_target(to: Path, *, option: str = "--to") -> None:
    """Raise OccupiedError unless ``to``, the value of ``option``, does not exist or is an empty folder."""
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise OccupiedError(
            "the target exists already, and an export does not overwrite anything",
            location=str(to),
            hint=f"choose another {option}",
        )


def is_exported(to: Path) -> bool:
    return (to / MANIFEST).is_file()


def _transfer(source: Path, target: Path, crc32: int, *, link: bool) -> None:
    if link:
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise ConfigError(
                "the target is on another filesystem, which hard links cannot span",
                location=str(target.parent.parent),
                hint="remove --link",
            ) from None
        found = crc32_of_file(target)
    else:
        found = _copy(source, target)
    if found != crc32:
        raise DataError(f"CRC-32 is {found:08x}, but {crc32:08x} in the manifest", location=str(source))


def _copy(source: Path, target: Path) -> int:
    """Copy and fsync a file; return the CRC-32 of what was read."""
    value = 0
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(CHUNK_BYTES):
            value = isal_zlib.crc32(chunk, value)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    return value


def _rename(temporary: Path, to: Path) -> None:
    try:
        os.rename(temporary, to)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        check_target(to)
        raise
    fsync_dir(to.parent)
