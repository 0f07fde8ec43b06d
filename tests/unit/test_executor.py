"""What submitit's local executor makes of a run's script."""

from __future__ import annotations

from pathlib import Path

import pytest

from primerl_hpc.common.rundir import RunDir
from primerl_hpc.launch.executor import submit_script
from tests.support import wait_for


@pytest.mark.parametrize("devices", [None, "", "2,3", "GPU-5b2f,GPU-77e0"])
def test_a_run_on_this_machine_sees_the_gpus_that_its_submission_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: str | None
) -> None:
    if devices is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    script, seen = tmp_path / "job.sbatch", tmp_path / "seen"
    script.write_text(f'echo "${{CUDA_VISIBLE_DEVICES-all}}" > {seen}.new && mv {seen}.new {seen}\n')
    submit_script(RunDir(tmp_path), script, "local")
    wait_for(seen.exists, "the script to run")
    assert seen.read_text().strip() == ("all" if devices is None else devices)
