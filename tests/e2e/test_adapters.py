"""Training of adapters as a user runs it: SFT with a resume, and RL whose engines load each version by name."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.run.scores import read_scores
from primerl_hpc.run.step_dirs import STABLE
from tests.e2e.test_trainer import make_run, sft_recipe
from tests.support.forked_ranks import ForkedRanks
from tests.support.helpers import PATIENCE_S, ROOT, captured, make_tiny_model
from tests.support.hold import Hold
from tests.support.runs import command, events, process_of, versions_served, wait_for_end, wait_in_run

pytestmark = pytest.mark.e2e

STEPS = 10


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_vllm_finds_a_module_for_every_tensor_of_an_adapter(tmp_path: Path) -> None:
    """Mixture-of-experts models with dense layers and shared experts, with vLLM's own models and reader: vLLM cannot
    serve their adapters on CPUs."""
    from primerl_hpc.recipe.schema.training import LoRA
    from tests.support.tiny_adapters import export_random_adapter, make_base

    words: list[str] = []
    families = ("deepseek_v3", "glm4_moe", "qwen2_moe")
    loras = [LoRA(rank=8, alpha=12.0, rank_stabilized=family == "qwen2_moe") for family in families]
    for family, lora in zip(families, loras, strict=True):
        base = tmp_path / family
        run = RunDir(tmp_path / f"{family}-run")
        words += [str(base), str(export_random_adapter(make_base(family, base), base, run, lora))]
    done = captured(
        [sys.executable, "-m", "tests.support.vllm_adapter", *words],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [each["names"] for each in found] == [38, 38, 62]
    assert not any(each["unknown"] or each["incomplete"] for each in found), found
    assert [each["scales"] for each in found] == [[pytest.approx(lora.scale)] for lora in loras]
    assert loras[0].scale == 1.5 and loras[2].scale == pytest.approx(12 / 8**0.5)


@pytest.mark.slow
def test_reward_rises_when_only_adapters_are_trained_and_the_engine_is_killed(
    start: Callable[..., RunDir], work: Path
) -> None:
    from transformers import AutoModelForCausalLM

    changes = ("lora.rank=8", "lora.alpha=16", "optimizer.lr=2e-3", "rollouts.batch_size=64")
    hold = Hold(work / "runs" / "adapters", after=5)
    run = start("adapters", hold.environment, *hold.variables, *changes, f"max_steps={STEPS}")
    wait_in_run(run, lambda: 3 in versions_served(run), "policy 3 at the engine")
    process_of(run.root, "inference-0").kill()
    hold.end()
    assert wait_for_end(run) == RunState.DONE
    assert {row["process"] for row in events(run, "role_restarting")} == {"inference-0"}
    live = versions_served(run)
    assert live[0] == 0 and live[-1] == STEPS

    evaluations = read_steps(run.metrics("eval"))
    before, after = (evaluations[version]["eval/held-out/reward/mean"] for version in (0, STEPS))
    assert after > before + 0.1, (before, after)
    steps = read_steps(run.metrics("trainer"))
    assert list(steps) == list(range(1, STEPS + 1))
    assert sum(steps[step]["mismatch_kl/all/mean"] for step in steps) / STEPS <= 0.01

    names = {path.name for path in run.weights_step(STEPS).iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "manifest.json", STABLE}
    base = read_json(run.weights_step(STEPS) / "adapter_config.json")["base_model_name_or_path"]
    command("export", str(run.root), "--to", "merged", "--merge", cwd=work)
    merged, plain = (AutoModelForCausalLM.from_pretrained(folder) for folder in (work / "merged", base))
    changed = {
        name for name, value in merged.named_parameters() if not value.equal(plain.get_parameter(name))
    }
    assert changed == {name for name, _ in plain.named_parameters() if "_proj" in name}

    words = (str(run.root), "--steps", str(STEPS), "--run-dir", "runs/scored-adapters", "--follow")
    command("eval", *words, cwd=work)
    scores = {
        step: row["avg@2"]
        for (step, _), row in read_scores(RunDir(work / "runs" / "scored-adapters")).items()
    }
    assert set(scores) == {0, STEPS} and scores[STEPS] > scores[0] + 0.2, scores


def test_sft_trains_saves_and_resumes_only_adapters(tmp_path: Path, forked_ranks: ForkedRanks) -> None:
    from safetensors.numpy import load_file

    tiny = make_tiny_model(tmp_path / "tiny", rows=300, hidden=64)
    recipe = sft_recipe(tiny, max_steps=4, lora={"rank": 4, "dropout": 0.2}, checkpoint={"interval": 2})
    run = make_run(tmp_path / "run", recipe, tiny / "model", ranks=1, role=Role.SFT)
    adapters = []
    for _ in range(2):
        code, log = forked_ranks(run, "sft-0")
        assert code == 0, log
        adapters.append((run.weights_step(4) / "adapter_model.safetensors").read_bytes())
        shutil.rmtree(run.weights)
        shutil.rmtree(run.checkpoint(4))
    assert "resumed from checkpoint 2" in log and adapters[0] == adapters[1]
    saved = {key for path in run.checkpoint(2).rglob("*.safetensors") for key in load_file(path)}
    assert saved and all(key.startswith(("adapter.", "optim.")) for key in saved)
    assert all(key.endswith(("lora_A", "lora_B")) for key in saved)
