"""Durations of weight updates and checkpoints."""

from __future__ import annotations

import pytest

from primerl_hpc.plan.predict.figure import Tier
from primerl_hpc.plan.predict.hardware import gpu_spec
from primerl_hpc.plan.predict.layouts import TrainerSetup
from primerl_hpc.plan.predict.shape import known_shape
from primerl_hpc.plan.predict.timing.time_transfer import (
    StorageRates,
    broadcast_update,
    checkpoint,
    checkpoint_bytes,
    delta_update,
    filesystem_update,
    weight_bytes_of,
    write,
)

SHAPE, H100 = known_shape("Qwen/Qwen3-4B"), gpu_spec("H100-SXM")


def setup(**settings):
    return TrainerSetup(**({"ranks": 8, "ranks_per_node": 8, "shard": 8, "seq_len": 8192} | settings))


SIZE = weight_bytes_of(SHAPE, setup())


def test_a_version_has_two_bytes_a_parameter_and_adapters_only_theirs():
    assert SIZE.value == 2 * SHAPE.total
    adapter = weight_bytes_of(SHAPE, setup(lora_rank=16))
    assert adapter.value == 2 * SHAPE.adapter_parameters(16)


def test_checkpoints_hold_float32_weights_and_states():
    assert checkpoint_bytes(SHAPE, setup()).value == 12 * SHAPE.total
    assert checkpoint_bytes(SHAPE, setup(optimizer="sign_sgd")).value == 4 * SHAPE.total
    assert checkpoint_bytes(SHAPE, setup(lora_rank=8)).value == 12 * SHAPE.adapter_parameters(8)


def test_one_writer_reaches_the_published_rate():
    assert SIZE.value / write(SIZE, 1, StorageRates(), "x").value == pytest.approx(1.55e9)


def test_known_rates_bound_the_time_and_narrow_the_interval():
    unknown = checkpoint(SHAPE, setup(), StorageRates())
    known = checkpoint(SHAPE, setup(), StorageRates(write_per_rank=2e9, write_total=10e9))
    assert known.value == pytest.approx(12 * SHAPE.total / 10e9)
    assert known.low == known.value == known.high
    assert unknown.tier is Tier.FORMULA and unknown.high / unknown.low > 5
    # eight ranks are at least as fast as one, and at most eight times as fast
    one = write(checkpoint_bytes(SHAPE, setup()), 1, StorageRates(), "x")
    assert one.value / 8 <= unknown.value <= one.value


def test_an_update_in_files_is_written_read_and_loaded():
    rates = StorageRates(write_per_rank=1e9, write_total=4e9, read_per_node=2e9)
    update = filesystem_update(SIZE, 8, 4, H100, rates)
    parts = {name.rsplit(".", 1)[1]: part.value for name, part in update.inputs.items()}
    assert parts["write"] == pytest.approx(SIZE.value / 4e9)
    assert parts["read"] == pytest.approx(SIZE.value / 2e9)
    assert sum(parts.values()) == pytest.approx(update.value)


def test_a_measured_broadcast_rate_replaces_the_published_one():
    assert broadcast_update(SIZE, H100, rate=2e10).value == pytest.approx(SIZE.value / 2e10)
    guess = broadcast_update(SIZE, H100)
    assert guess.high / guess.low > 8


def test_a_delta_writes_less_but_compares_everything():
    small, large = (delta_update(SIZE, share, 1, StorageRates()) for share in (0.001, 0.1))
    assert small.value < large.value
    assert small.value > SIZE.value / 1e10
