"""Runs whose roles are in containers, as a site with pyxis and one with apptainer would write their profiles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from primerl_hpc.common.names import RunState
from primerl_hpc.run.metrics import read_steps
from tests.slurm.test_real_run import model, submit  # noqa: F401 (fixtures)
from tests.support.containers import make_runtimes
from tests.support.real_slurm import RealRun

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.usefixtures("acting_user")]


@pytest.mark.parametrize("kind", ["pyxis", "apptainer"])
def test_all_roles_run_in_containers_and_the_supervisor_outside(
    submit: Callable[..., RealRun],  # noqa: F811
    model: Path,  # noqa: F811
    shared_folder: Path,
    kind: str,
) -> None:
    """The interpreter of the profile exists only in the image, and the model only where it is mounted."""
    runtimes = make_runtimes(shared_folder / kind)
    container: dict[str, Any] = {"kind": kind, "image": str(runtimes.image), "mounts": [f"{model}:{model}"]}
    if kind == "apptainer":
        container["command"] = str(runtimes.folder / "apptainer")
    profile = {
        "software.default": {"python": runtimes.python, "container": container},
        "software.setup": [f"export PATH={runtimes.folder}:$PATH"],
    }
    changes = [word for key, value in profile.items() for word in ("--profile-set", f"{key}={value}")]
    real = submit(f"in-{kind}", {"max_steps": 2}, *changes)
    real.wait_for_state(RunState.DONE)
    assert len(read_steps(real.run.metrics("trainer"))) == 2
    plan = real.run.plan.read_text()
    assert runtimes.python in plan and runtimes.python not in (real.run.launch / "job.sbatch").read_text()
