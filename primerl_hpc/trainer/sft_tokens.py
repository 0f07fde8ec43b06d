"""Supervised rows → tokens with a loss mask. Token ownership is the renderer's, not guessed from text.

A renderer that only wraps a chat template (``renderer: {name: default}``) knows no owner. There the template's own
renderings of the conversation's beginnings tell where a reply starts and ends, which is right only if each is a prefix of
the next: a row for which it is not is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from primerl_hpc.common.errors import ConfigError, DataError, PrimerlError
from primerl_hpc.recipe.sft_rows import Row, row_messages, row_template_kwargs, row_tools
from primerl_hpc.recipe.sft_schema import LossMask
from primerl_hpc.recipe.sft_tables import Rows

KEPT_TOKENS = 64_000_000  # of samples that were made and may be asked for again: about 0.3 GB


@dataclass
class Sample:
    input_ids: NDArray[np.int32]
    is_trained: NDArray[np.bool_]


@dataclass(frozen=True)
class Peers:
    """Ranks that share the work of making samples. ``gather``: every rank's list, in order of ranks."""

    rank: int = 0
    size: int = 1
    gather: Callable[[list], list[list]] = lambda mine: [mine]


class Tokenizer:
    """Rows → samples, each made once by one of the peers, and kept while there is room.

    ``make_renderer`` gives the renderer of a row's own ``chat_template_kwargs``; without it such rows are refused.
    """

    def __init__(
        self,
        rows: Rows,
        renderer: Any,
        mask: LossMask,
        seq_len: int,
        peers: Peers | None = None,
        make_renderer: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        self.rows, self.seq_len, self.peers = rows, seq_len, peers or Peers()
        self.trains_assistant = mask.assistant
        self.body_roles = {role for role in ("system", "user", "tool") if getattr(mask, role)}
        self._renderers = {"{}": renderer}
        self._make_renderer = make_renderer
        self._samples: dict[int, Sample] = {}
        self._kept_tokens = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self._samples[index]

    def prepare(self, indices: list[int]) -> None:
        """Make the samples of these rows, shared out among the peers. All peers ask for the same rows."""
        wanted = dict.fromkeys(indices)
        missing = [index for index in wanted if index not in self._samples]
        if not missing:
            return
        self._forget(wanted)
        mine = [self.make(self.rows[index]) for index in missing[self.peers.rank :: self.peers.size]]
        for rank, samples in enumerate(self.peers.gather(mine)):
            self._samples.update(zip(missing[rank :: self.peers.size], samples, strict=True))
        self._kept_tokens += sum(len(self._samples[index].input_ids) for index in missing)

    def _forget(self, wanted: dict[int, None]) -> None:
        """Drop the oldest samples while too many are kept; every peer drops the same."""
        for index in list(self._samples):
            if self._kept_tokens <= KEPT_TOKENS:
                return
            if index not in wanted:
                self._kept_tokens -= len(self._samples.pop(index).input_ids)

    def make(self, row: Row) -> Sample:
        """Raises DataError naming the row when a column, or the template's rendering of it, is not usable."""
        messages, tools = row_messages(row), row_tools(row)
        try:
            renderer = self._renderer_of(row)
            if type(renderer).__name__ == "DefaultRenderer":
                ids, is_trained = self._by_template(renderer, row, messages, tools)
            else:
                ids, is_trained = self._by_owner(renderer, messages, tools)
        except PrimerlError:
            raise
        except Exception as error:  # whatever renderers and Jinja raise for what they do not expect
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise DataError(f"the row cannot be rendered ({why:.300})", place=row.place) from error
        sample = Sample(
            np.array(ids[: self.seq_len], np.int32), np.array(is_trained[: self.seq_len], np.bool_)
        )
        sample.is_trained[:1] = False  # nothing predicts the first token
        return sample

    def _renderer_of(self, row: Row) -> Any:
        kwargs = row_template_kwargs(row)
        key = json.dumps(kwargs, sort_keys=True)
        if key not in self._renderers:
            try:
                if self._make_renderer is None:
                    raise ConfigError("this renderer takes none")
                self._renderers[key] = self._make_renderer(kwargs)
            except ConfigError as error:
                raise DataError(
                    f"column 'chat_template_kwargs': {key} does not suit the renderer ({error})",
                    place=row.place,
                ) from error
        return self._renderers[key]

    def _by_owner(
        self, renderer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], list[bool]]:
        from renderers.base import build_training_sample

        rendered = build_training_sample(
            renderer,
            messages,
            role_to_mask=lambda message: message["role"] == "assistant" and self.trains_assistant,
            content_sft_roles=self.body_roles,
            tools=tools,
            ensure_final_stop=True,
        )
        return rendered.token_ids, rendered.loss_mask

    def _by_template(
        self, renderer: Any, row: Row, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[list[int], list[bool]]:
        """Trains each reply through its last stop token; what the template adds after it is scaffold."""
        if self.body_roles:
            raise ConfigError(
                f"sft.loss_mask: renderer 'default' cannot tell the text of {', '.join(sorted(self.body_roles))} turns",
                mend="set model.renderer.name to the model's family",
            )
        whole = renderer.render_ids(messages, tools=tools)
        is_trained = [False] * len(whole)
        stops = set(renderer.get_stop_token_ids())
        for turn, message in enumerate(messages):
            if message["role"] != "assistant" or not self.trains_assistant:
                continue
            before = renderer.render_ids(messages[:turn], tools=tools, add_generation_prompt=True)
            through = renderer.render_ids(messages[: turn + 1], tools=tools)
            if whole[: len(through)] != through or through[: len(before)] != before:
                raise DataError(
                    f"the chat template renders the conversation up to turn {turn + 1} differently once more follows, "
                    "so it does not tell which tokens are that reply",
                    place=row.place,
                    mend="set model.renderer.name to the model's family, or leave reasoning out of earlier turns",
                )
            end = len(through)
            while (
                end > len(before)
                and stops & set(through[len(before) : end])
                and through[end - 1] not in stops
            ):
                end -= 1
            is_trained[len(before) : end] = [True] * (end - len(before))
        return whole, is_trained
