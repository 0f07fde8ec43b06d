"""Recomputed and offloaded activations: the same gradients, less memory; incompatible settings are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

torch = pytest.importorskip("torch")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from primerl_hpc.common.errors import ConfigError  # noqa: E402
from primerl_hpc.recipe.schema.training import TrainerConfig  # noqa: E402
from primerl_hpc.trainer.model.memory import apply_activation_checkpointing  # noqa: E402
from primerl_hpc.trainer.optim.optimizers import chunk_by_bytes  # noqa: E402


def tiny_model() -> Qwen3ForCausalLM:
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
    return Qwen3ForCausalLM(config).train()


def step(**settings) -> tuple[dict[str, torch.Tensor], int]:
    """Return gradients of one backward, and the bytes alive between forward and backward."""
    hf = tiny_model()
    apply_activation_checkpointing(hf, list(hf.model.layers), TrainerConfig.model_validate(settings))
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
        ({"activation_checkpointing": "full", "activation_checkpointing_every": 2}, 0.7),
        (
            {
                "activation_checkpointing": "full",
                "activation_checkpointing_every": 3,
                "activation_offload": True,
            },
            0.7,
        ),
        ({"activation_checkpointing": ["mlp"]}, 0.7),
        ({"activation_checkpointing": ["self_attn", "mlp"]}, 0.6),
    ],
)
def test_gradients_are_the_same_and_less_is_kept(settings, share):
    expected, full = step(activation_checkpointing="none")
    found, kept = step(**settings)
    assert kept < share * full
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def count_forwards(block: torch.nn.Module) -> list[int]:
    calls = [0]

    def count(*_) -> None:
        calls[0] += 1

    block.mlp.gate_proj.register_forward_hook(count)
    return calls


@pytest.mark.parametrize("parts", ["full", ["mlp"]])
@pytest.mark.parametrize(
    ("every", "recomputed"), [(1, [0, 1, 2, 3]), (2, [0, 2]), (3, [0, 3]), (4, [0]), (9, [0])]
)
def test_every_nth_block_is_recomputed_and_the_others_are_not(parts, every, recomputed):
    hf = tiny_model()
    blocks = list(hf.model.layers)
    counts = [count_forwards(block) for block in blocks]
    settings = {"activation_checkpointing": parts, "activation_checkpointing_every": every}
    apply_activation_checkpointing(hf, blocks, TrainerConfig.model_validate(settings))
    ids = torch.randint(64, (2, 8))
    hf(ids, labels=ids, use_cache=False).loss.backward()

    assert [number for number, (calls,) in enumerate(counts) if calls == 2] == recomputed
    assert all(calls in (1, 2) for (calls,) in counts)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "full", "activation_offload": True},
        {"activation_checkpointing": ["mlp"]},
    ],
)
@pytest.mark.parametrize("has_dropout", [False, True])
def test_generators_are_saved_for_recomputation_only_with_dropout(monkeypatch, settings, has_dropout):
    """The state of a GPU's generator is a copy to the host for each block."""
    hf = tiny_model()
    config = TrainerConfig.model_validate(settings)
    apply_activation_checkpointing(hf, list(hf.model.layers), config, has_dropout=has_dropout)
    reads = [0]

    def get_state() -> torch.Tensor:
        reads[0] += 1
        return torch.random.default_generator.get_state()

    monkeypatch.setattr(torch, "get_rng_state", get_state)
    ids = torch.randint(64, (2, 8))
    hf(ids, labels=ids, use_cache=False).loss.backward()
    assert (reads[0] > 0) == has_dropout


@pytest.mark.parametrize(("is_compiled", "options"), [(True, {"early_stop": False}), (False, {})])
def test_the_recomputation_of_a_compiled_block_runs_to_its_end(is_compiled, options):
    """To stop earlier is an error of torch while it records the history of a GPU's memory (`tests/gpu`)."""
    hf = tiny_model()
    config = TrainerConfig.model_validate({"activation_checkpointing": "full"})
    apply_activation_checkpointing(hf, list(hf.model.layers), config, is_compiled=is_compiled)
    found = hf.model.layers[0]._gradient_checkpointing_func.keywords
    assert {name: value for name, value in found.items() if name == "early_stop"} == options


def test_every_nth_block_of_none_is_refused():
    with pytest.raises(
        ValidationError, match="activation_checkpointing_every 2 needs activation_checkpointing full"
    ):
        TrainerConfig(activation_checkpointing="none", activation_checkpointing_every=2)


def test_a_module_that_no_block_has_is_named_with_those_that_are_there():
    with pytest.raises(
        ConfigError, match=r"names mpl, which no block of Qwen3ForCausalLM has; its blocks have .*mlp"
    ):
        step(activation_checkpointing=["mpl"])


def test_offloads_that_do_not_fit_together_are_refused():
    with pytest.raises(ValidationError, match="activation_offload needs activation_checkpointing full"):
        TrainerConfig(activation_checkpointing="none", activation_offload=True)
    with pytest.raises(ValidationError, match="leave out optimizer_offload"):
        TrainerConfig(cpu_offload=True, optimizer_offload=True)


def test_portions_hold_every_parameter_once_and_stay_within_their_bytes():
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (10, 20, 5, 100, 1)]
    portions = chunk_by_bytes(parameters, 8 * 30)
    assert [[len(each) for each in portion] for portion in portions] == [[10, 20], [5], [100], [1]]
