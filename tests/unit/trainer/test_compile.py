"""Compiled blocks: one graph per kind of block, without graph breaks, with the gradients of plain blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from primerl_hpc.trainer.batch import make_batch  # noqa: E402
from primerl_hpc.trainer.model import head  # noqa: E402
from primerl_hpc.trainer.model.head import choose_head  # noqa: E402
from primerl_hpc.trainer.model.policy import (  # noqa: E402
    Policy,
    build_policy,
    choose_attention,
    compiles_blocks,
)
from primerl_hpc.trainer.parallel.mesh import to_local  # noqa: E402
from tests.support.flash_kernels import flash_kernels_on_cpu  # noqa: E402
from tests.support.helpers import random_row, small_rl  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402

CPU = torch.device("cpu")
LENGTHS = [[9, 12, 3], [20, 2], [31, 4, 4, 4]]


@contextmanager
def compiler(monkeypatch: pytest.MonkeyPatch, backend: str) -> Iterator[None]:
    """Compile without code generation, which takes a minute per graph on a CPU."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))
    monkeypatch.setattr(head, "compile_head", partial(head.compile_head, backend=backend))
    torch.compiler.reset()
    counters.clear()
    with flash_kernels_on_cpu():
        yield
    torch.compiler.reset()


def policy_of(family: str, folder: Path, world: Any, **trainer: Any) -> Policy:
    model = make_family(family, folder, num_hidden_layers=4)
    recipe = small_rl(model)
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=trainer)})
    policy = build_policy(recipe, model, world)
    policy.attention = "varlen"
    return policy


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Return the sum of the gradients of forwards of several lengths."""
    rng = np.random.default_rng(0)
    for lengths in LENGTHS:
        logprobs, _ = policy(make_batch([random_row(rng, lengths)], CPU))
        logprobs.square().sum().backward()
    return {name: to_local(value.grad) for name, value in policy.named_parameters()}


@torch.no_grad()
def logprobs_of(policy: Policy) -> torch.Tensor:
    return policy(make_batch([random_row(np.random.default_rng(0), LENGTHS[0])], CPU))[0]


def test_compiled_blocks_have_the_gradients_of_plain_ones_and_share_their_graphs(
    one_rank, tmp_path, monkeypatch
):
    with compiler(monkeypatch, "aot_eager"):
        plain = gradients(policy_of("qwen3", tmp_path / "plain", one_rank, activation_checkpointing="full"))
        assert not counters["stats"]
        policy = policy_of(
            "qwen3", tmp_path / "model", one_rank, activation_checkpointing="full", compile=True
        )
        found = gradients(policy)
        assert not counters["graph_break"], dict(counters["graph_break"])
        # blocks: one for the first length, one for all others, which the four layers share; two of the head
        assert counters["stats"]["unique_graphs"] <= 5
    for name, value in plain.items():
        largest = float(value.abs().max())  # other elements are sums of such terms, which cancel
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6 * largest, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe", "gpt_oss"])
def test_blocks_of_the_main_families_have_no_graph_breaks(one_rank, tmp_path, monkeypatch, family):
    with compiler(monkeypatch, "eager"):
        plain = policy_of(family, tmp_path / "plain", one_rank)
        compiled = policy_of(family, tmp_path / "model", one_rank, compile=True)
        torch.testing.assert_close(logprobs_of(compiled), logprobs_of(plain), rtol=1e-4, atol=1e-5)
        assert not counters["graph_break"], dict(counters["graph_break"])
        kinds = (
            1 if family in ("llama", "qwen3_moe") else 2
        )  # dense blocks and mixtures; with and without window
        assert 2 <= counters["stats"]["unique_graphs"] <= 2 * kinds + 1  # one of the head
    torch.testing.assert_close(compiled.routing.loads, plain.routing.loads)


@pytest.mark.parametrize(
    ("family", "device", "changes", "is_compiled"),
    [
        ("qwen3", "cuda", {}, True),
        ("llama", "cuda", {}, True),
        ("qwen3", "cpu", {}, False),
        ("qwen3", "cuda", {"trainer": {"param_dtype": "float32"}}, False),  # no flash attention
        ("qwen3", "cuda", {"trainer": {"compile": False}}, False),
        ("qwen3", "cuda", {"trainer": {"float32": ["norm"]}}, False),
        ("qwen3_moe", "cpu", {"trainer": {"compile": True}}, True),
        ("qwen3_moe", "cuda", {}, False),  # gradients of compiled experts are not tested without a GPU
        ("qwen3", "cuda", {"lora": {"rank": 8}}, False),
        ("qwen3", "cuda", {"layout": {"trainer": {"context_parallel": 2}}}, False),
    ],
)
def test_auto_compiles_blocks_on_gpus_that_are_tested(tmp_path, family, device, changes, is_compiled):
    model = make_family(family, tmp_path / "model")
    recipe = small_rl(model, **{"trainer": {}, **changes})
    config = AutoConfig.from_pretrained(model)
    attention = choose_attention(recipe, config, torch.device(device))
    assert compiles_blocks(recipe, config, attention) == is_compiled


@pytest.mark.parametrize(
    ("device", "wanted", "is_compiled"),
    [("cuda", "auto", True), ("cuda", False, False), ("cpu", "auto", False), ("cpu", True, True)],
)
def test_auto_compiles_the_head_of_every_family_on_gpus(tmp_path, device, wanted, is_compiled):
    recipe = small_rl(make_family("qwen3_moe", tmp_path / "model"), trainer={"compile": wanted})
    assert (choose_head(recipe, torch.device(device)) is not None) == is_compiled
