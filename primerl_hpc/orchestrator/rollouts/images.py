"""The images of a rollout for the trainer: pixels from the model's image processor, and the positions of their tokens.

verifiers stores an image as the ``data:`` URL in its message, and the engine returns the tokens that it made of it.
Each URL is processed once, however many samples contain it.

    reader = ImageReader(recipe.model)
    await reader.add_images(rollout, episode)      # raises RolloutFailed
"""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64decode
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.safety import images
from primerl_hpc.orchestrator.rollout_data import Rollout, RolloutFailed
from primerl_hpc.orchestrator.rollouts.trajectories import trained_branches
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.transport.rollouts.micro_batch import PlacedPicture
from primerl_hpc.transport.rollouts.pictures import Pictures

if TYPE_CHECKING:
    from verifiers.v1.episode import Episode
    from verifiers.v1.trace import Branch

IMAGE = 1  # in verifiers' mm_token_type_ids; 0: text


class ImageReader:
    """Finds the images of samples, each processed once for as long as samples hold it."""

    def __init__(self, model: Model) -> None:
        self.pictures = Pictures(model.name, trust_remote_code=model.trust_remote_code)
        self._lock = asyncio.Lock()

    async def add_images(self, rollout: Rollout, episode: Episode[Any, Any, Any]) -> None:
        """Set ``images`` of each sample with image tokens. Raises RolloutFailed if images and tokens do not match."""
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
                async with self._lock:  # one at a time: the rollouts of a group show the same images
                    sample.images = await asyncio.to_thread(self._locate, branch, types)

    def _locate(self, branch: Branch, types: list[int]) -> tuple[PlacedPicture, ...]:
        spans = image_spans(types)
        urls = image_urls(branch)
        if len(spans) != len(urls):
            raise RolloutFailed(
                "ImageMismatch", f"the messages have {len(urls)} images, the tokens {len(spans)}"
            )
        placed = []
        for url, (start, length) in zip(urls, spans, strict=True):
            key = hashlib.sha256(url.encode()).hexdigest()
            picture = self.pictures.get(key, partial(open_image, url))
            expected = self.pictures.num_tokens(picture)
            if expected != length:
                raise RolloutFailed(
                    "ImageMismatch",
                    f"the engine made {length} tokens of an image, the processor of {self.pictures.model} makes "
                    f"{expected}",
                )
            placed.append(PlacedPicture(picture, start, length))
        return tuple(placed)


def open_image(url: str) -> Any:
    """Decode an image. Raises RolloutFailed unless it is a ``data:`` URL that `common.safety.images` accepts."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise RolloutFailed(
            "ImageElsewhere", f"only images in base64 data: URLs can be trained on, not {url[:80]}"
        )
    try:
        return images.open_image(b64decode(data, validate=True))
    except ValueError as error:
        raise RolloutFailed("DamagedImage", str(error)) from error


def refuse_images(episode: Episode[Any, Any, Any], environment: str, algorithm: str) -> None:
    """Raise ConfigError if the rollout shows images, for algorithms that do not support them.

    These algorithms score or re-render text only, so the images would be lost.
    """
    branches = [branch for trace in episode.traces if trace.agent.trainable for branch in trace.branches]
    if any(image_urls(branch) for branch in branches):
        raise ConfigError(
            f"its rollouts show images, but algorithm {algorithm} supports only text",
            location=f"environment {environment}",
            hint="use an algorithm that trains on rewards, such as grpo",
        )


def image_spans(types: list[int]) -> list[tuple[int, int]]:
    """Return (first token, number of tokens) of each image. Raises RolloutFailed for other media."""
    spans, start = [], 0
    for kind, run in groupby(types):
        length = len(list(run))
        if kind == IMAGE:
            spans.append((start, length))
        elif kind:
            raise RolloutFailed("NoVideo", "the messages contain media other than images")
        start += length
    return spans


def image_urls(branch: Branch) -> list[str]:
    """Return the image URLs of all messages, in order."""
    return [
        part.image_url.url
        for node in branch.nodes
        if isinstance(node.message.content, list)
        for part in node.message.content
        if part.type == "image_url"
    ]
