"""FP8 products on GPUs: torchao's kernels, and what a GPU must have for them.

torchao is imported only here (extra ``fp8``). Its blockwise products of linear layers are those of cuBLAS on Hopper and
of Triton on later GPUs; its products of experts are those of DeepGEMM. None of them has run in a test of this project:
tests compare the values, scales and products of `formats` and `products` with torchao's own reference code on CPUs.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.plan.predict.hardware import FP8_NEEDS, fp8_modes
from primerl_hpc.trainer.fp8.formats import BLOCKWISE, Fp8Format

LINEAR = {
    "blockwise": "torchao.prototype.blockwise_fp8_training.linear",
    "mxfp8": "torchao.prototype.moe_training.mxfp8_linear",
}
EXPERTS = {
    "blockwise": "torchao.prototype.moe_training.blockwise_fp8.grouped_mm",
    "mxfp8": "torchao.prototype.moe_training.mxfp8_grouped_mm",
}
HOPPER = (9, 0)


def check_gpu(form: Fp8Format, device: torch.device, *, has_experts: bool) -> None:
    """Raise ConfigError if the GPU or its packages cannot compute in ``form``."""
    capability = (0, 0) if torch.version.hip else torch.cuda.get_device_capability(device)
    modes = fp8_modes(capability)
    if form.name not in modes:
        raise ConfigError(
            f"trainer.fp8: {form.name} needs {FP8_NEEDS[form.name]}, but this is "
            f"{torch.cuda.get_device_name(device)}",
            hint=f"set it to {modes[-1] if modes else 'none'}",
        )
    for name in (LINEAR[form.name], *([EXPERTS[form.name]] if has_experts else [])):
        try:
            import_module(name)
        except (ImportError, OSError) as error:
            raise ConfigError(
                f"trainer.fp8 is {form.name}, which needs torchao, but {name} cannot be imported ({error})",
                hint="install the extra fp8 of primerl-hpc, or set it to none",
            ) from error
    if has_experts and form == BLOCKWISE and find_spec("deep_gemm") is None:
        raise ConfigError(
            "trainer.fp8: blockwise needs DeepGEMM for the experts of this model, and deep_gemm is not installed",
            hint="install it from github.com/deepseek-ai/DeepGEMM, or set it to none",
        )


def multiply(x: Tensor, weight: Tensor, form: Fp8Format) -> Tensor:
    """`products.multiply`. x [M, K], M a multiple of the tile; weight [N, K] → [M, N]."""
    module = import_module(LINEAR[form.name])
    x, weight = x.contiguous(), weight.contiguous()
    if form == BLOCKWISE:
        uses_triton = torch.cuda.get_device_capability(x.device) != HOPPER
        return module.fp8_blockwise_mm.apply(x, weight, form.tile, x.dtype, uses_triton)
    return module._to_mxfp8_then_scaled_mm(x, weight, **_mx_options(module))


def grouped_multiply(x: Tensor, weight: Tensor, ends: Tensor, form: Fp8Format) -> Tensor:
    """`products.grouped_multiply`. torchao fills the last tile of each expert's rows."""
    module = import_module(EXPERTS[form.name])
    transposed = weight.contiguous().transpose(-2, -1)
    options: dict[str, Any] = {"offs": ends, "out_dtype": x.dtype, "pad_token_groups_for_grouped_mm": True}
    if form == BLOCKWISE:
        return module._to_fp8_blockwise_then_scaled_grouped_mm(x.contiguous(), transposed, **options)
    return module._to_mxfp8_then_scaled_grouped_mm(
        x.contiguous(), transposed, **options, **_mx_options(module)
    )


def _mx_options(module: Any) -> dict[str, Any]:
    """Return the options for scales that are rounded up, on the fastest kernels."""
    return {
        "kernel_preference": module.KernelPreference.AUTO,
        "scale_calculation_mode": module.ScaleCalculationMode.RCEIL,
    }
