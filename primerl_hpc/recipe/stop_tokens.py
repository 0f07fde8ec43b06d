"""Tokens at which an engine ends a reply: those of the renderer, and those of the model's own files.

vLLM also stops at the tokenizer's end-of-sequence token and at the tokens in ``generation_config.json``, which a
renderer may not know: a base model with ChatML stops at ``<|endoftext|>`` as well as at ``<|im_end|>``.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from primerl_hpc.common.files import read_json_or_none

_GENERATION_CONFIG = "generation_config.json"


def engine_stop_ids(tokenizer: Any) -> list[int]:
    """Return the ids at which an engine with the files of this tokenizer ends a reply without being asked."""
    ids = [tokenizer.eos_token_id, *_configured(str(getattr(tokenizer, "name_or_path", "")))]
    return list(dict.fromkeys(token for token in ids if isinstance(token, int)))


def with_engine_stops(tokenizer: Any, own: list[int]) -> list[int]:
    """Return a renderer's ``own`` stop tokens, first, and the engine's."""
    return list(dict.fromkeys([*own, *engine_stop_ids(tokenizer)]))


def without_final_stops(token_ids: list[int], stops: list[int]) -> list[int]:
    """Return a reply without the stop tokens at its end."""
    end = len(token_ids)
    while end and token_ids[end - 1] in stops:
        end -= 1
    return list(token_ids[:end])


@cache
def _configured(name: str) -> tuple[int, ...]:
    """Return ``eos_token_id`` of the generation settings in a model folder, or in the hub cache."""
    path = Path(name) / _GENERATION_CONFIG
    if name.count("/") == 1 and not path.is_file():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, _GENERATION_CONFIG)
        path = Path(cached) if isinstance(cached, str) else path
    content = read_json_or_none(path) if name else None
    ids = content.get("eos_token_id") if isinstance(content, dict) else None
    return tuple(token for token in (ids if isinstance(ids, list) else [ids]) if isinstance(token, int))
