"""Interpolated utilization and times of single operations."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.hardware import GpuSpec, gpu_spec, known_gpus
from primerl_hpc.plan.predict.timing.curves import Operations, bus_factor, interpolate, weight_bytes

AXES = ([1, 10, 100], [2, 8])
VALUES = [[0.1, 0.4], [0.2, 0.8], [0.2, 0.9]]
H100 = Operations(gpu_spec("H100-SXM"))
OWN_CURVES = [name for name in known_gpus() if gpu_spec(name).curves_from == name]


def test_grid_points_are_returned_unchanged():
    for i, row in enumerate(AXES[0]):
        for j, column in enumerate(AXES[1]):
            assert interpolate(AXES, VALUES, (row, column)) == pytest.approx(VALUES[i][j])


def test_the_middle_is_the_geometric_mean():
    assert interpolate(AXES, VALUES, (1, 4)) == pytest.approx(math.sqrt(0.1 * 0.4))
    assert interpolate(AXES, VALUES, (math.sqrt(10), 2)) == pytest.approx(math.sqrt(0.1 * 0.2))


def test_outside_the_grid_its_edge_counts():
    assert interpolate(AXES, VALUES, (0.001, 1)) == 0.1
    assert interpolate(AXES, VALUES, (1e9, 1e9)) == 0.9


@given(st.floats(0.01, 1e4), st.floats(0.01, 1e3))
def test_interpolation_stays_between_the_values(x, y):
    assert 0.1 - 1e-12 <= interpolate(AXES, VALUES, (x, y)) <= 0.9 + 1e-12


@pytest.mark.parametrize("name", OWN_CURVES)
@given(rows=st.floats(1, 1e5), wide=st.integers(7, 14), ins=st.integers(7, 14))
def test_a_product_is_never_faster_than_light(name, rows, wide, ins):
    operations = Operations(gpu_spec(name))
    time = operations.gemm(rows, 2**ins, 2**wide)
    light = operations.light(2 * rows * 2 ** (ins + wide), 2.0 ** (ins + wide) * 2, "bfloat16")
    # kernels that clock above the datasheet's rate reach 1.1 in the tables
    assert time >= light / 1.15


@pytest.mark.parametrize("name", OWN_CURVES)
def test_measured_utilization_is_between_nothing_and_light(name):
    def leaves(node):
        if isinstance(node, list):
            for child in node:
                yield from leaves(child)
        else:
            yield node

    curves = gpu_spec(name).curves
    assert {"gemm", "moe", "decode_attention", "context_attention", "collectives"} <= curves.keys()
    for kind in ("gemm", "moe", "decode_attention"):
        for dtype, curve in curves[kind].items():
            assert all(0 < value < 2 for value in leaves(curve["values"])), (kind, dtype)


def test_large_products_reach_the_known_share_of_the_peak():
    """0.73–0.79 of the peak at 8,192 rows and widths of 4–8 thousand."""
    time = H100.gemm(8192, 4096, 8192)
    assert 0.68 < 2 * 8192 * 4096 * 8192 / time / 989.4e12 < 0.85


def test_decode_attention_reaches_the_known_share_of_the_bandwidth():
    """0.32 of the memory bandwidth for tens of megabytes, 0.9 for gigabytes."""
    shares = [64 * size / H100.decode_attention(64, size) / 3.35e12 for size in (2**18, 2**20, 2**25)]
    assert shares == sorted(shares) and 0.25 < shares[0] < 0.5 and 0.85 < shares[2] < 1


def test_collectives_reach_the_known_bus_bandwidth():
    size = 2.0**29
    speed = bus_factor("all_gather", 8) * size / H100.collective("all_gather", size, 8)
    assert speed == pytest.approx(331e9, rel=0.05)
    assert 3e-6 < H100.collective("all_reduce", 2**14, 8) < 3e-5
    assert H100.collective("all_reduce", size, 1) == 0


def test_slower_links_make_slower_collectives():
    size = 2.0**29
    h800 = Operations(gpu_spec("H800"))
    assert h800.collective("all_gather", size, 8) == pytest.approx(
        450 / 200 * H100.collective("all_gather", size, 8)
    )


def test_experts_take_longer_when_more_of_them_are_hit():
    times = [H100.experts(64, hit, 1536, 4096) for hit in (8, 32, 64)]
    assert times == sorted(times) and times[0] < times[2] / 2


def test_a_type_without_measured_utilization_is_refused():
    spec = GpuSpec("X", 2**36, {"bfloat16": 1e14}, 1e12, 1e11, 1e10)
    with pytest.raises(ConfigError, match="no measured utilization for GPU type X"):
        _ = Operations(spec).curves


def test_scales_of_quantized_formats_count():
    assert weight_bytes("fp4") == pytest.approx(0.53125) and weight_bytes("bfloat16") == 2
