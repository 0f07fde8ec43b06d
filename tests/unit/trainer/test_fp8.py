"""FP8 training: values, scales and products equal those of the formats' definitions, and of torchao where it is
installed; the layers that use them train as in bfloat16."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.plan.predict.hardware import fp8_modes  # noqa: E402
from primerl_hpc.recipe.load import parse_recipe  # noqa: E402
from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer.batch import make_batch  # noqa: E402
from primerl_hpc.trainer.fp8 import gpu  # noqa: E402
from primerl_hpc.trainer.fp8.formats import (  # noqa: E402
    BLOCKWISE,
    FORMATS,
    MXFP8,
    Fp8Format,
    quantize_blocks,
    quantize_tiles,
)
from primerl_hpc.trainer.fp8.layers import apply_fp8  # noqa: E402
from primerl_hpc.trainer.fp8.products import format_of, grouped_multiply, multiply  # noqa: E402
from primerl_hpc.trainer.model.policy import Policy, build_policy  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import to_local  # noqa: E402
from primerl_hpc.trainer.parallel.tensor.layers import ColumnLinear, Division  # noqa: E402
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup  # noqa: E402
from primerl_hpc.trainer.sft.stream import make_row  # noqa: E402
from primerl_hpc.trainer.sft.tokens import SFTSample  # noqa: E402
from primerl_hpc.trainer.train_step import build_trainer  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from tests.support.helpers import random_row, small_rl, small_sft  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402

CPU = torch.device("cpu")
E4M3 = sorted(
    {mantissa * 2.0**-9 for mantissa in range(8)}
    | {(1 + mantissa / 8) * 2.0**exponent for exponent in range(-6, 9) for mantissa in range(8)} - {480.0}
)
"""Every magnitude of e4m3: three bits of mantissa, exponents of -6 to 8, no infinity; 480 would be NaN."""
BOTH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def nearest(values: np.ndarray) -> np.ndarray:
    """Return the nearest values of e4m3; of two, the one with an even mantissa."""
    known, sizes = np.array(E4M3), np.abs(values.astype(np.float64))
    above = np.clip(np.searchsorted(known, sizes), 1, len(known) - 1)
    distance = (known[above] - sizes) - (sizes - known[above - 1])
    is_above = (distance < 0) | ((distance == 0) & (above % 2 == 0))
    return np.copysign(known[np.where(is_above, above, above - 1)], values)


def factor_of(amax: float, form: Fp8Format) -> np.float32:
    """Return what the values of a tile are multiplied by, by the definition of the format."""
    if form == MXFP8:
        return np.float32(2.0 ** -math.ceil(math.log2(amax / 448))) if amax else np.float32(1)
    return np.float32(448 / max(amax, 1e-12))


def rounded(x: Tensor, form: Fp8Format, rows: int) -> np.ndarray:
    """Return x [M, K] rounded to FP8, with a scale for every tile of ``rows`` × ``form.tile``, in float64."""
    values, found = x.float().numpy(), np.zeros(x.shape)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], form.tile):
            part = (slice(top, top + rows), slice(left, left + form.tile))
            factor = factor_of(float(np.abs(values[part]).max()), form)
            found[part] = nearest(np.clip(values[part] * factor, -448, 448)) / np.float64(factor)
    return found


def outliers(*shape: int, seed: int = 0) -> Tensor:
    """Random bfloat16 values of very different sizes, with tiles of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp(4 * torch.randn(shape, generator=generator))
    x[: shape[0] // 4, :128] = 0
    return x.bfloat16()


def grad_of(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad


@BOTH
def test_values_and_scales_are_those_of_the_definition(form):
    x = outliers(128, 256)
    np.testing.assert_allclose(quantize_tiles(x, form).dequantize(), rounded(x, form, 1), rtol=1e-6)
    if form.has_blocks:
        blocks = quantize_blocks(x, form)
        assert blocks.scales.shape == (1, 2)
        np.testing.assert_allclose(blocks.dequantize(), rounded(x, form, form.tile), rtol=1e-6)


@BOTH
def test_a_product_and_its_gradients_sum_rounded_values(form):
    # 72 tokens: the last tile along the tokens is filled with zeros
    x, weight, grad = outliers(72, 256), outliers(128, 256, seed=1), outliers(72, 128, seed=2)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    found = multiply(x, weight, form)
    found.backward(grad)
    rows = form.tile if form.has_blocks else 1
    full = [torch.zeros(-72 % form.tile, columns, dtype=x.dtype) for columns in (256, 128)]
    x_all, grad_all = torch.cat([x.detach(), full[0]]), torch.cat([grad, full[1]])
    w, wt = rounded(weight.detach(), form, rows), rounded(weight.detach().T, form, rows)
    expected = {
        "output": (found, rounded(x.detach(), form, 1) @ w.T),
        "grad of x": (grad_of(x), rounded(grad, form, 1) @ wt.T),
        "grad of weight": (grad_of(weight), rounded(grad_all.T, form, 1) @ rounded(x_all.T, form, 1).T),
    }
    for what, (value, reference) in expected.items():
        error = np.abs(value.detach().double().numpy() - reference).max() / np.abs(reference).max()
        assert error < 2**-8, (what, error)  # one rounding to bfloat16


@BOTH
def test_experts_without_any_row_have_an_empty_product_and_gradients_of_zero(form):
    weight = outliers(4 * 128, 128).view(4, 128, 128).requires_grad_()
    product = grouped_multiply(outliers(0, 128), weight, torch.zeros(4, dtype=torch.int32), form)
    assert product.shape == (0, 128)
    product.sum().backward()
    assert torch.equal(grad_of(weight), torch.zeros_like(weight))


@BOTH
def test_experts_multiply_their_own_rows(form):
    weight = outliers(4 * 128, 128).view(4, 128, 128).requires_grad_()
    x, ends = outliers(50, 128, seed=1).requires_grad_(), torch.tensor([30, 30, 41, 50], dtype=torch.int32)
    found = grouped_multiply(x, weight, ends, form)
    expected = torch.cat(
        [
            multiply(x[:30], weight[0], form),
            multiply(x[30:41], weight[2], form),
            multiply(x[41:], weight[3], form),
        ]
    )
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    assert not gradient[1].any() and all(gradient[expert].any() for expert in (0, 2, 3))


@BOTH
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_tile_that_is_not_finite_stays_so(form, bad):
    x = outliers(32, 256).float()
    x[5, 200] = bad
    found = quantize_tiles(x, form).dequantize()
    assert not found[5, 200].isfinite() and found[:5].isfinite().all() and found[5, :128].isfinite().all()


def test_values_scales_and_products_equal_those_of_torchao(monkeypatch):
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    grouped, linear = (import_module(modules["mxfp8"]) for modules in (gpu.EXPERTS, gpu.LINEAR))
    to_mx = import_module("torchao.prototype.mx_formats.mx_tensor").to_mx

    def equal(found: Tensor, expected: Tensor) -> bool:
        return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))

    x = outliers(256, 384)
    tiles, blocks = quantize_tiles(x, BLOCKWISE), quantize_blocks(x, BLOCKWISE)
    for found, (values, scales) in (
        (tiles, kernels.torch_blockwise_scale_act_quant_lhs(x)),
        (blocks, kernels.torch_blockwise_scale_weight_quant(x)),
    ):
        assert equal(found.values, values) and equal(found.scales, scales)
    values, scales = kernels.torch_blockwise_scale_act_quant_rhs(x)
    along_tokens = quantize_tiles(x.T, BLOCKWISE)
    assert equal(along_tokens.values.T, values) and equal(along_tokens.scales.T, scales)
    exponents, values = to_mx(x, torch.float8_e4m3fn, 32, linear.ScaleCalculationMode.RCEIL)
    tiles = quantize_tiles(x, MXFP8)
    assert equal(tiles.values, values) and torch.equal(tiles.scales, exponents.float())

    weight, grad = outliers(128, 384, seed=1), outliers(256, 128, seed=2)
    own, theirs = ([value.clone().requires_grad_() for value in (x, weight)] for _ in range(2))
    multiply(own[0], own[1], MXFP8).backward(grad)
    torch_casts = (linear.MXFP8Dim0CastKernelChoice.TORCH, linear.MXFP8Dim1CastKernelChoice.TORCH)
    kinds = (torch.float8_e4m3fn,) * 3
    emulated, rounds_up = linear.KernelPreference.EMULATED, linear.ScaleCalculationMode.RCEIL
    linear.mx_mm.apply(*theirs, *kinds, 32, emulated, *torch_casts, rounds_up, False).backward(grad)
    for mine, other in ((grad_of(mine), grad_of(other)) for mine, other in zip(own, theirs, strict=True)):
        assert (mine - other).norm() < 2**-8 * other.norm()
    experts, ends = outliers(512, 384, seed=3).view(4, 128, 384), torch.tensor([96, 96, 160, 256]).int()
    found = grouped_multiply(x, experts, ends, MXFP8)
    expected = grouped._to_mxfp8_then_scaled_grouped_mm(
        *(x, experts.mT), offs=ends, kernel_preference=emulated, pad_token_groups_for_grouped_mm=True
    )
    assert (found - expected).norm() < 2**-8 * expected.norm()

    # the calls of a GPU, with torchao's own emulation instead of its kernels
    class OnCPUs:
        AUTO = EMULATED = emulated

    for module in (grouped, linear):
        monkeypatch.setattr(module, "KernelPreference", OnCPUs)
    assert torch.equal(gpu.grouped_multiply(x, experts, ends, MXFP8), expected)
    found, expected = gpu.multiply(x, weight, MXFP8), multiply(x, weight, MXFP8)
    assert (found - expected).norm() < 2**-8 * expected.norm()


# -- models ----------------------------------------------------------------------------------------


WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_key_value_heads": 2}

SHARED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}


def fp8_recipe(recipe: Recipe, mode: str) -> Recipe:
    changes = {"fp8": mode, "param_dtype": "bfloat16"}
    return recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=changes)})


def gradients(policy: Policy) -> dict[str, Tensor]:
    logprobs, _ = policy(make_batch([random_row(np.random.default_rng(0), [30, 20, 9])], CPU))
    logprobs.sum().backward()
    return {
        name: to_local(grad_of(value)).float()
        for name, value in policy.named_parameters()
        if value.grad is not None
    }


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("gpt_oss", {"num_local_experts": 32}),  # matrices are stored as [E, in, out], and have biases
        (
            "qwen2_moe",
            {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_experts": 32},
        ),
    ],
)
def test_linear_layers_and_experts_are_fp8_and_the_rest_is_not(one_rank, tmp_path, family, changes):
    model = make_family(family, tmp_path / "model", **WIDE | changes)
    policies = {
        mode: build_policy(fp8_recipe(small_rl(model), mode), model, one_rank) for mode in ("none", "mxfp8")
    }
    chosen = {
        name.split(".", 4)[-1] for name, module in policies["mxfp8"].named_modules() if format_of(module)
    }
    assert not any(format_of(module) for module in policies["none"].modules())
    projections = {f"self_attn.{name}_proj" for name in "qkvo"}
    mlps = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    shared = {name.replace("mlp.", "mlp.shared_expert.") for name in mlps}
    of_family = {"qwen3": mlps, "gpt_oss": {"mlp.experts"}, "qwen2_moe": {"mlp.experts", *shared}}
    assert chosen == projections | of_family[family]
    # names and types of weights, and so checkpoints and exports, are those without FP8
    (plain, found) = (
        {name: (value.dtype, to_local(value)) for name, value in policy.tensors()}
        for policy in policies.values()
    )
    assert plain.keys() == found.keys()
    assert all(plain[name][0] == found[name][0] == torch.float32 for name in plain if name.endswith("weight"))
    assert all(torch.equal(plain[name][1], found[name][1]) for name in plain)
    expected, found = map(gradients, policies.values())
    head = next(name for name in expected if "lm_head" in name)
    error = (found[head] - expected[head]).norm() / expected[head].norm()
    assert 0.001 < error < 0.4, error


def test_a_short_training_follows_the_loss_of_bfloat16(one_rank, tmp_path):
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 128}
    model = make_family("qwen3", tmp_path / "model", **WIDE | sizes)
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8) % 101
    losses: dict[str, list[float]] = {}
    for mode in ("none", *FORMATS):
        recipe = fp8_recipe(small_sft(model), mode)
        values = recipe.model_dump(mode="json", exclude_unset=True)
        recipe = parse_recipe(values | {"max_steps": 20, "optimizer": {"type": "adamw", "lr": 1e-3}})
        watchdog = Watchdog(RunDir(tmp_path), "test", rank=0, size=1, timeout_s=600)
        trainer = build_trainer(recipe, str(model), one_rank, watchdog)
        losses[mode] = []
        for step in range(1, 21):
            start = np.random.default_rng(step).integers(0, len(text) - 64)
            row = make_row([SFTSample(text[start : start + 64].astype(np.int32), np.arange(64) > 0)])
            losses[mode].append(trainer.train_step(step, [row], []).metrics["loss/mean"])
        watchdog.pause()
    assert np.mean(losses["none"][-5:]) < 0.9 * losses["none"][0]  # it learns
    for mode in FORMATS:
        assert losses[mode] != losses["none"]
        means = {name: np.mean(np.reshape(losses[name], (2, 10)), 1) for name in (mode, "none")}
        np.testing.assert_allclose(means[mode], means["none"], rtol=0.01)


# -- refusals --------------------------------------------------------------------------------------


def test_a_model_without_matrices_of_the_size_is_refused(one_rank, tmp_path):
    model = make_family("qwen3", tmp_path / "model", **WIDE)
    with pytest.raises(ConfigError, match=r"trainer\.fp8: blockwise needs .* multiples of 128") as refused:
        build_policy(fp8_recipe(small_rl(model), "blockwise"), model, one_rank)
    assert "mxfp8 (multiples of 32)" in refused.value.hint


def test_the_model_and_not_the_layout_decides_which_layers_are_fp8():
    """A rank has 64 of 256 rows: one rank computes the layer in FP8, so four may not compute it in bfloat16."""
    layer: Any = torch.nn.Linear(128, 256)
    layer.__class__ = ColumnLinear
    layer.division = Division(TensorGroup(0, 4, None), (slice(0, 64),))
    blocks = [torch.nn.ModuleDict({"up_proj": layer})]
    with pytest.raises(ConfigError, match=r"tensor_parallel gives a rank parts of 64 × 128.*mxfp8"):
        apply_fp8(blocks, [], "blockwise", CPU)
    apply_fp8(blocks, [], "mxfp8", CPU)
    assert format_of(layer) == MXFP8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"param_dtype": "float32"}, "fp8 mxfp8 needs param_dtype bfloat16"),
        ({"compile": True}, "fp8 mxfp8 needs compile false or auto"),
    ],
)
def test_other_keys_of_the_trainer_are_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        small_rl(tmp_path, trainer={"fp8": "mxfp8", **changes})


def test_adapters_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"trainer\.fp8 mxfp8 is for full training; remove it, or lora"):
        small_rl(tmp_path, trainer={"fp8": "mxfp8"}, lora={})


@pytest.mark.parametrize(
    ("capability", "modes"),
    [
        ((8, 0), []),
        ((8, 9), []),
        ((9, 0), ["blockwise"]),
        ((10, 0), ["blockwise", "mxfp8"]),
        ((10, 3), ["blockwise", "mxfp8"]),
        ((12, 0), ["blockwise"]),
    ],
)
def test_modes_of_a_gpu(monkeypatch, capability, modes):
    assert fp8_modes(capability) == modes
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    for form in FORMATS.values():
        if form.name not in modes:
            with pytest.raises(
                ConfigError, match=rf"trainer\.fp8: {form.name} needs .* but this is GPU"
            ) as refused:
                gpu.check_gpu(form, torch.device("cuda"), has_experts=False)
            assert refused.value.hint == f"set it to {modes[-1] if modes else 'none'}"
