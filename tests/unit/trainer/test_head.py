"""The chunked head against the plain one."""

import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounter  # noqa: E402
from torch.library import Library  # noqa: E402

from primerl_hpc.plan.predict import memory_activations  # noqa: E402
from primerl_hpc.trainer.model import head  # noqa: E402
from primerl_hpc.trainer.model.head import (  # noqa: E402
    PLAIN,
    ChunkedLogprob,
    FusedHead,
    LogitForm,
    auto_chunk_tokens,
    logit_gradients,
    token_stats,
)


def plain(hidden, weight, targets, temperatures, bias=None, form=PLAIN):
    logits = torch.nn.functional.linear(hidden, weight, bias) * form.scale
    if form.cap is not None:
        logits = form.cap * torch.tanh(logits / form.cap)
    logs = torch.log_softmax(logits / temperatures[:, None], -1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


FUSED = FusedHead(token_stats, logit_gradients)
"""The operations that GPUs compile, without the compiler."""
KINDS = pytest.mark.parametrize("fused", [None, FUSED], ids=["in place", "fused"])


@KINDS
@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_chunked_head_equals_the_plain_one_forward_and_backward(chunk_tokens, fused):
    torch.manual_seed(0)
    hidden = torch.randn(29, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    targets, temperatures = torch.randint(50, (29,)), torch.rand(29) + 0.5
    factor = torch.randn(29)
    expected, entropy = plain(hidden, weight, targets, temperatures)
    wanted = torch.autograd.grad((expected * factor).sum(), (hidden, weight))
    found, found_entropy = ChunkedLogprob.apply(
        hidden, weight, targets, temperatures, chunk_tokens, None, None, PLAIN, fused
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_entropy, entropy)
    loss = (found * factor).sum()
    for _ in range(2):  # once with the last chunk as forward left it, once with all of them recomputed
        grads = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("chunk_tokens", [7, 64])
@pytest.mark.parametrize("form", [PLAIN, LogitForm(scale=0.3), LogitForm(cap=2.0), LogitForm(0.5, 1.5)])
def test_a_head_with_a_bias_a_scale_and_a_cap_equals_the_plain_one(form, chunk_tokens, fused):
    torch.manual_seed(0)
    hidden = torch.randn(29, 16, requires_grad=True)
    weight, bias = torch.randn(50, 16, requires_grad=True), torch.randn(50, requires_grad=True)
    targets, temperatures = torch.randint(50, (29,)), torch.rand(29) + 0.5
    factor, inputs = torch.randn(29), (hidden, weight, bias)
    expected, entropy = plain(hidden, weight, targets, temperatures, bias, form)
    wanted = torch.autograd.grad((expected * factor).sum(), inputs)
    found, found_entropy = ChunkedLogprob.apply(
        hidden, weight, targets, temperatures, chunk_tokens, None, bias, form, fused
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_entropy, entropy)
    for one, other in zip(torch.autograd.grad((found * factor).sum(), inputs), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_fused_head_is_compiled_once_for_chunks_of_all_lengths():
    counter = CompileCounter()
    compiled = head.compile_head(backend=counter)
    weight, results = torch.randn(50, 16), []
    for length in (29, 40, 64, 3):  # chunks of 8, and last ones of 5, 8, 8 and 3 tokens
        torch.manual_seed(0)
        hidden = torch.randn(length, 16, requires_grad=True)
        targets, temperatures = torch.randint(50, (length,)), torch.rand(length) + 0.5
        for fused in (None, compiled):
            values = ChunkedLogprob.apply(hidden, weight, targets, temperatures, 8, None, None, PLAIN, fused)
            results.append([*values, *torch.autograd.grad(values[0].sum(), hidden)])
    assert counter.frame_count == 2  # forward and backward
    for plain_values, fused_values in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(fused_values, plain_values, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_chunked_head_needs_an_eighth_of_the_plain_ones_memory_when_chunks_are_small():
    hidden = torch.randn(1024, 16, requires_grad=True)
    weight = torch.randn(5000, 16, requires_grad=True)
    targets, temperatures = torch.randint(5000, (1024,)), torch.ones(1024)

    def peak_bytes(head) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            head()[0].sum().backward()
        return peak_of(profile)

    whole = peak_bytes(lambda: plain(hidden, weight, targets, temperatures))
    chunked = peak_bytes(lambda: ChunkedLogprob.apply(hidden, weight, targets, temperatures, 64))
    assert whole > 3 * 1024 * 5000 * 4
    assert chunked < whole / 8


def test_backward_of_the_head_holds_one_chunk_at_a_time():
    """A name that outlived its chunk kept a second one alive: 1.5 GiB on a GPU."""
    hidden, weight = torch.randn(1024, 16, requires_grad=True), torch.randn(5000, 16)
    targets = torch.randint(5000, (1024,))
    found, _ = ChunkedLogprob.apply(hidden, weight, targets, None, 256)
    with torch.profiler.profile(profile_memory=True) as profile:
        found.sum().backward()
    assert peak_of(profile) < 1.5 * 256 * 5000 * 4


def peak_of(profile) -> int:
    alive = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def test_head_without_tokens_gives_zero_gradients():
    hidden, weight = torch.empty(0, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, _ = ChunkedLogprob.apply(hidden, weight, none, torch.empty(0), 8)
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0


def test_a_chunk_of_a_large_vocabulary_stays_within_its_bound():
    assert auto_chunk_tokens(150_000, torch.device("cpu")) * 150_000 * 4 <= 256 << 20
    assert auto_chunk_tokens(104, torch.device("cpu")) == 8192


@pytest.fixture
def mixed_products(monkeypatch):
    """CPU versions of CUDA's products of half types into float32, which the head then uses. Yields their names."""
    used = []

    def mm(left, right, out_dtype):
        used.append("mm")
        return torch.mm(left.to(out_dtype), right.to(out_dtype))

    def addmm_out(total, left, right, out_dtype, *, out):
        used.append("addmm")
        assert out.data_ptr() == total.data_ptr()
        return out.copy_(torch.addmm(total, left.to(out_dtype), right.to(out_dtype)))

    library = Library("aten", "IMPL")
    library.impl("mm.dtype", mm, "CPU")
    library.impl("addmm.dtype_out", addmm_out, "CPU")
    monkeypatch.setattr(head, "keeps_float32", lambda tensor: tensor.dtype == torch.bfloat16)
    yield used
    library._destroy()


def test_logits_of_bfloat16_factors_are_not_rounded_on_a_gpu(mixed_products):
    """Large logits: rounded to bfloat16 they would change log-probabilities by hundredths."""
    torch.manual_seed(0)
    hidden = (4 * torch.randn(40, 64)).bfloat16().requires_grad_()
    weight = torch.randn(500, 64).bfloat16().requires_grad_()
    targets, temperatures, factor = torch.randint(500, (40,)), torch.rand(40) + 0.5, torch.randn(40)
    exact = [value.detach().float().requires_grad_() for value in (hidden, weight)]
    expected, entropy = plain(*exact, targets, temperatures)
    wanted = torch.autograd.grad((expected * factor).sum(), exact)
    found, found_entropy = ChunkedLogprob.apply(hidden, weight, targets, temperatures, 16)
    grads = torch.autograd.grad((found * factor).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(found_entropy, entropy, rtol=1e-4, atol=1e-4)
    for one, other in zip(grads, wanted, strict=True):
        assert (one.float() - other).norm() < 0.01 * other.norm()  # gradients themselves are bfloat16
    assert (
        mixed_products.count("addmm") == 3 and mixed_products.count("mm") == 3 + 2
    )  # the last chunk is kept
    rounded = torch.log_softmax((hidden @ weight.t()).float() / temperatures[:, None], -1)
    assert (rounded.gather(-1, targets[:, None])[:, 0] - expected).abs().max() > 0.02


def test_chunks_are_larger_on_a_gpu():
    sizes = [auto_chunk_tokens(151_936, torch.device(kind)) for kind in ("cpu", "cuda")]
    assert sizes == [441, 2650]
    assert head.CHUNK_BYTES["cuda"] == memory_activations.CHUNK_LOGIT_BYTES  # the planner's
