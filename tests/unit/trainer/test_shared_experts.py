"""Shared experts that run while tokens are sent to the routed ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from primerl_hpc.recipe.load import parse_recipe  # noqa: E402
from primerl_hpc.trainer.parallel.expert import (  # noqa: E402
    distribute_experts,
    may_overlap_shared,
    overlap_shared_experts,
)
from primerl_hpc.trainer.parallel.mesh import make_expert_mesh, to_local  # noqa: E402
from tests.support.tiny_models import COMMON, FAMILIES, MORE_FAMILIES  # noqa: E402


class ObservedWork:
    """A message of torch.distributed that records when it is waited for."""

    def __init__(self, work, events: list[str]) -> None:
        self.work, self.events = work, events

    def wait(self) -> None:
        self.events.append("wait")
        self.work.wait()


def gradients(hf, ids):
    hf.zero_grad()
    loss = hf(input_ids=ids).logits.logsumexp(-1).sum()
    loss.backward()
    return [loss.detach(), *(to_local(weight.grad) for weight in hf.parameters())]


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [
        ("deepseek_v2", False),
        ("deepseek_v3", False),
        ("dots1", False),
        ("glm4_moe", False),
        ("glm4_moe_lite", True),
        ("deepseek_v3", True),
    ],
)
def test_shared_experts_run_while_tokens_are_sent_and_give_the_same_bits(
    one_rank, monkeypatch, family, recomputed
):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | (FAMILIES | MORE_FAMILIES)[family])
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    distribute_experts(hf, make_expert_mesh(one_rank, 1)["expert"], "torch")
    if recomputed:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    events: list[str] = []
    send = dist.all_to_all_single

    def sent(*args, **more):
        events.append("send")
        work = send(*args, **more)
        return None if work is None else ObservedWork(work, events)

    monkeypatch.setattr(dist, "all_to_all_single", sent)
    last = hf.model.layers[1].mlp.shared_experts.down_proj
    last.register_forward_hook(lambda *_: events.append("shared"))
    last.weight.register_hook(lambda _: events.append("gradient"))
    ids = torch.randint(0, 101, (2, 9))
    plain = gradients(hf, ids)
    without = list(events)
    events.clear()
    assert overlap_shared_experts(hf) == 1  # the first layer is dense
    overlapped = gradients(hf, ids)
    assert all(torch.equal(one, other) for one, other in zip(plain, overlapped, strict=True))
    counts, back = ["send", "wait"], ["send"]
    both_ways = ["send", "send", "wait", "wait"]
    assert without[:8] == [*counts, *both_ways, *back, "shared"]
    # between the start of the messages with tokens and their end, also in backward
    assert events[:8] == [*counts, "send", "send", "shared", "wait", "wait", *back]
    assert events[-6:] == [*back, "send", "send", "gradient", "wait", "wait"]
    assert events.count("send") == without.count("send") and events.count("wait") == without.count("wait")


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"trainer": {"activation_checkpointing": ["mlp", "self_attn"]}}, True),
        ({"trainer": {"activation_checkpointing": ["mlp.shared_experts"]}}, False),
        ({"trainer": {"activation_checkpointing": ["experts"]}}, False),
        ({"trainer": {"compile": True}}, False),
        ({"lora": {"rank": 4, "alpha": 4, "dropout": 0.1}}, False),
        ({"layout": {"trainer": {"tensor_parallel": 2}}}, False),
    ],
)
def test_shared_experts_run_early_only_as_a_part_of_their_block(changes, may):
    recipe = parse_recipe(
        {
            "kind": "sft", "name": "test", "model": {"name": "m"}, "max_steps": 1, "seq_len": 64,
            "sft": {"data": {"path": "none"}}, **changes,
        }
    )  # fmt: skip
    assert may_overlap_shared(recipe) is may
