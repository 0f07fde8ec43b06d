"""Control, bidirectional and undecodable characters in recipes, profiles, templates and paths.

They are rejected with one sentence that shows them escaped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.assets import template_dirs
from primerl_hpc.common.errors import ConfigError, ExitCode, PrimerlError
from primerl_hpc.common.safety.odd_text import is_odd
from primerl_hpc.launch.compose import check_path
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.engine import render_template
from tests.support.helpers import unusable_model
from tests.unit.cli.test_cli import primerl

RECIPE = {
    "kind": "rl",
    "name": "small",
    "model": {"name": "./model"},
    "max_steps": 3,
    "environments": {"train": [{"id": "reverse-text", "args": {"split": "train"}}]},
}
PROFILE = {"name": "here", "scheduler": {"type": "local"}, "node": {"cpu_slots": 2}}
ODD = {
    "NUL": "\0",
    "bell": "\a",
    "carriage return": "\r",
    "escape": "\x1b",
    "delete": "\x7f",
    "C1": "\x9b",
    "right-to-left override": "\u202e",
    "isolate": "\u2066",
    "right-to-left mark": "\u200f",
    "a byte that is not UTF-8": "\udcff",
    "a surrogate": "\ud800",
}
odd = pytest.mark.parametrize("char", ODD.values(), ids=ODD)


def refusal(function, *arguments, **more) -> str:
    """Return the message of a ConfigError, after checking that it is one line of printable characters."""
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **more)
    sentence = str(caught.value)
    assert not any(is_odd(char, is_path=True) for char in sentence), ascii(sentence)
    return sentence


def written(path: Path, values: dict) -> str:
    """Write a YAML file (JSON is YAML) with every such character escaped, so that the file itself is plain text."""
    path.write_text(json.dumps(values, indent=1))
    return str(path)


@odd
@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("name", lambda text: {"name": text}),
        ("model.name", lambda text: {"model": {"name": f"/models/{text}"}}),
        ("env.A", lambda text: {"env": {"A": text}}),
        ("base", lambda text: {"base": text}),
        (
            "environments.train.0.args.split",
            lambda text: {"environments": {"train": [{"id": "x", "args": {"split": text}}]}},
        ),
    ],
)
def test_a_recipe_value_with_control_characters_is_refused(
    tmp_path: Path, char: str, key: str, change
) -> None:
    sentence = refusal(load_recipe, written(tmp_path / "r.yaml", RECIPE | change(f"a{char}b")), environ={})
    assert key in sentence and "r.yaml:" in sentence


@odd
def test_control_characters_in_a_key_override_or_variable_are_refused(tmp_path: Path, char: str) -> None:
    refusal(load_recipe, written(tmp_path / "k.yaml", RECIPE | {f"see{char}d": 1}), environ={})
    path = written(tmp_path / "r.yaml", RECIPE)
    assert "--set: " in refusal(load_recipe, path, overrides=[f"model.name=a{char}b"], environ={})
    variable = "PRIMERL_MODEL__TOKENIZER"
    assert f"{variable}: " in refusal(load_recipe, path, environ={variable: f"a{char}b"})


@odd
@pytest.mark.parametrize("key", ["runs_dir", "scratch", "templates", "description"])
def test_a_profile_value_with_control_characters_is_refused(tmp_path: Path, char: str, key: str) -> None:
    path = written(tmp_path / "p.yaml", PROFILE | {key: f"a{char}b"})
    sentence = refusal(load_profile, path, environ={})
    assert key in sentence and "p.yaml:" in sentence
    plain = written(tmp_path / "q.yaml", PROFILE)
    assert key in refusal(load_profile, plain, overrides=[f"{key}=a{char}b"], environ={})


@odd
def test_control_characters_in_paths_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, char: str
) -> None:
    name = f"a{char}b"
    refusal(load_recipe, f"{name}/r.yaml", environ={})
    refusal(load_profile, f"{name}/p.yaml", environ={})
    refusal(check_path, tmp_path / name)
    if char not in ("\0", "\ud800"):  # environment variables cannot contain them
        monkeypatch.setenv("PRIMERL_TEMPLATES", name)
        assert "PRIMERL_TEMPLATES" in refusal(template_dirs)


@pytest.mark.parametrize("char", ["\u202e", "\u2066", "\u200f"])
def test_a_comment_with_bidirectional_characters_is_refused(tmp_path: Path, char: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(f"kind: rl\n# {char} a comment\nname: x\n")
    assert "r.yaml:2: " in refusal(load_recipe, str(path), environ={})


@pytest.mark.parametrize("text", ["kind: rl\nname: é\n".encode("utf-16"), b"kind: rl\nname: \xff\xfe\n"])
def test_a_recipe_in_another_encoding_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "r.yaml").write_bytes(text)
    assert "not a UTF-8 text file" in refusal(load_recipe, str(tmp_path / "r.yaml"), environ={})


@pytest.mark.parametrize(
    "char", [char for char in ODD.values() if not "\ud800" <= char <= "\udfff" and char != "\r"]
)
def test_a_template_with_control_characters_is_refused(tmp_path: Path, char: str) -> None:
    (tmp_path / "job.sbatch.j2").write_text(f"#!/bin/bash\n# a{char}b\n")
    assert "job.sbatch.j2:2: " in refusal(render_template, "job.sbatch.j2", first=[tmp_path])


def test_a_template_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch.j2").write_bytes(b"#!/bin/bash\n# \xff\xfe\n")
    sentence = refusal(render_template, "job.sbatch.j2", first=[tmp_path])
    assert sentence == "job.sbatch.j2: not a UTF-8 text file (invalid start byte)"


def test_ordinary_text_of_any_language_is_accepted(tmp_path: Path) -> None:
    text = "Grüße 日本語 😀 עברית العربية\n\tnext line"
    values = RECIPE | {"env": {"A": text}}
    values["environments"] = {"train": [{"id": "x", "args": {"prompt": text}}]}
    path = tmp_path / "größe 日本.yaml"
    path.write_text(json.dumps(values, ensure_ascii=False))
    recipe = load_recipe(str(path), environ={}).recipe
    assert recipe.env["A"] == recipe.environments.train[0].args["prompt"] == text


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(max_size=20), key=st.sampled_from(["name", "env", "model"]))
def test_arbitrary_text_is_accepted_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str, key: str
) -> None:
    change = {"name": text, "env": {"A": text}, "model": {"name": text}}[key]
    path = written(tmp_path_factory.mktemp("r") / "r.yaml", RECIPE | {key: change})
    try:
        load_recipe(path, environ={})
    except PrimerlError as error:
        assert not any(is_odd(char) for char in str(error))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe and a profile that `submit --dry-run` accepts."""
    unusable_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "completion": "ba"}\n')
    values = {
        "kind": "sft",
        "name": "small",
        "model": {"name": "./model", "renderer": {"name": "chatml"}},
        "seq_len": 64,
        "max_steps": 3,
    }
    written(tmp_path / "r.yaml", values | {"sft": {"data": {"path": "rows.jsonl"}}})
    written(tmp_path / "p.yaml", PROFILE)
    return tmp_path


def test_the_command_line_exits_with_one_sentence_and_the_configuration_exit_code(folder: Path) -> None:
    strange = os.fsdecode(b"x\xff\xfey")
    (folder / strange).mkdir()
    # a template that does not render: its path is in the message, which Jinja could not compose
    (folder / strange / "job.sbatch.j2").write_text("#!/bin/bash\n{{ nothing.here }}\n")
    written(folder / "nul.yaml", PROFILE | {"runs_dir": "a\0b"})
    dry = ("submit", "r.yaml", "--dry-run", "-p")
    for words, variables, says in (
        ((*dry, "nul.yaml"), {}, "runs_dir contains U+0000"),
        ((*dry, "p.yaml"), {"PRIMERL_TEMPLATES": strange}, "PRIMERL_TEMPLATES: the path"),
        ((*dry, "p.yaml", "--run-dir", strange), {}, "run directory: the path"),
    ):
        done = primerl(*words, cwd=folder, **variables)
        assert done.returncode == ExitCode.CONFIG and says in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1 and done.stderr.isascii()


@pytest.mark.parametrize("line_break", ["\\n", "\\r", "\\u0085", "\\u2028", "\\u2029"])
def test_a_key_of_an_imported_file_cannot_add_lines_to_the_recipe(tmp_path: Path, line_break: str) -> None:
    """YAML ends a comment at each of these characters, and no check would see what follows."""
    evil = f"{line_break}env: {{LD_PRELOAD: /tmp/evil.so}}{line_break}#"
    source = tmp_path / f"rl{json.loads(chr(34) + line_break + chr(34))}env: {{A: b}}.toml"
    source.write_text(
        f'max_steps = 3\n"x{evil}" = 1\n[slurm]\n"y{evil}" = 1\n[trainer]\nmax_steps = 4\n'
        f'[model]\nname = "m{evil}"\n[env_vars]\n"A{evil}" = "1"\n[[orchestrator.env]]\nid = "reverse-text"\n'
    )
    done = CliRunner().invoke(cli, ["import-config", str(source)])
    converted = json.loads(CliRunner().invoke(cli, ["import-config", str(source), "--json"]).stdout)
    assert "LD_PRELOAD" in done.stdout, done.exception
    assert yaml.safe_load(done.stdout) == converted["recipe"]
    assert "LD_PRELOAD" not in converted["recipe"]["env"]
