"""Number of files in a run directory after 1,000 RL steps: each writer with what deletes its old files.

tools/bench/files_of_run.py counts those of a real trainer.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from primerl_hpc.common.names import Role
from primerl_hpc.orchestrator.checkpoint.follower import CheckpointFollower
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.files.journal import Journal
from primerl_hpc.trainer.rl_loop import clean_up
from primerl_hpc.transport.rollouts.filesystem import FilesystemReceiver, FilesystemSender
from primerl_hpc.transport.rollouts.micro_batch import StepInfo
from primerl_hpc.transport.weights.filesystem import FilesystemWeightReader, WeightWriter
from tests.support.helpers import TOY_RECIPE, make_plan, process_plan, random_row

BUDGET = 500
STEPS, INTERVAL, SHARDS, RANKS, ENGINES = 1000, 50, 2, 2, 2


def publish(run: RunDir, version: int) -> None:
    """Write a version of `SHARDS` shards, which all engines load; they then release the previous one."""
    writer = WeightWriter(run, version)
    writer.begin()
    shards = [writer.shard_path(number, of=SHARDS) for number in range(1, SHARDS + 1)]
    for shard in shards:
        shard.write_bytes(b"weights")
    writer.commit([writer.finish_file(shard) for shard in shards])
    reader = FilesystemWeightReader(run)
    for engine in range(ENGINES):
        reader.open(version, f"inference-{engine}")
        if version > 1:
            reader.close(version - 1, f"inference-{engine}")


def save(run: RunDir, step: int, follower: CheckpointFollower) -> None:
    """Write a checkpoint with two files for each rank, and the orchestrator's side."""
    folder = run.checkpoint_side(step, "trainer")
    folder.mkdir(parents=True)
    for rank in range(RANKS):
        (folder / f"__{rank}_0.distcp").write_bytes(b"state")
        (folder / f"rank_{rank}.json").write_text("{}")
    run.finish_checkpoint_side(step, "trainer", ("trainer", "orchestrator"))
    assert follower.follow() == [step]


def test_a_thousand_steps_leave_a_limited_number_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # of a disk; it changes no number of files
    run, rng = RunDir(tmp_path / "run"), np.random.default_rng(0)
    recipe = Recipe.model_validate(
        TOY_RECIPE | {"max_steps": STEPS, "checkpoint": {"interval": INTERVAL, "keep_last": 2}}
    )
    make_plan(run.root, TOY_RECIPE, processes=[process_plan(Role.TRAINER)])
    sender, receiver = FilesystemSender(run), FilesystemReceiver(run, world_size=RANKS)
    metrics = [MetricsWriter(run.metrics(role)) for role in ("trainer", "orchestrator")]
    follower, journal = CheckpointFollower(run, "trainer-0"), Journal(run, 1)
    row, counts = random_row(rng, [4, 4]), []
    for step in range(1, STEPS + 1):
        sender.send(StepInfo(step=step, env_names=["reverse-text"]), [[row]] * RANKS)
        follower.remember(step, {}, [])
        for writer in metrics:
            writer.write(step, {"loss/mean": 1.0})
        publish(run, step)
        if step % INTERVAL == 0:
            save(run, step, follower)
            journal.record("role_restarting", process="inference-0", in_s=1.0)
            publish_endpoint(run, "inference-0", "http://127.0.0.1:1")
        clean_up(run, recipe, receiver, step)
        if step % 100 == 50:
            counts.append(sum(len(names) for _, _, names in os.walk(run.root)))
    journal.catch_up()
    assert max(counts) <= BUDGET, counts
    assert counts[-1] == counts[1], f"the number grows with the steps: {counts}"
