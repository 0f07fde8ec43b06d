"""No family trains with its configuration's dropout: log-probabilities would not be those of the served model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, PreTrainedConfig  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.trainer.batch import ForwardInputs  # noqa: E402
from primerl_hpc.trainer.model.policy import Policy, build_policy  # noqa: E402
from tests.support.helpers import small_rl, small_sft  # noqa: E402
from tests.support.tiny_models import (  # noqa: E402
    FAMILIES,
    MORE_FAMILIES,
    VISION_FAMILIES,
    make_family,
    make_vision_language,
)

RATE = 0.1
DIFFERENT_RATES = (
    "seed_oss", "phi3", "glm4", "qwen2", "gemma3_text", "mistral", "olmo2", "mixtral", "qwen2_moe", "phi", "gpt_neox",
    "granitemoe", "stablelm",
)  # fmt: skip
"""Families besides `FAMILIES` whose configurations have different rates."""
WITHOUT_RATES = {"ernie4_5", "ernie4_5_moe", "lfm2", "lfm2_moe"}
"""Families whose configurations have no rate."""
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])


def make_model(family: str, folder: Path) -> Path:
    if family in VISION_FAMILIES:
        return make_vision_language(folder, family)
    return make_family(family, folder)


def numbers(holder: Any) -> Iterator[str]:
    """Return attributes that are rates of dropout or noise, by name."""
    for name, value in list(vars(holder).items()):
        if ("drop" in name or "jitter" in name) and isinstance(value, int | float) and value is not False:
            yield name


def set_rates(config: PreTrainedConfig) -> int:
    """Set all rates in the config and the configs in it to `RATE`. Returns their number."""
    names = list(numbers(config))
    for name in names:
        setattr(config, name, RATE)
    parts = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return len(names) + sum(set_rates(part) for part in parts)


def logprobs_of(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    assert policy.training and policy.hf.training
    return policy(
        ForwardInputs(
            input_ids=ids, position_ids=POSITIONS, predictors=torch.arange(15), targets=ids.flatten()[1:]
        )
    )[0].detach()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "rl") for family in (*FAMILIES, *VISION_FAMILIES)),
        ("phi3", "sft"),
        *(
            pytest.param(family, kind, marks=pytest.mark.slow)
            for kind, families in (
                ("rl", MORE_FAMILIES),
                ("sft", (*FAMILIES, *(set(DIFFERENT_RATES) - {"phi3"}), *VISION_FAMILIES)),
            )
            for family in sorted(families)
        ),
    ],
)
def test_dropout_of_a_models_config_is_not_active(one_rank, tmp_path, family, kind):
    """Neither in modules nor in the rates that the model's code reads at run time."""
    model = make_model(family, tmp_path)
    recipe = small_rl(model) if kind == "rl" else small_sft(model)
    torch.manual_seed(0)
    ids = torch.randint(4, 90, POSITIONS.shape)
    expected = logprobs_of(build_policy(recipe, model, one_rank), ids)
    config = AutoConfig.from_pretrained(model)
    assert bool(set_rates(config)) == (family not in WITHOUT_RATES)
    config.save_pretrained(model)
    policy = build_policy(recipe, model, one_rank)
    assert torch.equal(logprobs_of(policy, ids), logprobs_of(policy, ids))
    assert torch.equal(logprobs_of(policy, ids), expected)
    for path, module in policy.hf.named_modules():
        assert not isinstance(module, torch.nn.Dropout) or module.p == 0, path
        assert not [name for name in numbers(module) if getattr(module, name)], path
    for holder in (policy.hf.config, policy.hf.config.get_text_config()):
        assert not [name for name in numbers(holder) if getattr(holder, name)]


@pytest.mark.parametrize("family", ["seed_oss", "phi3"])
def test_sft_keeps_the_dropout_of_the_model_where_it_is_asked_to(one_rank, tmp_path, family):
    model = make_family(family, tmp_path, attention_dropout=RATE)
    plain = small_sft(model)
    assert plain.sft is not None and not plain.sft.model_dropout
    recipe = plain.model_copy(update={"sft": plain.sft.model_copy(update={"model_dropout": True})})
    policy = build_policy(recipe, model, one_rank)
    ids = torch.randint(4, 90, POSITIONS.shape)
    assert not torch.equal(logprobs_of(policy, ids), logprobs_of(policy, ids))


def test_dropout_that_an_attention_does_not_compute_is_refused(one_rank, tmp_path):
    model = make_family("gpt_oss", tmp_path, attention_dropout=RATE)
    plain = small_sft(model)
    recipe = plain.model_copy(update={"sft": plain.sft.model_copy(update={"model_dropout": True})})
    policy = build_policy(recipe, model, one_rank)
    with pytest.raises(
        ConfigError, match=r"attention has dropout 0.1, which eager and ring attention do not"
    ):
        logprobs_of(policy, torch.randint(4, 90, POSITIONS.shape))
