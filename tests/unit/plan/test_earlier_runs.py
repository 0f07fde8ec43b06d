"""Run directories of earlier versions still load. `data/earlier_run` was written before plans had components.

It was prepared at commit 9187edb by ``submit --dry-run --run-dir``, with a warm-up and a node of the CPU partition.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import append_json, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.launch.submit import change_job, renew_scripts
from primerl_hpc.plan.plan import load_plan, upgrade
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.job import render_job
from primerl_hpc.run.rundir import RunDir

EARLIER = Path(__file__).with_name("data") / "earlier_run"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A copy of the earlier run, stopped after step 2."""
    run = RunDir(tmp_path / "earlier")
    shutil.copytree(EARLIER, run.root)
    write_json(run.state, {"attempt": 1, "state": "stopped", "phase": "main", "started": 1.0, "updated": 9.0})
    write_json(run.job, {"scheduler": "slurm", "job_id": "7", "attempt": 1, "submitted": 0.5})
    for step in (1, 2):
        append_json(
            run.metrics("trainer"), {"step": step, "time": float(step), "attempt": 1, "time/step": 1.0}
        )
    return run


def test_an_earlier_plan_equals_a_new_one_of_the_same_recipe_and_profile(run: RunDir) -> None:
    plan, profile = load_plan(run), load_profile(str(run.profile), environ={}).profile
    recipe = load_recipe(str(run.recipe)).recipe
    new = compile_plan(recipe, profile, run_dir="/shared/runs/earlier", python="/venv/bin/python")
    assert plan.components == new.components and plan.nodes == new.nodes and plan.preflight == new.preflight
    assert [phase.name for phase in plan.phases] == ["warmup", "main"]
    for earlier, later in zip(plan.phases, new.phases, strict=True):
        assert [process.name for process in earlier.processes] == [
            process.name for process in later.processes
        ]
        assert [process.nodes for process in earlier.processes] == [
            process.nodes for process in later.processes
        ]
    assert plan.phase("main").process("orchestrator-0").nodes == plan.components[0].nodes
    assert "#SBATCH hetjob" in render_job(plan, profile, python="/venv/bin/python")
    assert plan.phase_of(Role.TRAINER).recipe.max_steps == recipe.max_steps


def test_status_shows_an_earlier_run(run: RunDir) -> None:
    done = CliRunner().invoke(cli, ["status", str(run.root)], catch_exceptions=False)
    assert done.exit_code == 0 and "stopped" in done.output and "step 2/3" in done.output, done.output


def test_scripts_that_start_renamed_modules_are_written_again(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = load_plan(run)
    run.job_script.parent.mkdir()
    run.job_script.write_text("#!/bin/bash\nexec python -m primerl_hpc.runtime.supervisor /r  # edited\n")
    renew_scripts(run, plan)
    assert "# edited" in run.job_script.read_text() and not capsys.readouterr().err
    run.engines_script.write_text(
        "#!/bin/bash\nexec python -m primerl_hpc.runtime.elastic.engine_host /r 1\n"
    )
    renew_scripts(run, plan)
    assert "primerl_hpc.runtime.elastic.engine_host was renamed" in capsys.readouterr().err
    assert "# edited" not in run.job_script.read_text() and "#SBATCH" in run.job_script.read_text()


def test_a_change_of_srun_arguments_is_refused_for_any_key(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a new key that `_PLAN_SETTINGS` does not list."""
    monkeypatch.setattr("primerl_hpc.launch.submit._PLAN_SETTINGS", frozenset())
    monkeypatch.setattr("primerl_hpc.launch.submit.check_not_running", lambda _: None)
    before = run.profile.read_text()
    with pytest.raises(ConfigError, match=r"scheduler\.mpi=pmix changes the arguments of srun"):
        change_job(run, ["scheduler.mpi=pmix"])
    assert run.profile.read_text() == before


def test_every_module_that_an_earlier_plan_starts_still_exists(run: RunDir) -> None:
    phases = load_plan(run).phases
    modules = {process.argv[2] for phase in phases for process in phase.processes}
    assert modules and all(importlib.util.find_spec(module) is not None for module in modules)


def test_a_job_with_nodes_of_one_kind_has_no_components() -> None:
    plan = json.loads((EARLIER / "plan.json").read_text())
    for node in plan["nodes"]:
        node["is_cpu"] = False
    upgraded = upgrade(plan)
    assert "components" not in upgraded and "component_gpus" not in upgraded["preflight"]
    assert all("is_cpu" not in node for node in upgraded["nodes"])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["nodes", "preflight", "spare_nodes", "x"]), JSON))
def test_arbitrary_content_is_left_to_the_check_of_the_plan(values: dict[str, Any]) -> None:
    assert upgrade(values).keys() >= values.keys()
    assert upgrade(upgrade(values)) == upgrade(values)
