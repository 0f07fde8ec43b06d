"""Renderer for plain ChatML models: ``<|im_start|>role\\ncontent<|im_end|>\\n``, without thinking and tools.

It implements the interface of package ``renderers`` for custom renderers, which are named by import path. Environment
servers, the SFT trainer and evaluations therefore know for every token whether the model sampled it, and a new turn
extends the tokens of the previous one without tokenizing them again. Message text never becomes a control token.
"""

from __future__ import annotations

from typing import Any, Literal

import renderers as R
from renderers.base import ParsedResponse, RenderedTokens, extract_message_tool_names

from primerl_hpc.recipe.control_tokens import LiteralTokenizer
from primerl_hpc.recipe.renderer import CHATML_TOKENS
from primerl_hpc.recipe.stop_tokens import with_engine_stops, without_final_stops

START, END = CHATML_TOKENS


class ChatMLConfig(R.BaseRendererConfig):
    name: Literal["chatml"] = "chatml"


class ChatMLRenderer:
    config_class = ChatMLConfig
    is_prefix_stable = True
    supports_tools = False
    effective_thinking_retention = "all"

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        """Raise ValueError if the tokenizer lacks ChatML's two special tokens."""
        self.tokenizer, self.config = tokenizer, config or ChatMLConfig()
        self._literal = LiteralTokenizer(tokenizer)
        self.start, self.end = (tokenizer.convert_tokens_to_ids(token) for token in (START, END))
        if None in (self.start, self.end) or self.start == self.end:
            raise ValueError(
                f"renderer 'chatml' needs the tokens {START} and {END}, but the tokenizer does not have them"
            )
        self.stops = with_engine_stops(tokenizer, [self.end])

    def render(
        self, messages: list[Any], *, tools: Any = None, add_generation_prompt: bool = False, **_: Any
    ) -> RenderedTokens:
        ids, indices, sampled, content = self._emit(messages, add_generation_prompt)
        return RenderedTokens(
            token_ids=ids,
            message_indices=indices,
            sampled_mask=sampled,
            is_content=content,
            message_roles=[message["role"] for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )

    def render_ids(self, messages: list[Any], **kwargs: Any) -> list[int]:
        return self.render(messages, **kwargs).token_ids

    def get_stop_token_ids(self) -> list[int]:
        return list(self.stops)

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: Any = None
    ) -> ParsedResponse:
        ids = without_final_stops(token_ids, self.stops)
        return ParsedResponse(content=self.tokenizer.decode(ids, skip_special_tokens=False))

    def bridge_to_next_turn(
        self,
        prev_prompt: list[int],
        prev_completion: list[int],
        new_messages: list[Any],
        *,
        tools: Any = None,
    ) -> RenderedTokens | None:
        """Return the previous tokens extended by the new messages, or None if one of them is an assistant message."""
        if any(message["role"] == "assistant" for message in new_messages):
            return None
        prior = [*prev_prompt, *prev_completion]
        if prior[-1] not in self.stops:  # Close a truncated completion by a stop token that is not trained.
            prior.append(self.end)
        prior += self._encode("\n")
        ids, indices, _, content = self._emit(new_messages, True)
        return RenderedTokens(
            token_ids=prior + ids,
            message_indices=[-1] * len(prior) + indices,
            sampled_mask=[False] * (len(prior) + len(ids)),
            is_content=[False] * len(prior) + content,
            message_roles=[message["role"] for message in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )

    def _encode(self, text: str) -> list[int]:
        return self._literal.encode(text, add_special_tokens=False) if text else []

    def _emit(
        self, messages: list[Any], generation_prompt: bool
    ) -> tuple[list[int], list[int], list[bool], list[bool]]:
        ids: list[int] = []
        indices: list[int] = []
        sampled: list[bool] = []
        content: list[bool] = []

        def add(tokens: list[int], index: int, *, is_sampled: bool = False, is_content: bool = False) -> None:
            ids.extend(tokens)
            indices.extend([index] * len(tokens))
            sampled.extend([is_sampled] * len(tokens))
            content.extend([is_content] * len(tokens))

        for index, message in enumerate(self._literal.mark_messages(messages)):
            is_reply = message["role"] == "assistant"
            add([self.start, *self._encode(message["role"] + "\n")], index)
            add(self._encode(message.get("content") or ""), index, is_sampled=is_reply, is_content=True)
            add([self.end], index, is_sampled=is_reply, is_content=is_reply)
            add(self._encode("\n"), index)
        if generation_prompt:
            add([self.start, *self._encode("assistant\n")], -1)
        return ids, indices, sampled, content
