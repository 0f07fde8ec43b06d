"""Roles of processes in the bench of the loop, and its ratios."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "bench"))

from loop import ratios_of
from loop_processes import role_of


@pytest.mark.parametrize(
    ("words", "parent", "role"),
    [
        (
            ["python", "-m", "primerl_hpc.runtime.steps.guard", "--", "primerl_hpc.roles.trainer"],
            None,
            "supervisor",
        ),
        (["python", "-m", "primerl_hpc.roles.env_server", "run", "main"], "supervisor", "env_server"),
        (["python", "-m", "primerl_hpc.roles.inference", "run"], "supervisor", "api_server"),
        (["VLLM::EngineCore"], "api_server", "engine_core"),
        (["python", "-m", "primerl_hpc.trainer.torchrun"], "supervisor", "trainer"),
        (["python", "-c", "anything"], "env_server", "env_server"),
    ],
)
def test_the_role_of_a_process_follows_from_its_command_and_parent(words, parent, role):
    assert role_of(words, parent) == role


def test_ratios_compare_rates_of_tokens_and_times_of_a_batch():
    loop = {
        "what": "loop",
        "size": "256",
        "checkout": "after",
        "rollouts_per_s": 32.0,
        "tokens_per_s": 8192.0,
    }
    parts = [{"what": what, "size": "256", "s_per_batch": 0.8} for what in ("generate", "train")]
    peer = {"what": "TRL, vLLM", "size": "256", "s_per_batch": 4.0, "tokens": 4096.0}
    assert ratios_of([loop, *parts, peer]) == {
        "after: tokens/s / TRL, vLLM": 2.0,
        "after: step / sum of bare parts": pytest.approx(1.25),
    }
