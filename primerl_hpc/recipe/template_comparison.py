"""Compare a renderer with the chat template of its tokenizer.

`submit` calls `compare` in the interpreter of a role, so that it imports nothing heavy itself.
"""

from __future__ import annotations

import contextlib
from itertools import zip_longest
from typing import Any

from primerl_hpc.common.node.imports import without_collections, without_torch
from primerl_hpc.common.node.transformers_folders import read_models_once
from primerl_hpc.recipe.renderer import load_tokenizer, make_renderer
from primerl_hpc.recipe.schema.model import Model

CONVERSATION = [
    {"role": "user", "content": "Hello, what is 2 + 3?"},
    {"role": "assistant", "content": "It is 5."},
    {"role": "user", "content": "Thank you."},
]
"""Without a system message, tools and reasoning, in which templates differ on purpose."""


def difference(model: Model, tokenizer: Any) -> str | None:
    """Return the first token at which the renderer differs from the chat template; None if there is none."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    own = make_renderer(model, tokenizer).render_ids(CONVERSATION, add_generation_prompt=True)
    options = dict(model.renderer.options)
    text = tokenizer.apply_chat_template(CONVERSATION, add_generation_prompt=True, tokenize=False, **options)
    expected = tokenizer.encode(text, add_special_tokens=False)
    for number, (token, other) in enumerate(zip_longest(own, expected)):
        if token != other:
            texts = (_text(tokenizer, each) for each in (token, other))
            return "token {}: the renderer writes {}, the chat template {}".format(number, *texts)
    return None


def _text(tokenizer: Any, token: int | None) -> str:
    return "nothing more" if token is None else repr(tokenizer.decode([token]))


@without_collections()
def compare(block: dict[str, Any]) -> str | None:
    """Return the `difference` for the model block of a recipe. Imports no torch if possible."""
    read_models_once()
    model = Model.model_validate(block)
    with contextlib.suppress(ImportError), without_torch():  # a tokenizer may need torch nevertheless
        return difference(model, load_tokenizer(model))
    return difference(model, load_tokenizer(model))
