"""Rollouts through the run directory: ``rollouts/step_N/rank_R.safetensors`` and, written last, ``STABLE``.

A rank's file holds every stream of all its micro-batches one after another (an optional one where some row has it),
``micro_batch_tokens`` [M] and ``micro_batch_samples`` [M] to cut them apart again, and, as JSON in the safetensors header,
the `StepInfo`, the schema version, and where images are. The images of all ranks, each once, are in ``images.safetensors``. The folder is filled under another name and renamed, so ``step_N`` is whole or not there.

    FilesystemSender(run).send(StepInfo(step=3), ranks)
    info, rows = FilesystemReceiver(run).receive(3, rank=0, timeout_s=60)
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import fsync_dir, is_there, write_text
from primerl_hpc.common.rundir import STABLE, RunDir
from primerl_hpc.transport.rollouts import (
    MAPPED_STREAMS,
    OPTIONAL_STREAMS,
    SAMPLE_STREAMS,
    SCHEMA_VERSION,
    TOKEN_STREAMS,
    MicroBatch,
    Picture,
    PlacedPicture,
    StepInfo,
)
from primerl_hpc.transport.tensor_file import map_tensor, write_parts

IMAGES = "images.safetensors"
LAG_S = 60.0  # how long a network filesystem may hide a file behind its marker
FIRST_POLL_S, MAX_POLL_S = 0.01, 0.5


def rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.safetensors"


class FilesystemSender:
    def __init__(self, run: RunDir) -> None:
        self.run = run

    def send(self, info: StepInfo, ranks: list[list[MicroBatch]]) -> None:
        """See `RolloutSender.send`. Raises ValueError when ranks hold different numbers of rows."""
        if len({len(rows) for rows in ranks}) != 1:
            raise ValueError(
                f"ranks of step {info.step} hold {[len(rows) for rows in ranks]} rows: must be equal"
            )
        folder = self.run.rollouts_step(info.step)
        if is_there(folder / STABLE):
            return
        temporary = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.mkdir(parents=True)
        pictures = {
            placed.picture.key: [placed.picture.pixels]
            for rows in ranks
            for row in rows
            for placed in row.images
        }
        if pictures:
            write_parts(temporary / IMAGES, pictures, {})
        for rank, rows in enumerate(ranks):
            write_rank(rank_file(temporary, rank), info, rows, world_size=len(ranks))
        fsync_dir(temporary)
        os.rename(temporary, folder)
        fsync_dir(folder.parent)
        write_text(folder / STABLE, "")


def write_rank(path: Path, info: StepInfo, rows: list[MicroBatch], *, world_size: int) -> None:
    streams = {
        name: parts
        for name, dtype in (TOKEN_STREAMS | SAMPLE_STREAMS).items()
        if (parts := _parts(rows, name, dtype)) is not None
    }
    streams["micro_batch_tokens"] = [np.array([row.num_tokens for row in rows], np.int64)]
    streams["micro_batch_samples"] = [np.array([len(row.sample_lengths) for row in rows], np.int64)]
    header = {
        "schema_version": str(SCHEMA_VERSION),
        "world_size": str(world_size),
        "step_info": json.dumps(asdict(info)),
    }
    images = [
        (place, placed.picture.key, placed.picture.grid, placed.start, placed.length)
        for place, row in enumerate(rows)
        for placed in row.images
    ]
    if images:
        header["images"] = json.dumps(images)
    write_parts(path, streams, header)


def _parts(rows: list[MicroBatch], name: str, dtype: type) -> list[NDArray] | None:
    """The stream of each row; None when none has it."""
    parts = [getattr(row, name) for row in rows]
    there = [part for part in parts if part is not None]
    if name in OPTIONAL_STREAMS and not there:
        return None
    for place, row in enumerate(rows):
        if parts[place] is None:
            parts[place] = np.zeros((row.num_tokens, *there[0].shape[1:]), dtype)
    return parts if name in MAPPED_STREAMS else [np.asarray(part, dtype) for part in parts]


def read_rank(path: Path) -> tuple[StepInfo, list[MicroBatch], int]:
    """One rank's file: step info, rows, and for how many ranks the batch was cut.

    Raises DataError naming the file when it is of another schema version, or is damaged.
    """
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            if (version := header.get("schema_version")) != str(SCHEMA_VERSION):
                raise DataError(
                    f"rollouts of schema version {version}, this trainer reads {SCHEMA_VERSION}",
                    place=str(path),
                    mend="run orchestrator and trainer from the same version",
                )
            tensors = {
                name: map_tensor(path, name) if name in MAPPED_STREAMS else file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (no Mapping)
            }
        info = StepInfo(**json.loads(header["step_info"]))
        token_cuts = np.cumsum(tensors["micro_batch_tokens"])[:-1]
        sample_cuts = np.cumsum(tensors["micro_batch_samples"])[:-1]
        there = [
            name
            for name in (*TOKEN_STREAMS, *SAMPLE_STREAMS)
            if name in tensors or name not in OPTIONAL_STREAMS
        ]
        parts = {
            name: np.split(tensors[name], token_cuts if name in TOKEN_STREAMS else sample_cuts)
            for name in there
        }
        num_rows = len(tensors["micro_batch_tokens"])
        images = _read_images(path.with_name(IMAGES), json.loads(header.get("images", "[]")))
        rows = [
            MicroBatch(
                **{name: parts[name][index] for name in there},
                images=tuple(placed for place, placed in images if place == index),
            )
            for index in range(num_rows)
        ]
        return info, rows, int(header["world_size"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a whole rollout file ({error})", place=str(path)) from error


def _read_images(path: Path, found: list[list[Any]]) -> list[tuple[int, PlacedPicture]]:
    """Pairs of a row's place and a picture in it; pixels are mapped."""
    grids = {key: tuple(grid) for _, key, grid, _, _ in found}
    pictures = {key: Picture(key, map_tensor(path, key), grid) for key, grid in grids.items()}
    return [(place, PlacedPicture(pictures[key], start, length)) for place, key, _, start, length in found]


class FilesystemReceiver:
    def __init__(self, run: RunDir, *, world_size: int | None = None) -> None:
        """``world_size``: refuse batches that were cut for another number of ranks; None: do not look."""
        self.run, self.world_size = run, world_size

    def is_ready(self, step: int) -> bool:
        return is_there(self.run.rollouts_step(step) / STABLE)

    def receive(
        self, step: int, rank: int, *, timeout_s: float | None
    ) -> tuple[StepInfo, list[MicroBatch]] | None:
        """See `RolloutReceiver.receive`. Raises DataError when the marker is there but the rank's file is not."""
        folder = self.run.rollouts_step(step)
        if not _wait_for(folder / STABLE, timeout_s):
            return None
        path = rank_file(folder, rank)
        if not _wait_for(path, LAG_S):
            raise DataError(
                f"{folder / STABLE} is there, but {path.name} is not, after {LAG_S:.0f} s", place=str(path)
            )
        info, rows, world_size = read_rank(path)
        if self.world_size is not None and world_size != self.world_size:
            raise DataError(
                f"batch was cut for {world_size} trainer ranks, there are {self.world_size}", place=str(path)
            )
        return info, rows

    def forget(self, step: int) -> None:
        for done in self.run.list_steps(self.run.rollouts, STABLE):
            if done <= step:
                self.run.delete_step(self.run.rollouts_step(done), STABLE)


def _wait_for(path: Path, timeout_s: float | None) -> bool:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    poll_s = FIRST_POLL_S
    while not is_there(path):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.5, MAX_POLL_S)
    return True
