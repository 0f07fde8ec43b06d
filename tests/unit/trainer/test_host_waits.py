"""Waits of the host for the device in a complete training step: counted, and bounded by a list of allowed ones."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from primerl_hpc.run.rundir import RunDir  # noqa: E402
from primerl_hpc.trainer import batch  # noqa: E402
from primerl_hpc.trainer.model import policy  # noqa: E402
from primerl_hpc.trainer.parallel.expert import distribute_experts  # noqa: E402
from primerl_hpc.trainer.parallel.mesh import make_expert_mesh  # noqa: E402
from primerl_hpc.trainer.train_step import Trainer, build_trainer  # noqa: E402
from primerl_hpc.trainer.watchdog import Watchdog  # noqa: E402
from tests.support.flash_kernels import flash_kernels_on_cpu  # noqa: E402
from tests.support.helpers import random_row, small_rl  # noqa: E402
from tests.support.host_waits import HostWaits  # noqa: E402
from tests.support.tiny_models import make_family  # noqa: E402

ENVS = ["a", "b"]
LAYERS = 2
STEP_WAITS = {"_train_step": 1, "reduce": 2}
"""A step of a dense model waits for the norm, and for sums and maxima of the metrics."""


@contextmanager
def trainer_of(family: str, folder: Path, world: Any, **trainer: Any) -> Iterator[Trainer]:
    model = make_family(family, folder / "model")
    recipe = small_rl(model)
    recipe = recipe.model_copy(update={"trainer": recipe.trainer.model_copy(update=trainer)})
    watchdog = Watchdog(RunDir(folder), "trainer-0", rank=0, size=1, timeout_s=600)
    built = build_trainer(recipe, str(model), world, watchdog)
    built.policy.attention = "varlen"
    with flash_kernels_on_cpu():
        yield built
    watchdog.pause()
    gc.unfreeze()
    gc.enable()


def waits_of_step(trainer: Trainer, num_rows: int) -> HostWaits:
    rng = np.random.default_rng(0)
    rows = [random_row(rng, [9, 12, 3], num_envs=2) for _ in range(num_rows)]
    rows[0].ref_kl_weights[:] = 0.1
    trainer.train_step(1, rows, ENVS)  # the first step also makes the optimizer's state
    with HostWaits() as waits:
        result = trainer.train_step(2, rows, ENVS)
    assert not result.is_skipped and result.metrics["optim/grad_norm"] > 0
    return waits


@pytest.fixture(autouse=True)
def one_row_per_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "FORWARD_TOKENS", {"cpu": 1})


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "nemotron_h"])
def test_a_step_waits_three_times_whatever_its_micro_batches(one_rank, tmp_path, family):
    with trainer_of(family, tmp_path, one_rank, activation_checkpointing="full") as trainer:
        one, four = waits_of_step(trainer, 1), waits_of_step(trainer, 4)
    assert one.not_allowed() == four.not_allowed() == []
    mixture = {"take_metrics": 1} if family == "gpt_oss" else {}
    assert one.count() == four.count() == Counter(STEP_WAITS | mixture)


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 1), ("full", 2)])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_a_layer_of_distributed_experts_waits_once_per_pass_for_the_sizes_of_its_messages(
    one_rank, tmp_path, monkeypatch, family, checkpointing, passes
):
    def distributed(hf, recipe, world):
        mesh = make_expert_mesh(world, 1)
        distribute_experts(hf, mesh["expert"], "torch")
        return mesh

    monkeypatch.setattr(policy, "apply_expert_parallel", distributed)
    with trainer_of(family, tmp_path, one_rank, activation_checkpointing=checkpointing) as trainer:
        layers = len(trainer.policy.routing.sizes)
        waits = waits_of_step(trainer, 3)
    assert waits.not_allowed() == []
    sizes = {"read_sizes": 3 * passes * layers}
    assert waits.count() == Counter(STEP_WAITS | {"take_metrics": 1} | sizes)


def test_a_wait_in_a_step_is_found_by_its_function(one_rank, tmp_path, monkeypatch):
    """The test above can fail: a boolean mask is refused."""
    plain = policy.ChunkedLogprob.forward

    def masked(ctx, hidden, *rest):
        hidden[hidden.isnan().any(-1)]
        return plain(ctx, hidden, *rest)

    monkeypatch.setattr(policy.ChunkedLogprob, "forward", staticmethod(masked))
    with trainer_of("qwen3", tmp_path, one_rank) as trainer:
        assert waits_of_step(trainer, 1).not_allowed() == ["index by a mask at forward"]
