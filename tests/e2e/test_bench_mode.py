"""``primerl-hpc sft|trainer --bench``: real ranks and loops on made-up data, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.rundir import RunDir
from tests.e2e.runs import command
from tests.support import make_tiny_model
from tests.unit.test_cli import tree

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


def test_sft_is_measured_with_random_weights_where_there_is_only_a_config(tmp_path: Path) -> None:
    tiny = make_tiny_model(tmp_path / "tiny", rows=10, hidden=64)
    for path in (tiny / "model").glob("*.safetensors"):
        path.unlink()
    (tmp_path / "small.yaml").write_text(SFT)
    before = tree(tmp_path)
    words = ("--lengths", "20-60", "--steps", "3", "--warm-up", "1", "--trace", "trace", "--save-every", "2")
    done = command("sft", "--bench", "small.yaml", "-p", "local", *words, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("sft · Qwen3ForCausalLM") and "(random)" in lines[0]
    assert max(map(len, lines)) <= 80
    for label in ("tokens/s, whole steps", "forward and backward", "optimizer", "of it, save", "all_gather"):
        assert label in done.stdout
    traces = {path.name: json.loads(path.read_text()) for path in (tmp_path / "trace").iterdir()}
    assert sorted(traces) == ["rank_0.json", "rank_1.json"]
    names = {event.get("name") for event in traces["rank_0.json"]["traceEvents"]}
    assert "aten::mm" in names and "gloo:all_gather" in names
    left = tree(tmp_path)
    assert {name: left[name] for name in left if not name.startswith("trace/")} == before
    assert not (tmp_path / "runs").exists()


def test_rl_is_measured_as_a_prepared_run_would_run_and_the_run_stays_as_it_was(tmp_path: Path) -> None:
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
    refused = command("trainer", "--bench", "run", "--profile-set", "nodes=2", cwd=tmp_path, check=False)
    assert refused.returncode == ExitCode.CONFIG and "the plan was made with it" in refused.stderr
    asked = ("--lengths", "12,40", "--steps", "3", "--warm-up", "1", "--peak-tflops", "0.1", "--json")
    result = json.loads(command("trainer", "--bench", "run", *asked, cwd=tmp_path).stdout)
    assert tree(run.root) == before
    assert (result["loop"], result["ranks"], result["weights"]) == ("rl", 2, "of the folder")
    assert [step["number"] for step in result["steps"]] == [2, 3, 4]
    assert all(step["tokens"] == 8 * 12 + 8 * 40 for step in result["steps"])
    for step in result["steps"]:
        parts = sum(step[part] for part in ("data", "forward_backward", "optimizer", "weights"))
        assert 0 < parts <= step["step"]
    assert 0 < result["rates"]["mfu"]["median"] < 1
    assert 0 < result["peak_memory_gib"]["resident"] < 64
