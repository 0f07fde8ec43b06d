"""The chunked head against the plain one."""

import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.trainer.head import ChunkedLogprob, auto_chunk_tokens  # noqa: E402


def plain(hidden, weight, targets, temperatures):
    logs = torch.log_softmax(hidden @ weight.t() / temperatures[:, None], -1)
    return logs.gather(-1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_chunked_head_equals_the_plain_one_forward_and_backward(chunk_tokens):
    torch.manual_seed(0)
    hidden = torch.randn(29, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    targets, temperatures = torch.randint(50, (29,)), torch.rand(29) + 0.5
    factor = torch.randn(29)
    expected, entropy = plain(hidden, weight, targets, temperatures)
    wanted = torch.autograd.grad((expected * factor).sum(), (hidden, weight))
    found, found_entropy = ChunkedLogprob.apply(hidden, weight, targets, temperatures, chunk_tokens)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_entropy, entropy)
    loss = (found * factor).sum()
    for _ in range(2):  # once with the last chunk as forward left it, once with all of them computed anew
        grads = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        for one, other in zip(grads, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_chunked_head_needs_an_eighth_of_the_plain_ones_memory_when_chunks_are_small():
    hidden = torch.randn(1024, 16, requires_grad=True)
    weight = torch.randn(5000, 16, requires_grad=True)
    targets, temperatures = torch.randint(5000, (1024,)), torch.ones(1024)

    def peak_bytes(head) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            head()[0].sum().backward()
        alive = peak = 0
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        for event in sorted(events, key=lambda event: event.start_ns()):
            alive += event.nbytes()
            peak = max(peak, alive)
        return peak

    whole = peak_bytes(lambda: plain(hidden, weight, targets, temperatures))
    chunked = peak_bytes(lambda: ChunkedLogprob.apply(hidden, weight, targets, temperatures, 64))
    assert whole > 3 * 1024 * 5000 * 4
    assert chunked < whole / 8


def test_head_without_tokens_gives_zero_gradients():
    hidden, weight = torch.empty(0, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    none = torch.empty(0, dtype=torch.int64)
    logprobs, _ = ChunkedLogprob.apply(hidden, weight, none, torch.empty(0), 8)
    logprobs.sum().backward()
    assert weight.grad.abs().max() == 0


def test_a_chunk_of_a_large_vocabulary_stays_within_its_bound():
    assert auto_chunk_tokens(150_000) * 150_000 * 4 <= 256 << 20
    assert auto_chunk_tokens(104) == 8192
