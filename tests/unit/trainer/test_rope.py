"""Rope whose frequencies depend on a length: packed documents do not affect each other, and engines' rule applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.recipe.schema.layout import TrainerLayout  # noqa: E402
from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.trainer.model.families import check_rope  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from primerl_hpc.trainer.model.rope import document_lengths  # noqa: E402
from primerl_hpc.trainer.parallel.context import choose_style  # noqa: E402
from tests.support.helpers import small_rl, small_sft  # noqa: E402
from tests.support.packed_rows import make_samples, packed_logprobs, plain_logprobs  # noqa: E402
from tests.support.tiny_models import COMMON, LONGROPE, make_family  # noqa: E402

ORIGINAL = LONGROPE["rope_parameters"]["original_max_position_embeddings"]
LENGTHS = [20, 60, 40, 33, 5]  # of documents; some beyond 32, the original length
DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
}


def recipe_of(
    model: Path, *, kind: str = "sft", seq_len: int = 64, max_model_len: int | str = "auto"
) -> Recipe:
    recipe = small_rl(model) if kind == "rl" else small_sft(model)
    changes = {"seq_len": seq_len, "inference": {"max_model_len": max_model_len}}
    return Recipe.model_validate(recipe.model_dump(mode="json") | changes)


def load(model: Path, **changes: Any):
    config = AutoConfig.from_pretrained(model)
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(model, config=config, attn_implementation="sdpa")


@pytest.mark.parametrize("kind", ["sft", "rl"])
@pytest.mark.parametrize(
    ("seq_len", "max_model_len", "factors"),
    [
        (64, "auto", "long_factor"),
        (64, 32, "short_factor"),
        (32, "auto", "short_factor"),
        (32, 33, "long_factor"),
    ],
)
def test_longrope_has_the_engines_factors_for_every_document(
    one_rank, tmp_path, kind, seq_len, max_model_len, factors
):
    """vLLM: long factors for all positions where max_model_len exceeds the original length, else short ones."""
    model = make_family("phi3", tmp_path, **LONGROPE)
    recipe = recipe_of(model, kind=kind, seq_len=seq_len, max_model_len=max_model_len)
    policy = build_policy(recipe, model, one_rank)
    made = make_samples([length for length in LENGTHS if length <= seq_len])
    alone = [packed_logprobs(policy, [[document]])[0] for document in made]
    packed = packed_logprobs(policy, [made[:2], made[2:]])
    rope = LONGROPE["rope_parameters"]
    only = rope | {"short_factor": rope[factors], "long_factor": rope[factors]}
    hf = load(model, rope_parameters=only)
    for document, one, together in zip(made, alone, packed, strict=True):
        torch.testing.assert_close(together, one, rtol=0, atol=1e-5)
        torch.testing.assert_close(one, plain_logprobs(hf, document), rtol=0, atol=1e-5)


def test_dynamic_rope_of_sft_goes_by_each_documents_own_length(one_rank, tmp_path):
    model = make_family("llama", tmp_path, **DYNAMIC)
    policy = build_policy(recipe_of(model), model, one_rank)
    made = make_samples(LENGTHS)
    packed = packed_logprobs(policy, [made[:2], made[2:]])
    again = packed_logprobs(policy, [made[:2], made[2:]])
    for document, together, second in zip(made, packed, again, strict=True):
        assert torch.equal(together, second)
        # a model for each: transformers keeps the frequencies of the longest so far
        torch.testing.assert_close(together, plain_logprobs(load(model), document), rtol=0, atol=1e-5)


def test_dynamic_rope_within_its_length_is_trained_by_rl(one_rank, tmp_path):
    model = make_family("llama", tmp_path, **DYNAMIC)
    policy = build_policy(recipe_of(model, kind="rl", seq_len=32), model, one_rank)
    made = make_samples([20, 32, 7])
    hf = load(model)
    for document, together in zip(made, packed_logprobs(policy, [made]), strict=True):
        torch.testing.assert_close(together, plain_logprobs(hf, document), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [{"seq_len": 33}, {"seq_len": 32, "max_model_len": 40}])
def test_dynamic_rope_beyond_its_length_is_refused_in_rl(one_rank, tmp_path, lengths):
    model = make_family("llama", tmp_path, **DYNAMIC)
    with pytest.raises(ConfigError, match="dynamic rope, which vLLM does not scale beyond 32 positions"):
        build_policy(recipe_of(model, kind="rl", **lengths), model, one_rank)


def test_longrope_with_scales_of_its_own_is_refused():
    rope = LONGROPE["rope_parameters"] | {"short_mscale": 1.2, "long_mscale": 1.2}
    config = AutoConfig.for_model("phimoe", max_position_embeddings=128, rope_parameters=rope)
    with pytest.raises(ConfigError, match="longrope with its own scales"):
        check_rope(config, recipe_of(Path("org/phimoe")))


def test_ranks_share_rows_of_a_model_with_longrope():
    config = AutoConfig.for_model("phi3", **COMMON | LONGROPE)
    assert choose_style(TrainerLayout(), config, 2) == "ulysses"


def test_every_token_knows_the_length_of_its_document():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]])
    assert document_lengths(positions).tolist() == [[3, 3, 3, 2, 2, 1, 1], [7] * 7]
