"""Durations of training steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from primerl_hpc.plan.predict.hardware import gpu_spec, known_gpus
from primerl_hpc.plan.predict.layouts import TrainerSetup
from primerl_hpc.plan.predict.shape import known_models, known_shape
from primerl_hpc.plan.predict.timing.time_trainer import ATTENTION_TIME, TrainerConstants, TrainerTimes

SMALL, MIXTURE = known_shape("Qwen/Qwen3-4B"), known_shape("Qwen/Qwen3-30B-A3B")


def trainer(shape=SMALL, gpu="H100-SXM", constants=None, **settings):
    ranks = settings.get("ranks", 8)
    settings = {
        "ranks": ranks,
        "ranks_per_node": 8,
        "shard": ranks,
        "seq_len": 16384,
        "is_compiled": True,
    } | settings
    return TrainerTimes(shape, gpu_spec(gpu), TrainerSetup(**settings), constants or TrainerConstants())


def test_a_step_computes_at_a_plausible_share_of_the_peak():
    """4B, 16,384 tokens: 6·N·T and causal attention are 6.3e14 FLOP, 0.64 s at the peak of an H100."""
    assert 0.2 < 0.64 / trainer().step().value < 0.6


def test_micro_batches_repeat_all_but_the_optimizer():
    one, two = (trainer(micro_batches=number).step_parts() for number in (1, 2))
    assert two["matmuls"] == pytest.approx(2 * one["matmuls"])
    assert two["optimizer"] == one["optimizer"] > 0


@settings(max_examples=30, deadline=None)
@given(st.integers(9, 16))
def test_longer_samples_of_equal_sum_take_longer(power):
    length = 2**power
    times = trainer(seq_len=2**17)
    short = times.step_s([length] * (2**17 // length))
    assert times.step_s([2.0 * length] * (2**16 // length)) > short


def test_recomputation_adds_one_forward_of_matrix_products():
    full, none = (trainer(checkpointing=policy).step_parts() for policy in ("full", "none"))
    assert full["matmuls"] == pytest.approx(none["matmuls"] * 4 / 3)
    every = trainer(every=2).step_parts()
    assert none["matmuls"] < every["matmuls"] < full["matmuls"]


def test_products_in_fp8_are_faster_where_gpus_have_it_and_sizes_fill_tiles():
    for shape, part in ((SMALL, "matmuls"), (MIXTURE, "experts")):
        plain, rounded = (trainer(shape, fp8=kind).step_parts() for kind in ("none", "blockwise"))
        assert 0.4 < rounded[part] / plain[part] < 1
        assert rounded["small_kernels"] > plain["small_kernels"]
        assert all(
            rounded[name] == plain[name] for name in ("attention", "head", "communication", "optimizer")
        )
    assert (
        trainer(gpu="A100-SXM-80GB", fp8="blockwise").step_parts()
        == trainer(gpu="A100-SXM-80GB").step_parts()
    )
    odd = known_shape("openai/gpt-oss-20b")  # 2,880 is 22.5 tiles of 128, and 90 of 32
    plain, blockwise, mxfp8 = (
        trainer(odd, gpu="B200", fp8=kind).step_parts()["experts"] for kind in ("none", "blockwise", "mxfp8")
    )
    assert mxfp8 != plain == blockwise


def test_selective_recomputation_keeps_attention_unless_it_is_named():
    kept = trainer(checkpointing="selective").step_parts()
    recomputed = trainer(checkpointing="selective", checkpointed_modules=("attention",)).step_parts()
    assert kept["attention"] < recomputed["attention"]


def test_frozen_weights_have_no_gradient_and_adapters_cost_bytes():
    full, lora = trainer().step_parts(), trainer(lora_rank=16).step_parts()
    assert lora["matmuls"] == pytest.approx(full["matmuls"] * 3 / 4)
    assert lora["adapters"] > 0 == full["adapters"]
    assert lora["optimizer"] < full["optimizer"] / 10
    attention_only = trainer(lora_rank=16, lora_targets=("q_proj", "v_proj")).step_parts()
    assert attention_only["adapters"] < lora["adapters"] / 2


def test_an_old_attention_kernel_is_slower_on_hopper_and_the_same_on_ampere():
    kernels = [TrainerConstants(attention_kernel=f"flash_attention_{version}") for version in (2, 3)]
    old, new = (trainer(constants=kernel).step_parts()["attention"] for kernel in kernels)
    assert old == pytest.approx(ATTENTION_TIME["hopper"] * new)
    old, new = (trainer(gpu="A100", constants=kernel).step_parts()["attention"] for kernel in kernels)
    assert old == new
    eager = trainer(gpu="A100", constants=TrainerConstants(attention_kernel="eager")).step_parts()[
        "attention"
    ]
    assert eager > 3 * old


def test_more_ranks_of_one_node_hide_communication_and_slow_networks_do_not():
    alone = trainer(ranks=1, shard=1).step_parts()
    node = trainer(ranks=8).step_parts()
    assert alone["communication"] == 0 < node["communication"] < 0.1 * sum(node.values())
    slow = replace(gpu_spec("H100-SXM"), network_bytes_per_s=1e9)
    far = replace(trainer(MIXTURE, ranks=64, seq_len=4096), gpu=slow).step_parts()
    assert far["communication"] > far["matmuls"]


def test_replicas_sum_gradients_over_the_network():
    sharded, replicated = trainer(ranks=64, shard=8, replicate=8), trainer(ranks=8)
    assert sharded.reductions_s() > 2 * replicated.reductions_s()


def test_expert_parallelism_trades_gathers_for_exchanges():
    gathered, exchanged = trainer(MIXTURE), trainer(MIXTURE, expert_parallel=8)
    assert exchanged.gathers_s() < gathered.gathers_s() / 3
    assert exchanged.step_parts()["communication"] > gathered.step_parts()["communication"]


def test_context_parallelism_divides_a_row():
    one, four = (trainer(ranks=8, context_parallel=size, seq_len=65536).step_parts() for size in (1, 4))
    assert four["attention"] == pytest.approx(one["attention"] / 4, rel=0.15)
    assert four["matmuls"] == pytest.approx(one["matmuls"] / 4, rel=0.15)
    assert four["communication"] > one["communication"]


def test_tensor_parallelism_divides_matrices_and_tokens_of_experts_but_no_expert():
    one = trainer(MIXTURE, expert_parallel=8).step_parts()
    two = trainer(MIXTURE, expert_parallel=8, tensor_parallel=2, shard=4).step_parts()
    assert two["optimizer"] == pytest.approx(one["optimizer"])  # every weight has one owner
    assert two["matmuls"] == pytest.approx(one["matmuls"] / 2, rel=0.25)
    assert one["experts"] / 2.2 < two["experts"] < one["experts"] / 1.5
    assert two["communication"] > 0


def test_the_head_in_float32_is_most_of_a_small_model():
    small = known_shape("Qwen/Qwen3-0.6B")
    precise = trainer(small, constants=TrainerConstants(head_dtype="float32"), loss="rl").step_parts()
    fast = trainer(small, loss="rl").step_parts()
    assert precise["head"] > 4 * fast["head"]


def test_optimizer_offload_costs_transfers_and_cpu_offload_more():
    on_gpu, states, all_on_host = (
        trainer(**options).optimizer_s()
        for options in ({}, {"optimizer_offload": True}, {"cpu_offload": True})
    )
    assert on_gpu < states < all_on_host
    # 4.0e9 / 8 parameters: 8 bytes of states there and back over PCIe at 0.8 of 64 GB/s
    assert states - on_gpu == pytest.approx(2 * 8 * SMALL.text_total / 8 / (0.8 * 64e9))


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "sign_sgd"])
def test_every_optimizer_has_a_duration(optimizer):
    assert 0 < trainer(optimizer=optimizer).optimizer().value < 1


def test_intervals_are_wider_outside_hopper():
    hopper, other = (trainer(gpu=name).step() for name in ("H100-SXM", "A100-SXM-80GB"))
    assert other.high / other.value > 1.2 * hopper.high / hopper.value


@pytest.mark.parametrize("model", known_models())
def test_every_known_model_has_a_step_time(model):
    step = trainer(known_shape(model), gpu="B200", ranks=64, seq_len=8192, expert_parallel=1).step()
    assert 0 < step.low < step.value < step.high < 1e4


@pytest.mark.parametrize("name", known_gpus())
def test_every_known_gpu_has_a_step_time(name):
    assert 0.05 < trainer(gpu=name).step().value < 300
