"""Forecasts of recipes: where config.json comes from, refusals before the queue, what is unknown, and the commands."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from primerl_hpc.checks.recipe.model_config import find_config, load_config
from primerl_hpc.cli.main import cli
from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, ExitCode, NotFoundError
from primerl_hpc.launch.compose import plan_run
from primerl_hpc.launch.planning.alternatives import parse_nodes
from primerl_hpc.launch.planning.forecast import read_lengths
from primerl_hpc.launch.planning.screen import forecast_lines
from primerl_hpc.plan.predict.shape import known_config, known_models
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.metrics import MetricsWriter
from primerl_hpc.run.rundir import RunDir
from tests.support.api import serve_handler
from tests.support.helpers import ROOT

EIGHT_B = "Qwen/Qwen3-8B"
RECIPE = """\
kind: rl
name: math
model: {{name: {model}, renderer: {{name: chatml}}}}
seq_len: 16384
max_steps: 200
environments: {{train: [{{id: reverse-text}}]}}
rollouts: {{batch_size: 256, group_size: 8, sampling: {{max_tokens: 8192}}, expected: {{completion_tokens: 2000}}}}
{more}
"""
H100 = ("-p", "h100x64", "--profile-set", "scheduler.account=a", "--profile-set", "offline=true")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # no sbatch
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    write(tmp_path)
    return tmp_path


def write(folder: Path, model: str = EIGHT_B, more: str = "") -> None:
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, more=more))


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, words)


def plan(*words: str) -> Result:
    return run("plan", "recipe.yaml", *H100, *words)


def unfolded(text: str) -> str:
    """Return the text without line breaks and repeated blanks."""
    return " ".join(text.split())


# -- every known model on every site ---------------------------------------------------------------

HYBRID = ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B")
SITES = tuple(sorted(path.stem for path in (ROOT / "cluster_profiles").glob("*.yaml")))


@pytest.mark.parametrize("site", ("h100x64", "frontier", "vista"))
@pytest.mark.parametrize("model", HYBRID)
def test_what_is_not_predicted_is_a_line_of_the_plan(here: Path, model: str, site: str) -> None:
    write(here, model)
    planned = plan_run(load_recipe("recipe.yaml"), load_profile(site), missing=[])
    text = unfolded("\n".join(forecast_lines(planned.forecast)))
    assert "not predicted: the memory of layers with linear attention in the trainer" in text
    assert planned.plan.prediction is None or "memory.trainer" not in planned.plan.prediction.figures


@pytest.mark.slow
@pytest.mark.parametrize("site", SITES)
def test_every_known_model_is_planned_on_every_site(here: Path, site: str) -> None:
    profile = load_profile(site)
    for model in known_models():
        write(here, model)
        longest = known_config(model).get("max_position_embeddings") or 16384
        sizes = [f"seq_len={min(16384, longest)}", "rollouts.sampling.max_tokens=1024"]
        loaded = load_recipe("recipe.yaml", overrides=sizes)
        planned = plan_run(loaded, profile, missing=[])
        assert forecast_lines(planned.forecast), model


# -- the model's config.json -----------------------------------------------------------------------


def test_a_folder_wins_over_the_cache_and_the_cache_over_the_known_models(here: Path) -> None:
    known = known_config(EIGHT_B)
    assert find_config(EIGHT_B, {})["num_hidden_layers"] == known["num_hidden_layers"]
    snapshot = here / "hf" / "hub" / "models--Qwen--Qwen3-8B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({**known, "num_hidden_layers": 5}))
    assert find_config(EIGHT_B, {})["num_hidden_layers"] == 5
    folder = here / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**known, "num_hidden_layers": 3}))
    assert find_config(EIGHT_B, {})["num_hidden_layers"] == 3


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "the shape of model {name} is unknown: its config.json is neither in a folder"),
        ("{not json", "config.json is not valid JSON"),
        ("[1]", "must contain a JSON object"),
        ('{"model_type": "quantum_net"}', "does not know the family quantum_net"),
        ('{"model_type": "qwen3"}', "hidden_size"),
        ('{"hidden_size": 8}', "model_type is missing"),
        (json.dumps({**known_config(EIGHT_B), "vocab_size": 10**15}), "not between 1 and"),
    ],
)
def test_an_unreadable_or_absurd_config_is_one_sentence(
    here: Path, content: str | None, expected: str
) -> None:
    name = str(here / "model")
    (here / "model").mkdir()
    if content is not None:
        (here / "model" / "config.json").write_text(content)
    with pytest.raises(ConfigError) as caught:
        _ = load_config(name).shape
    assert expected.format(name=name) in str(caught.value)
    assert "\n" not in str(caught.value)
    write(here, name)
    shown = plan()
    assert shown.exit_code == 0, shown.output
    assert f"no prediction: {caught.value.cause}" in unfolded(shown.stdout)


@pytest.mark.parametrize("where", ["env", "software.default.env"])
def test_a_hub_cache_that_recipe_or_profile_sets_is_read(here: Path, where: str) -> None:
    write(here, "org/private-8b")
    assert "the shape of model org/private-8b is unknown" in plan().stdout
    snapshot = here / "other" / "hub" / "models--org--private-8b" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(known_config(EIGHT_B)))
    option = "--set" if where == "env" else "--profile-set"
    assert "predicted for org/private-8b" in plan(option, f"{where}.HF_HOME={here / 'other'}").stdout


@pytest.mark.parametrize(
    ("name", "hint"),
    [("org/none", "hf download org/none config.json"), ("outputs/tiny/model", ""), ("none", "")],
)
def test_only_a_hub_id_is_offered_for_download(here: Path, name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = load_config(name).shape
    assert caught.value.hint == hint


GATED = "org/gated-8b"


class GatedHub(BaseHTTPRequestHandler):
    """A hub that describes a gated model to everyone and refuses every request for its files."""

    def do_GET(self) -> None:
        is_described = self.path == f"/api/models/{GATED}"
        content = json.dumps({"id": GATED, "gated": "manual"}).encode() if is_described else b""
        self.send_response(200 if is_described else 401 if GATED in self.path else 404)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (GATED, "org/gated-8b is a gated model and this account has no access (HTTP 401)"),
        ("org/none", "has no model org/none, or it is private (HTTP 404)"),
    ],
)
def test_a_gated_or_missing_hub_id_is_one_sentence(here: Path, name: str, expected: str) -> None:
    write(here, name)
    with serve_handler(GatedHub) as url:
        online = ("--set", f"env.HF_ENDPOINT={url}", "--set", "env.HF_HUB_OFFLINE='0'")
        shown = plan("--profile-set", "offline=false", *online)
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.stderr.splitlines() if expected in line]
    assert len(lines) == 1 and lines[0].startswith("warning: "), shown.stderr
    assert f"no prediction: the shape of model {name} is unknown" in shown.stdout


def test_a_hub_id_in_no_cache_of_an_offline_profile_is_one_sentence(here: Path) -> None:
    write(here, "org/none")
    shown = plan()
    lines = [line for line in shown.stderr.splitlines() if "offline" in line]
    assert len(lines) == 1 and "org/none is in no cache here" in lines[0], shown.stderr


# -- plan ------------------------------------------------------------------------------------------


def test_plan_shows_the_prediction_on_one_screen_without_weights_or_network(here: Path) -> None:
    shown = plan()
    assert shown.exit_code == 0, shown.output
    for words in (
        "memory      fits: trainer",
        "KV cache",
        "bottleneck",
        "staleness",
        "generated tokens/s",
        "GPU-hours",
        "checkpoint",
        "no estimate of the start: sbatch is not on this machine",
    ):
        assert words in shown.stdout, shown.stdout
    assert len(shown.stdout.splitlines()) <= 24
    screen = shown.stdout.partition("predicted for")[2].splitlines()[1:]
    assert max(map(len, screen)) <= 80, screen


RECIPES = Path(__file__).parents[4] / "recipes"


@pytest.mark.parametrize(
    ("recipe", "profile", "words"),
    [
        ("math/qwen3_30b_a3b", "frontier", ()),
        ("math/glm_4.5_air", "h100x64", ("--compare",)),
        ("math/qwen3_30b_a3b", "h100x64", ("--nodes", "4..8")),
        ("math/qwen3_235b_a22b", "a100x32", ()),
        ("reverse_text/qwen3_0.6b_one_gpu", "h200x8", ()),
        ("local_search/qwen3_4b", "delta", ("--why", "time.trainer.step")),
    ],
)
def test_lines_of_plan_fit_into_80_columns(
    here: Path, recipe: str, profile: str, words: tuple[str, ...]
) -> None:
    shown = run("plan", str(RECIPES / f"{recipe}.yaml"), "-p", profile, *words)
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.stdout.splitlines())) <= 80, shown.stdout


def test_warnings_of_plan_break_at_blanks_in_a_terminal_but_not_in_commands(here: Path) -> None:
    write(here, "Qwen/Qwen3-32B", "layout: {inference: {nodes: 4}, trainer: {nodes: 4}}")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    code = "from primerl_hpc.cli.main import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [sys.executable, "-c", code, "plan", "recipe.yaml", *H100]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=here, env=environment) as process:
        os.close(theirs)
        shown = ""
        while part := _read(ours):
            shown += part
    os.close(ours)
    lines = shown.split("\r\n")
    too_long = [line for line in lines if len(line) > 80 and str(here) not in line]  # a path is one word
    assert process.returncode == 0 and not too_long, shown
    assert "warning: the plan does not fit: engines need" in shown
    assert any("primerl-hpc prefetch recipe.yaml -p h100x64" in line for line in lines), shown


def _read(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode()
    except OSError:  # the other end is closed
        return ""


def test_plan_json_and_plan_json_of_a_run_have_the_same_figures(here: Path) -> None:
    shown = json.loads(plan("--json").stdout)
    figures = shown["prediction"]["figures"]
    assert shown["prediction"]["fits"] is True
    assert figures["time.step"]["low"] <= figures["time.step"]["value"] <= figures["time.step"]["high"]
    assert {"memory.trainer", "time.trainer.step", "idle.trainer", "staleness.mean"} <= figures.keys()


def test_why_prints_formula_inputs_and_source_of_a_figure(here: Path) -> None:
    shown = plan("--why", "memory.trainer.weights")
    assert shown.exit_code == 0, shown.output
    assert "memory.trainer.weights = " in shown.stdout and "trained = 8,190,735,360" in shown.stdout
    missing = plan("--why", "memory.moon")
    assert isinstance(missing.exception, NotFoundError) and "no figure 'memory.moon'" in str(
        missing.exception
    )


def test_compare_and_nodes_show_other_layouts(here: Path) -> None:
    shown = plan("--compare")
    assert shown.exit_code == 0, shown.output
    assert "fastest" in shown.stdout and "slower" in shown.stdout and " layouts" in shown.stdout
    rows = json.loads(plan("--nodes", "2..4", "--json").stdout)
    assert [row["nodes"] for row in rows] == [2, 4]
    assert rows[0]["figures"]["time.step"] > rows[1]["figures"]["time.step"]


@pytest.mark.parametrize("text", ["x", "0..4", "8..4", "", "1..", "1,2,3,4,5,6,7,8,9"])
def test_a_range_of_nodes_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--nodes"):
        parse_nodes(text)


def test_ranges_of_nodes_double() -> None:
    assert parse_nodes("4..32") == [4, 8, 16, 32]
    assert parse_nodes("3..20") == [3, 6, 12, 20]
    assert parse_nodes("6") == [6]


def test_auto_is_decided_by_the_prediction_and_noted(here: Path) -> None:
    write(here, more="layout: {inference: {tensor_parallel: auto}, trainer: {context_parallel: auto}}")
    shown = json.loads(plan("--json").stdout)
    layout = shown["phases"][0]["recipe"]["layout"]
    assert isinstance(layout["inference"]["tensor_parallel"], int)
    assert isinstance(layout["trainer"]["nodes"], int)
    assert [note for note in shown["notes"] if note.startswith("auto: ") and "predicted step" in note]
    step = plan().stdout.partition("chosen automatically: auto: ")[2].partition("\n")[0]
    assert (
        " s," not in step and " s (" not in step
    )  # the step time is in one place, from the complete simulation


def test_a_profile_without_gpus_plans_without_a_prediction(here: Path) -> None:
    shown = run("plan", "recipe.yaml", "-p", "local")
    assert shown.exit_code == 0, shown.output
    assert "no prediction: profile 'local' has no GPUs, and only GPUs are predicted" in unfolded(shown.stdout)


def test_an_unknown_gpu_type_plans_without_a_prediction(here: Path) -> None:
    shown = plan("--profile-set", "node.gpu=TX-9000")
    assert shown.exit_code == 0, shown.output
    assert "no prediction: unknown GPU type 'TX-9000'" in unfolded(shown.stdout)
    assert "auto by fixed rules, because nothing is predicted" in unfolded(shown.stdout)
    why = plan("--profile-set", "node.gpu=TX-9000", "--why", "time.step")
    assert isinstance(why.exception, ConfigError) and "unknown GPU type" in str(why.exception)


# -- submit ----------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_the_queue_with_the_smallest_change(here: Path) -> None:
    write(here, "Qwen/Qwen3-32B", "layout: {inference: {nodes: 4}, trainer: {nodes: 4}}")
    refused = run("submit", "recipe.yaml", *H100, "--dry-run")
    assert isinstance(refused.exception, ConfigError)
    assert refused.exception.exit_code == ExitCode.CONFIG == 78
    assert "the plan does not fit: engines need" in str(refused.exception)
    assert refused.exception.hint == "set layout.inference.tensor_parallel to 2"
    shown = plan()
    assert shown.exit_code == 0
    assert "does not fit" in shown.stdout and "(submit refuses this)" in shown.stderr


def test_more_positions_than_the_model_has_are_refused_before_the_queue(here: Path) -> None:
    (here / "model").mkdir()
    write(here, str(here / "model"))
    for more, is_refused in (
        ({}, False),
        ({"max_position_embeddings": 8192}, True),
        ({"max_position_embeddings": 8192, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
    ):
        (here / "model" / "config.json").write_text(json.dumps({**known_config(EIGHT_B), **more}))
        result = plan()
        assert isinstance(result.exception, ConfigError) == is_refused, result.output
        if is_refused:
            assert "seq_len 16384 exceeds the 8192 positions of the model" in str(result.exception)


def test_a_dry_run_needs_no_weights_and_no_network(here: Path) -> None:
    shown = run("submit", "recipe.yaml", *H100, "--dry-run")
    assert shown.exit_code == 0, f"{shown.output} {shown.exception}"
    assert "job.sbatch:" in shown.stdout
    assert "is in no cache here" in shown.stderr


def test_rules_of_thumb_are_warnings_of_plan_and_submit(here: Path) -> None:
    for command in (plan, lambda *words: run("submit", "recipe.yaml", *H100, "--dry-run", *words)):
        shown = command("--set", "rollouts.batch_size=32")
        assert shown.exit_code == 0, shown.output
        assert "warning: rollouts.batch_size 32 is below 64" in shown.stderr


# -- lengths of an earlier run ---------------------------------------------------------------------


def test_lengths_of_an_earlier_run_replace_the_assumption(here: Path) -> None:
    root = RunDir(here / "runs" / "old")
    with pytest.raises(NotFoundError, match="no metrics of rollouts"):
        read_lengths(root)
    root.metrics("orchestrator").parent.mkdir(parents=True)
    writer = MetricsWriter(root.metrics("orchestrator"))
    for step in range(1, 5):
        row = {"min": 100.0, "p10": 200.0, "mean": 1000.0, "p90": 2500.0, "max": 4000.0}
        writer.write(step, {f"completion_tokens/{name}": value for name, value in row.items()})
    measured = read_lengths(root)
    assert measured.lengths.mean == pytest.approx(1000, rel=0.02)
    assert measured.source == "metrics of old"


# -- budget of the account -------------------------------------------------------------------------


def sshare(here: Path, left: int) -> None:
    """Put an sshare into PATH that prints a limit of 1,000 GPU-hours of account ``a``, ``left`` of them unused."""
    (here / "bin").mkdir()
    used = (1000 - left) * 60
    line = f"a||cpu=5,gres/gpu=60000|cpu=0,gres/gpu={used}"
    (here / "bin" / "sshare").write_text(f"#!/bin/sh\necho '{line}'\n")
    (here / "bin" / "sshare").chmod(0o755)


def test_plan_shows_the_gpu_hours_that_the_account_has_left(here: Path) -> None:
    assert "budget" not in plan().stdout and json.loads(plan("--json").stdout)["budget"] is None
    sshare(here, 900)
    shown = plan()
    assert "  budget      900 of 1,000 GPU-hours left for a\n" in shown.stdout
    assert "GPU-hours" not in shown.stderr
    budget = json.loads(plan("--json").stdout)["budget"]
    expected = {"limit_hours": 1000.0, "used_hours": 100.0, "remaining_hours": 900.0}
    assert budget == {"account": "a", "holder": "a", **expected}


def test_a_run_that_exceeds_the_budget_is_a_warning(here: Path) -> None:
    sshare(here, 3)
    shown = plan()
    assert shown.exit_code == 0
    assert "warning: the run needs" in shown.stderr and "3 are left for a" in shown.stderr
    assert any("3 are left for a" in text for text in json.loads(plan("--json").stdout)["warnings"])


def test_a_run_that_exceeds_the_budget_of_its_submission_is_a_warning_before_the_queue(here: Path) -> None:
    def submit(budget: str) -> Result:
        return run("submit", "recipe.yaml", *H100, "--dry-run", "--budget", budget)

    exceeds = submit("32GPUh")
    assert exceeds.exit_code == 0, exceeds.output
    assert "the run needs" in unfolded(exceeds.stderr)
    assert "--budget 32GPUh is used up after 30.0 min" in unfolded(exceeds.stderr)
    assert "is used up" not in submit("9999GPUh").stderr
    assert isinstance(submit("500").exception, ConfigError)
