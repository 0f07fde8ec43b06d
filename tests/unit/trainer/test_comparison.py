"""A family that no test compares is compared with transformers when the trainer starts, and refused if it differs."""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.recipe.load import parse_recipe  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.model import comparison  # noqa: E402
from primerl_hpc.trainer.model.comparison import compare  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from primerl_hpc.trainer.parallel import attention  # noqa: E402
from primerl_hpc.trainer.train_step import build_trainer  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402
from tests.support.one_rank import one_rank_world  # noqa: E402
from tests.support.tiny_models import MORE_FAMILIES, make_family  # noqa: E402

SMALL_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4}
NO_INTERFACE = "does not use transformers' attention interface"
UNCOMPARED: dict[str, tuple[dict[str, Any], str]] = {
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0}, ""),
    "phimoe": ({"num_experts_per_tok": 2, "num_local_experts": 8}, ""),
    "bloom": ({"n_layer": 2, "n_head": 4}, "the trainer computes something else than transformers"),
    "falcon": ({"num_kv_heads": 2, "new_decoder_architecture": True}, NO_INTERFACE),
    "gptj": (SMALL_GPT, NO_INTERFACE),
    "gpt_neo": ({"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, NO_INTERFACE),
    "mamba": ({"state_size": 8}, "has linear_attention layers, which this version does not train"),
    "falcon_mamba": ({"state_size": 8}, "has linear_attention layers, which this version does not train"),
    "falcon_h1": (
        {
            "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_ssm": 64,
            "mamba_chunk_size": 8, "head_dim": 8,
        },
        "has hybrid layers, which this version does not train",
    ),
}  # fmt: skip
"""Families without a row in docs/models.md: shape, and why they are refused; empty: they are trained."""


@pytest.fixture(scope="module")
def rank() -> Any:
    with one_rank_world() as world:
        yield world


@pytest.mark.parametrize("dtype", list(comparison.LIMITS))
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma2", "gemma3"])
def test_a_family_that_equals_transformers_is_trained_and_named(
    rank: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str, dtype: str
) -> None:
    make_family(family, tmp_path)
    recipe = small_sft(tmp_path, param_dtype=dtype)
    policy = build_policy(recipe, tmp_path, rank)
    with caplog.at_level(logging.INFO):
        compare(policy, recipe)
    assert f"family {family}, which no test compares, equals transformers: log-probabilities" in caplog.text
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_samples_that_see_each_other_are_refused_with_figures(
    rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a family whose attention would not read the packing."""
    make_family("qwen3", tmp_path)
    recipe = small_sft(tmp_path)
    policy = build_policy(recipe, tmp_path, rank)
    plain = attention.by_sample
    monkeypatch.setattr(
        attention,
        "by_sample",
        lambda query, key, value, lengths, *rest: plain(query, key, value, [63], *rest),
    )
    with pytest.raises(
        ConfigError, match=r"else than transformers for family qwen3: .* differ by \d.*expected"
    ):
        compare(policy, recipe)


def test_a_trainer_compares_what_no_test_compares_and_the_recipe_does_not_accept(
    rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XGLM counts positions along the row, BioGPT in each sample."""
    shape = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
    monkeypatch.setitem(MORE_FAMILIES, "xglm", shape)
    monkeypatch.setitem(MORE_FAMILIES, "biogpt", {})
    recipes = {family: small_sft(make_family(family, tmp_path / family)) for family in ("xglm", "biogpt")}
    watchdog = Watchdog(RunDir(tmp_path), "sft-0", rank=0, size=1, timeout_s=1000)
    build_trainer(recipes["biogpt"], recipes["biogpt"].model.name, rank, watchdog)
    name = recipes["xglm"].model.name
    with pytest.raises(ConfigError, match="something else than transformers for family xglm"):
        build_trainer(recipes["xglm"], name, rank, watchdog)
    accepted = recipes["xglm"].model_dump() | {"model": {"name": name, "accept_uncompared": True}}
    build_trainer(parse_recipe(accepted), name, rank, watchdog)


def test_a_family_without_the_attention_interface_is_refused(rank: Any, tmp_path: Path) -> None:
    folder = tmp_path / "gptj"
    AutoConfig.for_model("gptj", n_embd=32, n_layer=1, n_head=4, rotary_dim=8).save_pretrained(folder)
    with pytest.raises(ConfigError, match="GPTJConfig does not use transformers' attention interface"):
        build_policy(small_sft(folder), folder, rank, may_be_random=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", UNCOMPARED)
def test_other_families_are_trained_after_the_comparison_or_refused(
    rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    shape, refusal = UNCOMPARED[family]
    monkeypatch.setitem(MORE_FAMILIES, family, shape)
    recipe = small_sft(make_family(family, tmp_path))
    with pytest.raises(ConfigError, match=re.escape(refusal)) if refusal else nullcontext():
        compare(build_policy(recipe, tmp_path, rank), recipe)
