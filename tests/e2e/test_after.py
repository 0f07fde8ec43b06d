"""SFT followed by an export and an evaluation: the exported model loads, and the evaluated model is the trained one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_jsonl
from primerl_hpc.common.names import RunState
from primerl_hpc.observe.status.snapshot import take_snapshot
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import read_scores
from tests.support.helpers import make_tiny_model, wait_for
from tests.support.runs import command

pytestmark = pytest.mark.e2e


@pytest.mark.slow
def test_sft_is_followed_by_its_export_and_its_evaluation(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    make_tiny_model(tmp_path / "outputs" / "tiny", rows=500)
    held_out = "{id: reverse-text, name: held-out, args: {split: test}, samples: 2, num_tasks: 8}"
    changes = ["max_steps=6", f"after.evaluation.environments=[{held_out}]"]
    words = [word for change in changes for word in ("--set", change)]
    command("submit", "reverse_text/sft_then_evaluate", "-p", "local", "--follow", *words, cwd=tmp_path)
    run = RunDir(tmp_path / "runs" / "reverse-text-sft-001")
    shown = json.loads(command("status", run.root.name, "--json", cwd=tmp_path).stdout)
    assert shown["state"] == "done" and set(shown["after"]) == {"export", "evaluation"}

    wait_for(lambda: take_snapshot(run.evaluation).state.is_final, "the evaluation")
    assert take_snapshot(run.evaluation).state == RunState.DONE, run.evaluation.events.read_text()
    (row,) = read_steps(run.evaluation.metrics("eval")).values()
    assert (row["step"], row["eval/held-out/tasks"], row["eval/held-out/rollouts"]) == (6, 8, 16)
    assert row["eval/held-out/errors"] == 0 and 0 <= row["eval/held-out/avg@2"] <= 1
    assert row["eval/held-out/pass^2"] <= row["eval/held-out/pass@1"] <= row["eval/held-out/pass@2"]
    traces = list(read_jsonl(run.evaluation.traces("eval")))
    assert len(traces) == 16 and len({trace["task"] for trace in traces}) == 8
    mean = sum(trace["reward"] for trace in traces) / 16
    assert mean == pytest.approx(row["eval/held-out/reward/mean"], abs=1e-3)
    assert set(read_scores(run.evaluation)) == {(6, "held-out")}

    exported = tmp_path / "outputs" / "reverse-text-sft"
    model = AutoModelForCausalLM.from_pretrained(exported)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], tokenize=False)
    assert torch.isfinite(model(**tokenizer(text, return_tensors="pt")).logits).all()
    trained = AutoModelForCausalLM.from_pretrained(run.weights_step(6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
