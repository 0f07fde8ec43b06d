"""Tokenizers of an environment server: loaded once, and without torch, which only models need.

    policy, judge = load_tokenizers(recipe)     # in the environment server, before verifiers serves

transformers imports torch if it is installed: 2 s of CPU time and 300 MiB for a tokenizer that uses none of it.
verifiers loads one more tokenizer for each renderer, in a thread, while environments may import torch: it gets a copy.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from primerl_hpc.common.node.imports import without_torch
from primerl_hpc.recipe.renderer import load_tokenizer
from primerl_hpc.recipe.schema.model import Model
from primerl_hpc.recipe.schema.recipe import Recipe


def load_tokenizers(recipe: Recipe) -> tuple[Any | None, Any | None]:
    """Return the tokenizers of policy and judge; verifiers' renderers of the policy get copies of it from then on.

    The policy's is None if an external model or a teacher samples, the judge's if it is not a model of the run.
    """
    is_sampled = not recipe.is_external and all(one.samples_from == "policy" for one in recipe.algorithms)
    policy = recipe.model if is_sampled else None
    judge = recipe.judge.model if recipe.judge is not None and recipe.judge.base_url is None else None
    if not any(_has_own_code(model) for model in (policy, judge) if model is not None):
        with contextlib.suppress(ImportError), without_torch():  # a tokenizer may need torch nevertheless
            return _load(policy, judge)
    return _load(policy, judge)


def _load(policy: Model | None, judge: Model | None) -> tuple[Any | None, Any | None]:
    if policy is not None:
        share_tokenizer(policy.tokenizer or policy.name)
    return (
        None if policy is None else load_tokenizer(policy),
        None if judge is None else load_tokenizer(judge),
    )


def _has_own_code(model: Model) -> bool:
    """True if the tokenizer has code of its own, which may use torch."""
    from renderers.base import TRUSTED_REVISIONS

    return model.trust_remote_code or (model.tokenizer or model.name) in TRUSTED_REVISIONS


def share_tokenizer(source: str) -> None:
    """Load the tokenizer as renderers does, and patch renderers to return copies of it.

    A copy, because a renderer changes its tokenizer's state while it encodes.
    """
    from renderers import base

    general = base.load_tokenizer
    loaded = general(source)

    def load(name: str) -> Any:
        return copy.deepcopy(loaded) if name == source else general(name)

    base.load_tokenizer = load
