"""Secrets are rejected where they would be copied, passed by name instead, and hidden from what a model drives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Role, process_name
from primerl_hpc.common.safety.secret_values import MASK, is_secret, mask
from primerl_hpc.launch.submit import prepare_run
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.types import Launch
from tests.support.helpers import ROOT, make_tiny_model

TINY = str(ROOT / "recipes" / "reverse_text" / "tiny.yaml")
TOKEN = "hf_" + "AbCdEfGhIj" * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("WANDB_API_KEY", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("SLURM_JWT", "x"),
        ("DB_PASSWORD", "x"),
        ("openai_api_key", "x"),
        ("X", TOKEN),
        ("X", "sk-" + "a" * 40),
        ("X", "AKIAIOSFODNN7EXAMPLE"),
        ("X", "https://me:hunter2@index.example.org/simple"),
        ("X", "-----BEGIN RSA PRIVATE KEY-----"),
    ],
)
def test_a_secret_is_detected_by_its_name_or_its_form(name: str, value: str) -> None:
    assert is_secret(name, value)
    for where in ("env", "env_by_role.trainer"):
        with pytest.raises(ConfigError, match=rf"{name}: {{from: {name}}}"):
            load_recipe(TINY, overrides=[f"{where}.{name}={value}"], environ={})
    with pytest.raises(ConfigError, match="looks like a secret"):
        load_profile("local", overrides=[f"env.{name}={value}"], environ={})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("MAX_TOKENS", "12"),
        ("NCCL_DEBUG", "INFO"),
        ("HF_TOKEN_PATH", "/home/me/.cache/huggingface/token"),
        ("KEYBOARD", "x"),
        ("HTTPS_PROXY", "http://proxy.example.org:3128"),
    ],
)
def test_values_that_are_not_secrets_are_accepted(name: str, value: str) -> None:
    assert not is_secret(name, value)
    assert load_recipe(TINY, overrides=[f"env.{name}={value}"], environ={}).recipe.env[name] == value


@given(st.text(max_size=200))
def test_masking_removes_secrets_from_arbitrary_text(text: str) -> None:
    assert TOKEN not in mask(f"{text} {TOKEN} {text}")
    assert mask(f"HF_TOKEN={TOKEN}") == f"HF_TOKEN={MASK}"
    assert mask("env.WANDB_API_KEY=abc") == f"env.WANDB_API_KEY={MASK}"


def test_a_variable_passed_by_name_reaches_its_role_and_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "outputs" / "tiny", rows=10)
    monkeypatch.setenv("MY_HUB_TOKEN", TOKEN)
    monkeypatch.setattr(sys, "argv", ["primerl-hpc", "submit", "--set", f"env.X={TOKEN}"])
    loaded = load_recipe(TINY, overrides=["env.HF_TOKEN={from: MY_HUB_TOKEN}"], environ={})
    run, plan = prepare_run(loaded, load_profile("local", environ={}), tmp_path / "run")
    for path in run.root.rglob("*"):
        if path.is_file():
            assert TOKEN not in path.read_text(errors="replace"), path
    assert "HF_TOKEN" in run.recipe.read_text()
    process = plan.phase("main").process(process_name(Role.TRAINER, 0))
    assert process.inherited_env == {"HF_TOKEN": "MY_HUB_TOKEN"} and "HF_TOKEN" not in process.env
    assert Launch(process, run, "main", 1, 0).environment["HF_TOKEN"] == TOKEN
    assert type(plan).model_validate(json.loads(run.plan.read_text())) == plan


def test_an_unset_variable_to_be_passed_is_refused_at_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "outputs" / "tiny", rows=10)
    monkeypatch.delenv("MY_HUB_TOKEN", raising=False)
    loaded = load_recipe(TINY, overrides=["env.HF_TOKEN={from: MY_HUB_TOKEN}"], environ={})
    with pytest.raises(ConfigError, match="MY_HUB_TOKEN, which is not set"):
        prepare_run(loaded, load_profile("local", environ={}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


SECRETS = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "w",
    "AWS_SECRET_ACCESS_KEY": "a",
    "SLURM_JWT": "j",
    "SSH_AUTH_SOCK": "/tmp/agent",
}


def test_programs_that_a_model_drives_see_none_of_the_submitters_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that an environment server starts inherit its environment, and a model may write them."""
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "outputs" / "tiny", rows=10)
    loaded = load_recipe(TINY, overrides=["env.MINE=1", "env.GIVEN={from: HF_TOKEN}"], environ={})
    plan = compile_plan(
        resolve(loaded),
        load_profile("local", environ={}).profile,
        run_dir=str(tmp_path),
        python=sys.executable,
    )
    phase = plan.phase("main")
    show = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]

    def seen_by(name: str) -> dict[str, str]:
        outer = {**os.environ, **SECRETS, "LC_TIME": "C", "PATH": os.environ["PATH"]}
        code = (
            "import json, os, sys; from pathlib import Path; from primerl_hpc.run.rundir import RunDir;"
            "from primerl_hpc.plan.types import ProcessPlan; from primerl_hpc.runtime.types import Launch;"
            "process = ProcessPlan.model_validate_json(sys.argv[1]);"
            "os.environ.update(Launch(process, RunDir(Path(sys.argv[2])), 'main', 1, 0).environment);"
            "os.execv(sys.executable, [sys.executable, '-m', 'primerl_hpc.runtime.steps.guard', '--', *sys.argv[3:]])"
        )
        arguments = [phase.process(name).model_dump_json(), str(tmp_path), *show]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=outer | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    environment = seen_by(process_name(Role.ENV_SERVER, 0))
    assert not SECRETS.keys() & environment.keys()
    assert environment["MINE"] == "1" and environment["GIVEN"] == TOKEN, "what the recipe names is meant"
    assert environment["LC_TIME"] == "C" and environment["PRIMERL_PROCESS"] == "env_server-0"
    assert seen_by(process_name(Role.TRAINER, 0))["WANDB_API_KEY"] == "w"
    assert RunDir(tmp_path).root == tmp_path
