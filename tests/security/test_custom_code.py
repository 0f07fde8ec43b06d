"""Code that a recipe names is listed before the run executes it, and rejected with --no-custom-code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.recipe.custom_code import SHIPPED_ENVIRONMENTS, VERIFIERS_PLUGINS, custom_code
from primerl_hpc.recipe.load import parse_recipe
from tests.support.helpers import unusable_model
from tests.unit.cli.test_cli import primerl

PLAIN: dict[str, Any] = {
    "kind": "rl",
    "name": "coded",
    "model": {"name": "./model", "renderer": {"name": "qwen3"}},
    "seq_len": 64,
    "max_steps": 3,
    "rollouts": {"batch_size": 4, "group_size": 2, "sampling": {"max_tokens": 16}},
    "environments": {"train": [{"id": "reverse-text"}]},
}
CODE: dict[str, tuple[dict[str, Any], str]] = {
    "model.trust_remote_code": ({"model": {**PLAIN["model"], "trust_remote_code": True}}, "./model"),
    "model.renderer.options.import_path": (
        {"model": {"name": "./model", "renderer": {"name": "custom", "options": {"import_path": "mine.R"}}}},
        "mine.R",
    ),
    "loss.import_path": ({"loss": {"type": "custom", "import_path": "mine:loss"}}, "mine:loss"),
    "algorithm.import_path": (
        {"algorithm": {"type": "custom", "import_path": "mine:advantage"}},
        "mine:advantage",
    ),
    "environments.train.0.id": ({"environments": {"train": [{"id": "their/task"}]}}, "their/task"),
    "environments.train.0.gates.0.import_path": (
        {
            "environments": {
                "train": [{"id": "reverse-text", "gates": [{"type": "custom", "import_path": "mine:gate"}]}]
            }
        },
        "mine:gate",
    ),
    "environments.train.0.args.task.judges.0.id": (
        {
            "environments": {
                "train": [{"id": "reverse-text", "args": {"task": {"judges": [{"id": "my-judge"}]}}}]
            },
            "judge": {"model": {"name": "./model"}},
        },
        "my-judge",
    ),
    "environments.train.0.env_args.agent.harness.id": (
        {
            "environments": {
                "train": [{"id": "reverse-text", "env_args": {"agent": {"harness": {"id": "my-harness"}}}}]
            }
        },
        "my-harness",
    ),
    "judge.model.trust_remote_code": (
        {"judge": {"model": {"name": "judge", "trust_remote_code": True}}},
        "modeling code of judge",
    ),
    "inference.extra_args.worker-cls": ({"inference": {"extra_args": {"worker-cls": "mine.W"}}}, "mine.W"),
    "env.PYTHONPATH": ({"env": {"PYTHONPATH": "/shared/modules"}}, "/shared/modules"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    unusable_model(tmp_path / "model")
    return tmp_path


def run(folder: Path, recipe: dict[str, Any], *words: str) -> Any:
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return primerl(words[0], "recipe.yaml", "-p", "local", *words[1:], cwd=folder)


@pytest.mark.parametrize("key", CODE)
def test_every_kind_of_code_is_found_by_its_key(key: str) -> None:
    change, what = CODE[key]
    found = custom_code(parse_recipe({**PLAIN, **change}))
    assert [code.key for code in found] == [key]
    assert what in found[0].what


def test_shipped_code_is_not_custom_code() -> None:
    assert custom_code(parse_recipe(PLAIN)) == []
    from primerl_hpc.envs import SHIPPED

    harnesses = {"inproc-chat"}
    shipped = {path.name.replace("_", "-") for path in SHIPPED.iterdir() if (path / "__init__.py").is_file()}
    assert shipped == SHIPPED_ENVIRONMENTS | harnesses
    verifiers = pytest.importorskip("verifiers")
    root = Path(verifiers.__file__).parent / "v1"
    own = {
        path.stem.replace("_", "-")
        for kind in ("tasksets", "harnesses", "envs", "judges")
        for path in (root / kind).iterdir()
        if not path.name.startswith("_") and path.stem not in ("utils", "node") and path.suffix != ".txt"
    }
    assert own == VERIFIERS_PLUGINS - harnesses


@pytest.mark.parametrize(
    "command", [("plan",), ("submit", "--dry-run"), ("eval", "--dry-run")], ids=lambda c: c[0]
)
def test_a_command_prints_the_code_and_refuses_it_with_the_flag(
    folder: Path, command: tuple[str, ...]
) -> None:
    recipe = {**PLAIN, "env": {"PYTHONPATH": "/shared/modules"}}
    if command[0] == "eval":
        recipe["environments"] = {"eval": [{"id": "reverse-text"}]}
        recipe["kind"] = "eval"
        del recipe["max_steps"]
    done = run(folder, recipe, *command)
    assert done.returncode == 0, done.stderr
    assert "env.PYTHONPATH: modules of /shared/modules" in done.stderr
    refused = run(folder, recipe, *command, "--no-custom-code")
    assert refused.returncode == ExitCode.CONFIG
    assert len(refused.stderr.splitlines()) == 1 and "env.PYTHONPATH" in refused.stderr, refused.stderr
    plain = run(
        folder, {key: value for key, value in recipe.items() if key != "env"}, *command, "--no-custom-code"
    )
    assert plain.returncode == 0, plain.stderr
    assert "executes code" not in plain.stderr


def test_the_plan_has_the_code_in_json(folder: Path) -> None:
    done = run(folder, {**PLAIN, "loss": CODE["loss.import_path"][0]["loss"]}, "plan", "--json")
    assert json.loads(done.stdout)["custom_code"] == ["loss.import_path: mine:loss"]


def test_a_rejected_package_is_not_imported(folder: Path) -> None:
    (folder / "their_task.py").write_text("Judge = open('imported', 'w')\n")
    recipe = {**PLAIN, "environments": {"train": [{"id": "their-task"}]}}
    done = run(folder, recipe, "submit", "--dry-run", "--no-custom-code")
    assert done.returncode == ExitCode.CONFIG and not (folder / "imported").exists()
