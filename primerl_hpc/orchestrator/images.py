"""The images of a rollout as the trainer takes them: pixels by the model's own image processor, and which tokens they are.

verifiers keeps an image as the ``data:`` URL in its message, and an engine answers with the tokens that it made of it. What
the processor makes of the same URL is made once, however many samples show it.

    reader = ImageReader(recipe.model)
    await reader.add_images(rollout, episode)      # raises RolloutFailed
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import io
from base64 import b64decode
from itertools import groupby
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.orchestrator.trajectories import Rollout, RolloutFailed, trained_branches
from primerl_hpc.recipe.model_schema import Model
from primerl_hpc.transport.rollouts import Picture, PlacedPicture

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode
    from verifiers.v1.trace import Branch

IMAGE = 1  # of verifiers' mm_token_type_ids; 0: text


class ImageReader:
    def __init__(self, model: Model) -> None:
        self.model = model
        self._processor: Any = None
        self._pictures: WeakValueDictionary[str, Picture] = WeakValueDictionary()  # while samples hold them
        self._lock = asyncio.Lock()

    async def add_images(self, rollout: Rollout, episode: Episode[Any, Any, Any]) -> None:
        """Give each sample with image tokens its ``images``. Raises RolloutFailed where they do not belong to each other."""
        traces = [trace for trace in episode.traces if trace.agent.trainable and trace.mm_token_type_id_map]
        if not traces:
            return
        branches = [
            path.branch
            for trace in episode.traces
            if trace.agent.trainable
            for path in trained_branches(trace)
        ]
        for sample, branch in zip(rollout.samples, branches, strict=True):
            if (types := branch.mm_token_type_ids) is not None:
                async with self._lock:  # one at a time: the others of its group want the same images
                    sample.images = await asyncio.to_thread(self._place, branch, types)

    def _place(self, branch: Branch, types: list[int]) -> tuple[PlacedPicture, ...]:
        spans = image_spans(types)
        urls = image_urls(branch)
        if len(spans) != len(urls):
            raise RolloutFailed("ImageMismatch", f"{len(urls)} images, and image tokens of {len(spans)}")
        placed = []
        for url, (start, length) in zip(urls, spans, strict=True):
            picture = self._picture(url)
            expected = int(np.prod(picture.grid)) // self._processor.merge_size**2
            if expected != length:
                raise RolloutFailed(
                    "ImageMismatch",
                    f"the engine made {length} tokens of an image of which the processor of {self.model.name} makes {expected}",
                )
            placed.append(PlacedPicture(picture, start, length))
        return tuple(placed)

    def _picture(self, url: str) -> Picture:
        key = hashlib.sha256(url.encode()).hexdigest()
        if (known := self._pictures.get(key)) is not None:
            return known
        if self._processor is None:
            self._processor = load_image_processor(self.model)
        made = self._processor(images=[open_image(url)], return_tensors="np")
        (grid,) = made["image_grid_thw"].tolist()
        picture = Picture(key, np.ascontiguousarray(made["pixel_values"], np.float32), tuple(grid))
        self._pictures[key] = picture
        return picture


def load_image_processor(model: Model) -> Any:
    """The processor of the model, without torch. Raises OSError where it has none."""
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(
        model.name, backend="pil", trust_remote_code=model.trust_remote_code
    )


def open_image(url: str) -> Any:
    """Raises RolloutFailed unless it is a ``data:`` URL of an image."""
    from PIL import Image, UnidentifiedImageError

    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise RolloutFailed(
            "ImageElsewhere", f"only images in data: URLs with base64 are trained on, not {url[:80]}"
        )
    try:
        return Image.open(io.BytesIO(b64decode(data, validate=True))).convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError) as error:
        raise RolloutFailed("DamagedImage", str(error)) from error


def refuse_images(episode: Episode[Any, Any, Any], environment: str, algorithm: str) -> None:
    """For algorithms that do not take images: what they score or render anew would not be what was seen. Raises ConfigError."""
    branches = [branch for trace in episode.traces if trace.agent.trainable for branch in trace.branches]
    if any(image_urls(branch) for branch in branches):
        raise ConfigError(
            f"its rollouts show images, and algorithm {algorithm} knows text alone",
            place=f"environment {environment}",
            mend="train it by an algorithm of rewards, such as grpo",
        )


def image_spans(types: list[int]) -> list[tuple[int, int]]:
    """(first token, tokens) of each image. Raises RolloutFailed for other media."""
    spans, start = [], 0
    for kind, run in groupby(types):
        length = len(list(run))
        if kind == IMAGE:
            spans.append((start, length))
        elif kind:
            raise RolloutFailed("NoVideo", "its messages have media other than images")
        start += length
    return spans


def image_urls(branch: Branch) -> list[str]:
    """Of all messages, in their order."""
    return [
        part.image_url.url
        for node in branch.nodes
        if isinstance(node.message.content, list)
        for part in node.message.content
        if part.type == "image_url"
    ]
