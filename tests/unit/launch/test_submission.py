"""The path of a profile and a recipe through `submit`: every stage runs once, in one order."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from tests.support.helpers import ROOT
from tests.unit.checks.recipe.test_environments import folder  # noqa: F401 (a fixture)

STAGES = (
    "recipe/load.py: load_recipe",
    "recipe/load.py: validate_recipe",
    "cluster/load.py: load_profile",
    "launch/compose.py: compose",
    "recipe/resolve.py: resolve",
    "checks/recipe/model_config.py: read_model",
    "plan/planner.py: compile_plan",
    "offline/prefetch/needs.py: needs_of_plan",
    "render/job.py: render_job",
    "render/lint.py: check_script",
    "launch/checklist.py: check",
    "launch/checklist.py: check_chain",
    "launch/checklist.py: check_keys",
    "checks/recipe/software.py: check_software",
    "checks/recipe/environments.py: check_environments",
    "offline/prefetch/check.py: check_needs",
    "launch/submit.py: claim_run_dir",
    "launch/submit.py: write",
    "launch/submit.py: write_files",
    "run/registry.py: register_run",
)
"""Functions that process a recipe and a profile before the job is queued, in the order of their calls."""
ONCE = ("recipe/resolve.py", "plan/planner.py", "render/job.py")
"""Modules that other folders call once."""


def trace(*command: str) -> tuple[list[str], Counter[str]]:
    """Run a command in this process.

    Returns the stages in the order of their calls, and by module the number of calls from another folder.
    """
    package = str(ROOT / "primerl_hpc") + "/"
    stages: list[str] = []
    entries: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file, caller = frame.f_code.co_filename, frame.f_back
        if event != "call" or not file.startswith(package) or frame.f_code.co_name.startswith("<"):
            return
        module = file.removeprefix(package)
        if (name := f"{module}: {frame.f_code.co_name}") in STAGES:
            stages.append(name)
        origin = caller.f_code.co_filename.removeprefix(package) if caller is not None else ""
        is_of_package = caller is not None and caller.f_code.co_filename.startswith(package)
        if is_of_package and origin.split("/")[0] != module.split("/")[0]:
            entries[module] += 1

    sys.setprofile(note)
    try:
        done = CliRunner().invoke(cli, command, catch_exceptions=False)
    finally:
        sys.setprofile(None)
    assert done.exit_code == 0, done.output
    return stages, entries


def test_submit_runs_every_stage_once_and_in_order(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    stages, entries = trace("submit", "recipe.yaml", "-p", "h100x64", "--dry-run", "--run-dir", "run")
    assert tuple(stages) == STAGES
    assert [entries[module] for module in ONCE] == [1, 1, 1]
