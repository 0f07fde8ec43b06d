"""Complete runs whose prompts are images: SFT, an engine that processes images, updates of its weights, evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import RunState
from primerl_hpc.run.metrics import read_steps
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import ROOT, make_tiny_model
from tests.support.runs import command, events, kill_processes_of, told, wait_for_end
from tests.support.served_updates import DELTA

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BLIND = 1 / 6
"""Reward of a policy that does not see the squares."""
IN_BFLOAT16 = {
    "model": {"dtype": "bfloat16", "renderer": {"name": "qwen3.5"}}, "trainer": {"param_dtype": "bfloat16"},
}  # fmt: skip


def make_qwen3_5(folder: Path) -> None:
    """Replace the Qwen3-VL in ``folder`` by a Qwen3.5 with the same tower, in shapes that vLLM's CPU kernels take."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    old = read_json(folder / "config.json")
    tokens = {key: value for key, value in old.items() if key.endswith("token_id")}
    names = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "eos_token_id")
    # a quarter of each head's 32 values is rotated
    rope = old["text_config"]["rope_parameters"] | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    text = {name: old["text_config"][name] for name in names} | DELTA
    text |= {"num_attention_heads": 4, "rope_parameters": rope}
    tower = {**old["vision_config"], "deepstack_visual_indexes": []}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=tower, **tokens)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_a_policy_sees_images_in_trainer_and_engine(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("PRIMERL_HOME", str(tmp_path / "state"))
    made = make_tiny_model(tmp_path / "outputs" / "tiny-colors", task="color-squares", rows=12_000)
    own: dict[str, Any] = {"trainer": {"vision": "trained"}}
    if family == "qwen3_5":
        make_qwen3_5(made / "model")
        own = IN_BFLOAT16
    settings = {
        "base": str(ROOT / "recipes" / "color_squares" / "tiny.yaml"), "max_steps": 4,
        "rollouts": {"async_level": 0, "max_off_policy_steps": 0}, "warmup": {"max_steps": 150}, **own,
    }  # fmt: skip
    recipe, run = tmp_path / "colors.yaml", RunDir(tmp_path / "run")
    recipe.write_text(json.dumps(settings))
    request.addfinalizer(lambda: kill_processes_of(run.root))
    command("submit", str(recipe), "-p", "local", "--run-dir", str(run.root), cwd=tmp_path)
    assert wait_for_end(run) == RunState.DONE, told(run)
    assert not events(run, "role_restarting"), told(run)
    mismatch = [row["mismatch_kl/all/mean"] for row in read_steps(run.metrics("trainer")).values()]
    assert len(mismatch) == 4 and max(mismatch) < (2e-2 if family == "qwen3_5" else 1e-6)
    scores = [row["eval/held-out/reward/mean"] for row in read_steps(run.metrics("eval")).values()]
    assert min(scores) > BLIND + 0.3
