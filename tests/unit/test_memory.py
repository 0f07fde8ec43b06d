"""Recomputed and offloaded activations: the same gradients, less memory; what does not fit together is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

torch = pytest.importorskip("torch")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.recipe.training_schema import Trainer  # noqa: E402
from primerl_hpc.trainer.memory import save_activations  # noqa: E402
from primerl_hpc.trainer.optim import portions_of  # noqa: E402


def step(**settings) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients of one backward, and the bytes alive between forward and backward."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    hf = Qwen3ForCausalLM(config).train()
    save_activations(hf, list(hf.model.layers), Trainer.model_validate(settings))
    ids = torch.randint(64, (4, 64))
    kept: dict[int, int] = {}

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = hf(ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {name: value.grad for name, value in hf.named_parameters()}, sum(kept.values())


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"activation_checkpointing": "full"}, 0.4),
        ({"activation_checkpointing": "full", "activation_offload": True}, 0.4),
        ({"activation_checkpointing": ["mlp"]}, 0.7),
        ({"activation_checkpointing": ["self_attn", "mlp"]}, 0.6),
    ],
)
def test_gradients_are_the_same_and_less_is_kept(settings, share):
    expected, whole = step(activation_checkpointing="none")
    found, kept = step(**settings)
    assert kept < share * whole
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_a_module_that_no_block_has_is_named_with_those_that_are_there():
    with pytest.raises(
        ConfigError, match=r"names mpl, which no block of Qwen3ForCausalLM has; its blocks have .*mlp"
    ):
        step(activation_checkpointing=["mpl"])


def test_offloads_that_do_not_fit_together_are_refused():
    with pytest.raises(ValidationError, match="activation_offload needs activation_checkpointing full"):
        Trainer(activation_checkpointing="none", activation_offload=True)
    with pytest.raises(ValidationError, match="leave out optimizer_offload"):
        Trainer(cpu_offload=True, optimizer_offload=True)


def test_portions_hold_every_parameter_once_and_stay_within_their_bytes():
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (10, 20, 5, 100, 1)]
    portions = portions_of(parameters, 8 * 30)
    assert [[len(each) for each in portion] for portion in portions] == [[10, 20], [5], [100], [1]]
