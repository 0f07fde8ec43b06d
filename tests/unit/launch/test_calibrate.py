"""Calibration: rows with predictions of the curves, faults of SLURM and of the node, a GPU type corrected by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.errors import ConfigError, NotFoundError, RoleError, SchedulerError
from primerl_hpc.launch.bench.calibrate import _check_device, _command, _failure, _rows, calibrate
from primerl_hpc.plan.predict.hardware import gpu_spec
from primerl_hpc.plan.predict.ledger import LedgerKey, corrections
from primerl_hpc.plan.predict.timing.calibrated import calibrated_spec, probe_seconds
from primerl_hpc.plan.predict.timing.curves import Operations

H100 = gpu_spec("H100-SXM")
PROBES = [
    {"figure": "hardware.gemm", "rows": 256, "width": 4096, "dtype": "bfloat16"},
    {"figure": "hardware.gemm", "rows": 8192, "width": 4096, "dtype": "bfloat16"},
    {"figure": "hardware.copy", "bytes": 2**30},
    {"figure": "hardware.all_gather", "bytes": 64 * 2**20, "ranks": 8},
    {"figure": "hardware.all_reduce", "bytes": 64 * 2**20, "ranks": 8},
    {"figure": "hardware.file_write", "bytes": 2**31},
]


def result(slower: float = 1.0) -> dict:
    """A node whose operations take ``slower`` times as long as predicted."""
    rows = [{**probe, "seconds": slower * (probe_seconds(H100, probe) or 2.0)} for probe in PROBES]
    return {"device": "NVIDIA H100 80GB HBM3", "node": "gpu01", "torch": "2.9.1", "rows": rows}


def test_every_measurement_but_the_file_is_compared_with_the_curves() -> None:
    rows = _rows(result(1.3), H100, load_profile("h100x64").profile)
    ratios = [row.measured / row.predicted for row in rows if row.predicted]
    assert ratios == pytest.approx([1.3] * 5)
    assert rows[-1].predicted is None and rows[-1].figure == "hardware.file_write"
    assert {row.gpu for row in rows} == {"H100-SXM"} and {row.source for row in rows} == {"calibrate"}
    assert rows[0].layout == "rows 256, width 4096, bfloat16" and rows[3].layout == "67108864 bytes, 8 ranks"


def test_rows_of_cpus_have_no_prediction_and_their_own_type() -> None:
    rows = _rows({**result(), "device": "cpu"}, None, load_profile("local").profile)
    assert {row.gpu for row in rows} == {"cpu"} and all(row.predicted is None for row in rows)


def test_a_slower_node_makes_the_operations_of_the_next_plan_slower() -> None:
    rows = _rows(result(1.3), H100, load_profile("h100x64").profile)
    found = corrections(rows, LedgerKey("H100-SXM", "qwen3", "16 ranks"), now=rows[0].time)
    assert found.keys() == {probe["figure"] for probe in PROBES} - {"hardware.file_write"}
    corrected, before = Operations(calibrated_spec(H100, found)), Operations(H100)
    factor = found["hardware.gemm"].factor
    assert 1.1 < factor < 1.3
    assert corrected.gemm(4096, 4096, 4096) == pytest.approx(factor * before.gemm(4096, 4096, 4096))
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "alltoall"):
        assert corrected.collective(kind, 2**26, 8) > 1.1 * before.collective(kind, 2**26, 8)
    assert corrected.decode_attention(64, 2**24) > before.decode_attention(64, 2**24)
    assert Operations(H100).gemm(4096, 4096, 4096) == before.gemm(
        4096, 4096, 4096
    )  # the original is unchanged


def test_without_calibration_the_gpu_type_is_unchanged() -> None:
    assert calibrated_spec(H100, {}) is H100


def test_an_unknown_node_type_or_gpu_is_refused_before_a_job_is_queued() -> None:
    with pytest.raises(NotFoundError, match="no node type 'l40s'"):
        calibrate(load_profile("local").profile, node_type="l40s")
    with pytest.raises(ConfigError, match="unknown GPU type 'H9000'"):
        calibrate(load_profile("h100x64", overrides=["node.gpu=H9000"]).profile)
    nameless = load_profile("h100x64", overrides=["node_types.x={nodes: 1, gpus: 2}"]).profile
    with pytest.raises(ConfigError, match="does not name the GPU type") as caught:
        calibrate(nameless, node_type="x")
    assert caught.value.location == "node_types.x.gpu"


def test_a_node_with_other_gpus_than_the_profile_names_saves_nothing() -> None:
    found = {**result(), "device": "NVIDIA A100-SXM4-80GB"}
    with pytest.raises(ConfigError, match="is H100-SXM, but node gpu01 has NVIDIA A100"):
        _check_device(found, H100, "node.gpu")
    with pytest.raises(ConfigError, match="has NVIDIA GeForce GTX 1080"):
        _check_device({**result(), "device": "NVIDIA GeForce GTX 1080"}, H100, "node.gpu")
    _check_device(result(), H100, "node.gpu")


@pytest.mark.parametrize(
    ("lines", "kind", "says"),
    [
        (
            ["srun: error: Unable to allocate resources: Invalid partition"],
            SchedulerError,
            "Invalid partition",
        ),
        (["srun: fatal: Could not establish a configuration source"], SchedulerError, "configuration source"),
        (["hardware.gemm: 1 s", "error: torch finds no GPU on this node"], RoleError, "torch finds no GPU"),
        (["srun: error: n1: task 0: Out Of Memory"], RoleError, "Out Of Memory"),
        ([], RoleError, "exit code 1"),
    ],
)
def test_faults_of_slurm_and_of_the_node_are_distinguished(lines: list[str], kind: type, says: str) -> None:
    fault = _failure(1, lines, is_slurm=True)
    assert type(fault) is kind and says in str(fault)


def test_the_job_of_a_node_type_has_its_options(tmp_path: Path) -> None:
    types = "node_types.l40s={nodes: 2, gpus: 4, gpu: L40S, partition: cheap, cores: 32}"
    profile = load_profile("h100x64", overrides=[types]).profile
    (tmp_path / "srun").write_text("#!/bin/sh")
    (tmp_path / "srun").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        words = _command(profile, "l40s", tmp_path)
    assert {"--partition=cheap", "--gres=gpu:4", "--nodes=1", "--cpus-per-task=32", "--time=10"} <= set(words)
    assert words[-3:] == ["-m", "primerl_hpc.roles.calibrate", str(tmp_path)]
