"""Heads of layers with state among the ranks of a row, in the shapes of released models: nothing is computed.

Tests of what ranks compute are in tests/e2e/test_parallel.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from primerl_hpc.common.model_families import FAMILIES  # noqa: E402
from primerl_hpc.recipe.schema.training import LoRA  # noqa: E402
from primerl_hpc.trainer.model.families import decoder_blocks  # noqa: E402
from primerl_hpc.trainer.model.lora import attach_adapters  # noqa: E402
from primerl_hpc.trainer.model.recurrent.by_sample import run_by_sample, state_layer  # noqa: E402
from primerl_hpc.trainer.model.recurrent.shared_rows import HeadPart, channels_of, heads_of  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, make_packing  # noqa: E402
from tests.support.tiny_models import COMMON, MORE_FAMILIES  # noqa: E402

DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
MAMBA = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_n_heads": 128}
RELEASED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**DELTA, "linear_num_value_heads": 48},  # Qwen3.5-27B
    "qwen3_5_moe_text": {**DELTA, "linear_num_value_heads": 32},  # Qwen3.5-35B-A3B
    "qwen3_next": {**DELTA, "linear_num_value_heads": 32},  # Qwen3-Next-80B-A3B
    "nemotron_h": {
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
    },  # Nano 30B
    "granitemoehybrid": {**MAMBA, "hidden_size": 4096},  # Granite-4.0-H-Small
    "bamba": {**MAMBA, "hidden_size": 4096},  # Bamba-9B
    "lfm2": {"hidden_size": 2048},  # LFM2-1.2B
    "lfm2_moe": {"hidden_size": 2048},  # LFM2-8B-A1B
}


def layer_of(family: str) -> Any:
    config = AutoConfig.for_model(family, **COMMON | MORE_FAMILIES[family] | RELEASED[family])
    with torch.device("meta"):
        blocks = decoder_blocks(AutoModelForCausalLM.from_config(config))
    return next(layer for block in blocks if (layer := state_layer(block)) is not None)


STATE = {name for name, family in FAMILIES.items() if family.has_state and family.shares_rows}


@pytest.mark.parametrize("family", sorted(STATE & MORE_FAMILIES.keys()))
def test_heads_of_released_models_are_divided_among_up_to_16_ranks(family: str) -> None:
    layer = layer_of(family)
    heads = heads_of(layer)
    widths = {name: sum(part.count * part.width for part in parts) for name, parts in heads.inputs.items()}
    assert widths == {name: getattr(layer, name).out_features for name in heads.inputs}
    assert not heads.divide(3)  # every rank then computes the complete layer
    for size in (2, 4, 8, 16):
        assert heads.divide(size)
        for parts in (heads.channels, *heads.inputs.values()):
            ranks = [channels_of(parts, rank, size) for rank in range(size)]
            held = Counter(channel for channels in ranks for channel in channels)
            assert sorted(held) == list(range(sum(part.count * part.width for part in parts)))
            copies = {max(1, size // part.count) if part.is_shared else 1 for part in parts}
            assert set(held.values()) == copies


def test_ranks_with_heads_of_one_group_share_it() -> None:
    heads, groups = HeadPart(8, 2), HeadPart(2, 3, is_shared=True)
    assert [list(heads.of(rank, 4)) for rank in range(4)] == [
        list(range(4 * rank, 4 * rank + 4)) for rank in range(4)
    ]
    assert [list(groups.of(rank, 4)) for rank in range(4)] == [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2
    assert not heads.divides(16) and not groups.divides(3)


def test_a_kernel_that_includes_the_output_projection_is_not_used_with_an_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.nemotron_h import modeling_nemotron_h

    calls: list[str] = []
    # the place of the package's kernel, which is not installed here; None: not computed
    monkeypatch.setattr(
        modeling_nemotron_h, "mamba2_split_conv1d_scan_combined", lambda *_, **__: calls.append("fused")
    )
    for targets in (("in_proj",), ("in_proj", "out_proj")):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("nemotron_h", **COMMON | MORE_FAMILIES["nemotron_h"])
        ).train()
        blocks = decoder_blocks(model)
        run_by_sample(blocks)
        attach_adapters(model, blocks, LoRA(rank=2, target_modules=targets))
        layer: Any = state_layer(blocks[0])
        layer.packing_of_block = make_packing(torch.arange(5)[None], Context(), "sdpa")
        layer(hidden_states=torch.randn(1, 5, COMMON["hidden_size"]))
        assert calls == ["fused"]  # the first model's
