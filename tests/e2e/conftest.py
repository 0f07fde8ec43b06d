"""Fixtures that several end-to-end tests share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from primerl_hpc.run.rundir import RunDir
from tests.support.forked_ranks import ForkedRanks
from tests.support.helpers import make_tiny_model
from tests.support.one_rank import one_rank_world
from tests.support.runs import RL_RECIPE, SFT_RECIPE, TINY, command, kill_processes_of

if TYPE_CHECKING:
    from primerl_hpc.trainer.parallel.mesh import World


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with a tiny model, and demonstrations of both the right and the wrong answer."""
    folder = tmp_path_factory.mktemp("work")
    make_tiny_model(folder / "outputs" / "tiny", rows=20_000)
    return folder


@pytest.fixture(scope="session")
def warm_model(work: Path) -> Path:
    """The run directory of an SFT run of 300 steps, which keeps its weights every 100."""
    recipe = work / "sft.yaml"
    recipe.write_text(SFT_RECIPE.format(tiny=TINY, data=work / "outputs" / "tiny" / "sft.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMERL_HOME", str(work / "state"))
        command("submit", str(recipe), "-p", "local", "--run-dir", "runs/warm", "--follow", cwd=work)
    return work / "runs" / "warm"


@pytest.fixture
def start(work: Path, warm_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RunDir]]:
    """Submit an RL run from the warm model. After the test, all its processes are ended."""
    monkeypatch.setenv("PRIMERL_HOME", str(work / "state"))
    started: list[RunDir] = []

    def submit(name: str, *overrides: str, profile: str = "local") -> RunDir:
        recipe = work / "rl.yaml"
        recipe.write_text(RL_RECIPE.format(tiny=TINY))
        model = warm_model / "weights" / "step_300"
        words = [word for text in (f"model.name={model}", *overrides) for word in ("--set", text)]
        command("submit", str(recipe), "-p", profile, "--run-dir", f"runs/{name}", *words, cwd=work)
        started.append(RunDir(work / "runs" / name))
        return started[-1]

    yield submit
    for run in started:
        kill_processes_of(run.root)


@pytest.fixture(scope="session")
def forked_ranks() -> Iterator[ForkedRanks]:
    ranks = ForkedRanks()
    yield ranks
    ranks.stop()


@pytest.fixture
def one_rank() -> Iterator[World]:
    """A trainer in this process."""
    with one_rank_world() as world:
        yield world
    gc.unfreeze()
    gc.enable()
