"""Limits that a job exceeds in its partition, from sinfo's output, and the partition that admits it."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.launch.queue import excess_of, submit_script
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.slurm.jobs import SEPARATOR
from primerl_hpc.slurm.partitions import find_excess, parse_partitions

ROWS = (
    "gpu* up 1-00:00:00 1-32 20 gpu:8",
    "gpu* up 1-00:00:00 1-32 44 gpu:h100:8",
    "long up 7-00:00:00 1-infinite 96 gpu:8",
    "cpu up infinite 1-infinite 200 (null)",
    "old down infinite 1-infinite 500 gpu:4",
)
SINFO = "\n".join(row.replace(" ", SEPARATOR) for row in ROWS)
PARTITIONS = parse_partitions(f"Welcome to this site\n{SINFO}\n")


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        ({"partition": "gpu", "nodes": "4", "time": "12:00:00"}, None, None),
        ({"partition": "gpu", "nodes": "4", "time": None}, None, None),
        ({"partition": "gpu,long", "nodes": "96", "time": "2-00:00:00"}, None, None),
        ({"partition": "elsewhere", "nodes": "9999"}, None, None),
        ({"partition": "old", "nodes": "9999"}, None, None),
        (
            {"partition": "gpu", "nodes": "64"},
            "gpu admits at most 1-00:00:00 and 32 nodes",
            "--partition long",
        ),
        ({"nodes": "2", "time": "2-00:00:00"}, "job requests 2 nodes for 2-00:00:00", "--partition long"),
        (
            {"partition": "long", "nodes": "96", "time": "30-00:00:00"},
            "7-00:00:00",
            "scheduler.time to 7-00:00:00",
        ),
        ({"partition": "long", "nodes": "100"}, "long admits at most 7-00:00:00 and 96 nodes", "fewer nodes"),
        ({"partition": "cpu", "nodes": "201"}, "cpu admits at most 200 nodes", "fewer nodes"),
    ],
)
def test_the_limit_and_the_partition_that_fits_are_named(
    options: dict[str, str | None], what: str | None, remedy: str | None
) -> None:
    found = find_excess([options], PARTITIONS)
    if what is None or remedy is None:
        assert found is None
    else:
        assert found is not None and what in found.what and remedy in found.remedy
        assert "cpu" not in found.remedy, "the job needs GPUs, or the partition is its own"


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> None:
    """A site whose sinfo shows these partitions, and whose sbatch runs these lines."""
    (folder / "partitions").write_text(SINFO)
    bodies = {"sinfo": f"cat {folder}/partitions", "sbatch": sbatch, "srun": "true", "squeue": "true"}
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


REFUSED = (
    "echo 'sbatch: error: Batch job submission failed: Requested time limit is invalid "
    "(missing or exceeds some limit)' >&2; exit 1"
)
"""An sbatch that refuses the job for a limit of its partition."""


def test_a_refusal_for_a_limit_names_the_partition_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, REFUSED)
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --time=2-00:00:00\n#SBATCH --nodes=4\n")
    with pytest.raises(SchedulerError) as caught:
        submit_script(RunDir(tmp_path / "run"), script, "slurm")
    text = str(caught.value)
    assert "partition gpu admits at most 1-00:00:00 and 32 nodes" in text and "--partition long" in text
    assert "(Requested time limit is invalid" in text, "SLURM's own words remain"


def test_a_job_that_slurm_accepts_although_it_can_never_start_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EnforcePartLimits=NO, SLURM's default."""
    commands(tmp_path, monkeypatch, "echo Submitted batch job 7")
    script = tmp_path / "job.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --nodes=64\n")
    assert "and the job requests 64 nodes; partition long admits this job" in (excess_of(script) or "")
    script.write_text("#!/bin/bash\n#SBATCH --partition=gpu\n#SBATCH --nodes=2\n")
    assert excess_of(script) is None
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert excess_of(script) is None


def test_the_component_of_a_heterogeneous_job_that_exceeds_its_partition_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands(tmp_path, monkeypatch, REFUSED)
    script = tmp_path / "job.sbatch"
    lines = (
        *("--partition=cpu", "--nodes=1", "--time=2-00:00:00", "hetjob"),
        *("--partition=long", "--nodes=4", "--time=2-00:00:00", "hetjob"),
        *("--partition=gpu", "--nodes=8", "--time=2-00:00:00"),
    )
    script.write_text("#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines))
    what = "partition gpu admits at most 1-00:00:00 and 32 nodes, and component 3 of the job requests 8 nodes"
    remedy = "partition long admits it: set its partition in node_types or cpu_partition to long"
    found = excess_of(script) or ""
    assert what in found and remedy in found
    with pytest.raises(SchedulerError) as caught:
        submit_script(RunDir(tmp_path / "run"), script, "slurm")
    assert what in str(caught.value) and remedy in str(caught.value)
    script.write_text(script.read_text().replace("2-00:00:00", "1-00:00:00"))
    assert excess_of(script) is None
