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


def plain_head(hidden, weight, targets, temperatures):
    logits = torch.nn.functional.linear(hidden, weight).float() / temperatures[:, None]
    logs = torch.log_softmax(logits, -1)
    with torch.no_grad():
        entropies = -(logs.exp() * logs).sum(-1)
    return logs.gather(-1, targets[:, None])[:, 0], entropies


def chunked_head(hidden, weight, targets, temperatures):
    return ChunkedLogprob.apply(hidden, weight, targets, temperatures, 256, None, None, PLAIN, compile_head())


def test_the_chunked_head_needs_an_eighth_of_the_plain_ones_memory_for_the_same_values():
    """Memory of the operation itself, without the gradient of the weights."""
    torch.manual_seed(0)
    hidden = torch.randn(4096, 1024, device="cuda", requires_grad=True)
    weight = (torch.randn(151_936, 1024, device="cuda") / 32).requires_grad_()
    targets = torch.randint(151_936, (4096,), device="cuda")
    temperatures = torch.full((4096,), 0.9, device="cuda")
    peaks, values = [], []
    for head in (plain_head, chunked_head):
        for _ in range(2):  # the first call allocates workspaces and compiles
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            logprobs, entropies = head(hidden, weight, targets, temperatures)
            logprobs.mean().backward()
        peak = torch.cuda.max_memory_allocated() - before
        peaks.append(peak - weight.grad.numel() * weight.grad.element_size())
        values.append([logprobs.detach(), entropies, hidden.grad, weight.grad])
    assert peaks[0] >= 8 * peaks[1]
    for found, expected in zip(*values, strict=True):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
