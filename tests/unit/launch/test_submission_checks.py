"""Refusals of `submit` before a run directory exists or a job is queued, because the run would fail later."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import ConfigError, NotFoundError
from primerl_hpc.recipe.renderer import check_renderer, make_renderer
from primerl_hpc.recipe.schema.model import Model
from tests.support.api import serve
from tests.support.hub import cache_model
from tests.unit.cli.test_cli import break_recipe, folder  # noqa: F401 - a fixture

CHATML = "renderer: {name: chatml}"


def submit(*words: str) -> Result:
    return CliRunner().invoke(cli, ("submit", "recipe.yaml", "-p", "local", "--dry-run", *words))


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    monkeypatch.chdir(folder)
    for name in ("HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.mark.parametrize(
    ("renderer", "words"),
    [
        (
            "renderer: {name: chatlm}",
            ["recipe.yaml:3", "no renderer 'chatlm'", "did you mean 'chatml'", "qwen3.5"],
        ),
        ("renderer: {name: qwen3, options: {thinking: true}}", ["recipe.yaml:3", "no option 'thinking'"]),
        ("renderer: {name: qwen3, options: {enable_thinking: maybe}}", ["enable_thinking", "valid boolean"]),
        ("dtype: float32", ["recipe.yaml:3", "auto looks up models by hub name", "/model is a folder"]),
    ],
)
def test_a_renderer_that_the_run_cannot_make_is_refused(here: Path, renderer: str, words: list[str]) -> None:
    break_recipe(here, CHATML, renderer)
    error = submit().exception
    assert isinstance(error, ConfigError), error
    assert all(word in str(error) for word in words), error


def test_auto_is_refused_for_a_hub_model_that_package_renderers_does_not_list() -> None:
    check_renderer(Model(name="Qwen/Qwen3-0.6B"))
    check_renderer(Model(name="my/fine-tune", tokenizer="Qwen/Qwen3-0.6B"))
    with pytest.raises(ConfigError, match="no renderer is known for model my/fine-tune"):
        check_renderer(Model(name="my/fine-tune"))


def test_a_role_reports_a_wrong_renderer_as_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="no renderer 'qwen33'"):
        make_renderer(Model.model_validate({"name": "m", "renderer": {"name": "qwen33"}}), None)


def test_a_local_run_is_refused_if_its_interpreter_has_no_torch(here: Path) -> None:
    venv.create(here / "bare", with_pip=False)
    python = here / "bare" / "bin" / "python"
    error = submit("--profile-set", f"software.default.python={python}").exception
    assert isinstance(error, ConfigError), error
    assert str(error).startswith(f"{python} has no package torch, which role sft needs; ")
    assert submit("--profile-set", f"software.default.python={sys.executable}").exit_code == 0


def test_an_interpreter_that_does_not_exist_is_refused(here: Path) -> None:
    error = submit("--profile-set", f"software.default.python={here}/no/python").exception
    assert isinstance(error, ConfigError) and "/no/python cannot be run here" in str(error)


def test_a_model_that_is_neither_a_folder_nor_in_the_cache_of_an_offline_machine_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_recipe(here, "./model", "models/missing")
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    error = submit().exception
    assert isinstance(error, NotFoundError), error
    assert (
        f"models/missing is in no cache here ({here}/hub), and the folder {here}/models/missing does not exist"
        in str(error)
    )
    # setup lines may name another cache
    assert submit("--profile-set", "software.setup=[source site.sh]").exit_code == 0
    (here / "hub" / "models--models--missing").mkdir(parents=True)
    error = submit().exception
    assert isinstance(error, NotFoundError) and "models/missing is incomplete in the cache" in str(error)
    assert error.hint == "fetch it first: primerl-hpc prefetch recipe.yaml -p local; or set its folder"
    cache_model(here / "hub", "models/missing")
    assert submit().exit_code == 0


def test_a_model_that_the_hub_does_not_know_is_refused(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_recipe(here, "./model", "models/missing")
    monkeypatch.setenv("HF_HUB_CACHE", str(here / "hub"))
    asked: list[str | None] = []

    def answer(request):
        asked.append(request.headers.get("authorization"))
        return (200, {"id": "org/known"}) if request.path == "/api/models/org/known" else (404, {})

    with serve(answer) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_TOKEN", "secret")
        error = submit("--profile-set", "offline=false").exception
        assert isinstance(error, NotFoundError), error
        assert "has no model models/missing, or it is private (HTTP 404), and the folder" in str(error)
        done = submit("--profile-set", "offline=false", "--set", "model.name=org/known")
        assert done.exit_code == 0 and "warning" not in done.stderr, done.output
    assert asked == ["Bearer secret"] * 2
    done = submit("--profile-set", "offline=false")  # the server at that address has ended
    assert done.exit_code == 0 and done.stderr.startswith("warning: cannot ask"), done.output
