"""doctor against a real SLURM: what fits is said to fit, what does not is named with its mend, and nothing is queued."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.common.slurm import ask
from primerl_hpc.common.yamldoc import dump_yaml, load_yaml
from tests.slurm.virtual import Cluster, run_cli
from tests.support import ROOT

VIRTUAL = ROOT / "cluster_profiles" / "virtual.yaml"


def findings_of(profile: str, *words: str) -> dict[str, dict[str, Any]]:
    done = run_cli("doctor", "--profile", profile, "--json", *words)
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    is_healthy = all(finding["is_ok"] for finding in found.values())
    assert done.returncode == (ExitCode.DONE if is_healthy else ExitCode.CONFIG)
    return found


def test_a_fitting_profile_is_healthy_and_nothing_is_queued(cluster: Cluster) -> None:
    assert all(finding["is_ok"] for finding in findings_of("virtual").values())
    assert ask(["squeue", "--noheader"]) == ""


@pytest.mark.parametrize(
    "block, change, what, mend",
    [
        ("scheduler", {"partition": "gpu"}, "partition", "main, preemptible"),
        ("scheduler", {"time": "09:00:00"}, "walltime", "4:00:00"),
        ("scheduler", {"account": "physics"}, "account", "root"),
        ("scheduler", {"constraint": "a100&nvlink"}, "test submission", "scheduler.constraint"),
        ("node", {"cores": 128}, "cores of a node", "64"),
        ("node", {"gpus": 16}, "GPUs of a node", "8"),
        (None, {"nodes": 9}, "nodes", "lower"),
        (None, {"runs_dir": "/proc/nowhere"}, "run directory", "runs_dir"),
        ("cpu_partition", {"partition": "milan"}, "CPU partition", "cpu_partition.partition: one of cpu"),
        ("cpu_partition", {"cores": 128}, "CPU cores of a node", "cpu_partition.cores to 64"),
        ("cpu_partition", {"account": "physics"}, "CPU account", "cpu_partition.account: one of root"),
        ("cpu_partition", {"memory": "4000G"}, "CPU test submission", "cpu_partition"),
    ],
)
def test_what_does_not_fit_is_named_with_its_mend(
    cluster: Cluster, tmp_path: Path, block: str | None, change: dict[str, Any], what: str, mend: str
) -> None:
    values = dict(load_yaml(VIRTUAL).values)
    if block is None:
        values |= change
    else:
        values[block] = {**values[block], **change}
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(values))
    finding = findings_of(str(path))[what]
    assert not finding["is_ok"] and mend in finding["mend"]


def test_nodes_are_asked_for_themselves_and_bad_ones_are_named(cluster: Cluster, tmp_path: Path) -> None:
    """The fabric of one node is down, and the clock of another one is ahead."""
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
    assert "chrony or ntp" in clock["mend"]
    assert not (tmp_path / "runs").exists()
