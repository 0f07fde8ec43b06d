"""`doctor` with a real SLURM: it accepts what matches, reports each mismatch with a hint, and queues no job."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.document import dump_yaml, load_yaml
from primerl_hpc.common.errors import ExitCode
from primerl_hpc.slurm.commands import ask
from tests.support.helpers import ROOT
from tests.support.virtual_slurm import run_cli

pytestmark = pytest.mark.usefixtures("acting_user")
VIRTUAL = ROOT / "cluster_profiles" / "virtual.yaml"


def findings_of(profile: str, *words: str) -> dict[str, dict[str, Any]]:
    done = run_cli("doctor", "--profile", profile, "--json", *words)
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    is_healthy = all(finding["is_ok"] for finding in found.values())
    assert done.returncode == (ExitCode.DONE if is_healthy else ExitCode.CONFIG)
    return found


def test_a_matching_profile_passes_and_no_job_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIMERL_RUNS_DIR", str(tmp_path / "runs"))
    found = findings_of("virtual")
    assert all(finding["is_ok"] for finding in found.values()), found
    assert ask(["squeue", "--noheader"]) == ""


@pytest.mark.parametrize(
    "block, change, what, hint",
    [
        ("scheduler", {"partition": "gpu"}, "partition", "main, preemptible"),
        ("scheduler", {"time": "09:00:00"}, "walltime", "4:00:00"),
        ("scheduler", {"account": "physics"}, "account", "lab"),
        ("scheduler", {"constraint": "a100&nvlink"}, "test submission", "scheduler.constraint"),
        ("scheduler", {"gres": ["gpu:a100:4"]}, "GPU type", "scheduler.gres: name one of h100"),
        ("scheduler", {"gres": ["gpu:h100:16"]}, "GPU type", "scheduler.gres: request at most 8 of h100"),
        ("scheduler", {"memory": "900G"}, "requested memory", "lower scheduler.memory to 500G or less"),
        ("scheduler", {"memory": "900G"}, "test submission", "`sinfo -o "),
        ("node", {"cores": 128}, "cores of a node", "64"),
        ("node", {"gpus": 16}, "GPUs of a node", "8"),
        (None, {"nodes": 9}, "nodes", "lower"),
        (None, {"runs_dir": "/proc/nowhere"}, "run directory", "runs_dir"),
        ("cpu_partition", {"partition": "milan"}, "CPU partition", "cpu_partition.partition: one of cpu"),
        ("cpu_partition", {"cores": 128}, "CPU cores of a node", "cpu_partition.cores to 64"),
        ("cpu_partition", {"account": "physics"}, "CPU account", "set cpu_partition.account to one of lab"),
        ("cpu_partition", {"memory": "4000G"}, "CPU test submission", "cpu_partition"),
    ],
)
def test_each_mismatch_is_reported_with_a_hint(
    tmp_path: Path, block: str | None, change: dict[str, Any], what: str, hint: str
) -> None:
    values = dict(load_yaml(VIRTUAL).values)
    if block is None:
        values |= change
    else:
        values[block] = {**values[block], **change}
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(values))
    found = findings_of(str(path))
    assert not found[what]["is_ok"] and hint in found[what]["hint"], found
    assert "primerl-hpc doctor" not in json.dumps(found)  # which the user has just run


def test_each_node_is_checked_on_itself_and_bad_ones_are_named(tmp_path: Path) -> None:
    """The network of one node is down, and the clock of another one is ahead."""
    values = dict(load_yaml(VIRTUAL).values)
    values["runs_dir"] = str(tmp_path / "runs")
    values["preflight"] = {"health_checks": ['[ "$SLURMD_NODENAME" != n2 ] || { echo no link; exit 1; }']}
    ahead, python = tmp_path / "ahead", tmp_path / "python"
    ahead.mkdir()
    (ahead / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 600\n")
    python.write_text(
        f'#!/bin/sh\n[ "$SLURMD_NODENAME" != n3 ] || export PYTHONPATH={ahead}:$PYTHONPATH\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    values["software"] = {"default": {"python": str(python)}}
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(values))
    found = findings_of(str(path), "--nodes", "3")
    assert found["nodes: answers"]["is_ok"] and found["nodes: versions"]["is_ok"]
    bad = {what: finding for what, finding in found.items() if not finding["is_ok"]}
    assert set(bad) == {"nodes: site", "nodes: clock"} and bad["nodes: site"]["said"].startswith("n2:")
    clock = bad["nodes: clock"]
    assert clock["said"].startswith("n3: ") and clock["said"].endswith("s ahead of the head"), clock
    assert "chrony or ntp" in clock["hint"]
    assert not (tmp_path / "runs").exists()
