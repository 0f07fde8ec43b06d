"""Durations of engines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.figure import Tier
from primerl_hpc.plan.predict.hardware import gpu_spec, known_gpus
from primerl_hpc.plan.predict.layouts import EngineSetup
from primerl_hpc.plan.predict.shape import known_models, known_shape
from primerl_hpc.plan.predict.timing.layers import LayerSplit, LayerWork
from primerl_hpc.plan.predict.timing.time_engine import EngineTimes

DENSE, MIXTURE = known_shape("Qwen/Qwen3-32B"), known_shape("Qwen/Qwen3-30B-A3B")


def engine(shape=DENSE, gpu="H100-SXM", **settings):
    tensor, data = settings.get("tensor_parallel", 1), settings.get("data_parallel", 1)
    settings = {"gpus": tensor * data, "tensor_parallel": 1, "max_model_len": 16384} | settings
    return EngineTimes(shape, gpu_spec(gpu), EngineSetup(**settings))


def test_a_small_batch_takes_as_long_as_reading_the_weights():
    """One sequence: 65.5 GB of weights over two H100 with 3.35 TB/s are 9.8 ms at the full bandwidth."""
    step = engine(tensor_parallel=2).decode_step(1, 100)
    assert 9.8e-3 < step.value < 1.6 * 9.8e-3
    assert step.find("time.engine.decode_step.matmuls").value > 0.7 * step.value


@settings(max_examples=40, deadline=None)
@given(batch=st.integers(1, 500), context=st.integers(1, 30_000))
def test_more_sequences_or_context_never_make_a_step_shorter(batch, context):
    times = engine(MIXTURE)
    step = times.decode_s(batch, context)
    # utilization curves are medians of measurements, not exactly monotone
    assert times.decode_s(2 * batch, context) > 0.93 * step
    assert times.decode_s(batch, 2 * context) > 0.93 * step
    # twice the batch in one step is faster than two steps
    assert times.decode_s(2 * batch, context) < 2.05 * step


def test_more_gpus_make_a_step_shorter_and_add_communication():
    steps = [engine(tensor_parallel=size).decode_parts(64, 4096) for size in (1, 2, 4, 8)]
    totals = [sum(parts.values()) for parts in steps]
    assert totals == sorted(totals, reverse=True)
    assert steps[0]["communication"] == 0 < steps[1]["communication"]
    # communication and small kernels keep 8 GPUs from being 8 times as fast
    assert totals[3] > totals[0] / 8


def test_two_nodes_are_slower_than_one_for_the_same_group():
    inside = engine(tensor_parallel=8).decode_parts(64, 4096)["communication"]
    times = engine(tensor_parallel=8)
    outside = replace(times, gpus_per_node=4).decode_parts(64, 4096)["communication"]
    assert outside > 1.5 * inside


def test_fewer_key_heads_than_gpus_are_repeated():
    """Qwen3-30B-A3B has 4 key heads: on 8 GPUs each holds one, as on 4."""
    layer = MIXTURE.layers[0]
    four, eight = (LayerWork(layer, LayerSplit(tensor=size), MIXTURE.hidden) for size in (4, 8))
    assert four.kv_bytes(1000) == eight.kv_bytes(1000) == 2 * 2 * 128 * 1000


def test_a_window_bounds_what_attention_reads():
    shape = known_shape("openai/gpt-oss-120b")
    windowed = next(layer for layer in shape.layers if layer.attention.window)
    work = LayerWork(windowed, LayerSplit(), shape.hidden)
    assert work.kv_bytes(100_000) == work.kv_bytes(windowed.attention.window)


def test_latent_attention_is_kept_on_each_gpu():
    shape = known_shape("deepseek-ai/DeepSeek-V3")
    one, eight = (LayerWork(shape.layers[-1], LayerSplit(tensor=size), shape.hidden) for size in (1, 8))
    assert one.kv_bytes(1000) == eight.kv_bytes(1000) == 2 * 576 * 1000


def test_a_mixture_reads_only_the_experts_that_tokens_choose():
    times = engine(MIXTURE)
    one, many = times.decode_parts(1, 100)["experts"], times.decode_parts(256, 100)["experts"]
    assert many > 6 * one  # 8 of 128 experts against nearly all


def test_four_bit_mixtures_keep_other_weights_in_bfloat16():
    split = engine(known_shape("openai/gpt-oss-120b"), dtype="fp4").split
    assert (split.dtype, split.expert_dtype) == ("bfloat16", "fp4")
    assert engine(dtype="fp4", gpu="B200").split.dtype == "fp4"


def test_prefill_of_long_prompts_takes_several_steps_and_quadratic_attention():
    times = engine()
    short, long = times.prefill_parts(8192, 1024), times.prefill_parts(8192, 8192)
    assert long["attention"] > 4 * short["attention"]
    assert long["matmuls"] == pytest.approx(short["matmuls"])
    assert times.prefill_s(32768, 8192) == pytest.approx(4 * times.prefill_s(8192, 8192), rel=0.1)


def test_prefill_reaches_half_of_the_peak():
    times = engine()
    flops = 2 * DENSE.active * 8192
    assert 0.4 < flops / times.prefill_s(8192, 2048) / 989.4e12 < 0.8


def test_new_prompts_delay_running_sequences():
    times = engine(tensor_parallel=4)
    alone = times.decode_s(64, 4096 + 64)
    loaded = times.time_per_token(64, 4096, 128)
    assert loaded.value > 2 * alone
    assert times.time_per_token(1, 4096, 128).value == pytest.approx(times.decode_s(1, 4160))


def test_a_prefill_on_one_rank_delays_all_ranks_that_share_experts():
    together = engine(MIXTURE, data_parallel=4, expert_parallel=4)
    alone = engine(MIXTURE, data_parallel=4)
    delay = "time.engine.per_token.prefill_delay"
    delays = [times.time_per_token(256, 2048, 256).find(delay).value for times in (together, alone)]
    assert delays[0] > 2 * delays[1]


def test_without_cuda_graphs_small_steps_wait_for_launches():
    eager, graphs = engine(MIXTURE, enforce_eager=True), engine(MIXTURE)
    assert eager.decode_s(1, 100) > graphs.decode_s(1, 100)
    assert eager.decode_s(1, 100) >= 48 * 18 * 20e-6


def test_a_type_without_own_curves_has_wider_intervals_and_a_lower_tier():
    own, other = (engine(gpu=name).decode_step(32, 2048) for name in ("H100-SXM", "MI300X"))
    assert own.tier is Tier.TABLE and other.tier is Tier.DATASHEET
    assert other.high / other.value > 1.4 * own.high / own.value


def test_fp8_on_a_gpu_without_it_is_refused():
    with pytest.raises(ConfigError, match="A100-SXM-80GB does not compute in fp8"):
        engine(gpu="A100", dtype="fp8").decode_step(1, 100)


@pytest.mark.parametrize("model", known_models())
def test_every_known_model_has_a_decode_and_a_prefill_time(model):
    times = engine(known_shape(model), gpu="B200", tensor_parallel=8)
    assert 1e-4 < times.decode_s(16, 2048) < 1
    assert 1e-4 < times.prefill_s(4096, 2048) < 100


@pytest.mark.parametrize("name", known_gpus())
def test_every_known_gpu_has_a_decode_time(name):
    assert 1e-4 < engine(known_shape("Qwen/Qwen3-8B"), gpu=name).decode_step(16, 2048).value < 1


def test_parts_add_up_and_name_their_source():
    step = engine().decode_step(8, 1000)
    parts = step.inputs["time.engine.decode_step.operations"].inputs
    assert sum(part.value for part in parts.values()) == pytest.approx(step.value)
    assert all(part.source for part in parts.values())
    assert step.low < step.value < step.high
