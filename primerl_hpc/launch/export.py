"""A policy version of a run as a model folder that transformers, vLLM and the hub take: copied, checked, renamed.

weights/step_N is an HF folder already (sharded safetensors, config, generation config, tokenizer, chat template), so no
torch is needed here. Every file is read once, its CRC-32 compared with the manifest, which goes along. Of a run that
trains adapters the folder is PEFT's, unless it is merged into the base model (`merge`).
"""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isal import isal_zlib

from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError, OccupiedError
from primerl_hpc.common.files import crc32_of_file, fsync_dir, read_json
from primerl_hpc.common.leases import HeldLease, lease_path
from primerl_hpc.common.names import MAIN_PHASE, Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.launch.merge import base_folder, is_adapter, merge_adapter
from primerl_hpc.plan.types import load_plan
from primerl_hpc.transport.weights_filesystem import MANIFEST, FilesystemWeightReader

CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Exported:
    folder: Path
    step: int
    num_files: int
    num_bytes: int


def export_model(
    run: RunDir, to: Path, *, step: int | None = None, link: bool = False, merge: bool = False
) -> Exported:
    """Make ``to`` from policy version ``step`` (default: the last complete one). ``link``: hard links, no copies.

    ``merge``: of an adapter and its base model make a model. Raises NotFoundError (no such version), OccupiedError
    (``to`` holds something), DataError (a checksum differs), ConfigError (nothing to merge); nothing is left behind then.
    """
    version = choose_version(run, step)
    if merge and not is_adapter(run.weights_step(version)):
        raise ConfigError(
            "--merge is for runs that train adapters; this one has whole models",
            place=str(run.weights_step(version)),
            mend="leave it out",
        )
    to = to.expanduser().absolute()
    check_target(to)
    temporary = to.with_name(f".{to.name}.{os.getpid()}.tmp")
    name = f"export-{os.getpid()}"
    source = FilesystemWeightReader(run).open(version, name)
    held = HeldLease(lease_path(source, name))
    try:
        temporary.mkdir(parents=True)
        num_bytes, files = 0, read_json(source / MANIFEST)["files"]
        for entry in files:
            _transfer(source / entry["name"], temporary / entry["name"], entry["crc32"], link=link)
            num_bytes += entry["size_bytes"]
        shutil.copyfile(source / MANIFEST, temporary / MANIFEST)
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
    return Exported(to, version, len(files), num_bytes)


def _merge_in_place(run: RunDir, folder: Path, version: int) -> list[dict[str, Any]]:
    """Replace the adapter in ``folder``, whose checksums agree, by a model; its manifest entries."""
    adapter = folder.with_name(f"{folder.name}.adapter")
    os.rename(folder, adapter)
    try:
        folder.mkdir()
        base = base_folder(load_plan(run).phase(MAIN_PHASE).model_path)
        return merge_adapter(base, adapter, folder, version=version)
    finally:
        shutil.rmtree(adapter)


def choose_version(run: RunDir, step: int | None) -> int:
    """``step`` when its weights are there, or the last complete version."""
    kind = load_plan(run).kind
    if kind not in (Kind.RL, Kind.SFT):
        raise ConfigError(f"a run of kind {kind.value} trains nothing that could be exported")
    versions = run.stable_weights()
    if not versions:
        raise NotFoundError(
            "this run has no complete policy version yet",
            place=str(run.weights),
            mend=f"primerl-hpc status {run.root.name}",
        )
    if step is None:
        return versions[-1]
    if step in versions:
        return step
    kept = ", ".join(map(str, versions))
    if step in run.complete_checkpoints():
        cause = f"step {step} has a checkpoint of the trainer, but its weights were deleted"
    else:
        cause = f"there are no weights of step {step}"
    raise NotFoundError(
        cause,
        place=str(run.weights),
        mend=f"there are those of {kept}; weights.keep_last and checkpoint.keep_interval say which are kept",
    )


def check_target(to: Path, *, option: str = "--to") -> None:
    """Raises OccupiedError unless ``to``, which ``option`` named, is free, or an empty folder."""
    if to.is_symlink() or (to.exists() and (not to.is_dir() or any(to.iterdir()))):
        raise OccupiedError(
            "is there already, and an export overwrites nothing",
            place=str(to),
            mend=f"choose another {option}",
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
                "is on another filesystem, where hard links cannot reach",
                place=str(target.parent.parent),
                mend="leave --link out",
            ) from None
        found = crc32_of_file(target)
    else:
        found = _copy(source, target)
    if found != crc32:
        raise DataError(f"CRC-32 is {found:08x}, its manifest says {crc32:08x}", place=str(source))


def _copy(source: Path, target: Path) -> int:
    """Copy durably; the CRC-32 of what was read."""
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
