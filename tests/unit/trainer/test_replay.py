"""Router replay on real modeling code: the engine's choice of experts, the trainer's weights for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from primerl_hpc.common.errors import ConfigError, DataError  # noqa: E402
from primerl_hpc.trainer.batch import ForwardInputs  # noqa: E402
from primerl_hpc.trainer.model.policy import build_policy  # noqa: E402
from primerl_hpc.trainer.model.replay import Replay  # noqa: E402
from primerl_hpc.trainer.parallel.context import Context, make_packing  # noqa: E402
from primerl_hpc.trainer.parallel.expert import expert_modules  # noqa: E402
from tests.support.helpers import small_rl  # noqa: E402
from tests.support.tiny_models import FAMILIES, make_family  # noqa: E402

MOE = [family for family in FAMILIES if family not in ("qwen3", "llama")]
POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])


def load(family: str, folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(make_family(family, folder), dtype=torch.float32)


@contextmanager
def calls_of_experts(hf: torch.nn.Module) -> Iterator[list]:
    """Record (layer, hidden [N, H], index [N, k], weights [N, k]) of each call."""
    calls: list = []
    hooks = [
        experts.register_forward_pre_hook(lambda _, args, layer=layer: calls.append((layer, *args)))
        for layer, block in enumerate(hf.base_model.layers)
        for experts in expert_modules(block)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def run(hf: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    hf.zero_grad()
    logits = hf(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    return logits.detach(), {name: each.grad for name, each in hf.named_parameters() if each.grad is not None}


def routed_of(calls: list, shape: torch.Size, layers: int) -> torch.Tensor:
    routed = torch.zeros(*shape, layers, calls[0][2].shape[-1], dtype=torch.uint8)
    for layer, _, index, _ in calls:
        routed[:, :, layer] = index.view(*shape, -1)
    return routed


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", MOE)
def test_the_routers_own_choices_replayed_change_no_bit_of_loss_and_gradients(family, recompute, tmp_path):
    hf = load(family, tmp_path)
    hf.train()
    if recompute:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(4, 100, POSITIONS.shape)
    with calls_of_experts(hf) as calls:
        logits, gradients = run(hf, ids)
    packing = make_packing(POSITIONS, Context(), "sdpa")
    replay = Replay(list(hf.base_model.layers))
    replay.begin_forward(routed_of(calls, ids.shape, 2), packing)
    replayed, again = run(hf, ids)
    assert torch.equal(replayed, logits)
    assert gradients.keys() == again.keys()
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_recomputed_mixture_is_recomputed_with_the_same_choices(one_rank, family, tmp_path):
    """The choices differ from the routers': a recomputation by the routers would change gradients."""
    model = make_family(family, tmp_path)
    torch.manual_seed(0)
    ids = torch.randint(4, 100, POSITIONS.shape)
    routed = torch.stack([torch.randperm(8)[:2] for _ in range(ids.numel() * 2)]).view(*ids.shape, 2, 2)
    found = []
    for parts in ("none", ["mlp"], ["self_attn", "mlp.experts"]):
        trainer = {"param_dtype": "float32", "router_replay": True, "activation_checkpointing": parts}
        recipe = small_rl(model, trainer=trainer)
        policy = build_policy(recipe, model, one_rank)
        logprobs, _ = policy(
            ForwardInputs(
                input_ids=ids,
                position_ids=POSITIONS,
                predictors=torch.arange(15),
                targets=ids.flatten()[1:],
                routed_experts=routed,
            )
        )
        logprobs.sum().backward()
        found.append([logprobs, *(each.grad.full_tensor() for each in policy.parameters())])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def expected_weights(
    family: str, hf: torch.nn.Module, hidden: torch.Tensor, layer: int, chosen: torch.Tensor
):
    """Compute weights by each family's formula, from the logits of the chosen experts."""
    mixture = hf.base_model.layers[layer].mlp
    router = mixture.router if family == "gpt_oss" else mixture.gate
    logits = F.linear(hidden, router.weight, getattr(router, "bias", None))
    if family == "gpt_oss":
        return logits.gather(1, chosen).softmax(-1)
    if family == "qwen3_moe":
        found = logits.softmax(-1).gather(1, chosen)
        return found / found.sum(-1, keepdim=True)
    found = logits.sigmoid().gather(1, chosen)
    return found / found.sum(-1, keepdim=True) * hf.config.routed_scaling_factor


@pytest.mark.parametrize("family", MOE)
def test_other_choices_are_taken_as_they_are_and_weighed_by_the_trainers_router(family, tmp_path):
    hf = load(family, tmp_path)
    ids = torch.randint(4, 100, POSITIONS.shape)
    with calls_of_experts(hf) as own:
        _, gradients = run(hf, ids)
    routed = torch.stack([torch.randperm(8)[:2] for _ in range(ids.numel() * 2)]).view(*ids.shape, 2, 2)
    routed[0, 3] = 0  # not known: an old engine, or text that it never saw
    replay = Replay(list(hf.base_model.layers))
    replay.begin_forward(routed.to(torch.uint16), make_packing(POSITIONS, Context(), "sdpa"))
    with calls_of_experts(hf) as calls:
        _, found = run(hf, ids)
    for layer, hidden, index, weights in calls:
        chosen = routed[:, :, layer].flatten(0, 1).clone()
        chosen[3] = index[3]
        assert torch.equal(index, chosen)
        assert index[3, 0] != index[3, 1]
        expected = expected_weights(family, hf, hidden, layer, chosen)
        torch.testing.assert_close(weights, expected.to(weights.dtype))
    first = min(layer for layer, *_ in calls)
    choice = next(index for layer, _, index, _ in own if layer == first)
    assert torch.equal(next(index for layer, _, index, _ in calls if layer == first)[3], choice[3])
    routers = [name for name in found if name.endswith(("gate.weight", "router.weight"))]
    assert routers and all(found[name].abs().sum() > 0 for name in routers)
    assert any(not torch.equal(found[name], gradients[name]) for name in routers)
    replay.begin_forward(None, make_packing(POSITIONS, Context(), "sdpa"))
    with calls_of_experts(hf) as calls:
        run(hf, ids)
    assert all(torch.equal(one[2], other[2]) for one, other in zip(own, calls, strict=True))


def test_ranks_that_share_a_row_replay_their_own_tokens(tmp_path):
    hf = load("qwen3_moe", tmp_path)
    routed = torch.arange(1, 8)[None, :, None, None].expand(1, 7, 2, 2)  # token t: t + 1
    shares = []
    for rank in range(2):
        replay = Replay(list(hf.base_model.layers))
        replay.begin_forward(routed, make_packing(torch.arange(7)[None], Context("ring", rank, 2), "sdpa"))
        shares.append(replay._ids[:, 0, 0].tolist())
    assert shares == [[1, 2, 7, 0], [3, 4, 5, 6]]


def test_a_dense_model_and_choices_of_another_models_layers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="router_replay is set, but the model is not a mixture"):
        Replay(list(load("llama", tmp_path / "dense").base_model.layers))
    replay = Replay(list(load("qwen3_moe", tmp_path / "moe").base_model.layers))
    with pytest.raises(DataError, match="of 3 layers, the model has 2"):
        replay.begin_forward(
            torch.ones(1, 8, 3, 2, dtype=torch.uint8), make_packing(POSITIONS[:1], Context(), "sdpa")
        )
