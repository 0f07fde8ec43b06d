"""Sparse attention whose keys an indexer chooses: pieces of samples, and rows in which all keys are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM  # noqa: E402

from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from primerl_hpc.trainer.parallel import indexed  # noqa: E402
from tests.support.helpers import small_sft  # noqa: E402
from tests.support.one_rank import one_rank_world  # noqa: E402
from tests.support.packed_rows import make_samples, packed_logprobs, plain_logprobs  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402


@pytest.fixture(scope="module")
def rank() -> Any:
    with one_rank_world() as world:
        yield world


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa/shared"])
@pytest.mark.parametrize(("queries", "chosen"), [(7, 5), (7, 21), (512, 5), (7, 64)])
def test_samples_in_pieces_have_the_log_probabilities_of_transformers(
    rank: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, queries: int, chosen: int
) -> None:
    """Fewer keys than a piece has, more, and more than a sample has. With few heads, many scores are 0, and equal."""
    monkeypatch.setattr(indexed, "QUERIES", queries)
    make_family(family, tmp_path, index_topk=chosen, index_n_heads=16)
    policy = build_policy(small_sft(tmp_path), tmp_path, rank)
    samples = make_samples([30, 2, 9, 22])
    found = torch.cat(packed_logprobs(policy, [samples[:2], samples[2:]], 40))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = torch.cat([plain_logprobs(plain, sample) for sample in samples])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    found.sum().backward()
    frozen = {name for name, each in policy.hf.named_parameters() if not each.requires_grad}
    assert frozen and all(".indexer." in name for name in frozen)
