"""Refuse a tokenizer with more tokens than the model has embeddings, without loading either.

    check_token_ids(recipe, model)      # ConfigError: token '<|im_start|>' has id 32000, …

In a rank or an engine, such an id is an index out of range, on a GPU an assertion of the device without a name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.checks.recipe.model_config import ModelConfig, find_file, load_config
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none
from primerl_hpc.common.names import Role
from primerl_hpc.common.safety.decoding import decoding
from primerl_hpc.recipe.renderer import CHATML_TOKENS, uses_renderer
from primerl_hpc.recipe.schema.recipe import Model, Recipe

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TokenId:
    text: str
    id: int


def check_token_ids(recipe: Recipe, policy: ModelConfig) -> None:
    """Raise ConfigError if the tokenizer of the policy may produce an id that the model, or a teacher that scores its
    tokens, has no embedding for.

    Nothing is checked without tokenizer.json and config.json, for example before a download; ranks check the ids of
    their rows.
    """
    if not uses_renderer(recipe) or (highest := highest_token(recipe.model, policy.variables)) is None:
        return
    models = [policy]
    if "opd" in recipe.algorithm_types and (teacher := recipe.served_models.get(Role.TEACHER)) is not None:
        models.append(load_config(teacher.model.name, policy.variables))
    for model in models:
        if (size := _vocab_size(model)) is None or highest.id < size:
            continue
        source = recipe.model.tokenizer or recipe.model.name
        raise ConfigError(
            f"the tokenizer of {source} has the token {highest.text!r} with id {highest.id}, but model {model.name} "
            f"has {size} embeddings (vocab_size of its config.json)",
            hint="set model.tokenizer to the tokenizer of the model, or enlarge the model's embeddings and save it "
            "(resize_token_embeddings, save_pretrained)",
        )


def highest_token(model: Model, variables: Mapping[str, str]) -> TokenId | None:
    """Return the token with the highest id that text or renderer may produce; None if tokenizer.json is not here.

    Raises DataError for a tokenizer.json of another form.

    A special token that neither the chat template, the renderer nor the tokenizer's settings name is not produced:
    renderers encode such text in messages as characters. Gemma 3 has one beyond its embeddings.
    """
    name = model.tokenizer or model.name
    path = find_file(name, "tokenizer.json", variables)
    if path is None or (content := _read(path)) is None:
        return None
    settings = _read(find_file(name, "tokenizer_config.json", variables)) or {}
    template = find_file(name, "chat_template.jinja", variables)
    texts = json.dumps(settings.get("chat_template") or "", ensure_ascii=False)
    if template is not None:
        texts += template.read_text("utf-8", errors="replace")
    named = {_text(settings.get(key)) for key in _NAMED_TOKENS}
    named |= set(CHATML_TOKENS) if model.renderer.name == "chatml" else set()
    with decoding("not a tokenizer of package tokenizers", location=path):
        tokens = [
            token
            for token, is_special in (*_vocabulary(content), *_added(content, settings))
            if not is_special or token.text in named or token.text in texts
        ]
    return max(tokens, key=lambda token: token.id, default=None)


def _vocabulary(content: Mapping[str, Any]) -> Iterator[tuple[TokenId, bool]]:
    """Yield the token of the vocabulary with the highest id that is not an added token."""
    added = {entry.get("id") for entry in content.get("added_tokens") or ()}
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, dict):
        pairs = ((text, number) for text, number in vocabulary.items())
    else:
        pairs = ((entry[0], number) for number, entry in enumerate(vocabulary))
    plain = [TokenId(str(text), number) for text, number in pairs if number not in added]
    if plain:
        yield max(plain, key=lambda token: token.id), False


def _added(content: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[tuple[TokenId, bool]]:
    """Yield added tokens, and whether they are special."""
    for entry in content.get("added_tokens") or ():
        yield TokenId(entry["content"], entry["id"]), bool(entry.get("special"))
    for number, entry in (settings.get("added_tokens_decoder") or {}).items():
        yield TokenId(_text(entry), int(number)), bool(entry.get("special"))


def _text(token: Any) -> str:
    """Return the text of a token, which files store as text or as a mapping."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)


def _read(path: Path | None) -> dict[str, Any] | None:
    content = None if path is None else read_json_or_none(path)
    return content if isinstance(content, dict) else None


def _vocab_size(model: ModelConfig) -> int | None:
    config = model.content or {}
    size = (config.get("text_config") or config).get("vocab_size")
    return size if isinstance(size, int) else None
