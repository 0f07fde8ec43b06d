"""Follow-up jobs of a run: their checks before anything is written, their scripts, an evaluation of the last
weights."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.follow_up_jobs import follow_up_states, state_with_parent
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.jobs import JobFact
from tests.unit.cli.test_cli import folder, primerl, tree  # noqa: F401

AFTER = """\
environments: {eval: [{id: reverse-text, name: held-out}]}
rollouts: {sampling: {max_tokens: 12}}
after:
  export: {to: %s, profile: {scheduler: {time: "00:20:00"}}}
  evaluation: {replicas: 2}
"""

ROOM = "rollouts: {sampling: {max_tokens: 12}}\n"


def add_after(folder: Path, to: str = "exported", text: str = AFTER) -> None:  # noqa: F811
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text() + (text % json.dumps(to) if "%s" in text else text))


def prepare(folder: Path, profile: str = "virtual", *more: str) -> subprocess.CompletedProcess[str]:  # noqa: F811
    return primerl("submit", "recipe.yaml", "-p", profile, "--dry-run", "--run-dir", "run", *more, cwd=folder)


def test_follow_up_scripts_and_the_evaluation_run_are_prepared_with_the_run(folder: Path) -> None:  # noqa: F811
    add_after(folder)
    done = prepare(folder)
    assert done.returncode == 0, done.stderr
    run = RunDir(folder / "run")
    script = (run.launch / "export.sbatch").read_text()
    assert "#SBATCH --time=00:20:00" in script and "#SBATCH --nodes=1\n" in script
    words = shlex.split(script.splitlines()[-1])
    assert words[-4:] == ["export", str(run.root), "--to", str(folder / "exported")]
    plan = read_json(run.evaluation.plan)
    (phase,) = plan["phases"]
    assert plan["kind"] == "eval" and phase["model_path"] == str(folder / "model")
    asked = phase["recipe"]["evaluation"]
    assert (asked["weights"], asked["steps"], asked["base"]) == (str(run.weights), [3], False)
    assert [process["role"] for process in phase["processes"]].count("inference") == 2
    again = load_recipe(str(run.evaluation.recipe)).recipe
    assert again.kind == "eval" and again.environments.eval[0].name == "held-out"


def test_the_export_sources_its_own_setup_functions(folder: Path) -> None:  # noqa: F811
    (folder / "site").mkdir()
    (folder / "site" / "setup.sh.j2").write_text("# of the CPU nodes\n")
    add_after(folder, text=f"after: {{export: {{to: x, profile: {{templates: {folder / 'site'}}}}}}}\n")
    done = prepare(folder, "virtual", "--profile-set", "software.setup=[date]")
    assert done.returncode == 0, done.stderr
    launch = RunDir(folder / "run").launch
    assert "setup_begin()" in (launch / "setup.sh").read_text()
    assert (launch / "export-setup.sh").read_text() == "# of the CPU nodes\n"
    assert "/launch/export-setup.sh || refuse_run" in (launch / "export.sbatch").read_text()


def test_a_hostile_folder_name_stays_one_argument(folder: Path) -> None:  # noqa: F811
    add_after(folder, to="a'b $(touch pwned) `id`; c")
    assert prepare(folder).returncode == 0
    script = folder / "run" / "launch" / "export.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert shlex.split(script.read_text().splitlines()[-1])[-1] == str(folder / "a'b $(touch pwned) `id`; c")


@pytest.mark.parametrize(
    "text, code, said",
    [
        (f"{ROOM}after: {{evaluation: {{}}}}\n", ExitCode.CONFIG, "after.evaluation needs environments"),
        ("after: {export: {}}\n", ExitCode.CONFIG, "after.export.to"),
        ("after: {export: {to: x, merge: true}}\n", ExitCode.CONFIG, "for recipes with lora"),
        ("after: {export: {to: model}}\n", ExitCode.OCCUPIED, "does not overwrite anything"),
        ("after: {export: {to: x, profile: {scheduler: {tme: 1}}}}\n", ExitCode.CONFIG, "tme"),
        (AFTER.replace("%s", "x").replace("12", "64"), ExitCode.CONFIG, "leaves no room for a prompt"),
        (AFTER.replace("%s", "x").replace("replicas: 2", "replicas: 99"), ExitCode.CONFIG, "accelerators"),
    ],
)
def test_follow_up_jobs_that_cannot_work_are_refused_before_the_run(
    folder: Path,  # noqa: F811
    text: str,
    code: ExitCode,
    said: str,
) -> None:
    add_after(folder, text=text)
    before = tree(folder)
    done = prepare(folder, "local")
    assert done.returncode == code and said in done.stderr, done.stderr
    assert tree(folder) == before


def test_an_evaluation_trains_nothing_that_could_be_exported(folder: Path) -> None:  # noqa: F811
    (folder / "eval.yaml").write_text(
        "kind: eval\nname: judge\nmodel: {name: ./model, renderer: {name: chatml}}\nenvironments: {eval: [{id: reverse-text}]}\n"  # noqa: E501
        "after: {export: {to: x}}\n"
    )
    done = primerl("plan", "eval.yaml", "-p", "local", cwd=folder)
    assert done.returncode == ExitCode.CONFIG and "after belongs to kinds rl and sft" in done.stderr


def test_a_refused_submission_leaves_neither_run_directory(folder: Path) -> None:  # noqa: F811
    add_after(folder)
    done = primerl("submit", "recipe.yaml", "-p", "virtual", "--run-dir", "run", cwd=folder, PATH="/nowhere")
    assert done.returncode == ExitCode.UNAVAILABLE, done.stderr
    assert not (folder / "run").exists() and not (folder / "run-evaluation").exists()


@pytest.mark.parametrize(
    "state, fact, said",
    [
        (RunState.RUNNING, None, "waits for this run"),
        (RunState.RUNNING, JobFact("9", "PENDING", "Dependency"), "waits for this run"),
        (RunState.DONE, JobFact("9", "PENDING", "Resources"), "pending: Resources"),
        (RunState.DONE, JobFact("9", "RUNNING"), "running"),
        (RunState.FAILED, JobFact("9", "CANCELLED"), "dropped: this run did not finish"),
        (RunState.DONE, JobFact("9", "TIMEOUT"), "timeout"),
        (RunState.FAILED, None, "not done"),
    ],
)
def test_status_reports_the_result_of_an_export(state: RunState, fact: JobFact | None, said: str) -> None:
    job = {"after": {"export": {"job_id": "9", "to": "/nowhere/model"}}}
    assert follow_up_states(job, state, {"9": fact} if fact else {})["export"]["state"] == said


def test_a_run_that_waits_for_another_one_reports_it() -> None:
    job = {"parent": "/runs/trained"}
    assert state_with_parent(job, RunState.PENDING, "Dependency") == (RunState.PENDING, "waits for trained")
    assert state_with_parent(job, RunState.PENDING, "Resources") == (RunState.PENDING, "Resources")
    state, message = state_with_parent(job, RunState.CANCELLED, "…")
    assert state == RunState.CANCELLED and "trained did not finish" in (message or "")
