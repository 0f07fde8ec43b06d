"""Rollouts in the run directory: ``rollouts/step_N/rank_R.safetensors`` and, written last, ``STABLE``.

The file of a rank holds each stream, concatenated over its M micro-batches (an optional stream only if at least one
row has it); ``micro_batch_tokens`` [M] and ``micro_batch_samples`` [M], by which the reader splits the streams; and,
as JSON in the safetensors header, the `StepInfo`, the schema version, and the positions of images.
``images.safetensors`` holds the distinct images of all ranks. The folder is written under a temporary name and
renamed, so ``step_N`` is always complete.

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
from primerl_hpc.common.safety.decoding import decoding, is_count, parse_json
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.step_dirs import STABLE
from primerl_hpc.transport.rollouts.micro_batch import (
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
LAG_S = 60.0  # time limit for a network filesystem to show a file whose marker is visible
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
        (index, placed.picture.key, placed.picture.grid, placed.start, placed.length)
        for index, row in enumerate(rows)
        for placed in row.images
    ]
    if images:
        header["images"] = json.dumps(images)
    write_parts(path, streams, header)


def _parts(rows: list[MicroBatch], name: str, dtype: type) -> list[NDArray] | None:
    """Return the stream of each row; None if no row has it."""
    parts = [getattr(row, name) for row in rows]
    present = [part for part in parts if part is not None]
    if name in OPTIONAL_STREAMS and not present:
        return None
    for index, row in enumerate(rows):
        if parts[index] is None:
            parts[index] = np.zeros((row.num_tokens, *present[0].shape[1:]), dtype)
    return parts if name in MAPPED_STREAMS else [np.asarray(part, dtype) for part in parts]


def read_rank(path: Path) -> tuple[StepInfo, list[MicroBatch], int]:
    """Read one rank's file. Returns step info, rows, and the number of ranks that the batch was split over.

    Raises DataError naming the file if it is damaged or has another schema version.
    """
    with decoding("incomplete or damaged rollout file", location=path, more=(SafetensorError, OSError)):
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            if (version := header.get("schema_version")) != str(SCHEMA_VERSION):
                raise DataError(
                    f"the rollouts have schema version {version}, but this trainer reads {SCHEMA_VERSION}",
                    location=str(path),
                    hint="run orchestrator and trainer from the same version of primerl-hpc",
                )
            tensors = {
                name: map_tensor(path, name) if name in MAPPED_STREAMS else file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 (no Mapping)
            }
        info = _step_info(header["step_info"])
        _check_streams(tensors)
        token_splits = np.cumsum(tensors["micro_batch_tokens"])[:-1]
        sample_splits = np.cumsum(tensors["micro_batch_samples"])[:-1]
        present = [
            name
            for name in (*TOKEN_STREAMS, *SAMPLE_STREAMS)
            if name in tensors or name not in OPTIONAL_STREAMS
        ]
        parts = {
            name: np.split(tensors[name], token_splits if name in TOKEN_STREAMS else sample_splits)
            for name in present
        }
        num_rows = len(tensors["micro_batch_tokens"])
        images = _read_images(path.with_name(IMAGES), parse_json(header.get("images", "[]")))
        rows = [
            MicroBatch(
                **{name: parts[name][index] for name in present},
                images=tuple(placed for row_index, placed in images if row_index == index),
            )
            for index in range(num_rows)
        ]
        for row in rows:
            if any(placed.start + placed.length > row.num_tokens for placed in row.images):
                raise ValueError("an image extends beyond the end of its row")
        return info, rows, int(header["world_size"])


def _step_info(text: str) -> StepInfo:
    """Parse the step info. Raises TypeError or ValueError."""
    info = StepInfo(**parse_json(text))
    counts = (info.step, info.policy_version_min, info.policy_version_max, info.num_samples)
    if not all(map(is_count, counts)) or not isinstance(info.metrics, dict):
        raise ValueError("a value in step_info has the wrong type")
    if not isinstance(info.env_names, list) or not all(isinstance(name, str) for name in info.env_names):
        raise ValueError("env_names is not a list of strings")
    return info


def _check_streams(tensors: dict[str, NDArray]) -> None:
    """Raise ValueError if a stream has the wrong type, or a length other than the total of the rows."""
    counts = {}
    for name in ("micro_batch_tokens", "micro_batch_samples"):
        rows = tensors[name]
        if rows.dtype != np.int64 or rows.ndim != 1 or rows.min(initial=0) < 0:
            raise ValueError(f"{name} is not a list of counts")
        # each count is at most the length of its stream, so their sum cannot overflow
        stream = "input_ids" if name == "micro_batch_tokens" else "sample_lengths"
        if rows.max(initial=0) > len(tensors[stream]):
            raise ValueError(f"{name} counts more values than {stream} has")
        counts[stream] = int(rows.sum())
    if len(tensors["micro_batch_tokens"]) != len(tensors["micro_batch_samples"]):
        raise ValueError("micro_batch_tokens and micro_batch_samples differ in length")
    lengths = tensors["sample_lengths"]
    for streams, stream in ((TOKEN_STREAMS, "input_ids"), (SAMPLE_STREAMS, "sample_lengths")):
        for name, dtype in streams.items():
            if name in tensors or name not in OPTIONAL_STREAMS:
                values, is_mapped = tensors[name], name in MAPPED_STREAMS
                is_typed = values.dtype == dtype or (is_mapped and values.dtype == np.uint16)
                if not is_typed or values.ndim != (3 if is_mapped else 1) or len(values) != counts[stream]:
                    raise ValueError(
                        f"stream {name} has unexpected type {values.dtype} or shape {list(values.shape)}"
                    )
    if lengths.min(initial=0) < 0 or lengths.max(initial=0) > counts["input_ids"]:
        raise ValueError("a value in sample_lengths is negative or exceeds the length of input_ids")


def _read_images(path: Path, found: list[list[Any]]) -> list[tuple[int, PlacedPicture]]:
    """Return (row index, picture) pairs. Pixels are memory-mapped."""
    for row_index, key, grid, start, length in found:
        is_grid = isinstance(grid, list) and len(grid) == 3
        if not (isinstance(key, str) and is_grid and all(map(is_count, (row_index, start, length, *grid)))):
            raise ValueError("a value in images has the wrong type")
    grids = {key: tuple(grid) for _, key, grid, _, _ in found}
    pictures = {key: Picture(key, map_tensor(path, key), grid) for key, grid in grids.items()}
    if any(picture.pixels.dtype != np.float32 or picture.pixels.ndim != 2 for picture in pictures.values()):
        raise ValueError("an image is not a matrix of float32")
    return [
        (row_index, PlacedPicture(pictures[key], start, length)) for row_index, key, _, start, length in found
    ]


class FilesystemReceiver:
    def __init__(self, run: RunDir, *, world_size: int | None = None) -> None:
        """``world_size``: reject batches that were split over another number of ranks; None: do not check."""
        self.run, self.world_size = run, world_size

    def is_ready(self, step: int) -> bool:
        return is_there(self.run.rollouts_step(step) / STABLE)

    def receive(
        self, step: int, rank: int, *, timeout_s: float | None
    ) -> tuple[StepInfo, list[MicroBatch]] | None:
        """See `RolloutReceiver.receive`. Raises DataError if the marker exists but the rank's file does not."""
        folder = self.run.rollouts_step(step)
        if not _wait_for(folder / STABLE, timeout_s):
            return None
        path = rank_file(folder, rank)
        if not _wait_for(path, LAG_S):
            raise DataError(
                f"{folder / STABLE} exists, but {path.name} is still missing after {LAG_S:.0f} s",
                location=str(path),
            )
        info, rows, world_size = read_rank(path)
        if self.world_size is not None and world_size != self.world_size:
            raise DataError(
                f"the batch was split over {world_size} data-parallel trainer ranks, but there are {self.world_size}",
                location=str(path),
            )
        return info, rows

    def forget(self, step: int) -> None:
        for stable_step in self.run.list_steps(self.run.rollouts, STABLE):
            if stable_step <= step:
                self.run.delete_step(self.run.rollouts_step(stable_step), STABLE)


def _wait_for(path: Path, timeout_s: float | None) -> bool:
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    poll_s = FIRST_POLL_S
    while not is_there(path):
        if deadline is not None and time.monotonic() >= deadline:
            return False
        time.sleep(poll_s)
        poll_s = min(poll_s * 1.5, MAX_POLL_S)
    return True
