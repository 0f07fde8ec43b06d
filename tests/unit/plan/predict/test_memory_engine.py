"""Memory of an engine's GPU, its capacity, and published logs of vLLM."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.plan.predict.architectures.parts import Matrix, WeightKind
from primerl_hpc.plan.predict.layouts import EngineSetup
from primerl_hpc.plan.predict.memory_engine import default_limits, engine_memory, sequence_bytes, stored_bytes
from primerl_hpc.plan.predict.shape import known_models, known_shape

GIB = 2**30
H100 = 79.2 * GIB
BASE = EngineSetup(gpus=1, tensor_parallel=1, max_model_len=8192)


def memory(name: str, gpu: float = H100, **changes):
    return engine_memory(known_shape(name), replace(BASE, **changes), gpu)


# -- published logs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "dtype", "gib"),
    [
        ("Qwen/Qwen3-30B-A3B", 4, "bfloat16", 14.2474),  # vllm-project/vllm 17327
        ("meta-llama/Llama-3.1-8B", 1, "bfloat16", 14.96),  # 10511; its Llama 3 has the same sizes
        ("meta-llama/Llama-3.1-8B", 2, "bfloat16", 7.48),  # 10511
        ("meta-llama/Llama-3.1-8B", 1, "bfloat16", 14.9889),  # 17122
    ],
)
def test_weights_of_a_gpu_are_those_that_vllm_logged(name, tensor, dtype, gib):
    found = memory(name, tensor_parallel=tensor, gpus=tensor, dtype=dtype)
    assert found.weights.value / GIB == pytest.approx(gib, rel=0.003)


def test_the_kv_cache_of_a_published_log_has_its_number_of_tokens():
    """vllm-project/vllm 21348: 8.11 GiB hold 178,880 tokens with 4 GPUs. 12330: 11.12 GiB hold 5,691 blocks."""
    found = memory(
        "Qwen/Qwen3-235B-A22B-FP8", tensor_parallel=4, gpus=4, dtype="fp8", kv_cache_bytes=int(8.11 * GIB)
    )
    assert found.kv_tokens.value == pytest.approx(178_880, rel=0.015)
    found = memory("meta-llama/Llama-3.1-8B", kv_cache_bytes=int(11.12 * GIB))
    assert found.kv_tokens.value / 16 == pytest.approx(5691, rel=0.002)
    assert found.concurrency(8192).value == pytest.approx(11.12, rel=0.002)


def test_tokens_of_published_engines_are_predicted_within_three_percent():
    """vllm-project/vllm 2031: 7,351 blocks of 16 tokens. 10511: 53.29 GiB for the KV cache, of 71.29 GiB."""
    found = memory(
        "meta-llama/Llama-2-7b-hf",
        79.15 * GIB,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        dtype="float16",
        kv_dtype="float16",
        enforce_eager=True,  # its KV cache was sized before graphs were captured
    )
    assert found.kv_tokens.value == pytest.approx(7351 * 16, rel=0.03)
    found = memory("meta-llama/Llama-3.1-8B", 79.22 * GIB, enforce_eager=True)
    assert found.kv.value / GIB == pytest.approx(53.29, rel=0.03)
    assert found.kv.low / GIB <= 53.29 <= found.kv.high / GIB
    assert found.activations.value / GIB == pytest.approx(1.26, rel=0.02)


# -- layouts ---------------------------------------------------------------------------------------


def test_heads_are_repeated_beyond_their_number():
    shape = known_shape("Qwen/Qwen3-30B-A3B")  # 4 heads of keys and values
    by_tensor = {
        tensor: sequence_bytes(shape, replace(BASE, tensor_parallel=tensor, gpus=tensor)).of(1024)
        for tensor in (1, 2, 4, 8)
    }
    assert by_tensor[1] == 2 * by_tensor[2] == 4 * by_tensor[4]
    assert by_tensor[8] == by_tensor[4]


def test_latent_attention_is_not_split():
    shape = known_shape("deepseek-ai/DeepSeek-V3")
    alone = sequence_bytes(shape, BASE).of(1024)
    assert alone == sequence_bytes(shape, replace(BASE, tensor_parallel=8, gpus=8)).of(1024)
    assert alone == 1024 * 61 * 576 * 2


def test_indexers_are_on_every_gpu_and_fused_queries_are_split():
    sparse = known_shape("deepseek-ai/DeepSeek-V3.2")
    layer = next(layer for layer in sparse.layers if layer.attention.index_dim)
    bare = replace(layer, matrices=tuple(m for m in layer.matrices if ".indexer." not in m.name))
    indexer = 2 * (layer.parameters - bare.parameters)
    eight = replace(BASE, tensor_parallel=8, gpus=8)
    found, without = (
        engine_memory(replace(sparse, layers=(each,)), eight, H100).weights.value for each in (layer, bare)
    )
    assert found - without == pytest.approx(indexer)
    fused = Matrix("self_attn.qkv_proj", WeightKind.ATTENTION, 64, 96)
    one = replace(bare, matrices=(fused,), vectors=())
    weights = engine_memory(replace(sparse, layers=(one,), vocab=1), eight, H100).weights
    assert weights.inputs["blocks"] == 2 * 64 * 96 / 8


def test_windows_bound_what_their_layers_keep():
    shape = known_shape("openai/gpt-oss-20b")
    each = sequence_bytes(shape, BASE)
    per_layer = 8 * 2 * 64 * 2
    assert each.of(64) == 24 * per_layer * 64
    assert each.of(8192) == 12 * per_layer * 8192 + 12 * per_layer * (128 + 16)


def test_linear_attention_needs_a_state_of_constant_size():
    each = sequence_bytes(known_shape("Qwen/Qwen3.5-27B"), BASE)
    assert each.state == 48 * (48 * 128 * 128 * 4 + (2 * 16 * 128 + 48 * 128) * 3 * 2)
    assert each.of(2048) - each.of(1024) == 1024 * 16 * 2 * 4 * 256 * 2


def test_quantized_weights_include_scales_and_leave_the_ends_in_bf16():
    assert stored_bytes("fp8") == pytest.approx(1.000244, abs=1e-6)
    full = memory("openai/gpt-oss-120b", 192 * GIB)
    packed = memory("openai/gpt-oss-120b", 192 * GIB, dtype="fp4")
    # its repository has 60.8 GiB of weights (model card: the 120b model fits on one GPU of 80 GB)
    assert packed.weights.value / GIB == pytest.approx(60.8, rel=0.02)
    assert full.weights.value == pytest.approx(2 * known_shape("openai/gpt-oss-120b").total, rel=1e-3)


def test_a_model_that_leaves_no_space_does_not_fit():
    found = memory("meta-llama/Llama-3.1-70B")
    assert found.kv.value == 0
    assert not found.fits
    assert memory("meta-llama/Llama-3.1-70B", tensor_parallel=4, gpus=4).fits
    long = memory("Qwen/Qwen3-32B", max_model_len=131_072)
    assert long.kv.value > 0
    assert not long.fits


def test_limits_are_vllms_defaults_for_the_gpu():
    assert default_limits(178 * GIB, "B200") == (1024, 16_384)
    assert default_limits(H100, "H100-SXM") == (1024, 8192)
    assert default_limits(79.2 * GIB, "A100-SXM-80GB") == (256, 2048)
    assert default_limits(44 * GIB, "L40S") == (256, 2048)


def test_adapters_and_experts_over_gpus_change_the_weights():
    name = "Qwen/Qwen3-30B-A3B"
    shape, alone = known_shape(name), memory(name)
    with_adapter = memory(name, max_loras=1, lora_rank=16)
    assert with_adapter.weights.value - alone.weights.value == 2 * shape.adapter_parameters(16)
    spread = memory(name, data_parallel=8, gpus=8, expert_parallel=8)
    experts = sum(number * layer.expert_parameters for layer, number in shape.groups)
    assert alone.weights.value - spread.weights.value == pytest.approx(2 * experts * 7 / 8)


def test_concurrency_is_bounded_by_the_setting_and_counts_all_data_parallel_ranks():
    assert memory("Qwen/Qwen3-0.6B").concurrency(128).value == BASE.max_num_seqs
    one, two = (
        memory("Qwen/Qwen3-8B", data_parallel=degree, gpus=degree, kv_cache_bytes=4 * GIB).concurrency(8192)
        for degree in (1, 2)
    )
    assert two.value == 2 * one.value
    assert one.find("memory.engine.kv") is not None


@given(
    st.sampled_from(known_models()),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 262_144),
    st.sampled_from(["bfloat16", "fp8"]),
)
def test_any_known_model_has_consistent_figures(name, tensor, length, kv_dtype):
    shape = known_shape(name)
    setup = replace(BASE, gpus=tensor, tensor_parallel=tensor, max_model_len=length, kv_dtype=kv_dtype)
    found = engine_memory(shape, setup, 192 * GIB)
    assert found.kv.low <= found.kv.value <= found.kv.high
    if found.kv.value:
        assert found.total.value == pytest.approx(0.9 * 192 * GIB)
    assert found.fits == (found.kv_tokens.value / length >= 1 or found.concurrency(length).value >= 1)
    wider = engine_memory(shape, replace(setup, gpus=2 * tensor, tensor_parallel=2 * tensor), 192 * GIB)
    assert wider.weights.value < found.weights.value
