"""Converts supervised rows to tokens with a loss mask. Token ownership comes from the renderer, not from text.

A renderer that only wraps a chat template (``renderer: {name: default}``) does not know owners. There the start and end
of a reply are inferred from the template's renderings of the conversation's prefixes, which is correct only if each is
a prefix of the next: any other row is refused.

Of images, a sample has only the positions of their tokens. The rank that trains it reads and processes them again
(`Tokenizer.pictures_of`), which costs less than an exchange of pixels between ranks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import ConfigError, DataError, PrimerlError
from primerl_hpc.common.safety.images import open_image
from primerl_hpc.recipe.schema.sft import LossMask
from primerl_hpc.recipe.sft.rows import (
    Row,
    images_of,
    not_rendered,
    read_image,
    row_messages,
    row_template_kwargs,
    row_tools,
    trained_turns,
)
from primerl_hpc.recipe.sft.tables import Rows
from primerl_hpc.trainer.sft.checks import RowChecks, is_template, name_of
from primerl_hpc.transport.rollouts.micro_batch import PlacedPicture
from primerl_hpc.transport.rollouts.pictures import Pictures

KEPT_TOKENS = 64_000_000  # of cached samples: about 0.3 GB


@dataclass
class SFTSample:
    input_ids: NDArray[np.int32]
    is_trained: NDArray[np.bool_]
    num_cut: int = 0
    """Tokens beyond seq_len, which are dropped."""
    location: str = ""
    """File and line of the row, for messages."""
    images: tuple[tuple[int, int], ...] = ()
    """First token and number of tokens of each image."""
    row: int = 0


@dataclass(frozen=True)
class Peers:
    """Ranks that share the work of tokenizing. ``gather``: returns every rank's list, in order of ranks."""

    rank: int = 0
    size: int = 1
    gather: Callable[[list[SFTSample]], list[list[SFTSample]]] = lambda own: [own]


def pack_samples(samples: list[SFTSample]) -> bytes:
    """Return samples as bytes: the length of the JSON header (unsigned 32-bit), the header, all ids, all masks."""
    header = json.dumps(
        [(len(each.input_ids), each.num_cut, each.location, each.images, each.row) for each in samples]
    ).encode()
    ids = b"".join(sample.input_ids.tobytes() for sample in samples)
    masks = b"".join(sample.is_trained.tobytes() for sample in samples)
    return struct.pack("!I", len(header)) + header + ids + masks


def unpack_samples(data: bytes) -> list[SFTSample]:
    """Return the samples of `pack_samples`."""
    start = 4 + struct.unpack_from("!I", data)[0]
    entries = json.loads(data[4:start])
    total = sum(length for length, *_ in entries)
    ids = np.frombuffer(data, np.int32, total, start)
    masks = np.frombuffer(data, np.bool_, total, start + ids.nbytes)
    ends = np.cumsum([length for length, *_ in entries], dtype=np.int64)
    return [
        SFTSample(
            ids[end - length : end].copy(),
            masks[end - length : end].copy(),
            num_cut,
            location,
            tuple((start, count) for start, count in images),
            row,
        )
        for end, (length, num_cut, location, images, row) in zip(ends, entries, strict=True)
    ]


class Samples(Protocol):
    """Samples by row number, as a stream reads them: `prepare` is called for rows before they are read."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> SFTSample: ...

    def prepare(self, indices: list[int]) -> None: ...

    def pictures_of(self, sample: SFTSample) -> list[PlacedPicture]: ...


def shares_of(indices: list[int], num_peers: int) -> list[list[int]]:
    """Divide sorted rows into a share of neighbors for each peer, so that each decodes few row groups."""
    bounds = [len(indices) * peer // num_peers for peer in range(num_peers + 1)]
    return [indices[start:end] for start, end in itertools.pairwise(bounds)]


class Tokenizer:
    """Converts rows to samples, each computed once by one of the peers and cached while there is room.

    ``make_renderer`` returns the renderer for a row's own ``chat_template_kwargs``; without it such rows are refused.
    """

    pictures: Pictures | None = None
    """Set if the vision tower of the model is loaded; without it, rows with images are refused."""

    def __init__(
        self,
        rows: Rows,
        renderer: Any,
        mask: LossMask,
        seq_len: int,
        peers: Peers | None = None,
        make_renderer: Callable[[dict[str, Any]], Any] | None = None,
        checks: RowChecks | None = None,
    ) -> None:
        self.rows, self.seq_len, self.peers = rows, seq_len, peers or Peers()
        self.checks = checks or RowChecks()
        self.trains_assistant = mask.assistant
        self.body_roles = {role for role in ("system", "user", "tool") if getattr(mask, role)}
        self._renderers = {"{}": renderer}
        self._make_renderer = make_renderer
        self._samples: dict[int, SFTSample] = {}
        self._kept_tokens = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> SFTSample:
        return self._samples[index]

    def prepare(self, indices: list[int]) -> None:
        """Compute the samples of these rows, divided among the peers. All peers must pass the same rows."""
        wanted = dict.fromkeys(indices)
        missing = [index for index in wanted if index not in self._samples]
        if not missing:
            return
        self._evict(wanted)
        shares = shares_of(sorted(missing), self.peers.size)
        own_samples = [self.make(self.rows[index], index) for index in shares[self.peers.rank]]
        for share, samples in zip(shares, self.peers.gather(own_samples), strict=True):
            self._samples.update(zip(share, samples, strict=True))
        self._kept_tokens += sum(len(self._samples[index].input_ids) for index in missing)

    def _evict(self, wanted: dict[int, None]) -> None:
        """Evict the oldest samples while too many are cached; every peer evicts the same."""
        for index in list(self._samples):
            if self._kept_tokens <= KEPT_TOKENS:
                return
            if index not in wanted:
                self._kept_tokens -= len(self._samples.pop(index).input_ids)

    def make(self, row: Row, index: int = 0) -> SFTSample:
        """Tokenize a row. Raises DataError naming the row if a column, or the template's rendering, cannot be used."""
        ignored = self.checks.ignored_keys
        messages, turns = trained_turns(row, row_messages(row, ignored), ignored)
        tools = row_tools(row, ignored)
        images: list[tuple[int, int]] = []
        try:
            renderer = self._renderer_of(row)
            if images_of(messages):
                messages = self._with_images(renderer, row, messages)
            self.checks.check_parts(renderer, row, messages, tools)
            if is_template(renderer):
                ids, is_trained = self._by_template(renderer, row, messages, tools, turns)
            else:
                ids, is_trained, images = self._by_owner(renderer, messages, tools, turns)
        except PrimerlError:
            raise
        except Exception as error:  # renderers and Jinja may raise anything for unexpected input
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"the row cannot be rendered ({cause:.300})", location=row.location) from error
        self.checks.check_ids(row, ids)
        length = min([self.seq_len, *(start for start, count in images if start + count > self.seq_len)])
        sample = SFTSample(
            np.array(ids[:length], np.int32),
            np.array(is_trained[:length], np.bool_),
            num_cut=max(0, len(ids) - length),
            location=row.location,
            images=tuple(image for image in images if image[0] < length),
            row=index,
        )
        sample.is_trained[:1] = False  # nothing predicts the first token
        return sample

    def pictures_of(self, sample: SFTSample) -> list[PlacedPicture]:
        """Return the images of a sample, read and processed again."""
        if not sample.images:
            return []
        assert self.pictures is not None  # otherwise `make` refuses the row
        row = self.rows[sample.row]
        placed = []
        for source, (start, count) in zip(
            images_of(row_messages(row, self.checks.ignored_keys)), sample.images, strict=False
        ):
            data = read_image(row, source)
            picture = self.pictures.get(hashlib.sha256(data).hexdigest(), partial(open_image, data))
            placed.append(PlacedPicture(picture, start, count))
        return placed

    def _with_images(self, renderer: Any, row: Row, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with opened images. Raises DataError if they cannot be rendered or trained."""
        from renderers.base import is_multimodal

        if not is_multimodal(renderer):
            raise not_rendered(row, "images", name_of(renderer))
        if self.pictures is None:
            raise DataError(
                "the row has images, but the model's vision tower is not loaded",
                location=row.location,
                hint="use a model of the Qwen-VL family, and leave out trainer.vision none",
            )
        # the class of the renderer would load the processor of videos too, which needs torchvision
        renderer._processor = SimpleNamespace(image_processor=self.pictures.processor)

        def opened(part: dict[str, Any]) -> dict[str, Any]:
            if part["type"] != "image":
                return part
            try:
                return {**part, "image": open_image(read_image(row, part["image"]))}
            except ValueError as error:
                raise DataError(str(error), location=row.location) from error

        return [
            {**message, "content": [opened(part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _renderer_of(self, row: Row) -> Any:
        kwargs = row_template_kwargs(row)
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._renderers:
            try:
                if self._make_renderer is None:
                    raise ConfigError("this renderer accepts none")
                self._renderers[key] = self._make_renderer(kwargs)
            except ConfigError as error:
                raise DataError(
                    f"column 'chat_template_kwargs': {key} is not supported by the renderer ({error})",
                    location=row.location,
                ) from error
        return self._renderers[key]

    def _by_owner(
        self, renderer: Any, messages: list[Any], tools: list[Any] | None, turns: list[bool]
    ) -> tuple[list[int], list[bool], list[tuple[int, int]]]:
        from renderers.base import build_training_sample

        rendered = build_training_sample(
            renderer,
            messages,
            role_to_mask=lambda message: message["role"] == "assistant" and self.trains_assistant,
            content_sft_roles=self.body_roles,
            tools=tools,
            ensure_final_stop=True,
            message_loss_mask=list(turns),
        )
        media = rendered.multi_modal_data
        spans = media.mm_placeholders.get("image", []) if media is not None else []
        return rendered.token_ids, rendered.loss_mask, [(span.offset, span.length) for span in spans]

    def _by_template(
        self, renderer: Any, row: Row, messages: list[Any], tools: list[Any] | None, turns: list[bool]
    ) -> tuple[list[int], list[bool]]:
        """Train each reply up to its last stop token; the template's text after it is not trained."""
        if self.body_roles:
            raise ConfigError(
                "sft.loss_mask: renderer 'default' cannot identify the text of "
                f"{', '.join(sorted(self.body_roles))} turns",
                hint="set model.renderer.name to the model's family",
            )
        all_ids = renderer.render_ids(messages, tools=tools)
        is_trained = [False] * len(all_ids)
        stops = set(renderer.get_stop_token_ids())
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or not self.trains_assistant or not turns[turn]:
                continue
            before = renderer.render_ids(messages[:turn], tools=tools, add_generation_prompt=True)
            through = renderer.render_ids(messages[: turn + 1], tools=tools)
            if all_ids[: len(through)] != through or through[: len(before)] != before:
                raise DataError(
                    f"the chat template renders the conversation up to turn {turn + 1} differently "
                    "if more turns follow, "
                    "so the tokens of that reply cannot be identified",
                    location=row.location,
                    hint="set model.renderer.name to the model's family, or remove reasoning from "
                    "earlier turns",
                )
            end = len(through)
            while (
                end > len(before)
                and stops & set(through[len(before) : end])
                and through[end - 1] not in stops
            ):
                end -= 1
            is_trained[len(before) : end] = [True] * (end - len(before))
        return all_ids, is_trained
