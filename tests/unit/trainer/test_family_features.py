"""Families of docs/models.md with adapters, as PEFT computes them, and in FP8, against bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from primerl_hpc.recipe.schema.training import LoRA
from primerl_hpc.trainer.fp8.products import format_of
from primerl_hpc.trainer.model.policy import build_policy
from tests.support.helpers import small_sft
from tests.support.tiny_models import FAMILIES, MORE_FAMILIES, make_family
from tests.unit.trainer.test_adapter_format import assert_peft_agrees
from tests.unit.trainer.test_fp8 import fp8_recipe, gradients

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank")]

SINGLE = {name for name in FAMILIES | MORE_FAMILIES if "/" not in name}
JOINED_EXPERTS = {"gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared"}
"""Families whose files hold all experts of a layer in one tensor, which no adapter format supports."""
WITHOUT_PEFT = {
    "gpt2": "its projections are no linear layers", "gpt_bigcode": "no name of its projections is known",
    "jamba": "another result", "nemotron_h": "PEFT refuses to adapt out_proj of Mamba layers",
}  # fmt: skip
ADAPTED = SINGLE - JOINED_EXPERTS - WITHOUT_PEFT.keys()
FIXED_SIZES = {"bamba", "granitemoehybrid", "gemma4_text"}
"""Families whose tiny models cannot be made wider by the same few keys."""
WITHOUT_LINEAR = {"gpt2"}
IN_FP8 = SINGLE - FIXED_SIZES - WITHOUT_LINEAR
EVERY_EXPERT = {
    "num_experts_per_tok": 8, "moe_k": 8, "moe_topk": 8, "top_k_experts": 8,
}  # fmt: skip
"""Every token uses all experts: with another rounding, a router may choose other ones."""


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize("family", sorted(ADAPTED))
def test_peft_loads_and_merges_the_adapters_of_a_family(tmp_path: Path, family: str) -> None:
    assert_peft_agrees(tmp_path, family, LoRA(rank=8, alpha=12.0, dropout=0.1, target_modules="auto"))


def wide(config: dict[str, Any]) -> dict[str, Any]:
    """Return changes that make the matrices of a tiny model multiples of 32, and each token use all experts."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "moe_intermediate_size": 32}
    sizes |= {"shared_expert_intermediate_size": 32, "shared_intermediate_size": 32}
    always = ("hidden_size", "intermediate_size")
    counts = [
        config[key]
        for key in ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        if key in config
    ]
    return {key: value for key, value in sizes.items() if key in config or key in always} | {
        key: counts[0] for key in EVERY_EXPERT if key in config and counts
    }


@pytest.mark.parametrize("family", sorted(IN_FP8))
def test_a_family_in_fp8_has_the_gradients_of_bfloat16_but_for_rounding(
    one_rank: Any, tmp_path: Path, family: str
) -> None:
    model = make_family(family, tmp_path, **wide((FAMILIES | MORE_FAMILIES)[family]))
    policies = [
        build_policy(fp8_recipe(small_sft(model), mode), model, one_rank) for mode in ("none", "mxfp8")
    ]
    assert any(format_of(module) for module in policies[1].modules())
    head = policies[0].hf.get_output_embeddings().weight
    name = next(name for name, value in policies[0].named_parameters() if value is head)
    expected, found = (gradients(policy)[name] for policy in policies)
    assert 0.001 < (found - expected).norm() / expected.norm() < 0.4
