"""Policy versions as delta links (`transport.weights.delta`): every rank keeps its shards and writes the changes.

    links = DeltaPublisher(run, trainer)
    links.publish(version, is_full=False)

A rank keeps the bytes of its own shards (over all ranks the model in the engines' type), and needs as much again while
it publishes. The first version of a process is full, because no previous one is known; so is a version whose delta
would not be smaller.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from isal import isal_zlib
from numpy.typing import NDArray
from transformers import PreTrainedModel

from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.setup import broadcast_from_rank0, gather_to_rank0
from primerl_hpc.trainer.train_step import Trainer
from primerl_hpc.trainer.weights.filesystem import (
    DTYPES,
    METADATA,
    WRITERS,
    ArrivingTensors,
    Shard,
    commit_shards,
    data_bytes,
    engine_tensors,
    export_types,
    gather_shards,
)
from primerl_hpc.trainer.weights.shards import Types, safetensors_image
from primerl_hpc.transport.weights.delta import LinkWriter
from primerl_hpc.transport.weights.delta_codec import encode
from primerl_hpc.transport.weights.filesystem import WeightWriter

MAX_DELTA_RATIO = 0.9  # a delta of at least this share of the version is not written

log = logging.getLogger("primerl_hpc.trainer")


@dataclass
class Image:
    """A shard as the bytes of its file."""

    data: NDArray[np.uint8]
    names: list[str]  # of its tensors
    num_bytes: int  # of their data
    crc32: int


class DeltaPublisher:
    def __init__(self, run: RunDir, trainer: Trainer) -> None:
        self.run, self.trainer, self.dtype = run, trainer, DTYPES[trainer.recipe.model.dtype]
        self._version: int | None = None
        self._images: dict[str, Image] = {}  # of `_version`, by file name

    @torch.no_grad()
    def publish(self, version: int, *, is_full: bool) -> None:
        """Write the link to ``version``, and all of it if it ``is_full`` or the link is not smaller. Collective."""
        world = self.trainer.world
        link, writer = LinkWriter(self.run, version), WeightWriter(self.run, version)
        if world.is_leader:
            link.begin()
            writer.begin()
        dist.barrier()
        with ThreadPoolExecutor(WRITERS, "weights") as pool:
            images = self._make_images(writer, pool)
            is_linked = self._version == version - 1 and self._write_link(link, images, pool)
            if is_full or not is_linked:
                files = ((writer.temporary / name, image) for name, image in images.items())
                shards = list(pool.map(lambda file: _write_image(*file), files))
                commit_shards(writer, shards, self.trainer)
        if world.is_leader:
            link.discard()
            writer.discard()
        self._images, self._version = images, version

    def write_full(self, version: int) -> None:
        """Write the full version in addition to its link."""
        self.publish(version, is_full=True)

    def _make_images(self, writer: WeightWriter, pool: ThreadPoolExecutor) -> dict[str, Image]:
        """Return images of this rank's current shards. Collective."""
        policy = self.trainer.policy
        types = export_types(policy, self.dtype)
        futures: dict[str, Future[Image]] = {}
        for number, num_shards, gathered in gather_shards(policy, self.trainer.world, types):
            if len(futures) >= WRITERS:
                list(futures.values())[-WRITERS].result()
            name = writer.shard_path(number, of=num_shards).name
            futures[name] = pool.submit(_make_image, gathered, policy.hf, types)
        return {name: future.result() for name, future in futures.items()}

    def _write_link(self, link: LinkWriter, images: dict[str, Image], pool: ThreadPoolExecutor) -> bool:
        """Write the link if it is smaller than the version. Returns True if it was written. Collective."""
        world = self.trainer.world

        def write(name: str) -> dict[str, Any]:
            old, new = self._images[name], images[name]
            return link.write(name, encode(old.data, new.data, word_bytes=self.dtype.itemsize))

        changed = [
            name for name, image in images.items() if not np.array_equal(image.data, self._images[name].data)
        ]
        entries = list(pool.map(write, changed))
        result = [
            {"name": name, "size_bytes": len(image.data), "crc32": image.crc32}
            for name, image in images.items()
        ]
        gathered = gather_to_rank0((entries, result))
        is_smaller = False
        if world.is_leader:
            entries, result = (list(chain(*lists)) for lists in zip(*gathered, strict=True))
            delta_bytes, full_bytes = (
                sum(entry["size_bytes"] for entry in files) for files in (entries, result)
            )
            is_smaller = delta_bytes < MAX_DELTA_RATIO * full_bytes
            log.info("delta of v%d has %.3f of its bytes", link.version, delta_bytes / full_bytes)
            if is_smaller:
                link.commit(entries, result)
        return broadcast_from_rank0(is_smaller)


def _make_image(gathered: ArrivingTensors, hf: PreTrainedModel, types: Types) -> Image:
    gathered.wait()
    with torch.no_grad():
        tensors, types = engine_tensors(gathered, hf, types)
        data = safetensors_image(tensors, METADATA, types=types)
    return Image(data, list(tensors), data_bytes(tensors, types), isal_zlib.crc32(data))


def _write_image(path: Path, image: Image) -> Shard:
    with path.open("wb") as file:
        file.write(image.data.data)
        file.flush()
        os.fsync(file.fileno())
    return Shard(WeightWriter.entry(path, image.crc32), image.names, image.num_bytes)
