"""Benchmark mode: comparison of its formulas with independent counts, its input checks, its summary."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402
from transformers import (  # noqa: E402
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from primerl_hpc.common.errors import ConfigError, ExitCode  # noqa: E402
from primerl_hpc.launch.bench.tables import trainer_table  # noqa: E402
from primerl_hpc.plan.bench_plans import BenchRequest, for_bench  # noqa: E402
from primerl_hpc.plan.predict.flops import visible_pairs  # noqa: E402
from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.trainer.batch import make_batch  # noqa: E402
from primerl_hpc.trainer.bench import collective_seconds, summarize  # noqa: E402
from primerl_hpc.trainer.model.policy import Policy  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing  # noqa: E402
from primerl_hpc.trainer.perf import FlopCounter, peak_flops_of, windows_of  # noqa: E402
from tests.support.helpers import random_row  # noqa: E402
from tests.unit.cli.test_cli import primerl  # noqa: E402
from tools.bench.machine import QWEN3_600M  # noqa: E402

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def counter_of(model: torch.nn.Module) -> FlopCounter:
    return FlopCounter(Policy(model, chunk_tokens=64, attention="sdpa", context=Context()))


def rows(*lengths: int) -> list:
    return [random_row(np.random.default_rng(0), lengths)]


LATENT = {  # queries and keys of 24 + 8, values of 12; head_dim is 8
    **{key: SHAPE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 28,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(
    ("make", "config", "rotary"),
    [(Qwen3ForCausalLM, Qwen3Config(**SHAPE), 16), (DeepseekV3ForCausalLM, DeepseekV3Config(**LATENT), 8)],
    ids=["qwen3", "deepseek_v3"],
)
def test_flop_counts_equal_those_of_torch_without_causal_attention(make, config, rotary):
    """torch counts all products of the full attention matrix, without causal masking: twice our count."""
    config._attn_implementation = "eager"
    model = make(config)
    lengths = (7, 20)
    counted = 0
    for length in lengths:
        ids = torch.zeros(1, length, dtype=torch.long)
        with FlopCounterMode(display=False) as mode:
            model(ids, use_cache=False).logits.sum().backward()
        counted += mode.get_total_flops()
    counter = counter_of(model)
    angles = rotary * sum(lengths)  # a product too: half as many frequencies × positions
    made = rows(*lengths)
    made[0].ce_weights = np.ones(sum(lengths), np.float32)
    dense = counter.flops.blocks * sum(lengths) + counter.flops.head * (sum(lengths) - len(lengths))
    attention = counter(made) - dense
    assert dense + counter.flops.head * len(lengths) + 2 * attention == counted - angles


def test_the_head_counts_only_for_predicted_tokens():
    counter = counter_of(Qwen3ForCausalLM(Qwen3Config(**SHAPE)))
    prompts, replies = rows(7, 20), rows(7, 20)
    prompts[0].loss_mask[:] = False
    num_replied = len(make_batch(replies, torch.device("cpu")).predictors)
    assert num_replied == 4 + 10
    assert counter(replies) - counter(prompts) == 6 * 97 * 32 * num_replied


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (GptOssConfig(num_hidden_layers=4, sliding_window=8), [8, None, 8, None]),
        (MistralConfig(num_hidden_layers=2, sliding_window=8), [8, 8]),
        (Qwen3Config(num_hidden_layers=2, sliding_window=8), [None, None]),  # unless use_sliding_window
    ],
)
def test_a_sliding_window_layer_counts_only_keys_in_its_window(config, windows):
    assert windows_of(config) == Counter(windows)
    lengths = np.array([5.0, 20.0, 64.0])
    for window in set(windows):
        positions = torch.cat([torch.arange(int(each)) for each in lengths])[None]
        packing = Packing(Context(), positions)
        seen = int(packing.visible(packing.own, packing.own, window).sum())
        # the formula has half of each query's own key
        halves = sum(min(each, window or each) for each in lengths) / 2
        assert visible_pairs(lengths, window) == seen - halves


def test_a_rank_without_rows_counts_zero_flop():
    assert counter_of(Qwen3ForCausalLM(Qwen3Config(**SHAPE)))([]) == 0


def test_only_selected_experts_are_counted():
    config = Qwen3MoeConfig(**SHAPE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
    h, d, a, g, m = 32, 16, 4, 2, 24
    layer = 2 * h * a * d + 2 * h * g * d + 3 * h * m * 2 + h * 8
    counter = counter_of(Qwen3MoeForCausalLM(config))
    assert (counter.flops.blocks, counter.flops.head) == (6 * 3 * layer, 6 * 97 * h)


def test_the_figure_of_prime_rl_follows_its_formula():
    """Its published SFT baseline: 26,005 tokens/s at 8,192 tokens on an H100 are 16.81 % MFU of 989 TFLOP/s."""
    with torch.device("meta"):
        counter = counter_of(Qwen3ForCausalLM(Qwen3Config(**QWEN3_600M)))
    assert 26_005 * counter.prime_rl(1, 8192) / 989e12 == pytest.approx(0.1681, abs=5e-5)
    # by hand: 440,401,920 in blocks, 155,582,464 in the head; 6·28·16·128·8,192 for causal attention with the true
    # head_dim
    assert (counter.flops.blocks, counter.flops.head) == (6 * 440_401_920, 6 * 155_582_464)
    assert (
        counter(rows(8192)) / 8192 == counter.flops.blocks + counter.flops.head / 2 + 6 * 28 * 16 * 128 * 8192
    )


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_peak_tflops_are_found_by_the_device_names_of_torch(name, teraflops):
    assert peak_flops_of(name) == (None if teraflops is None else teraflops * 1e12)


def test_lengths_are_constant_uniform_or_cyclic():
    assert BenchRequest(lengths="64").draw(3, seed=0) == [64, 64, 64]
    assert BenchRequest(lengths="8,16,32").draw(4, seed=0) == [8, 16, 32, 8]
    drawn = BenchRequest(lengths="10-20").draw(500, seed=0)
    assert set(drawn) == set(range(10, 21)) and drawn == BenchRequest(lengths="10-20").draw(500, seed=0)
    assert drawn != BenchRequest(lengths="10-20").draw(500, seed=1)


@pytest.mark.parametrize("text", ["", "many", "20-10", "1", "8,,8", "8-16-32", "-8", "8, 16"])
def test_lengths_of_unknown_form_are_refused(text):
    with pytest.raises(ValidationError, match="512-4096"):
        BenchRequest(lengths=text)


def test_a_sample_longer_than_a_row_is_refused_and_the_recipe_loses_data_saves_export_and_tracking():
    recipe = Recipe.model_validate(
        {
            "kind": "sft",
            "name": "x",
            "model": {"name": "m"},
            "seq_len": 64,
            "max_steps": 1000,
            "sft": {"data": {"path": "mine.jsonl"}, "validation": {"data": {"path": "mine.jsonl"}}},
            "checkpoint": {"interval": 3, "keep_interval": 9},
            "after": {"export": {"to": "out"}},
            "tracking": {"wandb": {}},
        }
    )
    with pytest.raises(ConfigError, match="up to 65 tokens do not fit into rows of seq_len 64"):
        for_bench(recipe, BenchRequest(lengths="8,65"))
    found = for_bench(recipe, BenchRequest(lengths="64", warmup=1, steps=4, trace="/t", save_every=2))
    assert found.max_steps == 6  # one more is traced
    assert (found.checkpoint.interval, found.checkpoint.at_end) == (2, False)
    assert found.after is None and found.tracking.wandb is None
    assert found.sft.validation is None and found.sft.sources[0].path == "synthetic"


STEPS = [
    {"tokens": 100, "flops": 4e12, "flops_prime_rl": 8e12, "forward_backward": 1.5, "optimizer": 0.5, "step": 4.0},
    {"tokens": 100, "flops": 4e12, "flops_prime_rl": 8e12, "forward_backward": 0.5, "optimizer": 0.5, "step": 2.0},
    {"tokens": 100, "flops": 4e12, "flops_prime_rl": 8e12, "forward_backward": 3.0, "optimizer": 1.0, "step": 5.0},
    {"tokens": 100, "flops": 4e12, "flops_prime_rl": 8e12, "forward_backward": 9.0, "optimizer": 1.0, "step": 30.0, "save": 19.0},  # noqa: E501
]  # fmt: skip


def test_rates_cover_measured_steps_and_saves_are_separate():
    found = summarize([dict(step) for step in STEPS], 2, 10e12)
    assert found["rates"]["tokens_per_s"] == {"median": 25.0, "min": 20.0, "max": 50.0}
    assert found["rates"]["tokens_per_s_training_per_rank"]["median"] == 25.0
    assert found["rates"]["mfu"]["median"] == 4e12 / 2.0 / 20e12
    assert found["rates"]["mfu_prime_rl"]["median"] == 8e12 / 2.0 / 20e12
    assert found["seconds"]["save"]["median"] == 19.0 and found["seconds"]["step_with_save"]["max"] == 30.0
    assert "mfu" not in summarize([dict(step) for step in STEPS], 2, None)["rates"]


def test_the_table_fits_80_columns_and_explains_a_missing_mfu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("deep" * 20)
    deep.mkdir()
    monkeypatch.chdir(deep)
    result = summarize([dict(step) for step in STEPS], 2, None) | {
        "loop": "rl",
        "model": "Qwen3MoeForCausalLM",
        "parameters": 30_532_122_624,
        "weights": "random",
        "ranks": 64,
        "device": "NVIDIA H100 80GB HBM3",
        "versions": {"torch": "2.13.0", "transformers": "5.17.0"},
        "seq_len": 131_072,
        "request": BenchRequest(lengths="512-131072", trace=str(deep / "trace")).model_dump(),
        "peak_memory_gib": {"resident": 12.3, "allocated": 60.0, "reserved": 71.2},
        "collectives_s": {"all_gather": 0.1, "reduce_scatter": 0.2, "all_reduce": 0.001},
    }
    lines = trainer_table(result)
    assert max(map(len, lines)) <= 80
    assert "traces: trace" in lines and any("--peak-tflops" in line for line in lines)
    assert "".join(lines).count("MFU (") == 0 and lines[0].startswith("rl · Qwen3MoeForCausalLM, 30.5 B")


def test_collectives_of_a_trace_are_summed_by_kind():
    events = [
        ("gloo:all_gather", 1.0),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0.5),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(…)", 2.0),
        ("nccl:_all_gather_base", 9.0),  # the call on the host, not the kernel
        ("aten::mm", 9.0),
    ]
    assert collective_seconds(events) == {"all_gather": 1.5, "reduce_scatter": 2.0}


RECIPE = """\
kind: rl
name: small
model: {name: ./model}
seq_len: 64
max_steps: 3
layout: {trainer: {ranks: 1}}
environments: {train: [{id: reverse-text}]}
rollouts: {sampling: {max_tokens: 8}}
"""


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ("bench", "trainer", "r.yaml", "--rate", "3"),
            ExitCode.USAGE,
            "--rate is for inference, not for trainer",
        ),
        (
            ("bench", "loop", "r.yaml", "--index", "1"),
            ExitCode.USAGE,
            "--index is for trainer, sft, not for loop",
        ),
        (("bench", "trainer", "r.yaml"), ExitCode.CONFIG, "--profile"),
        (("bench", "trainer", "r.yaml", "-p", "local", "--lengths", "x"), ExitCode.USAGE, "512-4096"),
        (
            ("bench", "trainer", "r.yaml", "-p", "local", "--lengths", "65"),
            ExitCode.CONFIG,
            "rows of seq_len 64",
        ),
        (("bench", "sft", "r.yaml", "-p", "local"), ExitCode.CONFIG, "primerl-hpc bench trainer"),
        (("bench", "trainer", "no.yaml", "-p", "local"), ExitCode.NOT_FOUND, "no.yaml"),
        (
            ("bench", "trainer", "r.yaml", "-p", "local", "--set", "model.name=./other"),
            ExitCode.NOT_FOUND,
            "model folder",
        ),
        (
            ("bench", "trainer", "r.yaml", "-p", "local", "--set", "layout.trainer.ranks=5"),
            ExitCode.CONFIG,
            "has 4",
        ),
        (
            ("bench", "trainer", "r.yaml", "-p", "h100x64", "--set", "layout.trainer.ranks=16"),
            ExitCode.UNAVAILABLE,
            "SLURM is not installed on this machine",
        ),
    ],
)
def test_invalid_input_is_one_sentence_and_leaves_no_files(tmp_path: Path, words, code, says):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "r.yaml").write_text(RECIPE)
    done = primerl(*words, cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == code and says in done.stderr and done.stdout == "", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "r.yaml"]
