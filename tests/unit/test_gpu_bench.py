"""The command that runs everything on a GPU: its parts fit into its time, have a small form, and are read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from primerl_hpc.recipe.load import parse_recipe

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools" / "bench"))

import gpu
import rl_run

ROW = {
    "transport": "delta",
    "state": "done",
    "steps": 4,
    "updates": 3,
    **dict.fromkeys(("tokens/s", "step_s", "train_s", "publish_s", "update_s", "paused_s", "GiB"), 1.5),
    "mismatch_kl": 1e-4,
}


def test_all_parts_fit_into_the_time_of_the_command():
    assert sum(part.limit_s for part in gpu.PARTS.values()) <= gpu.WITHIN_S


def test_every_kind_of_part_has_a_small_form_for_cpus():
    """Speed, complete runs and the loop; the rest are tests and measurements that only a GPU can show."""
    small = {name for name, part in gpu.PARTS.items() if part.on_cpu is not None}
    assert set(gpu.PARTS) - small == {"tests", "memory"}
    for name in small:
        command, on_cpu = gpu.PARTS[name].command, gpu.PARTS[name].on_cpu
        assert on_cpu is not None and command[0] == on_cpu[0]  # the same code


def test_the_figures_of_a_run_are_next_to_the_planners():
    compared = {"label": "step", "unit": "s", "predicted": 2.0, "low": 1.8, "high": 2.2, "measured": 2.5}
    document = {"rows": [ROW | {"planner": [compared | {"is_inside": False}]}], "wrong": []}
    figures = gpu.run_figures(json.dumps(document))
    assert figures[-1] == {
        "figure": "delta: step (s)",
        "value": 2.5,
        "asked": "planned 2, 1.8 to 2.2",
        "met": False,
    }
    assert {"figure": "delta: update_s", "value": 1.5, "asked": "", "met": None} in figures


def test_a_run_that_does_not_end_or_updates_nothing_is_a_failure():
    assert rl_run.failures(ROW, 4) == []
    assert rl_run.failures(ROW | {"state": "failed", "steps": 2}, 4) == [
        "delta: the run is failed",
        "delta: 2 of 4 steps",
    ]
    assert rl_run.failures(ROW | {"updates": 0}, 4) == ["delta: no batch came after a weight update"]


def test_a_call_keeps_the_results_of_other_parts_and_runs_its_own_in_the_order_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, order = tmp_path / "gpu.json", []

    def run_part(command: object, part: gpu.Part, limit_s: float, devices: str) -> dict[str, object]:
        order.append(next(name for name, found in gpu.PARTS.items() if found is part))
        return {"outcome": "done", "seconds": 1.0, "figures": []}

    def call(*words: str) -> dict[str, dict[str, object]]:
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--json", str(path), *words])
        gpu.main()
        return json.loads(path.read_text())["parts"]

    monkeypatch.setattr(gpu, "describe_device", lambda: {"device": "H100", "devices": 1})
    monkeypatch.setattr(gpu, "run_part", run_part)
    call("--only", "memory", "tests")
    assert order == ["memory", "tests"]
    parts = call("--within", "0", "--only", "tests", "trainer-loop")
    assert len(order) == 2
    assert {name: result["outcome"] for name, result in parts.items()} == {
        "memory": "done",
        "tests": "not begun: no time is left",
        "trainer-loop": "not begun: no time is left",
    }


def test_on_one_gpu_only_the_transport_with_which_engines_may_sleep_takes_turns(tmp_path: Path):
    """The others are refused in a recipe with turns."""
    modes = {}
    for transport in ("filesystem", "delta"):
        recipe = rl_run.recipe_of(tmp_path, rl_run.SMALL, transport, 4, is_colocated=True)
        modes[transport] = parse_recipe(recipe).layout.takes_turns
    assert modes == {"filesystem": True, "delta": False}


def test_goals_next_to_published_figures_name_the_part_that_measures_them():
    rows = gpu.goal_rows(1)
    assert [row["part"] for row in rows][-1] == "needs 8 GPUs"
    assert {row["part"] for row in rows[:-1]} <= set(gpu.PARTS)
