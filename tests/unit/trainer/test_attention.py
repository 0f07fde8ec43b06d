"""Attention over packed rows: with every implementation a sample attends only to itself."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.trainer.parallel import context  # noqa: E402
from primerl_hpc.trainer.parallel.attention import full_rows  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing  # noqa: E402
from primerl_hpc.trainer.parallel.flash import States  # noqa: E402


def packed(*rows: list[int], length: int) -> Packing:
    """Return rows of samples of these lengths, padded to ``length``: each padding token is a separate sample."""
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    for row, lengths in zip(positions, rows, strict=True):
        filled = torch.cat([torch.arange(each) for each in lengths])
        row[: len(filled)] = filled
    return Packing(Context(), positions)


def plain(query, key, value, packing, scale):
    """Compute attention token by token, in float64."""
    out = torch.zeros(*query.shape[:3], value.shape[-1], dtype=torch.float64)
    for row, position in itertools.product(*map(range, packing.positions.shape)):
        start = position - int(packing.positions[row, position])
        keys, values = (
            each[row, :, start : position + 1].repeat_interleave(2, 0).double() for each in (key, value)
        )
        scores = (keys @ query[row, :, position, :, None].double())[..., 0] * scale
        out[row, :, position] = (scores.softmax(-1)[:, None] @ values)[:, 0]
    return out


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        ([[20, 30, 14], [17, 40]], [20, 30, 14, 17, 40, 7]),
        (
            [[1, 1, 40], [30, 1, 20]],
            [2, 40, 22, 30, 1, 20, 13],
        ),  # pads are one sample, also next to short ones
        ([[33], [64]], [33, 31, 64]),
        ([[64], [64]], None),  # a batch as it is
        ([[5] * 12, [3] * 20], None),  # too many for one by one
    ],
)
def test_a_sample_sees_itself_alone_by_mask_and_one_by_one(rows, lengths, monkeypatch):
    torch.manual_seed(0)
    states = [torch.randn(2, heads, 64, 8, requires_grad=True) for heads in (4, 2, 2)]
    packing = packed(*rows, length=64)
    is_real = packing.positions + F.pad(packing.positions, (0, 1))[:, 1:] > 0  # of two tokens or more
    expected = plain(*states, packing, 0.3) * is_real[:, None, :, None]
    wanted = torch.autograd.grad(expected.square().sum(), states)
    assert packing.lengths(None) == lengths
    for shortest in (context.SHORT_SAMPLE, 1000):
        monkeypatch.setattr(context, "SHORT_SAMPLE", shortest)
        out = (
            full_rows(States(*states), packed(*rows, length=64), 0.3, 0.0, None, None)
            * is_real[:, None, :, None]
        )
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(out.square().sum(), states)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-5)


def test_a_window_wider_than_every_sample_hides_nothing():
    packing = packed([20, 30, 14], [17, 40], length=64)
    assert packing.lengths(40) == packing.lengths(None)
    assert packing.lengths(39) is None


@pytest.mark.parametrize("inner", ["sdpa", "flash_attention_2", "flash_attention_3"])
def test_sinks_are_refused_where_they_would_be_left_out(inner):
    packing = Packing(Context(), torch.arange(4)[None], inner)
    states = torch.zeros(3, 1, 2, 4, 8)
    with pytest.raises(
        ConfigError, match=rf"{inner} attention does not support sinks; set model.attention to auto"
    ):
        full_rows(States(*states), packing, 1.0, 0.0, None, torch.zeros(2))
