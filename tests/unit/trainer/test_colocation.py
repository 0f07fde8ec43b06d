"""A trainer on accelerators that it shares with engines: its tensors leave the device and return unchanged."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from primerl_hpc.common.names import Role, process_name
from primerl_hpc.recipe.schema.layout import Colocated
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer import host_copy
from primerl_hpc.trainer.device_turns import AlwaysOnDevice, TrainerTurns, make_turns
from primerl_hpc.trainer.host_copy import HostCopy
from primerl_hpc.trainer.optim.optimizers import Optimizers, state_tensors
from primerl_hpc.trainer.parallel.mesh import to_local
from primerl_hpc.trainer.train_step import Trainer, build_trainer
from primerl_hpc.trainer.watchdog import Watchdog
from primerl_hpc.transport.turns import Grant, read_request, write_grant
from tests.support.helpers import random_row, small_sft, wait_for
from tests.support.tiny_models import make_family

TRAINER = process_name(Role.TRAINER, 0)


@contextmanager
def trainer_of(model: Path, world: Any, root: Path) -> Iterator[Trainer]:
    watchdog = Watchdog(RunDir(root), TRAINER, rank=0, size=1, timeout_s=600)
    yield build_trainer(small_sft(model), str(model), world, watchdog)
    watchdog.pause()
    gc.unfreeze()
    gc.enable()


def train(trainer: Trainer, steps: int, between: Any) -> dict[str, torch.Tensor]:
    """Train on equal rows and return weights and optimizer state."""
    generator = np.random.default_rng(0)
    for step in range(1, steps + 1):
        rows = [random_row(generator, [12, 9])]
        trainer.train_step(step, rows, [])
        between()
    states = {name: to_local(value).clone() for name, value in trainer.policy.named_parameters()}
    moments = state_tensors(trainer.optimizer, trainer.names)
    return states | {name: to_local(value).clone() for name, value in moments.items()}


def test_training_with_moves_to_the_host_between_steps_equals_training_without(
    tmp_path: Path, one_rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copy, "SLAB_BYTES", 4096)  # tensors span slabs
    model = make_family("qwen3", tmp_path / "model")
    with trainer_of(model, one_rank, tmp_path) as trainer:
        expected = train(trainer, 3, lambda: None)
    with trainer_of(model, one_rank, tmp_path) as trainer:
        copy = HostCopy(trainer.policy, trainer.optimizer, one_rank.device)
        parameters = list(trainer.policy.parameters())
        on_host: list[int] = []

        def away_and_back() -> None:
            copy.to_host()
            on_host.append(copy.num_bytes)
            assert sum(to_local(each).untyped_storage().nbytes() for each in parameters) == 0
            copy.to_device()
            assert copy.num_bytes == 0

        found = train(trainer, 3, away_and_back)
    assert found.keys() == expected.keys() and any(name.startswith("optim.exp_avg.") for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    num_bytes = 4 * sum(to_local(each).numel() for each in parameters)
    assert on_host[0] >= 3 * num_bytes and len(set(on_host)) == 1  # weights and two moments


def test_tensors_that_share_memory_are_copied_once(one_rank: Any) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Parameter(torch.arange(6.0))
            self.embedding = torch.nn.Parameter(self.head.data)

    model = Tied()
    copy = HostCopy(model, Optimizers(torch.optim.SGD(model.parameters(), lr=0.1)), torch.device("cpu"))
    copy.to_host()
    assert copy.num_bytes == 24
    copy.to_device()
    assert model.embedding.tolist() == model.head.tolist() == [0, 1, 2, 3, 4, 5]
    assert model.embedding.data_ptr() == model.head.data_ptr()


def test_a_turn_begins_with_its_own_grant_and_is_reported_as_over(tmp_path: Path, one_rank: Any) -> None:
    run = RunDir(tmp_path)
    turns = TrainerTurns(run, one_rank)

    def grant() -> None:
        wait_for(lambda: read_request(run, TRAINER, 1), "the trainer's request")
        write_grant(run, Grant(1, (0, 7), {}))  # of another turn
        write_grant(run, Grant(1, (0, 1), {"inference-0": 0}))

    arbiter = threading.Thread(target=grant)
    arbiter.start()
    with turns.take() as metrics:
        request = read_request(run, TRAINER, 1)
        assert request is not None and (request.number, request.is_released) == (1, False)
    arbiter.join()
    assert metrics.keys() == {"time/wait_for_turn", "time/move_to_device"}
    after = read_request(run, TRAINER, 1)
    assert after is not None and after.is_released
    assert read_request(run, TRAINER, 2) is None, "of an earlier attempt"


def test_a_turn_that_raises_is_not_over(tmp_path: Path, one_rank: Any) -> None:
    run = RunDir(tmp_path)
    write_grant(run, Grant(1, (0, 1)))
    with pytest.raises(ZeroDivisionError), TrainerTurns(run, one_rank).take():
        raise ZeroDivisionError
    request = read_request(run, TRAINER, 1)
    assert request is not None and not request.is_released


def test_only_layouts_with_turns_wait_for_them(tmp_path: Path, one_rank: Any) -> None:
    recipe = small_sft(tmp_path)
    for colocated, kind in (
        (None, AlwaysOnDevice),
        (Colocated(mode="share"), AlwaysOnDevice),
        (Colocated(), TrainerTurns),
    ):
        layout = recipe.layout.model_copy(update={"colocated": colocated})
        turns = make_turns(recipe.model_copy(update={"layout": layout}), RunDir(tmp_path), one_rank)
        assert type(turns) is kind
    with AlwaysOnDevice().take() as metrics:
        assert metrics == {} and not RunDir(tmp_path).turn(TRAINER).exists()
