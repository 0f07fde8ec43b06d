"""tools/bench/gpu.py as far as it goes without a GPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.recipe.load import parse_recipe
from tests.support.helpers import ROOT, captured, is_alive, wait_for

STARTS_AND_HANGS = """
import signal, subprocess
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
print(f"child: {child.pid}; asked: at least 1: met", flush=True)
signal.pause()
"""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools/bench"))
    return importlib.import_module("gpu")


def test_without_a_gpu_it_reports_that_and_exits_as_unavailable():
    pytest.importorskip("torch")
    done = captured(
        [sys.executable, str(ROOT / "tools/bench/gpu.py"), "--only", "tests"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == ExitCode.UNAVAILABLE
    assert done.stderr.splitlines() == ["torch finds no NVIDIA GPU on this machine; all parts need one"]


def test_a_part_that_hangs_is_ended_with_everything_it_started(gpu: ModuleType, tmp_path: Path):
    out = tmp_path / "out"
    with out.open("w") as file:
        process = gpu.start_guarded(["-c", STARTS_AND_HANGS], dict(os.environ), file, subprocess.DEVNULL)
    wait_for(lambda: out.read_text().endswith("\n"), "the child")
    (figure,) = gpu.asked_figures(out.read_text())
    child = psutil.Process(int(figure["value"]))
    assert not gpu.ends_within(process, 0.1)
    assert not is_alive(child)


def test_a_part_that_fails_keeps_its_figures_and_its_last_output(gpu: ModuleType):
    part = gpu.Part(("-c", "print('ratio: 2; asked: at least 1: met'); raise SystemExit('no driver')"), 60)
    result = gpu.run_part(part.command, part, 60, devices="")
    assert result["outcome"] == "failed with exit code 1"
    assert result["tail"][-1] == "no driver"
    rows = gpu.rows_of({"part": result})
    assert [(row["figure"], row["met"]) for row in rows] == [("ratio", "met"), (result["outcome"], "MISSED")]


def test_a_part_that_prints_no_figures_is_not_done(gpu: ModuleType):
    for read in (gpu.asked_figures, gpu.speed_figures):
        part = gpu.Part(("-c", "print('all is well')"), 60, read)
        assert gpu.run_part(part.command, part, 60, devices="")["outcome"] == "printed no figures"


def test_the_figures_that_a_bench_asks_for_are_read_as_it_printed_them(gpu: ModuleType, capsys):
    machine = importlib.import_module("machine")
    machine.is_met("trainer over bare", 0.981, at_least=0.97)
    machine.is_met("memory: over the plain one's", 0.2, at_most=1 / 8)
    found = gpu.asked_figures("2 cores: fine\n" + capsys.readouterr().out)
    assert found == [
        {"figure": "trainer over bare", "value": 0.981, "asked": "at least 0.97", "met": True},
        {"figure": "memory: over the plain one's", "value": 0.2, "asked": "at most 0.125", "met": False},
    ]


def test_tests_are_counted_though_they_did_not_come_to_their_end(gpu: ModuleType):
    text = "a.py::one[x y] PASSED [ 25%]\na.py::two FAILED [ 50%]\na.py::three SKIPPED (no second GPU) [ 75%]\na.py::four "  # noqa: E501
    assert [figure["value"] for figure in gpu.pytest_figures(text)] == [1, 1, 1]


def test_tests_come_first_and_every_part_has_its_share_of_the_total_time(gpu: ModuleType):
    names = list(gpu.PARTS)
    assert names[0] == "tests"
    left_s = gpu.WITHIN_S - 2 * gpu.GRACE_S
    assert gpu.time_for(names[0], names[1:], left_s) == gpu.PARTS["tests"].limit_s + left_s - sum(
        part.limit_s for part in gpu.PARTS.values()
    )
    for number, name in enumerate(names, start=1):
        given_s = gpu.time_for(name, names[number:], left_s)
        assert gpu.PARTS[name].limit_s <= given_s <= left_s
        left_s -= given_s
    assert gpu.time_for("memory", [], 20.0) == 20.0


@pytest.mark.parametrize("has_gpu", [True, False])
def test_recipes_and_profile_of_the_speeds_are_read(gpu: ModuleType, tmp_path: Path, has_gpu: bool):
    speed = importlib.import_module("trainer_speed")
    path = tmp_path / "here.yaml"
    path.write_text(json.dumps(speed.profile_of(has_gpu=has_gpu)))
    assert load_profile(str(path)).profile.accelerator == ("gpu" if has_gpu else "cpu")
    for case in speed.CASES.values():
        assert parse_recipe(speed.recipe_of(case, tmp_path, case.seq_len)).seq_len == case.seq_len
