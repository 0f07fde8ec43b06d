"""FP8 products of a GPU equal the emulated ones, which CPUs compare with the definition of the formats."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.trainer.fp8.formats import FORMATS, Fp8Format  # noqa: E402
from primerl_hpc.trainer.fp8.gpu import check_gpu  # noqa: E402
from primerl_hpc.trainer.fp8.products import grouped_multiply, multiply  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
FORMS = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)


def need(form: Fp8Format, *, has_experts: bool) -> None:
    try:
        check_gpu(form, torch.device("cuda"), has_experts=has_experts)
    except ConfigError as error:
        pytest.skip(str(error))


def results(device: str, tensors: list[Tensor], form: Fp8Format, ends: Tensor | None) -> list[Tensor]:
    """Return the product of the first two tensors and its gradients for the third, on the host."""
    x, weight, grad = (tensor.to(device) for tensor in tensors)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    if ends is None:
        out = multiply(x, weight, form)
    else:
        out = grouped_multiply(x, weight, ends.to(device), form)
    return [found.detach().cpu().float() for found in (out, *torch.autograd.grad(out, (x, weight), grad))]


def assert_equal_to_cpu(tensors: list[Tensor], form: Fp8Format, ends: Tensor | None = None) -> None:
    """Compare with the emulation: both round the same values and sum them in another order."""
    found, expected = (
        results(device, [tensor.clone() for tensor in tensors], form, ends) for device in ("cuda", "cpu")
    )
    for mine, other in zip(found, expected, strict=True):
        assert (mine - other).norm() < 2**-7 * other.norm()


@FORMS
@pytest.mark.parametrize("num_tokens", [256, 200])
def test_products_of_linear_layers(form, num_tokens):
    need(form, has_experts=False)
    torch.manual_seed(0)
    shapes = [(num_tokens, 512), (384, 512), (num_tokens, 384)]
    assert_equal_to_cpu([torch.randn(shape).bfloat16() for shape in shapes], form)


@FORMS
def test_products_of_experts_one_of_which_has_no_token(form):
    need(form, has_experts=True)
    torch.manual_seed(0)
    shapes = [(300, 512), (4, 384, 512), (300, 384)]
    ends = torch.tensor([100, 100, 227, 300], dtype=torch.int32)
    assert_equal_to_cpu([torch.randn(shape).bfloat16() for shape in shapes], form, ends)
