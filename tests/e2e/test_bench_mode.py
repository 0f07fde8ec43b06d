"""``bench`` of trainer, sft, inference, orchestrator and loop: real ranks, engines and loops on synthetic data; no file
or process remains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import make_tiny_model
from tests.support.runs import TINY, command, processes_of
from tests.unit.cli.test_cli import tree

pytestmark = [pytest.mark.e2e]

SFT = """\
kind: sft
name: small
model: {name: tiny/model, renderer: {name: chatml}}
seq_len: 128
max_steps: 1000
layout: {trainer: {ranks: 2}}
sft: {data: {path: not-there.jsonl}, batch_size: 4}
trainer: {param_dtype: float32}
"""


@pytest.mark.slow
def test_sft_is_measured_with_random_weights_if_the_model_has_only_a_config(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", rows=10, hidden=64)
    for path in (tiny / "model").glob("*.safetensors"):
        path.unlink()
    (tmp_path / "small.yaml").write_text(SFT)
    before = tree(tmp_path)
    words = ("--lengths", "20-60", "--steps", "3", "--warm-up", "1", "--trace", "trace", "--save-every", "2")
    done = command("bench", "sft", "small.yaml", "-p", "local", *words, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("sft · Qwen3ForCausalLM") and "(random)" in lines[0]
    assert max(map(len, lines)) <= 80
    for label in ("tokens/s, full steps", "forward and backward", "optimizer", "of which save", "all_gather"):
        assert label in done.stdout
    traces = {path.name: json.loads(path.read_text()) for path in (tmp_path / "trace").iterdir()}
    assert sorted(traces) == ["rank_0.json", "rank_1.json"]
    names = {event.get("name") for event in traces["rank_0.json"]["traceEvents"]}
    assert "aten::mm" in names and "gloo:all_gather" in names
    left = tree(tmp_path)
    assert {name: left[name] for name in left if not name.startswith("trace/")} == before
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_rl_is_measured_with_the_plan_of_a_prepared_run_which_stays_unchanged(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", rows=10)
    settings = [
        f"model.name={tiny}/model",
        f"warmup.sft.data.path={tiny}/sft.jsonl",
        "rollouts.batch_size=16",
    ]
    words = [word for text in settings for word in ("--set", text)]
    command(
        "submit", "reverse_text/tiny", "-p", "local", "--dry-run", "--run-dir", "run", *words, cwd=tmp_path
    )
    run = RunDir(tmp_path / "run")
    before = tree(run.root)
    refused = command("bench", "trainer", "run", "--profile-set", "nodes=2", cwd=tmp_path, check=False)
    assert refused.returncode == ExitCode.CONFIG and "the plan depends on it" in refused.stderr
    asked = ("--lengths", "12,40", "--steps", "3", "--warm-up", "1", "--peak-tflops", "0.1", "--json")
    result = json.loads(command("bench", "trainer", "run", *asked, cwd=tmp_path).stdout)
    assert tree(run.root) == before
    assert (result["loop"], result["ranks"], result["weights"]) == ("rl", 2, "of the folder")
    assert [step["number"] for step in result["steps"]] == [2, 3, 4]
    assert all(step["tokens"] == 8 * 12 + 8 * 40 for step in result["steps"])
    for step in result["steps"]:
        parts = sum(step[part] for part in ("data", "forward_backward", "optimizer", "weights"))
        assert 0 < parts <= step["step"]
    assert 0 < result["rates"]["mfu"]["median"] < 1
    assert 0 < result["peak_memory_gib"]["resident"] < 64


LOOP = """\
base: {tiny}
name: small
warmup: null
model: {{name: {model}}}
max_steps: 1000
inference: {{kv_cache_gib: 0.0625}}
layout: {{trainer: {{ranks: 1}}}}
rollouts: {{batch_size: 16, group_size: 4}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A folder with a recipe of the complete loop and its model."""
    tiny = make_tiny_model(tmp_path / "tiny", rows=10)
    (tmp_path / "small.yaml").write_text(LOOP.format(tiny=TINY, model=tiny / "model"))
    return tmp_path


def measure(folder: Path, *words: str) -> dict[str, Any]:
    """Run a benchmark and check that it left neither files nor processes."""
    before = tree(folder)
    name, *more = words
    done = command("bench", name, "small.yaml", "-p", "local", *more, "--json", cwd=folder)
    assert tree(folder) == before and not (folder / "runs").exists()
    assert not [process for process in processes_of(folder / "runs") if process.is_running()]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_engines_are_measured_in_closed_and_open_loops(recipe: Path) -> None:
    lengths = ("--prompt-tokens", "20-40", "--output-tokens", "48", "--requests", "8")
    result = measure(recipe, "inference", "--concurrency", "1,4", "--rate", "50", *lengths)
    levels = result["levels"]
    assert [(level["loop"], level["requests"], level["failed"]) for level in levels] == [
        ("closed", 8, 0),
        ("closed", 8, 0),
        ("open", 8, 0),
    ]
    for level in levels:
        assert level["output_tokens"] == 8 * 48 and 8 * 20 <= level["prompt_tokens"] <= 8 * 40
        assert level["output_tokens_per_s"] == pytest.approx(8 * 48 / level["duration_s"])
        assert 0 < level["ttft_s"]["median"] <= level["latency_s"]["max"] <= level["duration_s"]
        assert level["itl_s"]["max"] > 0 and 0 <= level["kv_use"]["max"] <= 1
    assert result["engines"] == 1 and result["versions"]["vllm"]
    words = ("--prompt-tokens", "200", "--output-tokens", "12")
    refused = command("bench", "inference", "small.yaml", "-p", "local", *words, cwd=recipe, check=False)
    assert refused.returncode == ExitCode.CONFIG
    assert "requests of up to 212 tokens do not fit into inference.max_model_len 128" in refused.stderr


@pytest.mark.slow
def test_the_complete_loop_is_measured_on_synthetic_rollouts(recipe: Path) -> None:
    result = measure(recipe, "loop", "--steps", "2", "--warm-up", "1", "--output-tokens", "10")
    assert (result["bench"], result["steps"]) == ("loop", 2)
    assert result["rates"]["sampled_tokens_per_s"] == pytest.approx(10 * result["rates"]["rollouts_per_s"])
    assert result["rates"]["trainer_tokens_per_s"] > 0
    assert 0 <= result["shares"]["trainer_waits"] < 1
    assert 0.2 < result["means"]["reward"] < 0.8 and result["means"]["errored_rollouts"] == 0
    seconds = result["seconds"]
    assert 0 < seconds["trainer"]["forward_backward"]["median"] < seconds["trainer"]["step"]["max"]
    assert seconds["orchestrator"]["weight_update"]["median"] > 0


def test_the_orchestrator_is_measured_on_its_environments_without_a_trainer(recipe: Path) -> None:
    result = measure(recipe, "orchestrator", "--steps", "3", "--warm-up", "1")
    assert (result["bench"], result["steps"]) == ("orchestrator", 3)
    assert set(result["seconds"]) == {"orchestrator"} and result["shares"] == {"orchestrator_waits": 0.0}
    assert result["rates"]["rollouts_per_s"] > 0 and result["means"]["errored_rollouts"] == 0
