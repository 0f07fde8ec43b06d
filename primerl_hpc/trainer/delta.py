"""Policy versions as links (`transport.weights_delta`): every rank remembers its shards and writes what changed.

    links = DeltaPublisher(run, core)
    links.publish(version, is_whole=False)

A rank keeps the bytes of its own shards, in all ranks together the model in the engines' type, and as much again while it
publishes. The first version of a life is whole, because nothing is remembered, and so is one whose delta would not be smaller.
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
from torch import Tensor, nn

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.trainer.core import Core
from primerl_hpc.trainer.export import (
    DTYPES,
    METADATA,
    WRITERS,
    Shard,
    commit_shards,
    data_bytes,
    engine_tensors,
    export_types,
    gather_shards,
)
from primerl_hpc.trainer.setup import from_leader
from primerl_hpc.trainer.shards import Types, safetensors_image
from primerl_hpc.transport.delta_codec import encode
from primerl_hpc.transport.weights_delta import LinkWriter
from primerl_hpc.transport.weights_filesystem import WeightWriter

WORTH_IT = 0.9  # a delta larger than this share of the version is not written

log = logging.getLogger("primerl_hpc.trainer")


@dataclass
class Image:
    """A shard as the bytes of its file."""

    data: NDArray[np.uint8]
    names: list[str]  # of its tensors
    num_bytes: int  # of their data
    crc32: int


class DeltaPublisher:
    def __init__(self, run: RunDir, core: Core) -> None:
        self.run, self.core, self.dtype = run, core, DTYPES[core.recipe.model.dtype]
        self._version: int | None = None
        self._images: dict[str, Image] = {}  # of `_version`, by file name

    @torch.no_grad()
    def publish(self, version: int, *, is_whole: bool) -> None:
        """Write the link to ``version``, and the version itself where it ``is_whole`` or the link is not worth it. Collective."""
        world = self.core.world
        link, writer = LinkWriter(self.run, version), WeightWriter(self.run, version)
        if world.is_leader:
            link.begin()
            writer.begin()
        dist.barrier()
        with ThreadPoolExecutor(WRITERS, "weights") as pool:
            images = self._make_images(writer, pool)
            is_linked = self._version == version - 1 and self._write_link(link, images, pool)
            if is_whole or not is_linked:
                files = ((writer.temporary / name, image) for name, image in images.items())
                shards = list(pool.map(lambda file: _write_image(*file), files))
                commit_shards(writer, shards, self.core)
        if world.is_leader:
            link.discard()
            writer.discard()
        self._images, self._version = images, version

    def write_whole(self, version: int) -> None:
        """Beside its link, if it has one."""
        self.publish(version, is_whole=True)

    def _make_images(self, writer: WeightWriter, pool: ThreadPoolExecutor) -> dict[str, Image]:
        """This rank's shards as they are now. Collective."""
        policy = self.core.policy
        types = export_types(policy, self.dtype)
        made: dict[str, Future[Image]] = {}
        for number, num_shards, gathered in gather_shards(policy, self.core.world, types):
            if len(made) >= WRITERS:
                list(made.values())[-WRITERS].result()
            name = writer.shard_path(number, of=num_shards).name
            made[name] = pool.submit(_make_image, gathered, policy.hf, types)
        return {name: each.result() for name, each in made.items()}

    def _write_link(self, link: LinkWriter, images: dict[str, Image], pool: ThreadPoolExecutor) -> bool:
        """Whether there is a link now: it is smaller than the version. Collective."""
        world = self.core.world

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
        everyones: list = [None] * world.size
        dist.gather_object((entries, result), everyones if world.is_leader else None)
        is_worth_it = False
        if world.is_leader:
            entries, result = (list(chain(*lists)) for lists in zip(*everyones, strict=True))
            delta_bytes, whole_bytes = (
                sum(each["size_bytes"] for each in found) for found in (entries, result)
            )
            is_worth_it = delta_bytes < WORTH_IT * whole_bytes
            log.info("v%d: its link has %.3f of its bytes", link.version, delta_bytes / whole_bytes)
            if is_worth_it:
                link.commit(entries, result)
        return from_leader(is_worth_it)


def _make_image(whole: dict[str, Tensor], hf: nn.Module, types: Types) -> Image:
    with torch.no_grad():
        tensors, types = engine_tensors(whole, hf, types)
        data = safetensors_image(tensors, METADATA, types=types)
    return Image(data, list(tensors), data_bytes(tensors, types), isal_zlib.crc32(data))


def _write_image(path: Path, image: Image) -> Shard:
    with path.open("wb") as file:
        file.write(image.data)
        file.flush()
        os.fsync(file.fileno())
    return Shard(WeightWriter.entry(path, image.crc32), image.names, image.num_bytes)
