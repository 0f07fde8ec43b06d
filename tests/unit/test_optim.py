"""Muon and SignSGD against plain NumPy, on one rank and on tensors cut over several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from primerl_hpc.recipe.schema import Recipe  # noqa: E402
from primerl_hpc.recipe.training_schema import Trainer  # noqa: E402
from primerl_hpc.trainer import optim  # noqa: E402
from primerl_hpc.trainer.muon import Muon  # noqa: E402
from primerl_hpc.trainer.optim import (  # noqa: E402
    Optimizers,
    SignSGD,
    build_optimizer,
    make_state,
    matrix_parameters,
    num_updates,
    portions_of,
    state_kinds,
    state_tensors,
)

SHAPES = ((7, 5), (7, 5), (7, 5), (7, 5), (4, 9), (4, 6, 3), (5, 3, 8))
STEPS, LR, MOMENTUM, DECAY = 3, 0.1, 0.9, 0.05
PLACEMENTS = {  # of 2-D and 3-D parameters, on a mesh
    "rows": ([Shard(0)], [Shard(0)]),
    "columns": ([Shard(1)], [Shard(1)]),
    "replicated-and-rows": ([Replicate(), Shard(0)], [Replicate(), Shard(0)]),
    "experts-and-rows": ([Shard(1), Shard(0)], [Shard(0), Shard(1)]),
}


def tensors(step: int) -> list[np.ndarray]:
    """Weights (step 0) or gradients of a step."""
    rng = np.random.default_rng(step)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def reference_muon() -> list[np.ndarray]:
    """Float64, matrix by matrix; Newton–Schulz needs no transposing to be right."""
    weights = [value.astype(np.float64) for value in tensors(0)]
    momenta = [np.zeros_like(value) for value in weights]
    for step in range(1, STEPS + 1):
        for index, gradient in enumerate(tensors(step)):
            momenta[index] = MOMENTUM * momenta[index] + (1 - MOMENTUM) * gradient
            update = (1 - MOMENTUM) * gradient + MOMENTUM * momenta[index]
            if update.ndim == 3:
                update = np.stack([orthogonal(each) for each in update])
            else:
                update = orthogonal(update)
            scale = 0.2 * LR * np.sqrt(max(update.shape[-2:]))
            weights[index] = weights[index] * (1 - LR * DECAY) - scale * update
    return weights


def train(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[np.ndarray]:
    for step in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, tensors(step), strict=True):
            parameter.grad = torch.from_numpy(gradient)
            if isinstance(parameter, DTensor):
                parameter.grad = distribute_tensor(
                    parameter.grad, parameter.device_mesh, parameter.placements
                )
        optimizer.step()
    return [
        (value.full_tensor() if isinstance(value, DTensor) else value).detach().numpy()
        for value in parameters
    ]


def make_muon(parameters: list[nn.Parameter]) -> Muon:
    return Muon(parameters, lr=LR, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY, dtype=torch.float32)


def whole_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.from_numpy(value)) for value in tensors(0)]


def test_muon_is_the_plain_algorithm():
    parameters = whole_parameters()
    for value, expected in zip(train(parameters, make_muon(parameters)), reference_muon(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_muon_of_matrices_is_torchs_own():
    """In bfloat16, the only type torch's has."""
    ours, theirs = (whole_parameters()[:5] for _ in range(2))
    options = {"lr": LR, "momentum": MOMENTUM, "nesterov": True, "weight_decay": DECAY}
    values = train_some(ours, Muon(ours, dtype=torch.bfloat16, **options))
    expected = train_some(theirs, torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options))
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=2e-3)


def train_some(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[np.ndarray]:
    for step in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, tensors(step), strict=False):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return [value.detach().numpy() for value in parameters]


def make_sign_sgd(parameters: list[nn.Parameter]) -> SignSGD:
    return SignSGD(parameters, lr=LR, weight_decay=DECAY)


def reference_sign_sgd() -> list[np.ndarray]:
    weights = tensors(0)
    for step in range(1, STEPS + 1):
        weights = [
            w * (1 - LR * DECAY) - LR * np.sign(g) for w, g in zip(weights, tensors(step), strict=True)
        ]
    return weights


KINDS = {"muon": (make_muon, reference_muon), "sign_sgd": (make_sign_sgd, reference_sign_sgd)}


def run_rank(rank: int, size: int, mesh_shape: tuple[int, ...], names: list[str], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", mesh_shape)
    worst = {}
    for name in names:
        for kind, (make, reference) in KINDS.items():
            flat, fused = PLACEMENTS[name]
            parameters = [
                nn.Parameter(
                    distribute_tensor(torch.from_numpy(value), mesh, flat if value.ndim == 2 else fused)
                )
                for value in tensors(0)
            ]
            values = train(parameters, make(parameters))
            worst[f"{name}, {kind}"] = max(
                float(np.abs(value - other).max()) for value, other in zip(values, reference(), strict=True)
            )
    Path(folder, f"rank_{rank}.json").write_text(json.dumps(worst))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("mesh_shape", "names"),
    [((3,), ["rows", "columns"]), ((2, 2), ["replicated-and-rows", "experts-and-rows"])],
    ids=["3-ranks", "2x2-ranks"],
)
def test_an_update_does_not_depend_on_how_matrices_are_cut(tmp_path, mesh_shape, names):
    size = int(np.prod(mesh_shape))
    torch.multiprocessing.spawn(run_rank, (size, mesh_shape, names, str(tmp_path)), nprocs=size)
    for rank in range(size):
        worst = json.loads((tmp_path / f"rank_{rank}.json").read_text())
        assert set(worst) == {f"{name}, {kind}" for name in names for kind in KINDS}
        assert max(worst.values()) < 1e-5


def test_sign_sgd_moves_every_weight_by_the_rate_and_keeps_no_state():
    parameters = whole_parameters()
    optimizer = make_sign_sgd(parameters)
    for value, other in zip(train(parameters, optimizer), reference_sign_sgd(), strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)
    assert not optimizer.state


def tiny_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def recipe_with(optimizer: dict) -> Recipe:
    return Recipe.model_validate(
        {"kind": "inference", "name": "test", "model": {"name": "x"}, "optimizer": optimizer}
    )


def test_muon_gets_matrices_and_experts_and_adamw_the_rest():
    hf = tiny_moe()
    muon, adamw = build_optimizer(hf, recipe_with({"type": "muon"})).parts
    names = {parameter: name for name, parameter in hf.named_parameters()}
    matrices, rest = (
        {names[parameter] for group in part.param_groups for parameter in group["params"]}
        for part in (muon, adamw)
    )
    assert matrices | rest == set(names.values())
    assert not matrices & rest
    assert all("norm" in name or name in ("model.embed_tokens.weight", "lm_head.weight") for name in rest)
    assert "model.layers.0.mlp.experts.gate_up_proj" in matrices
    assert muon.dtype == torch.bfloat16


def test_muon_gets_no_biases_of_experts():
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    hf = GptOssForCausalLM(config)
    matrices = {name for name, parameter in hf.named_parameters() if parameter in matrix_parameters(hf)}
    layer = "model.layers.0"
    assert matrices == {
        *(f"{layer}.self_attn.{each}_proj.weight" for each in "qkvo"),
        f"{layer}.mlp.router.weight",
        f"{layer}.mlp.experts.gate_up_proj",
        f"{layer}.mlp.experts.down_proj",
    }


@pytest.mark.parametrize("kind", ["adamw", "sgd", "muon", "sign_sgd"])
def test_optimizer_state_goes_through_its_names_and_back(kind):
    def fresh() -> tuple[nn.Module, Optimizers, dict]:
        torch.manual_seed(0)
        hf = tiny_moe()
        names = {parameter: name for name, parameter in hf.named_parameters()}
        return hf, build_optimizer(hf, recipe_with({"type": kind, "lr": 1e-2})), names

    def step(hf: nn.Module, optimizer: Optimizers, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in hf.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    hf, optimizer, names = fresh()
    step(hf, optimizer, 1)
    saved = {name: value.clone() for name, value in state_tensors(optimizer, names).items()}
    other_hf, other, other_names = fresh()
    other_hf.load_state_dict(hf.state_dict())
    make_state(other, state_kinds(optimizer), num_updates(optimizer))
    into = state_tensors(other, other_names)
    assert set(into) == set(saved)
    with torch.no_grad():
        for name, value in into.items():
            value.copy_(saved[name])
    step(hf, optimizer, 2)
    step(other_hf, other, 2)
    for name, value in hf.named_parameters():
        assert torch.equal(value, other_hf.get_parameter(name)), name


def test_portions_are_of_what_a_rank_holds_and_copies_are_held_whole():
    """Of two copies, each cut over two ranks, a rank holds halves."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        parameters = [
            nn.Parameter(distribute_tensor(torch.zeros(64, 8), mesh, [Replicate(), Shard(0)]))
            for _ in range(6)
        ]
        half_bytes = 8 * 64 * 8 // 2
        portions = portions_of(parameters, 2 * half_bytes)
        assert [len(portion) for portion in portions] == [2, 2, 2]
    finally:
        dist.destroy_process_group()


def test_state_made_for_a_checkpoint_goes_to_the_host_part_by_part(monkeypatch):
    """Of an offloaded optimizer no more than one part's state is ever on the device."""
    monkeypatch.setattr(optim, "OFFLOAD_BYTES", 8 * 1024)
    hf = tiny_moe()
    recipe = recipe_with({"type": "adamw"})
    recipe = recipe.model_copy(update={"trainer": Trainer(optimizer_offload=True)})
    optimizer = build_optimizer(hf, recipe)
    assert len(optimizer.parts) > 2
    on_device: list[int] = []

    def move(part: torch.optim.Optimizer, *, to_host: bool) -> None:
        assert to_host and part is optimizer.parts[len(on_device)]
        on_device.append(sum(bool(each.state) for each in optimizer.parts) - len(on_device))

    monkeypatch.setattr(optim, "move_state", move)
    make_state(optimizer, ["exp_avg", "exp_avg_sq"], 3)
    assert on_device == [1] * len(optimizer.parts)
