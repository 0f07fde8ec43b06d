"""`primerl-hpc new`: options, questions in a terminal, and refusals that write nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.recipe.load import load_recipe
from tests.support.terminal import Terminal

OPTIONS = ("--model", "Qwen/Qwen3-0.6B", "--env", "reverse-text", "-p", "h100x64", "--gpus", "2")


def new(*words: str) -> Result:
    return CliRunner().invoke(cli, ["new", *words])


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("PRIMERL_PROFILE", raising=False)


def test_options_write_a_recipe_and_show_its_plan(tmp_path: Path) -> None:
    done = new("my.yaml", *OPTIONS)
    assert done.exit_code == 0, done.output
    assert "predicted for Qwen/Qwen3-0.6B" in done.output and "wrote my.yaml" in done.output
    recipe = load_recipe("my.yaml").recipe
    assert (recipe.model.name, recipe.name) == ("Qwen/Qwen3-0.6B", "reverse-text-qwen3-0.6b")
    assert "primerl-hpc submit my.yaml -p h100x64" in (tmp_path / "my.yaml").read_text()


def test_json_has_the_recipe_the_layout_and_the_figures() -> None:
    done = new("my.yaml", *OPTIONS, "--env-arg", "min_len=3", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["gpus"] == 2 and found["layout"]["num_engines"] == 1 and found["figures"]["time.step"] > 0
    assert found["recipe"]["environments"]["train"][0]["args"] == {"min_len": 3}
    assert any("Qwen3-0.6B is in no cache" in warning for warning in found["warnings"])


def test_on_one_gpu_engine_and_trainer_take_turns() -> None:
    done = new("my.yaml", *OPTIONS, "--gpus", "1", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["gpus"] == 1 and found["layout"]["is_colocated"]
    layout = load_recipe("my.yaml").recipe.layout
    assert layout.colocated is not None and layout.inference.replicas == layout.trainer.ranks == 1
    assert load_recipe("my.yaml").recipe.rollouts.max_off_policy_steps == 0
    planned = CliRunner().invoke(cli, ["plan", "my.yaml", "-p", "h100x64"])
    shown = " ".join(planned.output.split())
    assert "GPUs 0 " in shown and "1 engine and 1 trainer rank use the same" in shown


def test_missing_values_without_a_terminal_are_named_together(tmp_path: Path) -> None:
    done = new("my.yaml", "--kind", "distillation", "--model", "Qwen/Qwen3-4B")
    assert done.exit_code == ExitCode.USAGE
    assert "missing --env, --teacher, --profile" in done.output and "not a terminal" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--model", "Qwen/Nope"), "hf download Qwen/Nope config.json"),
        (("--model", "Qwen/Qwen3-235B-A22B", "--gpus", "1"), "needs at least 32 GPUs"),
    ],
)
def test_refusals_write_nothing(words: tuple[str, ...], cause: str, tmp_path: Path) -> None:
    done = new("my.yaml", *OPTIONS, *words)
    assert isinstance(done.exception, PrimerlError) and done.exception.exit_code == ExitCode.CONFIG
    assert cause in str(done.exception) and not list(tmp_path.iterdir())


def test_an_existing_file_stays_as_it_is_without_force(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("mine")
    done = new("my.yaml", *OPTIONS)
    assert isinstance(done.exception, PrimerlError) and done.exception.exit_code == ExitCode.OCCUPIED
    assert (tmp_path / "my.yaml").read_text() == "mine"
    assert new("my.yaml", *OPTIONS, "--force").exit_code == 0
    assert load_recipe("my.yaml").recipe.max_steps == 200


def test_a_malformed_argument_of_an_environment_is_a_usage_error() -> None:
    done = new("my.yaml", *OPTIONS, "--env-arg", "split")
    assert done.exit_code == ExitCode.USAGE and "KEY=VALUE" in done.output


def test_a_terminal_is_asked_and_asked_again(tmp_path: Path) -> None:
    with Terminal("primerl_hpc", "new", "my.yaml", "--name", "mine", cwd=tmp_path) as terminal:
        for question, answer in (
            ("Kind", "\n"),
            ("Model", "Qwen/Nope\n"),
            ("is unknown", "Qwen/Qwen3-0.6B\n"),
            ("Environment", "reverse-text\n"),
            ("profile", "nowhere\n"),
            ("no cluster profile", "h100x64\n"),
            ("GPUs [64]", "65\n"),
            ("use 64 or 72 GPUs", "2\n"),
            ("wrote my.yaml", ""),
        ):
            terminal.wait_for(question)
            terminal.press(answer)
        assert terminal.end() == 0
    recipe = load_recipe("my.yaml").recipe
    assert (recipe.name, recipe.kind, recipe.layout.trainer.ranks) == ("mine", "rl", 1)
