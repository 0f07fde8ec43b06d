"""`submit` refuses an unknown environment with file and line, if the interpreter of the roles can check it."""

from __future__ import annotations

import site
import venv
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from tests.support.helpers import ROOT, unusable_model
from tests.unit.cli.test_cli import primerl

RECIPE = """\
kind: rl
name: small
model: {name: ./model, renderer: {name: chatml}}
seq_len: 64
max_steps: 3
rollouts: {sampling: {max_tokens: 16}}
environments:
  train:
    - id: reverse-text
      args: {split: train}
  eval:
    - id: alphabet-sort
      args: {turns: 2}
      env_args: {agent: {max_turns: 2}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    unusable_model(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def dry_run(folder: Path, *words: str, **variables: str):
    return primerl("submit", "recipe.yaml", "-p", "local", "--dry-run", *words, cwd=folder, **variables)


def test_valid_environments_are_submitted_without_a_warning(folder: Path) -> None:
    done = dry_run(folder)
    assert done.returncode == 0, done.stderr
    assert "environment" not in done.stderr


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("id: reverse-text", "id: revers-text", ["recipe.yaml:9: ", "'revers-text'", "mean 'reverse-text'?"]),
        ("{split: train}", "{splt: train}", ["recipe.yaml:10: ", "'args.splt'", "did you mean 'split'?"]),
        ("{split: train}", "{split: dev}", ["recipe.yaml:10: ", "args.split: must be 'train' or 'test'"]),
        ("{turns: 2}", "{turns: two}", ["recipe.yaml:13: ", "args.turns: must be a valid integer"]),
        ("{turns: 2}", "{turns: 99}", ["recipe.yaml:13: ", "turns × names_per_turn must be at most"]),
        ("max_turns: 2", "max_turn: 2", ["recipe.yaml:14: ", "agent.max_turn'", "did you mean 'max_turns'?"]),
    ],
    ids=["id", "argument", "choice", "type", "combination", "env_args"],
)
def test_an_unknown_environment_is_refused_with_file_line_and_similar_names(
    folder: Path, old: str, new: str, says: list[str]
) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace(old, new))
    done = dry_run(folder, "--run-dir", "run")
    assert done.returncode == ExitCode.CONFIG, done.stdout
    assert len(done.stderr.splitlines()) == 1 and all(text in done.stderr for text in says), done.stderr
    assert not (folder / "run").exists()


def test_an_environment_on_the_recipes_own_path_is_found(folder: Path) -> None:
    (folder / "mine").mkdir()
    (folder / "mine" / "my_task.py").write_text(
        "import verifiers.v1 as vf\n"
        "class Config(vf.TasksetConfig):\n    size: int = 1\n"
        "class MyTask(vf.Taskset[vf.Task, Config]):\n    pass\n"
        "__all__ = ['MyTask']\n"
    )
    text = RECIPE.replace("id: reverse-text", "id: my-task").replace("{split: train}", "{size: 3}")
    (folder / "recipe.yaml").write_text(text)
    assert "environment 'my-task' does not exist" in dry_run(folder).stderr
    found = ("--set", f"env.PYTHONPATH={folder / 'mine'}")
    assert dry_run(folder, *found).returncode == 0
    assert "args.sise" in dry_run(folder, *found, "--set", "environments.train[0].args.sise=3").stderr


def test_a_module_in_the_submission_folder_is_not_imported(folder: Path) -> None:
    for name in ("verifiers", "reverse_text", "heapq"):
        (folder / f"{name}.py").write_text("open('imported', 'w')\n")
    (folder / "recipe.yaml").write_text(RECIPE.replace("{split: train}", "{splt: train}"))
    found = primerl("submit", "recipe.yaml", "-p", "local", "--dry-run", cwd=folder, PYTHONSAFEPATH="1")
    assert "did you mean 'split'?" in found.stderr
    assert not (folder / "imported").exists()


def test_an_interpreter_without_verifiers_is_not_checked_and_a_warning_is_printed(folder: Path) -> None:
    """An interpreter as on a login node, with only the package's own requirements."""
    venv.create(folder / "plain", with_pip=False, symlinks=True)
    packages = Path(site.getsitepackages()[0])
    (target,) = (folder / "plain" / "lib").glob("python*/site-packages")
    names = (
        "pydantic",
        "pydantic_core",
        "annotated_types",
        "typing_extensions.py",
        "typing_inspection",
        "yaml",
    )
    for name in (*names, "isal"):
        (target / name).symlink_to(packages / name)
    (folder / "recipe.yaml").write_text(RECIPE.replace("reverse-text", "revers-text"))
    python = folder / "plain" / "bin" / "python"
    here = (folder, "-p", "h100x64", "--profile-set")  # a local run needs its software on this machine
    done = dry_run(*here, f"software.default.python={python}", PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert f"were not checked: {python} has no verifiers here" in done.stderr
    done = dry_run(*here, "software.default.python=/no/such/python")
    assert done.returncode == 0 and "/no/such/python cannot be run here" in done.stderr
