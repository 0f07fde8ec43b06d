"""The command line as a process: invalid input ends with one sentence and a documented code and leaves no files."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from primerl_hpc.cli.aliases import ROLES
from primerl_hpc.cli.main import COMMANDS, cli
from primerl_hpc.common.errors import ExitCode, NotFoundError, PrimerlError
from primerl_hpc.common.files import write_json
from primerl_hpc.run.lock import SupervisorLock
from primerl_hpc.run.rundir import RunDir
from tests.support.forked_commands import run_command
from tests.support.helpers import ROOT, captured, unusable_model
from tests.support.hub import cache_model

RECIPE = """\
kind: sft
name: small
model: {name: ./model, renderer: {name: chatml}}
seq_len: 64
max_steps: 3
sft: {data: {path: rows.jsonl}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder with a recipe and all its files (the weights are never loaded here)."""
    unusable_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab", "completion": "ba"}\n')
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def primerl(*words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_command(*words, cwd=cwd, environ={**os.environ, "PYTHONPATH": str(ROOT), **variables})


def start_command(*words: str, cwd: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "primerl_hpc", *words]
    return captured(command, cwd=cwd, env=environ)


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
    "removed key": (
        lambda f: break_recipe(f, "seq_len: 64", "timeouts: {distributed_s: 60}"),
        ExitCode.CONFIG,
        ["recipe.yaml:4", "key 'timeouts.distributed_s' was removed", "timeouts.trainer_hang_s"],
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
def test_invalid_input_is_one_sentence_and_starts_and_writes_nothing(folder: Path, case: str) -> None:
    spoil, code, expected = BAD[case]
    spoil(folder)
    before = tree(folder)
    done = primerl("submit", "recipe.yaml", "--profile", "local", cwd=folder)
    assert done.returncode == code and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    for word in expected:
        assert word in done.stderr
    assert tree(folder) == before and not (folder / "runs").exists()


def test_an_occupied_run_directory_is_refused_and_stays_unchanged(folder: Path) -> None:
    (folder / "my thesis").mkdir()
    (folder / "my thesis" / "thesis.txt").write_text("years of work")
    done = primerl("submit", "recipe.yaml", "-p", "local", "--run-dir", "my thesis", cwd=folder)
    assert done.returncode == ExitCode.OCCUPIED and "not empty" in done.stderr
    assert "resume" not in done.stderr  # there is no run
    assert [path.name for path in (folder / "my thesis").iterdir()] == ["thesis.txt"]
    (folder / "my thesis" / "plan.json").write_text("{}")
    done = primerl("submit", "recipe.yaml", "-p", "local", "--run-dir", "my thesis", cwd=folder)
    assert f"primerl-hpc resume '{folder}/my thesis'" in done.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("run-%j", "which SLURM replaces in names of files"),
        ("100%/run", "which SLURM replaces in names of files"),
        ("-rf", "commands take for an option"),
        ("--help", "commands take for an option"),
    ],
)
def test_a_run_directory_that_slurm_or_a_command_takes_for_another_one_is_refused(
    folder: Path, name: str, reason: str
) -> None:
    done = primerl("submit", "recipe.yaml", "-p", "local", f"--run-dir={name}", cwd=folder)
    assert done.returncode == ExitCode.CONFIG and reason in done.stderr, done.stderr
    assert not (folder / name).exists()


def test_unknown_profiles_and_runs_list_the_known_ones(folder: Path) -> None:
    done = primerl("submit", "recipe.yaml", "-p", "nowhere", cwd=folder)
    assert done.returncode == ExitCode.NOT_FOUND and "leonardo, local, lumi" in done.stderr
    done = primerl("status", "nobody", cwd=folder)
    assert done.returncode == ExitCode.NOT_FOUND and "primerl-hpc status --list" in done.stderr


def test_without_a_profile_the_error_lists_the_choices(folder: Path) -> None:
    done = primerl("plan", "recipe.yaml", cwd=folder)
    assert done.returncode == ExitCode.CONFIG and "--profile" in done.stderr and "local" in done.stderr


def test_the_environment_may_name_the_profile_and_set_keys_that_no_file_sets(folder: Path) -> None:
    variables = {"PRIMERL_PROFILE": "local", "PRIMERL_MAX_STEPS": "7", "PRIMERL_OPTIMIZER__EPS": "1e-6"}
    done = primerl("plan", "recipe.yaml", "--json", cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    recipe = json.loads(done.stdout)["phases"][0]["recipe"]
    assert (recipe["max_steps"], recipe["optimizer"]["eps"]) == (3, 1e-6)
    assert "warning: PRIMERL_MAX_STEPS is ignored because recipe.yaml:" in done.stderr


def test_a_prepared_run_can_be_started_manually_for_any_folder_name(
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
    output = json.loads(done.stdout)
    assert Path(output["path"]).read_text() == output["script"]
    assert (folder / "run" / "plan.json").is_file()
    state = json.loads(primerl("status", "run", "--json", cwd=folder).stdout)
    assert state["state"] == "unknown" and "never submitted" in state["message"]


TOOLS = """\
kind: rl
name: small
model: {name: ./model, renderer: {name: chatml}}
seq_len: 64
max_steps: 3
rollouts: {sampling: {max_tokens: 12}}
environments: {train: [{id: calculator}]}
"""


def test_tools_with_a_renderer_without_tools_are_refused_before_a_run_directory_exists(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(TOOLS)
    before = tree(folder)
    for more in ((), ("--dry-run",)):
        done = primerl("submit", "recipe.yaml", "-p", "local", "--run-dir", "out", *more, cwd=folder)
        assert done.returncode == ExitCode.CONFIG
        assert (
            "environment calculator: the environment has tools, but renderer 'chatml' of model" in done.stderr
        )
        assert "set model.renderer.name to a renderer with tools" in done.stderr
    assert tree(folder) == before


JUDGED = """\
kind: eval
name: small
model: {name: ./model, renderer: {name: chatml}}
environments: {eval: [{id: reverse-text}]}
judge: {model: {name: big}, base_url: "http://judge/v1", key_variable: NO_SUCH_KEY}
"""


@pytest.mark.parametrize(
    ("recipe", "profile", "code", "expected"),
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
    expected: str,
) -> None:
    monkeypatch.chdir(folder)
    (folder / "recipe.yaml").write_text(recipe)
    changes = [word for key, value in profile.items() for word in ("--profile-set", f"{key}={value}")]
    for last in ((), ("--dry-run",)):
        done = CliRunner().invoke(cli, ["submit", "recipe.yaml", "-p", "local", *changes, *last])
        assert isinstance(done.exception, PrimerlError), done.output
        assert done.exception.exit_code == code and expected in str(done.exception)
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("words", [("plan",), ("plan", "--scripts"), ("submit", "--dry-run")], ids=" ".join)
def test_shown_paths_are_in_the_runs_folder_of_the_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    words = (*words, "recipe.yaml", "-p", "local", "--profile-set", "runs_dir=/r", "--json")
    assert "/r/small" in CliRunner().invoke(cli, words, catch_exceptions=False).output


def test_slurm_without_slurm_leaves_no_run_directory_and_a_user_folder_unchanged(folder: Path) -> None:
    (folder / "site.yaml").write_text("name: site\nnodes: 2\nnode: {gpus: 8}\n")
    (folder / "mine").mkdir(mode=0o2770)  # striped, or with ACLs
    before = (folder / "mine").stat().st_ino
    for name in ("run", "mine"):
        words = ("submit", "recipe.yaml", "-p", "site.yaml", "--run-dir", name)
        done = primerl(*words, cwd=folder, PATH="/usr/bin/nothing")
        assert done.returncode == ExitCode.UNAVAILABLE and "srun" in done.stderr
    assert not (folder / "run").exists()
    assert (folder / "mine").stat().st_ino == before and not any((folder / "mine").iterdir())


def test_resume_may_change_sbatch_options_but_not_the_plan(folder: Path, tmp_path: Path) -> None:
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


def test_one_of_two_resumes_at_once_is_refused_and_changes_nothing(folder: Path) -> None:
    primerl("submit", "recipe.yaml", "-p", "h100x64", "--dry-run", "--run-dir", "run", cwd=folder)
    lock, before = SupervisorLock(RunDir(folder / "run").resume_lock), tree(folder / "run")
    lock.acquire()
    words = ("resume", "run", "--set", "max_steps=30")
    done = primerl(*words, cwd=folder, PATH="/usr/bin/nothing")
    assert done.returncode == ExitCode.OCCUPIED and "another resume of this run" in done.stderr
    lock.release()
    assert tree(folder / "run") == before
    done = primerl(*words, cwd=folder, PATH="/usr/bin/nothing")
    assert done.returncode == ExitCode.UNAVAILABLE and not lock.path.exists()


def test_resume_warns_that_edits_of_the_frozen_recipe_are_ignored(folder: Path) -> None:
    primerl("submit", "recipe.yaml", "-p", "h100x64", "--dry-run", "--run-dir", "run", cwd=folder)
    root = folder / "run"
    recipe, plan = (root / "recipe.yaml").read_text(), (root / "plan.json").read_bytes()
    bare = {"cwd": folder, "PATH": "/usr/bin/nothing"}  # no SLURM: every resume ends there
    (root / "recipe.yaml").write_text(f"# a comment changes nothing\n{recipe}")
    assert "edited" not in primerl("resume", "run", **bare).stderr
    (root / "recipe.yaml").write_text(recipe.replace("max_steps: 3", "max_steps: 30"))
    hint = f"primerl-hpc submit RECIPE --set checkpoint.fork.run={root}"
    done = primerl("resume", "run", **bare)
    assert done.returncode == ExitCode.UNAVAILABLE and (root / "plan.json").read_bytes() == plan
    assert done.stderr.startswith(f"warning: {root}/recipe.yaml was edited: resume ignores the edits")
    assert hint in done.stderr
    (root / "control" / "state.json").write_text('{"state": "done", "attempt": 1}')
    done = primerl("resume", "run", **bare)
    assert (
        done.returncode == ExitCode.OCCUPIED
        and "this run is done; edits of its recipe.yaml are ignored" in done.stderr
    )
    assert hint in done.stderr
    done = primerl("resume", "run", "--set", "seed=3", **bare)
    assert done.returncode == ExitCode.CONFIG and "seed cannot change at a resume" in done.stderr
    assert hint in done.stderr and (root / "plan.json").read_bytes() == plan
    done = primerl("resume", "run", "--step", "2", **bare)
    assert done.returncode == ExitCode.NOT_FOUND and "no complete checkpoint of step 2" in done.stderr
    done = primerl("resume", "run", "--set", "max_steps=30", **bare)
    assert done.returncode == ExitCode.UNAVAILABLE  # the run has steps left, so it would be queued
    assert json.loads((root / "plan.json").read_text())["phases"][-1]["recipe"]["max_steps"] == 30


SERVED = """\
kind: inference
name: served
model: {name: ./model, renderer: {name: chatml}}
layout: {inference: {replicas: 1}}
"""


def test_earlier_names_of_commands_do_the_same_and_name_the_present_one_on_stderr(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "served.yaml").write_text(SERVED)
    where = ("-p", "local", "--set", "layout.inference.replicas=2")
    pairs = (
        (("inference", "served.yaml", *where, "--dry-run"), ("submit", "served.yaml", *where, "--dry-run")),
        (("render", "served.yaml", *where), ("plan", "--scripts", "served.yaml", *where)),
        (("list",), ("status", "--list")),
        (("schema", "profile"), ("explain", "--schema", "--of", "profile")),
    )
    for words, present in pairs:
        old, new = (CliRunner().invoke(cli, (*each, "--json")) for each in (words, present))
        assert old.exit_code == new.exit_code == 0 and json.loads(old.stdout) == json.loads(new.stdout)
        note, *others = old.stderr.splitlines()
        assert note.startswith(f"note: 'primerl-hpc {words[0]}' is now 'primerl-hpc {present[0]}")
        assert others == new.stderr.splitlines()


@pytest.mark.parametrize(
    ("words", "present"),
    [
        *(((role, "--help"), f"role {role}") for role in ROLES),
        (("shell", "--help"), "exec"),
        (("trainer", "--bench", "--help"), "bench trainer"),
        (("submit", "--bench", "--help"), "bench loop"),
    ],
    ids=str,
)
def test_an_earlier_name_shows_the_help_of_the_present_command(words: tuple[str, ...], present: str) -> None:
    done = CliRunner().invoke(cli, words)
    command = present.split(maxsplit=1)[0]
    assert done.exit_code == 0 and done.stdout.startswith(f"Usage: cli {command} ")
    assert done.stderr.count("\n") == 1 and f"is now 'primerl-hpc {present}'" in done.stderr
    assert cli.get_command(click.Context(cli), command) and words[0] not in set(COMMANDS) - {"submit"}


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("recipe.yaml", "-p", "local"), ExitCode.CONFIG, "kind sft has more processes than engines"),
        (("served.yaml", "-p", "local", "--index", "1"), ExitCode.USAGE, "--index"),
        (("run", "--follow"), ExitCode.USAGE, "--follow"),
        (("nowhere",), ExitCode.NOT_FOUND, "no run named 'nowhere'"),
    ],
)
def test_the_earlier_command_inference_refuses_other_recipes_and_options_for_a_run(
    folder: Path, words: tuple[str, ...], code: int, expected: str
) -> None:
    (folder / "served.yaml").write_text(SERVED)
    primerl("submit", "served.yaml", "-p", "local", "--dry-run", "--run-dir", "run", cwd=folder)
    before = tree(folder)
    done = primerl("inference", *words, cwd=folder)
    assert done.returncode == code and expected in done.stderr and tree(folder) == before


@pytest.mark.parametrize("content", [b"mine\n", b"\xff\x00"])
def test_plan_does_not_overwrite_another_file(folder: Path, content: bytes) -> None:
    (folder / "job.sbatch").write_bytes(content)
    done = primerl("plan", "--scripts", "recipe.yaml", "-p", "local", "--out", ".", cwd=folder)
    assert done.returncode == ExitCode.OCCUPIED and (folder / "job.sbatch").read_bytes() == content


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
    nodes = "1 node(s) of 2 CPU slots + 1 of the CPU partition + 1 spare + 2 job(s) of one engine"
    assert nodes in " ".join(shown.stdout.split())
    assert re.search(r"  inference ×2 +own jobs +CPU slots 1 each ", shown.stdout)
    assert all(f"\n{name}:\n" in shown.stdout for name in names) and "--array=0-1" in shown.stdout
    assert (
        list(json.loads(primerl("plan", "--scripts", *where, "--json", cwd=folder).stdout)["scripts"])
        == names
    )
    primerl("plan", "--scripts", *where, "--out", "out", cwd=folder)
    assert sorted(tree(folder / "out")) == sorted(names)
    (folder / "engines.sbatch.j2").write_text("#!/bin/bash\nif true; then\n")
    broken = primerl("submit", *where, "--dry-run", cwd=folder, PRIMERL_TEMPLATES=str(folder))
    assert broken.returncode == ExitCode.CONFIG and "engines.sbatch" in broken.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_and_its_exit_codes(name: str, tmp_path: Path) -> None:
    done = primerl(name, "--help", cwd=tmp_path)
    assert done.returncode == 0 and "Example" in done.stdout and "Exit codes: 0 done, " in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_help_fits_80_columns_and_an_empty_list_of_runs_is_reported(tmp_path: Path) -> None:
    lines = primerl("--help", cwd=tmp_path).stdout.splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    done = primerl("status", "--list", cwd=tmp_path, PRIMERL_HOME=str(tmp_path / "home"))
    assert done.returncode == 0 and done.stdout == "" and done.stderr.startswith("no runs yet")


def test_the_error_for_a_mistyped_command_suggests_the_nearest(tmp_path: Path) -> None:
    done = primerl("sumbit", cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE and "'submit'" in done.stderr


@pytest.mark.parametrize("words", [("explain",), ("--help",)], ids=" ".join)
def test_a_closed_pipe_ends_a_command_with_success(words: tuple[str, ...], tmp_path: Path) -> None:
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


def test_forked_commands_equal_started_ones_and_leave_nothing_to_the_next(folder: Path) -> None:
    """The other tests of this module and of complete runs fork their commands (tests/support/forked_commands.py)."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    cases = (
        (("plan", "recipe.yaml", "--json"), {"PRIMERL_PROFILE": "local"}),
        (("plan", "recipe.yaml"), {}),
        (("plan", "--scripts", "recipe.yaml", "-p", "local", "--out", "."), {}),
        (("--debug", "resume", "nothing"), {}),
    )
    made = []
    for run in (run_command, start_command):
        ends = [run(*words, cwd=folder, environ=environ | more) for words, more in cases]
        script = folder / "job.sbatch"
        made.append((script.read_bytes(), script.stat().st_mode))
        made.append([(done.returncode, done.stdout) for done in ends])
        made.append([done.stderr.splitlines()[-1:] for done in ends])
        script.unlink()
    assert made[:3] == made[3:]
    assert [code for code, _ in made[1]] == [0, ExitCode.CONFIG, 0, 1], made


def test_recipes_and_profiles_with_dots_in_their_names_are_found(folder: Path) -> None:
    for kind, text in (
        ("recipes", RECIPE),
        ("cluster_profiles", "name: site.v2\nscheduler: {type: local}\n"),
    ):
        (folder / "home" / kind).mkdir(parents=True)
        (folder / "home" / kind / "site.v2.yaml").write_text(text)
    done = primerl("plan", "site.v2", "-p", "site.v2", cwd=folder, PRIMERL_HOME=str(folder / "home"))
    assert "on profile site.v2" in done.stdout, done.stderr


def test_a_model_that_offline_nodes_would_not_find_is_reported(folder: Path) -> None:
    break_recipe(folder, "./model", "org/model")
    cache = {"HF_HOME": "", "HF_HUB_CACHE": str(folder / "hub"), "HF_HUB_OFFLINE": ""}
    cache |= {"HF_ENDPOINT": "http://127.0.0.1:9"}

    def output(*more: str) -> str:
        words = ("submit", "recipe.yaml", "-p", "local", "--dry-run", *more)
        return primerl(*words, cwd=folder, **cache).stderr

    assert "org/model is in no cache here" in output()
    # whether the hub has it is asked: test_submission_checks.py
    assert "cannot ask http://127.0.0.1:9 whether it has model org/model" in output(
        "--profile-set", "offline=false"
    )
    cache_model(folder / "hub", "org/model")
    assert output() == ""
    assert "org/model is in no cache" in output("--profile-set", f"env.HF_HUB_CACHE={folder}")


def test_an_unexpected_error_is_one_line_too(folder: Path) -> None:
    break_recipe(folder, "max_steps", "environments: {eval: [{id: e, args: {d: !!binary gIGC}}]}\nmax_steps")
    done = primerl("plan", "recipe.yaml", "-p", "local", "--json", cwd=folder)
    assert done.returncode == ExitCode.FAILED and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and done.stderr.endswith("; --debug shows where\n")


def test_debug_shows_the_traceback(folder: Path) -> None:
    done = primerl("--debug", "submit", "nothing.yaml", "-p", "local", cwd=folder)
    assert "Traceback" in done.stderr


def test_plan_groups_equal_processes_and_explains_a_missing_estimate(folder: Path) -> None:
    text = (
        RECIPE.replace("kind: sft", "kind: rl")
        + """\
environments: {train: [{id: reverse-text}]}
rollouts: {sampling: {max_tokens: 12}}
layout: {inference: {replicas: 256}, trainer: {nodes: 32}}
"""
    )
    (folder / "recipe.yaml").write_text(text)
    (folder / "bin").mkdir()
    sbatch = folder / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: Unable to contact slurm controller' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    site = ("plan", "recipe.yaml", "-p", "h100x64", "--profile-set", "nodes=64")
    shown = primerl(*site, cwd=folder, PATH=path)
    assert shown.returncode == 0, shown.stderr
    assert re.search(r"  inference ×256 +on nodes 0-31, 8 a node +GPUs 1 each +restart", shown.stdout)
    assert re.search(r"  trainer-0 +on nodes 32-63 +GPUs 0-7 +ends_phase", shown.stdout)
    assert len(shown.stdout.splitlines()) <= 24  # a terminal
    assert "no estimate of the start: " in shown.stdout and "Unable to contact" in shown.stdout
    sbatch.unlink()
    shown = primerl(*site, "--json", cwd=folder, PATH=str(folder / "bin"))
    assert json.loads(shown.stdout)["estimate"] == {"unknown": "sbatch is not on this machine"}


@pytest.fixture
def run_of_another(folder: Path) -> Iterator[Path]:
    """A run of root in a folder that others may read; tmp_path is closed to them."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        run = Path(name) / "theirs"
        made = primerl("submit", "recipe.yaml", "-p", "local", "--dry-run", "--run-dir", str(run), cwd=folder)
        assert made.returncode == 0, made.stderr
        write_json(run / "control" / "job.json", {"scheduler": "slurm", "job_id": "5", "attempt": 1})
        yield run


def error_as_nobody(*words: str) -> tuple[str, int]:
    """Run a command as the user `nobody`, in a fork with loaded modules; return its error and exit code."""
    for name in (
        "launch.cancel",
        "launch.resume.reserve",
        "launch.submit",
        "observe.follow",
        "observe.report.report",
        *(f"cli.{words[0]}",),
    ):
        importlib.import_module(f"primerl_hpc.{name}")
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        error = CliRunner().invoke(cli, words).exception
        os.write(write, json.dumps([str(error), int(getattr(error, "exit_code", 1))]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text, code = json.load(pipe)
    return text, code


@pytest.mark.parametrize(
    "command, way",
    [
        ("cancel", "only its owner can cancel it"),
        ("resume", "checkpoint.fork"),
        ("report", "--out FILE"),
        ("report", "only its owner can read its state"),
        ("diagnose", "only its owner can read its state"),
        ("cancel", "only its owner can read it"),
    ],
)
def test_another_users_run_is_refused_in_one_sentence(
    run_of_another: Path, monkeypatch: pytest.MonkeyPatch, command: str, way: str
) -> None:
    """A run directory that is private, as created by default; shared except for its control folder; and completely
    shared, as created by earlier versions."""
    run_of_another.chmod(0o700 if way.endswith("read it") else 0o755)
    (run_of_another / "control").chmod(0o755 if "--out" in way else 0o700)
    monkeypatch.chdir("/")
    before = tree(run_of_another)
    text, code = error_as_nobody(command, str(run_of_another))
    assert code == ExitCode.OCCUPIED and "\n" not in text, text
    assert "this run belongs to root; " in text and way in text and ".tmp" not in text
    assert tree(run_of_another) == before


@pytest.mark.parametrize("words", [("plan",), ("submit", "--dry-run")])
def test_plan_and_submit_warn_of_quantization_by_its_old_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(folder)
    (folder / "recipe.yaml").write_text("kind: inference\nname: served\nmodel: {name: ./model}\n")
    command = (*words, "recipe.yaml", "-p", "local", "--set", "inference.extra_args.quantization=")
    old, new = (
        CliRunner().invoke(cli, (*command[:-1], command[-1] + name)) for name in ("fp8", "fp8_per_tensor")
    )
    assert old.exit_code == new.exit_code == 0, old.output + new.output
    assert old.stderr.startswith("warning: inference.extra_args: vLLM 0.31 deprecates quantization 'fp8'")
    assert "write {quantization: fp8_per_tensor}" in old.stderr and old.stderr.count("\n") == 1
    assert new.stderr == ""


@pytest.mark.parametrize("command", [("plan",), ("plan", "--scripts")], ids=" ".join)
def test_a_recipe_with_missing_files_is_planned_with_warnings_but_not_submitted(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Shipped recipes before tools/tiny-model was run, or on a login node without access to the model."""
    misspelled = ("--set", "environments.eval=[{id: revers-text, num_tasks: 8}]")
    done = primerl(*command, "reverse_text/tiny", "-p", "h100x64", *misspelled, cwd=tmp_path)
    assert "revers-text" in done.stderr and "(submit refuses this)" in done.stderr.replace("\n", " ")
    done = primerl(*command, "reverse_text/tiny", "-p", "h100x64", cwd=tmp_path)
    assert done.returncode == 0 and "reverse-text-tiny" in done.stdout, done.stderr
    warnings = done.stderr.splitlines()
    assert [line for line in warnings if "model folder" in line and "does not exist" in line]
    assert [line for line in warnings if "sft.jsonl does not exist" in line]
    assert all(line.startswith("warning: ") and line.endswith("(submit refuses this)") for line in warnings)
    planned = json.loads(primerl("plan", "reverse_text/tiny", "-p", "h100x64", "--json", cwd=tmp_path).stdout)
    assert (
        len(planned["warnings"]) == 2
        and planned["phases"][0]["model_path"] == f"{tmp_path}/outputs/tiny/model"
    )
    done = primerl("submit", "reverse_text/tiny", "-p", "h100x64", "--dry-run", cwd=tmp_path)
    assert done.returncode == ExitCode.NOT_FOUND and not list(tmp_path.iterdir())


def test_a_missing_model_is_fetched_by_the_command_of_the_error_and_only_warned_of_before(
    tmp_path: Path,
) -> None:
    """With the known config.json, everything but the weights can be checked: plan, scripts and prediction."""
    options = ("distillation/qwen3_4b_opd", "-p", "h100x64", "--profile-set", "scheduler.partition=x")
    variables = {"HF_HOME": "", "HF_HUB_CACHE": str(tmp_path / "hub")}
    (tmp_path / "hub").mkdir()
    fetch = f"primerl-hpc prefetch {ROOT}/recipes/distillation/qwen3_4b_opd.yaml -p h100x64"
    planned = primerl("plan", *options, cwd=tmp_path, **variables)
    assert planned.returncode == 0 and "predicted for Qwen/Qwen3-4B" in planned.stdout, planned.stderr
    shown = primerl("submit", *options, "--dry-run", cwd=tmp_path, **variables)
    assert shown.returncode == ExitCode.NOT_FOUND and "#SBATCH" in shown.stdout, shown.stderr
    for done in (planned, shown):
        assert "warning: the nodes of profile 'h100x64' are offline" in done.stderr and fetch in done.stderr
    refused = primerl("submit", *options, cwd=tmp_path, **variables)
    assert refused.returncode == ExitCode.NOT_FOUND and fetch in refused.stderr, refused.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hub"]


@pytest.mark.parametrize(
    "words",
    ["", "submit", "submit x --resume", "resume", "logs x --grep (", "no-such-command", "--no-such-option"],
)
def test_a_usage_error_ends_with_one_newline(tmp_path: Path, words: str) -> None:
    done = primerl(*words.split(), cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE and ("--resume" in words) == ("resume RUN" in done.stderr)
    assert done.stderr.endswith("\n") and not done.stderr.endswith("\n\n")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_completion_prints_a_script_and_completes(tmp_path: Path, shell: str) -> None:
    documented = (ROOT / "docs" / "watching.md").read_text()
    assert f"primerl-hpc completion {shell}" in documented
    variable = "_PRIMERL_HPC_COMPLETE"
    program = Path(sys.executable).with_name("primerl-hpc")

    def output(*words: str, **variables: str) -> str:
        environ = {**os.environ, **variables}
        return captured([program, *words], env=environ, check=True).stdout

    assert "primerl_hpc_completion" in output("completion", shell)
    where = "dia" if shell == "fish" else "1"  # fish passes the word itself
    asked = {variable: f"{shell}_complete", "COMP_WORDS": "primerl-hpc dia", "COMP_CWORD": where}
    assert "diagnose" in output(**asked)
