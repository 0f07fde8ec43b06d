"""The head's compiled operations on logits, with the kernels that a GPU computes them with."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.trainer.model.head import PLAIN, ChunkedLogprob, LogitForm, compile_head  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("form", [PLAIN, LogitForm(0.5, 30.0)], ids=["plain", "capped"])
def test_the_compiled_head_computes_what_the_one_in_place_computes(form):
    """A vocabulary that is no multiple of a kernel's block, two sizes of chunks, bfloat16."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(50_257, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets, temperatures = torch.randint(50_257, (300,), device="cuda"), torch.rand(300, device="cuda") + 0.5
    factor, results = torch.randn(300, device="cuda"), []
    for fused in (None, compile_head()):
        logprobs, entropies = ChunkedLogprob.apply(
            hidden, weight, targets, temperatures, 128, None, None, form, fused
        )
        grads = torch.autograd.grad((logprobs * factor).sum(), (hidden, weight))
        results.append([logprobs, entropies, *grads])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).float().norm() < 2e-3 * expected.float().norm()
