"""Muon and SignSGD against plain NumPy, on one rank and on tensors cut over several."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from primerl_hpc.recipe.schema.recipe import Recipe  # noqa: E402
from primerl_hpc.recipe.schema.training import TrainerConfig  # noqa: E402
from primerl_hpc.trainer.model.projections import SINGLE, Projections, find_projections  # noqa: E402
from primerl_hpc.trainer.optim import optimizers as optim  # noqa: E402
from primerl_hpc.trainer.optim.loss_scale import LossScale  # noqa: E402
from primerl_hpc.trainer.optim.muon import MuonOptimizer, newton_schulz  # noqa: E402
from primerl_hpc.trainer.optim.optimizers import (  # noqa: E402
    Optimizers,
    SignSGDOptimizer,
    build_optimizer,
    chunk_by_bytes,
    make_state,
    matrix_parameters,
    num_updates,
    state_kinds,
    state_tensors,
    zero_gradients,
)
from tests.support.spawned_ranks import spawn_ranks  # noqa: E402
from tests.support.tiny_models import COMMON, FAMILIES, MORE_FAMILIES  # noqa: E402

SHAPES = ((7, 5), (7, 5), (7, 5), (7, 5), (4, 9), (4, 6, 3), (5, 3, 8))
STEPS, LR, MOMENTUM, DECAY = 3, 0.1, 0.9, 0.05
PLACEMENTS = {  # of 2-D and 3-D parameters, on a mesh
    "rows": ([Shard(0)], [Shard(0)]),
    "columns": ([Shard(1)], [Shard(1)]),
    "replicated-and-rows": ([Replicate(), Shard(0)], [Replicate(), Shard(0)]),
    "experts-and-rows": ([Shard(1), Shard(0)], [Shard(0), Shard(1)]),
}


def tensors(step: int) -> list[np.ndarray]:
    """Return weights (step 0) or gradients of a step."""
    rng = np.random.default_rng(step)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


def orthogonal(matrix: np.ndarray) -> np.ndarray:
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


FUSED = {
    0: Projections((3, 2, 2)),  # query, key, value
    4: Projections((2, 2)),  # gate, up
    5: Projections((3, 3)),
    6: Projections((4, 4), is_interleaved=True, dim=-1),
}
"""Indices into `SHAPES`."""


def reference_fused_muon() -> list[np.ndarray]:
    return reference_muon(FUSED)


def scaled_update(update: np.ndarray, fused: Projections | None) -> np.ndarray:
    """Return √max(rows, columns) times the orthogonalized matrix, projection by projection."""
    if fused is None:
        return np.sqrt(max(update.shape)) * orthogonal(update)
    rows = update if fused.dim == -2 else update.T
    count = len(fused.sizes)
    places = (
        [np.arange(start, len(rows), count) for start in range(count)]
        if fused.is_interleaved
        else np.split(np.arange(len(rows)), np.cumsum(fused.sizes)[:-1])
    )
    out = np.empty_like(rows)
    for place in places:
        out[place] = np.sqrt(max(rows[place].shape)) * orthogonal(rows[place])
    return out if fused.dim == -2 else out.T


def reference_muon(fused: dict[int, Projections] | None = None) -> list[np.ndarray]:
    """Compute Muon in float64, matrix by matrix; Newton–Schulz is correct without transposing."""
    weights = [value.astype(np.float64) for value in tensors(0)]
    momenta = [np.zeros_like(value) for value in weights]
    for step in range(1, STEPS + 1):
        for index, gradient in enumerate(tensors(step)):
            momenta[index] = MOMENTUM * momenta[index] + (1 - MOMENTUM) * gradient
            update = (1 - MOMENTUM) * gradient + MOMENTUM * momenta[index]
            split = (fused or {}).get(index)
            if update.ndim == 3:
                update = np.stack([scaled_update(each, split) for each in update])
            else:
                update = scaled_update(update, split)
            weights[index] = weights[index] * (1 - LR * DECAY) - 0.2 * LR * update
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


def make_muon(parameters: list[nn.Parameter], fused: dict[int, Projections] | None = None) -> MuonOptimizer:
    return MuonOptimizer(
        parameters,
        lr=LR,
        momentum=MOMENTUM,
        nesterov=True,
        weight_decay=DECAY,
        dtype=torch.float32,
        projections={parameters[index]: each for index, each in (fused or {}).items()},
    )


def make_fused_muon(parameters: list[nn.Parameter]) -> MuonOptimizer:
    return make_muon(parameters, FUSED)


def whole_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.from_numpy(value)) for value in tensors(0)]


def test_muon_is_the_plain_algorithm():
    parameters = whole_parameters()
    for value, expected in zip(train(parameters, make_muon(parameters)), reference_muon(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


def test_muon_makes_one_update_at_a_time(monkeypatch):
    """All updates together would be as large as the gradients."""
    parameters = [nn.Parameter(torch.randn(8, 8)) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = torch.randn(8, 8)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = [0]
    plain = MuonOptimizer._advance_momentum

    def advance(optimizer, group, parameter):
        update = plain(optimizer, group, parameter)
        alive.add(update)
        most[0] = max(most[0], len(alive))
        return update

    monkeypatch.setattr(MuonOptimizer, "_advance_momentum", advance)
    make_muon(parameters).step()
    assert most[0] <= 2


def test_muon_multiplies_matrices_on_the_device_though_they_are_on_the_host():
    parameter = nn.Parameter(torch.randn(4, 4))
    parameter.grad = torch.randn(4, 4)
    options = {"lr": LR, "momentum": MOMENTUM, "nesterov": True, "weight_decay": DECAY}
    muon = MuonOptimizer([parameter], dtype=torch.bfloat16, **options)
    muon.device = torch.device("meta")
    assert muon._advance_momentum(muon.param_groups[0], parameter).device.type == "meta"
    assert muon.state[parameter]["momentum_buffer"].device.type == "cpu"


def test_muon_of_fused_projections_is_the_plain_algorithm_on_each():
    parameters = whole_parameters()
    values = train(parameters, make_fused_muon(parameters))
    for value, expected in zip(values, reference_fused_muon(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


def test_muon_of_matrices_is_torchs_own():
    """Compared in bfloat16, the only type of torch's implementation."""
    ours, theirs = (whole_parameters()[:5] for _ in range(2))
    options = {"lr": LR, "momentum": MOMENTUM, "nesterov": True, "weight_decay": DECAY}
    values = train_some(ours, MuonOptimizer(ours, dtype=torch.bfloat16, **options))
    expected = train_some(theirs, torch.optim.Muon(theirs, adjust_lr_fn="match_rms_adamw", **options))
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_allclose(value, other, atol=2e-3)


def train_some(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[np.ndarray]:
    for step in range(1, STEPS + 1):
        for parameter, gradient in zip(parameters, tensors(step), strict=False):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return [value.detach().numpy() for value in parameters]


def make_sign_sgd(parameters: list[nn.Parameter]) -> SignSGDOptimizer:
    return SignSGDOptimizer(parameters, lr=LR, weight_decay=DECAY)


def reference_sign_sgd() -> list[np.ndarray]:
    weights = tensors(0)
    for step in range(1, STEPS + 1):
        weights = [
            w * (1 - LR * DECAY) - LR * np.sign(g) for w, g in zip(weights, tensors(step), strict=True)
        ]
    return weights


KINDS = {
    "muon": (make_muon, reference_muon),
    "muon of fused projections": (make_fused_muon, reference_fused_muon),
    "sign_sgd": (make_sign_sgd, reference_sign_sgd),
}


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
    spawn_ranks(run_rank, size, size, mesh_shape, names, str(tmp_path))
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


def one_step(hf: nn.Module) -> dict[str, torch.Tensor]:
    """Return each parameter's change by one step of Muon in float32 without decay; gradients depend on names."""
    recipe = recipe_with({"type": "muon", "lr": 1.0, "weight_decay": 0.0, "nesterov": False, "momentum": 0.0})
    recipe = recipe.model_copy(update={"trainer": TrainerConfig(param_dtype="float32")})
    optimizer = build_optimizer(hf, recipe)
    before = {name: value.detach().clone() for name, value in hf.named_parameters()}
    for number, parameter in enumerate(hf.parameters()):
        generator = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return {name: before[name] - value.detach() for name, value in hf.named_parameters()}


def expected_move(gradient: torch.Tensor) -> torch.Tensor:
    return 0.2 * max(gradient.shape) ** 0.5 * newton_schulz(gradient)


def pieces_of(family: str, name: str, value: torch.Tensor) -> list[torch.Tensor]:
    """Split a fused tensor like the family's own forward, except for rows and columns."""
    if family == "gpt_oss":
        return [value[:, ::2], value[:, 1::2]]
    if name.endswith("qkv_proj.weight"):
        return list(value.split([32, 16, 16]))  # 4 heads of 8, 2 key-value heads
    if sizes := BY_HEAD.get(name.split(".")[-2]):
        starts = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
        heads = range(0, len(value), starts[-1])
        return [
            torch.cat([value[head + start : head + end] for head in heads]) for start, end in pairwise(starts)
        ]
    return list(value.chunk(2))


BY_HEAD = {
    "q_b_proj": (8, 4),
    "kv_b_proj": (8, 8),
    "kv_a_proj_with_mqa": (16, 4),
    "query_key_value": (8, 8, 8),
}
"""Rows of each projection, repeated for each head: without and with rope, key and value, latent and rope."""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3_moe", "model.layers.0.mlp.experts.gate_up_proj"),
        ("mixtral", "model.layers.0.mlp.experts.gate_up_proj"),
        ("deepseek_v3", "model.layers.1.mlp.experts.gate_up_proj"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj"),
        ("phi3", "model.layers.0.mlp.gate_up_proj.weight"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight"),
        ("glm4", "model.layers.0.mlp.gate_up_proj.weight"),
        ("deepseek_v3", "model.layers.0.self_attn.q_b_proj.weight"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"),
        ("deepseek_v3", "model.layers.0.self_attn.kv_b_proj.weight"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight"),
    ],
)
def test_muon_moves_fused_projections_as_a_family_that_keeps_them_apart(family, name):
    """Moonlight and dense MLPs keep gate and up, and query, key and value, as separate matrices."""
    hf = tiny_family(family)
    moved = one_step(hf)[name]
    gradient = hf.get_parameter(name).grad
    if gradient.ndim == 2:
        moved, gradient = moved[None], gradient[None]
    for expert_moved, expert_gradient in zip(moved, gradient, strict=True):
        for found, own in zip(
            pieces_of(family, name, expert_moved), pieces_of(family, name, expert_gradient), strict=True
        ):
            torch.testing.assert_close(found, expected_move(own), rtol=1e-6, atol=1e-6)


def test_complete_matrices_move_as_before():
    hf = tiny_family("qwen3_moe")
    split = find_projections(hf)
    assert {name for name, each in hf.named_parameters() if each in split} == {
        f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)
    }
    moved = one_step(hf)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.gate.weight"):
        torch.testing.assert_close(moved[name], expected_move(hf.get_parameter(name).grad))
    assert SINGLE.split(moved[name])[0] is moved[name]


def test_momentum_of_fused_projections_is_one_tensor_as_in_older_checkpoints():
    hf = tiny_family("phi3")
    optimizer = build_optimizer(hf, recipe_with({"type": "muon"}))
    make_state(optimizer, state_kinds(optimizer) or ["momentum_buffer"], 1)
    names = {parameter: name for name, parameter in hf.named_parameters()}
    found = state_tensors(optimizer, names)
    for name in ("mlp.gate_up_proj.weight", "self_attn.qkv_proj.weight"):
        own = f"model.layers.0.{name}"
        assert found[f"optim.momentum_buffer.{own}"].shape == hf.get_parameter(own).shape


def tiny_family(family: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON | (FAMILIES | MORE_FAMILIES)[family])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


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


def test_portions_are_of_the_parts_of_a_rank_and_copies_are_complete():
    """With two copies, each sharded over two ranks, a rank holds halves."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        parameters = [
            nn.Parameter(distribute_tensor(torch.zeros(64, 8), mesh, [Replicate(), Shard(0)]))
            for _ in range(6)
        ]
        half_bytes = 8 * 64 * 8 // 2
        portions = chunk_by_bytes(parameters, 2 * half_bytes)
        assert [len(portion) for portion in portions] == [2, 2, 2]
    finally:
        dist.destroy_process_group()


def test_state_made_for_a_checkpoint_goes_to_the_host_part_by_part(monkeypatch):
    """At most one part's state of an offloaded optimizer is on the device at a time."""
    monkeypatch.setattr(optim, "OFFLOAD_BYTES", 8 * 1024)
    hf = tiny_moe()
    recipe = recipe_with({"type": "adamw"})
    recipe = recipe.model_copy(update={"trainer": TrainerConfig(optimizer_offload=True)})
    optimizer = build_optimizer(hf, recipe)
    assert len(optimizer.parts) > 2
    on_device: list[int] = []

    def move(part: torch.optim.Optimizer) -> None:
        assert part is optimizer.parts[len(on_device)]
        on_device.append(sum(bool(each.state) for each in optimizer.parts) - len(on_device))

    monkeypatch.setattr(optimizer.host, "to_host", move)
    make_state(optimizer, ["exp_avg", "exp_avg_sq"], 3)
    assert on_device == [1] * len(optimizer.parts)


def test_zero_gradients_are_counted_once_over_the_ranks_that_hold_them():
    first, second, frozen = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    first.grad, second.grad = torch.zeros(2, 3), torch.tensor([[0.0, 1, -0.0], [2, 3, 4]])
    assert zero_gradients([first, second, frozen], world_size=1).tolist() == [8, 12]
    assert zero_gradients([first, second, frozen], world_size=4).tolist() == [2, 3]


def test_the_loss_scale_follows_the_rules_of_torchs_grad_scaler():
    config = TrainerConfig(param_dtype="float16", loss_scale=1024.0, loss_scale_growth=3)
    ours = LossScale(config)
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=config.loss_scale, growth_interval=config.loss_scale_growth
    )
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    found = []
    for is_overflow in (False, False, True, False, False, False, True, True, False, False, False, False):
        weight.grad = theirs.scale(torch.full((1,), torch.inf if is_overflow else 1.0))
        theirs.step(optimizer)
        theirs.update()
        ours.update(is_overflow=is_overflow)
        found.append((ours.value, theirs.get_scale()))
    assert all(value == expected for value, expected in found)
    assert len({value for value, _ in found}) == 3


class LoggedEvent:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")


class LoggedStream:
    """A CUDA stream whose copies end when they are issued. Events are named after the stream and numbered."""

    names: Iterator[str]
    log: list[str]

    def __init__(self) -> None:
        self.name, self.number = next(self.names), 0

    def wait_stream(self, _) -> None: ...

    def record_event(self) -> LoggedEvent:
        self.log.append(f"{self.name} {self.number}")
        self.number += 1
        return LoggedEvent(f"{self.name} {self.number - 1}", self.log)


class CurrentStream:
    def wait_event(self, event: LoggedEvent) -> None:
        LoggedStream.log.append(f"device waits for {event.name}")


def test_state_arrives_and_leaves_while_another_part_is_updated_with_the_same_bits(monkeypatch):
    plain_empty = torch.empty

    def unpinned(*shape, pin_memory=False, **more):
        return plain_empty(*shape, **more)

    log: list[str] = []
    LoggedStream.names, LoggedStream.log = iter(["arrival", "return"]), log
    monkeypatch.setattr(torch.cuda, "Stream", LoggedStream)
    monkeypatch.setattr(torch.cuda, "current_stream", CurrentStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch, "empty", unpinned)
    weights = [[nn.Parameter(torch.linspace(0, 1, 5)) for _ in range(3)] for _ in range(2)]
    offloaded, plain = (
        [torch.optim.AdamW([weight], lr=0.1, fused=True) for weight in group] for group in weights
    )
    host = optim.HostState(is_pinned=True)
    for number, part in enumerate(offloaded):
        part.register_step_pre_hook(lambda *_, number=number: log.append(f"update {number}"))
    for step in range(3):
        for group in weights:
            for weight in group:
                weight.grad = torch.linspace(-1, 1, 5) * (step + 1)
        log.clear()
        host.step(offloaded)
        for part in plain:
            part.step()
    events = [event.replace(" 6", " 0").replace(" 7", " 1").replace(" 8", " 2") for event in log]
    assert events == [
        "arrival 0",
        "arrival 1", "device waits for arrival 0", "update 0", "return 0",
        "host waits for return 0", "arrival 2", "device waits for arrival 1", "update 1", "return 1",
        "host waits for return 1", "device waits for arrival 2", "update 2", "return 2",
        "host waits for return 2",
    ]  # fmt: skip
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
