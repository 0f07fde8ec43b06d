"""A wrapper for any renderer that encodes text literally, never as control tokens, and knows the engine's stop tokens.

    {"name": "custom", "import_path": "primerl_hpc.recipe.literal_renderer.LiteralRenderer", "inner": {"name": "qwen3"}}

The result is the renderer of ``inner``, as an instance of a subclass that marks messages before it renders them (see
`control_tokens`). A reply ends at any token at which the engine may have stopped (see `stop_tokens`).
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import renderers as R
from pydantic import ConfigDict, TypeAdapter

from primerl_hpc.recipe.control_tokens import LiteralTokenizer
from primerl_hpc.recipe.stop_tokens import engine_stop_ids, without_final_stops
from primerl_hpc.recipe.template_settings import check_template_kwargs


class LiteralConfig(R.BaseRendererConfig):
    """Config of the wrapper; fields other than ``inner`` are the conversation's ``chat_template_kwargs``."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: Literal["literal"] = "literal"
    inner: dict[str, Any]
    _internal_fields = frozenset({"inner"})
    _allow_opaque_template_kwargs = True


class LiteralRenderer:
    config_class = LiteralConfig

    def __new__(cls, tokenizer: Any, config: LiteralConfig) -> Any:
        """Return the wrapped inner renderer.

        Raises ValueError for a setting that the template does not use, and the errors of the inner renderer.
        """
        inner_config = TypeAdapter(R.RendererConfig).validate_python(config.inner)
        kwargs = dict(config.model_extra or {})
        literal = LiteralTokenizer(tokenizer)
        renderer: Any = R.create_renderer(literal, inner_config, chat_template_kwargs=kwargs or None)
        if type(renderer).__name__ == "DefaultRenderer":
            check_template_kwargs(tokenizer, kwargs)
        inner_stops = renderer.get_stop_token_ids()
        renderer.__class__ = _marking(type(renderer))
        renderer.literal_tokenizer = literal
        renderer.extra_stops = [token for token in engine_stop_ids(tokenizer) if token not in inner_stops]
        return renderer


@cache
def _marking(base: type) -> type:
    """Return a subclass of ``base`` with the same name that marks messages and tools before rendering.

    It strips the engine's stop tokens from replies.
    """

    def render(self: Any, messages: Any, *, tools: Any = None, **kwargs: Any) -> Any:
        literal = self.literal_tokenizer
        return base.render(self, literal.mark_messages(messages), tools=literal.mark(tools), **kwargs)

    def render_ids(self: Any, messages: Any, *, tools: Any = None, **kwargs: Any) -> Any:
        literal = self.literal_tokenizer
        return base.render_ids(self, literal.mark_messages(messages), tools=literal.mark(tools), **kwargs)

    def bridge_to_next_turn(
        self: Any,
        prompt_ids: Any,
        completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any = None,
        **kwargs: Any,
    ) -> Any:
        if completion_ids and completion_ids[-1] in self.extra_stops:
            return (
                None  # The inner renderer would add its own stop token: the conversation is rendered again.
            )
        literal = self.literal_tokenizer
        new_messages, tools = literal.mark_messages(new_messages), literal.mark(tools)
        return base.bridge_to_next_turn(self, prompt_ids, completion_ids, new_messages, tools=tools, **kwargs)

    def get_stop_token_ids(self: Any) -> list[int]:
        return [*base.get_stop_token_ids(self), *self.extra_stops]

    def parse_response(self: Any, token_ids: Any, **kwargs: Any) -> Any:
        return base.parse_response(self, without_final_stops(token_ids, self.extra_stops), **kwargs)

    methods = (render, render_ids, bridge_to_next_turn, get_stop_token_ids, parse_response)
    return type(base.__name__, (base,), {method.__name__: method for method in methods})
