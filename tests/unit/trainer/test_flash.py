"""torch's flash attention operators in the trainer, by CPU versions: packed rows, windows, sinks, the ring."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from primerl_hpc.trainer.parallel import flash  # noqa: E402
from primerl_hpc.trainer.parallel.attention import full_rows  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, Packing, pad  # noqa: E402
from primerl_hpc.trainer.parallel.flash import States  # noqa: E402
from primerl_hpc.trainer.parallel.ring import Blocks, MatrixBlocks, merged  # noqa: E402
from primerl_hpc.trainer.parallel.ring_flash import FlashBlocks  # noqa: E402
from tests.support.flash_kernels import flash_kernels_on_cpu  # noqa: E402

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def positions_of(lengths: list[int]) -> torch.Tensor:
    """Return two rows: samples of these lengths and padding, and the same in reverse order."""
    rows = [torch.cat([torch.arange(length) for length in order]) for order in (lengths, lengths[::-1])]
    return torch.stack([torch.cat([row, torch.zeros(3, dtype=torch.long)]) for row in rows])


def inputs_for(positions: torch.Tensor, value_width: int = 6) -> list[torch.Tensor]:
    """Return queries of four heads, keys and values of two."""
    torch.manual_seed(0)
    shape = positions.shape
    return [
        torch.randn(shape[0], heads, shape[1], width, requires_grad=True)
        for heads, width in ((4, 8), (2, 8), (2, value_width))
    ]


def is_read_of(positions: torch.Tensor) -> torch.Tensor:
    """Return which tokens belong to samples of at least two: padding may see other padding, which nothing reads."""
    return (positions > 0) | (torch.nn.functional.pad(positions, (0, 1))[:, 1:] == 1)


class FlashAttention4:
    """The two functions of flash_attn.cute.interface that the trainer calls, by torch's operators."""

    def __init__(self) -> None:
        self.calls = 0

    def _flash_attn_fwd(self, query, key, value, *, return_lse, **options):
        assert return_lse
        self.calls += 1
        out, sums, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *self.bounds(options), 0.0, options["causal"], False, **self.rest(options)
        )
        return out, sums, None, None, None  # 4.0.0b36 returns five

    def _flash_attn_bwd(self, query, key, value, out, grad_out, sums, *, deterministic, **options):
        assert not deterministic
        state = torch.zeros(2, dtype=torch.uint64), torch.empty(0)
        bounds, rest = self.bounds(options), self.rest(options)
        return torch.ops.aten._flash_attention_backward(
            grad_out, query, key, value, out, sums, *bounds, 0.0, options["causal"], *state, **rest
        )

    def bounds(self, options):
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        return [options[name] for name in names]

    def rest(self, options):
        """Return scale and window in torch's form, where an open side is −1 and a causal call has no window."""
        left, right = options["window_size_left"], options["window_size_right"]
        assert not (options["causal"] and (left, right) != (None, None))
        sides = {
            "window_size_left": -1 if left is None else left,
            "window_size_right": -1 if right is None else right,
        }
        sides |= {"window_size_right": 0} if options["causal"] else {}
        return {"scale": options["softmax_scale"], **sides}


@pytest.fixture(params=["torch", "FlashAttention-4"])
def kernels(request, monkeypatch):
    """The kernels that the trainer calls. Yields the stand-in for FlashAttention-4, or None."""
    package = FlashAttention4() if request.param == "FlashAttention-4" else None
    monkeypatch.setattr(flash, "KERNELS", flash.Kernels(package, range(8, 129)))
    return package


@given(lengths=LENGTHS, window=st.none() | st.integers(1, 6), has_sinks=st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flash_attention_of_packed_rows_equals_plain_matrices(kernels, lengths, window, has_sinks):
    positions = positions_of(lengths)
    states = inputs_for(positions)
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    inputs = [*states, *([sinks] if has_sinks else [])]
    is_read = is_read_of(positions)
    results = []
    for inner in ("eager", "varlen"):
        with flash_kernels_on_cpu():
            out = full_rows(States(*states), Packing(Context(), positions, inner), 0.3, 0.0, window, sinks)
            out = out * is_read[:, None, :, None]
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert kernels is None or kernels.calls


@pytest.mark.parametrize(
    ("capability", "installed", "chosen"),
    [
        ((9, 0), {"flash_attn.cute.interface", "flash_attn_interface"}, "FlashAttention-4"),
        ((10, 0), {"flash_attn.cute.interface", "flash_attn_interface"}, "FlashAttention-4"),
        ((9, 0), {"flash_attn_interface"}, "FlashAttention-3"),
        ((10, 0), {"flash_attn_interface"}, "FlashAttention-2"),
        ((8, 0), {"flash_attn.cute.interface", "flash_attn_interface"}, "FlashAttention-2"),
        ((9, 0), set(), "FlashAttention-2"),
    ],
)
def test_the_fastest_installed_kernels_of_a_gpu_are_chosen(monkeypatch, capability, installed, chosen):
    def load(name: str) -> object:
        if name not in installed:
            raise ImportError(f"No module named {name}")
        return FlashAttention4()

    monkeypatch.setattr(flash, "import_module", load)
    monkeypatch.setattr(flash, "activate_fa3", lambda: "flash_attn_interface" in installed)
    assert chosen_for(monkeypatch, capability).startswith(chosen)
    narrow, wide = (States(*(torch.empty(1, 1, width) for _ in range(3))) for width in (128, 256))
    assert flash.KERNELS.take(narrow) == (chosen == "FlashAttention-4")
    assert flash.KERNELS.take(wide) == (chosen == "FlashAttention-4" and capability == (9, 0))


def chosen_for(monkeypatch, capability: tuple[int, int]) -> str:
    """Return the kernels chosen for a GPU, on which CPU versions of torch's operators compute a sample."""
    compute = flash.compute_sample
    monkeypatch.setattr(flash, "KERNELS", flash.Kernels())
    monkeypatch.setattr(flash, "compute_sample", lambda device, *shape: compute(torch.device("cpu"), *shape))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with flash_kernels_on_cpu():
        return flash.choose_kernels(torch.device("cuda"), 4, 2, 20)


class ChangedForward(FlashAttention4):
    def _flash_attn_fwd(self, query, key, value, **options):
        raise TypeError("unexpected keyword argument 'return_lse'")


@pytest.mark.parametrize("package", [object(), ChangedForward()], ids=["other functions", "other arguments"])
def test_a_flash_attention_4_that_cannot_compute_a_sample_is_not_used(monkeypatch, caplog, package):
    """The trainer calls private functions of a beta."""
    monkeypatch.setattr(flash, "import_module", lambda name: package)
    monkeypatch.setattr(flash, "activate_fa3", lambda: False)
    assert chosen_for(monkeypatch, (9, 0)) == "FlashAttention-2 of torch"
    assert flash.KERNELS.fa4 is None
    assert "FlashAttention-4 is installed and not used: " in caplog.text


def test_padding_is_one_segment_whatever_its_length():
    positions = torch.cat([torch.arange(5), torch.zeros(59, dtype=torch.long)])[None].repeat(2, 1)
    states = inputs_for(positions)
    with flash_kernels_on_cpu() as calls:
        full_rows(States(*states), Packing(Context(), positions, "varlen"), 0.3, 0.0, None, None)
    assert calls == [4]  # one sample and its padding in each of two rows


def results_of_ring(
    blocks: Blocks, states: States, grad_out: torch.Tensor, is_read: torch.Tensor
) -> list[torch.Tensor]:
    """Return output and log-sums of the tokens of a rank that are read, and the gradients from each rank's keys.

    ``states`` and ``grad_out`` are of full rows; ``is_read``: [B, N].
    """
    packing = blocks.packing
    own = packing.own
    rank, size = packing.context.rank, packing.context.size
    sources = [rank, *(source for source in range(size) if source != rank)]
    parts = {
        source: States(states.query[:, :, own], *(part[:, :, packing.tokens[source]] for part in states[1:]))
        for source in sources
    }
    out = sums = None
    for source in sources:
        for part in blocks.forward(parts[source], source):
            out, sums = part if out is None else merged(out, sums, *part)
    grads = [
        blocks.backward(parts[source], source, out.to(grad_out.dtype), sums, grad_out[:, :, own])
        for source in sources
    ]
    own_read = is_read[:, None, own]
    return [out * own_read[..., None], sums * own_read, *itertools.chain(*grads)]


@given(lengths=LENGTHS, size=st.integers(1, 3), window=st.none() | st.integers(1, 12))
@example(lengths=[9, 2, 9], size=2, window=5)  # one token of the third sample precedes six in the next piece
@settings(max_examples=40)
def test_a_ring_of_flash_kernels_computes_what_plain_matrices_compute(lengths, size, window):
    context = Context("ring", 0, size)
    positions = pad(positions_of(lengths), context)
    states, is_read = States(*(part.detach() for part in inputs_for(positions))), is_read_of(positions)
    grad_out = torch.randn(*states.query.shape[:3], states.value.shape[-1]) * is_read[:, None, :, None]
    for rank in range(size):
        packing = Packing(Context("ring", rank, size), positions)
        with flash_kernels_on_cpu():
            expected, found = (
                results_of_ring(kind(packing, 0.3, window), states, grad_out, is_read)
                for kind in (MatrixBlocks, FlashBlocks)
            )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
