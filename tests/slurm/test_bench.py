"""``bench sft|trainer|loop`` over several nodes, started on the submit host: a job measures, and no file or process
remains."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.document import dump_yaml
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.names import Role
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.commands import ask
from tests.support.helpers import PATIENCE_S, make_tiny_model, safetensors_bytes
from tests.support.virtual_slurm import Cluster, run_cli, start_cli
from tests.unit.cli.test_cli import tree

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("acting_user")]
STATE = "state"
"""The user's folder for the state of the toolkit."""

MODEL = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
COMMON = {
    "name": "small",
    "seq_len": 64,
    "max_steps": 1000,
    "layout": {"trainer": {"ranks": 2, "nodes": 2}},
    "trainer": {"param_dtype": "float32"},
}
SFT = {"kind": "sft", "sft": {"data": {"path": "not-there.jsonl"}, "batch_size": 4}}
RL = {
    "kind": "rl",
    "environments": {"train": [{"id": "reverse-text"}]},
    "rollouts": {"batch_size": 8, "group_size": 4, "sampling": {"max_tokens": 8}},
}


@pytest.fixture
def recipe_for(cluster: Cluster, tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    """A file with the recipe, whose model has random weights."""

    def write(recipe: dict[str, Any]) -> str:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
        settings = {
            **COMMON,
            **recipe,
            "model": {"name": str(tmp_path / "model"), "renderer": {"name": "chatml"}},
        }
        (tmp_path / "recipe.yaml").write_text(dump_yaml(settings))
        return str(tmp_path / "recipe.yaml")

    return write


def bench_words(recipe: str, *more: str) -> tuple[str, ...]:
    runs = Path(recipe).with_name("runs")
    place = ("-p", "virtual", "--profile-set", f"runs_dir={runs}", "--time", "5")
    return ("bench", "sft", recipe, *place, *more)


def assert_nothing_is_left(tmp_path: Path, files: list[str]) -> None:
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != STATE) == files
    assert ask(["squeue", "--noheader"]) == ""
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in _text(path)]


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
def test_the_ranks_of_both_nodes_are_measured_together(
    recipe_for: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    asked = ("--lengths", "40", "--steps", "3", "--warm-up", "1", "--json")
    done = run_cli(*bench_words(recipe_for(SFT), *asked))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["ranks"], result["loop"], result["weights"]) == (2, "sft", "random")
    assert [step["number"] for step in result["steps"]] == [2, 3, 4]
    assert result["rates"]["tokens_per_s"]["median"] > 0
    assert ", 2 nodes" in done.stderr and "attempt 1 on n1" in done.stderr
    assert_nothing_is_left(tmp_path, ["model", "recipe.yaml"])


@pytest.mark.slow
def test_a_failure_of_a_benchmarked_run_has_the_exit_code_of_its_ranks(
    recipe_for: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    """Each rank has its share of batches that are sent once; otherwise there would be no second step to fail."""
    wild = {"optimizer": {"lr": 1e30}, "trainer": {"param_dtype": "float32", "max_skipped_steps": 1}}
    recipe = recipe_for(RL | wild)
    asked = [tmp_path / "model" / name for name in ("model.safetensors", "tokenizer.json")]
    for path in asked:
        path.write_bytes(safetensors_bytes())  # a run is refused without
    done = run_cli("submit", recipe, "-p", "virtual", "--dry-run", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    for path in asked:
        path.unlink()  # benchmark mode needs neither
    before = tree(tmp_path / "run")
    (trainer,) = load_plan(RunDir(tmp_path / "run")).phase("main").of_role(Role.TRAINER)
    assert trainer.nodes == (2, 3)  # the job has two, 0 and 1
    done = run_cli("bench", "trainer", str(tmp_path / "run"), "--time", "5")
    assert done.returncode == ExitCode.NO_CONTINUE and done.stdout == "", done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: trainer-0 on n") and "the last one 2" in last, done.stderr
    assert_nothing_is_left(tmp_path, ["model", "recipe.yaml", "run"])
    assert tree(tmp_path / "run") == before


@pytest.mark.slow
def test_an_interrupt_cancels_the_benchmark_job(
    recipe_for: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    """SIGINT and SIGHUP while it waits in the queue, SIGTERM while it runs."""
    words = bench_words(recipe_for(SFT), "--steps", "100000")
    later = ("--profile-set", "scheduler.begin=now+1hour")
    for number, more, said in (
        (signal.SIGINT, later, "in the queue: BeginTime"),
        (signal.SIGHUP, later, "in the queue: BeginTime"),
        (signal.SIGTERM, (), "starting sft"),
    ):
        with start_cli(*words, *more) as process:
            assert process.stderr is not None
            assert any(said in line for line in process.stderr)  # in a while
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out) == (128 + number, ""), err
        assert_nothing_is_left(tmp_path, ["model", "recipe.yaml"])


@pytest.mark.slow
def test_the_complete_loop_is_measured_by_a_job(
    recipe_for: Callable[[dict[str, Any]], str], tmp_path: Path
) -> None:
    """Engines on two nodes, a trainer over two; the job ends when the last step is measured."""
    tiny = make_tiny_model(tmp_path / "tiny", rows=1)
    recipe = recipe_for(RL | {"inference": {"kv_cache_gib": 0.0625}})
    runs = ("-p", "virtual", "--profile-set", f"runs_dir={tmp_path / 'runs'}", "--time", "5")
    model = ("--set", f"model.name={tiny / 'model'}", "--set", "model.dtype=float32")
    done = run_cli("bench", "loop", recipe, *runs, *model, "--steps", "2", "--warm-up", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["nodes"], result["steps"], result["profile"]) == (4, 2, "virtual")
    assert result["rates"]["trainer_tokens_per_s"] > 0 and result["means"]["errored_rollouts"] == 0
    assert_nothing_is_left(tmp_path, ["model", "recipe.yaml", "tiny"])
