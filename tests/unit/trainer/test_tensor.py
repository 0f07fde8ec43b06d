"""Tensor parallelism: plans of families, degrees, parts. Layouts are compared in ``tests/e2e/test_parallel.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from transformers import AutoConfig, LlamaConfig

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.trainer.model.families import tensor_plan
from primerl_hpc.trainer.parallel.tensor.divide import check_heads
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup


@pytest.mark.parametrize(
    ("family", "output", "mlp"),
    [
        ("qwen3", "rows", "columns"),
        ("gpt_oss", "rows", None),
        ("deepseek_v3", "rows", "columns"),
        ("olmo2", None, "columns"),
    ],
)
def test_the_plan_of_a_family_is_that_of_transformers_or_ours(family, output, mlp):
    plan = tensor_plan(AutoConfig.for_model(family))
    assert plan.get("self_attn.o_proj") == output
    assert plan.get("mlp.up_proj") == mlp
    assert not any(".experts" in path for path in plan)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "nearest"), [(4, 2, 3, 2), (12, 3, 8, 6), (40, 8, 16, 8)]
)
def test_a_degree_that_does_not_divide_heads_is_refused_with_the_nearest_one(heads, kv_heads, size, nearest):
    config = LlamaConfig(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    with pytest.raises(ConfigError) as caught:
        check_heads(config, size)
    assert f"layout.trainer.tensor_parallel {size} does not divide" in str(caught.value)
    assert str(caught.value).endswith(f"the nearest possible value is {nearest}")
    check_heads(config, nearest)


def test_parts_of_a_tensor_are_those_that_torch_shards():
    parts = [TensorGroup(rank, 4).part_of(6) for rank in range(4)]
    assert [(part.start, part.stop) for part in parts] == [(0, 2), (2, 4), (4, 6), (6, 6)]
