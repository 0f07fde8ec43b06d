"""Every family of docs/models.md on one rank: packed rows, compared with transformers on each sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from primerl_hpc.trainer.model.families import file_tensors  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from primerl_hpc.transport.base_models.untrained import is_tower_tensor  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402
from tests.support.one_rank import one_rank_world  # noqa: E402
from tests.support.packed_rows import make_samples, packed_logprobs, plain_logprobs  # noqa: E402
from tests.support.tiny_models import COMPOSITES, FAMILIES, MORE_FAMILIES, auto_model, make_family  # noqa: E402

TOLERANCE = 1e-5
ROUNDING = 2e-6
"""Rounding of float32 relative to the samples' absolute values: above `TOLERANCE` only if four fifths cancel."""
SAMPLES = [[7, 21, 3], [1, 30, 2], [12, 17]]
"""Tokens of each sample of each row."""
LENGTH = 34


@pytest.fixture(scope="module")
def rank() -> Any:
    """The process group of one rank for all families."""
    with one_rank_world() as world:
        yield world


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def reference(
    plain: Any, samples: list[Any], weights: Tensor
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return log-probabilities, their weighted sum's gradients, and the sums of the samples' absolute gradients.

    Gradients of samples may cancel, as those of a gate's decay do (0.18 of 2.03 remain); rounding errors do not.
    """
    logprobs: list[Tensor] = []
    totals: dict[str, Tensor] = {}
    magnitudes: dict[str, Tensor] = {}
    for sample in samples:
        found = plain_logprobs(plain, sample)
        start = sum(map(len, logprobs))
        (found * weights[start : start + len(found)]).sum().backward()
        logprobs.append(found.detach())
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                totals[name] = totals.get(name, 0) + parameter.grad
                magnitudes[name] = magnitudes.get(name, 0) + parameter.grad.abs()
        plain.zero_grad()
    return torch.cat(logprobs), totals, magnitudes


@pytest.mark.parametrize("family", sorted(FAMILIES | MORE_FAMILIES | COMPOSITES))
def test_a_family_computes_and_exports_what_transformers_does(family: str, rank: Any, tmp_path: Path) -> None:
    """Log-probabilities and all gradients; exported tensors have the names, shapes and bits of the files."""
    make_family(family, tmp_path)
    policy = build_policy(small_sft(tmp_path, vision="none"), tmp_path, rank)
    plain = auto_model(family).from_pretrained(tmp_path, attn_implementation="eager")  # without dropout
    samples = iter(make_samples([count for row in SAMPLES for count in row]))
    rows = [[next(samples) for _ in row] for row in SAMPLES]
    found = torch.cat(packed_logprobs(policy, rows, LENGTH))
    weights = torch.randn(len(found), generator=torch.Generator().manual_seed(1))
    expected, wanted, magnitudes = reference(plain, [sample for row in rows for sample in row], weights)
    # values reach 50, where float32 resolves 4e-6
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=TOLERANCE)
    (found * weights).sum().backward()
    gradients = {
        name: full(each.grad) for name, each in policy.hf.named_parameters() if each.grad is not None
    }
    assert gradients.keys() == wanted.keys()
    negligible = 1e-6 * torch.stack([each.norm() for each in wanted.values()]).norm()
    for name, gradient in wanted.items():
        limit = max(TOLERANCE * (gradient.norm() + negligible), ROUNDING * magnitudes[name].norm())
        assert (gradients[name] - gradient).norm() <= limit, name
    source = load_file(tmp_path / "model.safetensors")
    exported = file_tensors(policy.hf, {name: full(value) for name, value in policy.tensors()})
    towers = {name for name in source if is_tower_tensor(name)}
    assert exported.keys() == source.keys() - towers and bool(towers) == (family in COMPOSITES)
    assert all(torch.equal(value, source[name]) for name, value in exported.items())
