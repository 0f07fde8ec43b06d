"""The command line as a process: bad input is one sentence and a documented code, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import COMMANDS, cli
from primerl_hpc.common.errors import ExitCode, NotFoundError, PrimerlError
from tests.support import ROOT

RECIPE = """\
kind: sft
name: small
model: {name: ./model}
seq_len: 64
max_steps: 3
sft: {data: {path: rows.jsonl}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a recipe whose files are all there (the weights are never loaded here)."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "completion": "ba"}\n')
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def primerl(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def break_recipe(folder: Path, old: str, new: str) -> None:
    path = folder / "recipe.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


BAD = {
    "no recipe file": (lambda f: remove(f, "recipe.yaml"), ExitCode.NOT_FOUND, ["recipe.yaml"]),
    "YAML error": (
        lambda f: break_recipe(f, "name: small", "name: ["),
        ExitCode.CONFIG,
        ["recipe.yaml:", "YAML"],
    ),
    "unknown key": (
        lambda f: break_recipe(f, "max_steps", "max_stepz"),
        ExitCode.CONFIG,
        ["recipe.yaml:5", "max_stepz", "max_steps"],
    ),
    "wrong type": (
        lambda f: break_recipe(f, "64", "many"),
        ExitCode.CONFIG,
        ["recipe.yaml:4", "seq_len", "many"],
    ),
    "more than the profile has": (
        lambda f: break_recipe(f, "seq_len: 64", "layout: {trainer: {ranks: 9}}"),
        ExitCode.CONFIG,
        ["9", "has 4"],
    ),
    "model without weights": (
        lambda f: remove(f, "model/model.safetensors"),
        ExitCode.DATA,
        ["recipe.yaml:3", "no weights"],
    ),
    "no dataset": (lambda f: remove(f, "rows.jsonl"), ExitCode.NOT_FOUND, ["recipe.yaml:6", "rows.jsonl"]),
    "row without its column": (
        lambda f: (f / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n'),
        ExitCode.DATA,
        ["rows.jsonl:2", "'completion'"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_starts_nothing_and_writes_nothing(folder: Path, case: str) -> None:
    spoil, code, says = BAD[case]
    spoil(folder)
    before = tree(folder)
    done = primerl("submit", "recipe.yaml", "--profile", "local", cwd=folder)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    for word in says:
        assert word in done.stderr
    assert tree(folder) == before and not (folder / "runs").exists()


def test_an_occupied_run_directory_is_refused_and_left_alone(folder: Path) -> None:
    (folder / "my thesis").mkdir()
    (folder / "my thesis" / "thesis.txt").write_text("years of work")
    done = primerl("submit", "recipe.yaml", "-p", "local", "--run-dir", "my thesis", cwd=folder)
    assert done.returncode == ExitCode.OCCUPIED and "not empty" in done.stderr
    assert f"primerl-hpc resume '{folder}/my thesis'" in done.stderr
    assert [path.name for path in (folder / "my thesis").iterdir()] == ["thesis.txt"]


def test_an_unknown_profile_and_run_name_what_there_is(folder: Path) -> None:
    done = primerl("submit", "recipe.yaml", "-p", "nowhere", cwd=folder)
    assert done.returncode == ExitCode.NOT_FOUND and "leonardo, local, lumi" in done.stderr
    done = primerl("status", "nobody", cwd=folder)
    assert done.returncode == ExitCode.NOT_FOUND and "primerl-hpc list" in done.stderr


def test_no_profile_is_a_sentence_with_the_choices(folder: Path) -> None:
    done = primerl("plan", "recipe.yaml", cwd=folder)
    assert done.returncode == ExitCode.CONFIG and "--profile" in done.stderr and "local" in done.stderr


def test_the_environment_may_name_the_profile_and_override_keys(folder: Path) -> None:
    done = primerl(
        "plan", "recipe.yaml", "--json", cwd=folder, PRIMERL_PROFILE="local", PRIMERL_MAX_STEPS="7"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["phases"][0]["recipe"]["max_steps"] == 7


def test_a_prepared_run_is_started_by_hand_whatever_its_folder_is_called(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    words = ("submit", "recipe.yaml", "-p", "local", "--dry-run", "--run-dir", "my run")
    done = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert f"bash '{folder}/my run/launch/job.sbatch'\n" in done.output
    with pytest.raises(NotFoundError, match="primerl-hpc resume 'my run'"):
        CliRunner().invoke(cli, ("logs", "my run", "-f"), catch_exceptions=False)
    done = CliRunner().invoke(cli, ("submit", "recipe.yaml", "-p", "local", "--partition", ""))
    assert done.exit_code == ExitCode.USAGE and "must not be empty" in done.output


def test_a_dry_run_writes_nothing_without_a_run_dir_and_prepares_one_with_it(folder: Path) -> None:
    before = tree(folder)
    done = primerl("submit", "recipe.yaml", "-p", "local", "--dry-run", cwd=folder)
    assert done.returncode == 0 and "exec " in done.stdout and tree(folder) == before
    done = primerl(
        "submit", "recipe.yaml", "-p", "local", "--dry-run", "--run-dir", "run", "--json", cwd=folder
    )
    said = json.loads(done.stdout)
    assert Path(said["path"]).read_text() == said["script"]
    assert (folder / "run" / "plan.json").is_file()
    state = json.loads(primerl("status", "run", "--json", cwd=folder).stdout)
    assert state["state"] == "unknown" and "never submitted" in state["message"]


JUDGED = """\
kind: eval
name: small
model: {name: ./model}
environments: {eval: [{id: reverse-text}]}
judge: {model: {name: big}, base_url: "http://judge/v1", key_variable: NO_SUCH_KEY}
"""


@pytest.mark.parametrize(
    ("recipe", "profile", "code", "says"),
    [
        (RECIPE + "after: {export: {to: model}}\n", {}, ExitCode.OCCUPIED, "choose another after.export.to"),
        (RECIPE + "after: {export: {to: x, profile: {nod: 1}}}\n", {}, ExitCode.CONFIG, "key 'nod'"),
        (RECIPE, {"runs_dir": "$NOPE/x"}, ExitCode.CONFIG, "$NOPE, which is not set"),
        (JUDGED, {}, ExitCode.CONFIG, "NO_SUCH_KEY"),
    ],
)
def test_a_dry_run_refuses_what_a_submission_refuses(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    recipe: str,
    profile: dict[str, str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "recipe.yaml").write_text(recipe)
    changes = [word for key, value in profile.items() for word in ("--profile-set", f"{key}={value}")]
    for last in ((), ("--dry-run",)):
        done = CliRunner().invoke(cli, ["submit", "recipe.yaml", "-p", "local", *changes, *last])
        assert isinstance(done.exception, PrimerlError), done.output
        assert done.exception.exit_code == code and says in str(done.exception)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("words", [("plan",), ("render",), ("submit", "--dry-run")], ids=" ".join)
def test_what_is_shown_lies_where_the_profile_puts_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    words = (*words, "recipe.yaml", "-p", "local", "--profile-set", "runs_dir=/r", "--json")
    assert "/r/small" in CliRunner().invoke(cli, words, catch_exceptions=False).output


def test_slurm_without_slurm_is_refused_and_leaves_no_run_directory(folder: Path, tmp_path: Path) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("name: site\nnodes: 2\nnode: {gpus: 8}\n")
    words = ("submit", "recipe.yaml", "-p", str(profile), "--run-dir", "run")
    done = primerl(*words, cwd=folder, PATH="/usr/bin/nothing")
    assert done.returncode == ExitCode.UNAVAILABLE and "srun" in done.stderr
    assert not (folder / "run").exists()


def test_a_refused_submission_leaves_a_folder_that_the_user_made_as_it_was(
    folder: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("name: site\nnodes: 2\nnode: {gpus: 8}\n")
    (folder / "run").mkdir(mode=0o2770)  # striped, or with ACLs
    before = (folder / "run").stat().st_ino
    words = ("submit", "recipe.yaml", "-p", str(profile), "--run-dir", "run")
    assert primerl(*words, cwd=folder, PATH="/usr/bin/nothing").returncode == ExitCode.UNAVAILABLE
    assert (folder / "run").stat().st_ino == before and not any((folder / "run").iterdir())


def test_resume_may_ask_sbatch_for_something_else_and_for_nothing_that_the_plan_holds(
    folder: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "site.yaml"
    profile.write_text("name: site\nnodes: 2\nnode: {gpus: 8}\nscheduler: {partition: gpu}\n")
    primerl("submit", "recipe.yaml", "-p", str(profile), "--dry-run", "--run-dir", "run", cwd=folder)
    before = tree(folder / "run")
    done = primerl("resume", "run", "--profile-set", "node.gpus=4", cwd=folder)
    assert done.returncode == ExitCode.CONFIG and "node.gpus cannot change" in done.stderr
    assert tree(folder / "run") == before
    more = ("--time", "12:00:00", "--profile-set", "scheduler.signal_margin_s=900")
    done = primerl("resume", "run", *more, cwd=folder, PATH="/usr/bin/nothing")
    assert done.returncode == ExitCode.UNAVAILABLE  # no SLURM here: what it would be asked is written
    script = (folder / "run" / "launch" / "job.sbatch").read_text()
    assert "#SBATCH --time=12:00:00\n" in script and "#SBATCH --partition=gpu\n" in script
    assert "12:00:00" in (folder / "run" / "profile.yaml").read_text()
    assert json.loads((folder / "run" / "plan.json").read_text())["signal_margin_s"] == 900


SERVED = """\
kind: inference
name: served
model: {name: ./model}
layout: {inference: {replicas: 1}}
"""


def test_inference_submits_a_recipe_of_that_kind_as_submit_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "served.yaml").write_text(SERVED)
    words = ("served.yaml", "-p", "local", "--set", "layout.inference.replicas=2", "--dry-run", "--json")
    said, same = (
        json.loads(CliRunner().invoke(cli, (name, *words), catch_exceptions=False).output)
        for name in ("inference", "submit")
    )
    roles = [each["role"] for each in said["plan"]["phases"][0]["processes"]]
    assert said == same and sorted(roles) == ["inference", "inference", "router"]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("recipe.yaml", "-p", "local"), ExitCode.CONFIG, "kind sft has more than engines"),
        (("served.yaml", "-p", "local", "--index", "1"), ExitCode.USAGE, "--index is of one part of a run"),
        (("run", "--follow"), ExitCode.USAGE, "--follow is for a recipe"),
        (("run", "--time", "5"), ExitCode.USAGE, "--time is for a recipe"),
        (("nowhere", "-p", "local"), ExitCode.NOT_FOUND, "neither a recipe nor a run"),
    ],
)
def test_inference_refuses_what_is_neither_a_served_recipe_nor_a_part_of_a_run(
    folder: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    (folder / "served.yaml").write_text(SERVED)
    primerl("submit", "served.yaml", "-p", "local", "--dry-run", "--run-dir", "run", cwd=folder)
    before = tree(folder)
    done = primerl("inference", *words, cwd=folder)
    assert done.returncode == code and says in done.stderr and tree(folder) == before


def test_render_does_not_overwrite_another_script(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "job.sbatch").write_text("mine\n")
    done = primerl("render", "recipe.yaml", "-p", "local", "--out", "out", cwd=folder)
    assert done.returncode == ExitCode.OCCUPIED and (folder / "out" / "job.sbatch").read_text() == "mine\n"


def test_every_script_of_a_run_is_shown_and_checked_before_it_is_prepared(folder: Path) -> None:
    text = (
        RECIPE.replace("kind: sft", "kind: rl")
        + """\
environments: {train: [{id: reverse-text}]}
rollouts: {sampling: {max_tokens: 12}}
layout: {inference: {elastic: true, replicas: 2}, trainer: {nodes: 1}, orchestrator: {place: cpu-partition}}
after: {export: {to: exported}}
"""
    )
    (folder / "recipe.yaml").write_text(text)
    names = ["job.sbatch", "engines.sbatch", "export.sbatch"]
    where = ("recipe.yaml", "-p", "virtual", "--profile-set", "scheduler.spare_nodes=1")
    shown = primerl("submit", *where, "--dry-run", cwd=folder)
    assert shown.returncode == 0, shown.stderr
    assert (
        "  1 node(s) of 2 CPU slots + 1 of the CPU partition + 1 spare + 2 job(s) of one engine"
        in shown.stdout
    )
    assert "inference-1      own job       CPU slots" in shown.stdout
    assert all(f"\n{name}:\n" in shown.stdout for name in names) and "--array=0-1" in shown.stdout
    assert list(json.loads(primerl("render", *where, "--json", cwd=folder).stdout)["scripts"]) == names
    primerl("render", *where, "--out", "out", cwd=folder)
    assert sorted(tree(folder / "out")) == sorted(names)
    (folder / "engines.sbatch.j2").write_text("#!/bin/bash\nif true; then\n")
    broken = primerl("submit", *where, "--dry-run", cwd=folder, PRIMERL_TEMPLATES=str(folder))
    assert broken.returncode == ExitCode.CONFIG and "engines.sbatch" in broken.stderr


def test_render_leaves_a_file_that_is_no_text_alone(folder: Path) -> None:
    (folder / "job.sbatch").write_bytes(b"\xff\x00")
    done = primerl("render", "recipe.yaml", "-p", "local", "--out", ".", cwd=folder)
    assert done.returncode == ExitCode.OCCUPIED and (folder / "job.sbatch").read_bytes() == b"\xff\x00"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, tmp_path: Path) -> None:
    done = primerl(name, "--help", cwd=tmp_path)
    assert done.returncode == 0 and "Example" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_mistyped_command_offers_the_nearest(tmp_path: Path) -> None:
    done = primerl("sumbit", cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE and "'submit'" in done.stderr


@pytest.mark.parametrize("words", [("explain",), ("--help",)], ids=" ".join)
def test_a_reader_that_goes_away_ends_a_command_quietly(words: tuple[str, ...], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_recipes_and_profiles_whose_names_have_dots_are_found_by_them(folder: Path) -> None:
    for kind, text in (
        ("recipes", RECIPE),
        ("cluster_profiles", "name: site.v2\nscheduler: {type: local}\n"),
    ):
        (folder / "home" / kind).mkdir(parents=True)
        (folder / "home" / kind / "site.v2.yaml").write_text(text)
    done = primerl("plan", "site.v2", "-p", "site.v2", cwd=folder, PRIMERL_HOME=str(folder / "home"))
    assert "on profile site.v2" in done.stdout, done.stderr


def test_a_model_that_offline_nodes_would_not_find_is_told_of(folder: Path) -> None:
    break_recipe(folder, "./model", "org/model")
    cache = {"HF_HOME": "", "HF_HUB_CACHE": str(folder / "hub")}

    def said(*more: str) -> str:
        words = ("submit", "recipe.yaml", "-p", "local", "--dry-run", *more)
        return primerl(*words, cwd=folder, **cache).stderr

    assert "org/model lies in no cache here" in said()
    assert said("--profile-set", "offline=false") == ""
    (folder / "hub" / "models--org--model").mkdir(parents=True)
    assert said() == ""
    assert "org/model lies in no cache" in said("--profile-set", f"env.HF_HUB_CACHE={folder}")


def test_a_fault_that_nobody_foresaw_is_one_line_too(folder: Path) -> None:
    break_recipe(folder, "max_steps", "environments: {eval: [{id: e, args: {d: !!binary gIGC}}]}\nmax_steps")
    done = primerl("plan", "recipe.yaml", "-p", "local", "--json", cwd=folder)
    assert done.returncode == ExitCode.FAILED and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and done.stderr.endswith("; --debug shows where\n")


def test_debug_shows_the_traceback(folder: Path) -> None:
    done = primerl("--debug", "submit", "nothing.yaml", "-p", "local", cwd=folder)
    assert "Traceback" in done.stderr
