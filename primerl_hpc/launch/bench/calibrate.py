"""Calibration: measure one node of a profile, locally or in a short SLURM job, and compare with the planner's curves.

    result = calibrate(profile, node_type=None, report=print)
    append_rows(user_ledger(), result.rows)

The measuring process (`roles/calibrate.py`) runs with the interpreter or container of the trainer. Its folder is in the
folder of run directories, so that the measured file write is one to that filesystem. Rows of a node without GPUs have
the GPU type ``cpu`` and no prediction.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from primerl_hpc.checks.nodes import node_srun_command, work_folder
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import (
    ConfigError,
    NotFoundError,
    PrimerlError,
    RoleError,
    SchedulerError,
    TimeoutWaitingError,
)
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.names import Role
from primerl_hpc.common.package import with_package
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.plan.container import in_container, with_cache
from primerl_hpc.plan.pools import Pools
from primerl_hpc.plan.predict.hardware import GpuSpec, gpu_spec, spec_of_device
from primerl_hpc.plan.predict.timing.calibrated import probe_layout, probe_seconds
from primerl_hpc.render.requests import type_request
from primerl_hpc.run.ledger.rows import LedgerRow

SECONDS = 90.0
"""Time for the measurements; imports and the start of the processes come in addition."""
MINUTES = 10
"""Walltime of the job."""
FILE_BYTES = {"gpu": 2 * 2**30, "cpu": 64 * 2**20}
RESULT_S = 60.0
"""Time for a file written on a node to become visible on this machine."""
MODULE = "primerl_hpc.roles.calibrate"


@dataclass(frozen=True)
class Calibration:
    node: str
    device: str
    """As torch names it; ``cpu`` without GPUs."""
    gpu: str
    """GPU type of the rows; ``cpu`` without GPUs."""
    rows: tuple[LedgerRow, ...]


def calibrate(
    profile: Profile,
    *,
    node_type: str | None = None,
    seconds: float = SECONDS,
    report: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measure one node. ``report`` gets lines of progress.

    Raises NotFoundError for an unknown node type; ConfigError for an unknown GPU, or a node with other GPUs than the
    profile names; SchedulerError if SLURM starts no job; RoleError if a measurement fails.
    """
    pool = Pools(profile).by_type.get(node_type)
    if pool is None:
        known = ", ".join(profile.node_types) or "none"
        raise NotFoundError(
            f"--node-type: profile '{profile.name}' has no node type '{node_type}'",
            hint=f"its types: {known}",
        )
    location = "node.gpu" if node_type is None else f"node_types.{node_type}.gpu"
    gpu = gpu_spec(pool.node.gpu, location=location) if pool.node.gpus else None
    with work_folder(profile, ".calibrate-") as work:
        request = {
            "gpus": pool.node.gpus,
            "cpu_ranks": min(2, pool.per_node),
            "seconds": seconds,
            "file_bytes": FILE_BYTES[profile.accelerator],
        }
        write_json(work / "request.json", request)
        _run(_command(profile, node_type, work), profile, report)
        result_file = work / "result.json"
        with contextlib.suppress(TimeoutWaitingError):
            wait_until(result_file.is_file, what="the result of the node", timeout_s=RESULT_S)
        result = read_json_or_none(result_file)
    if result is None:
        raise RoleError(
            "the measuring process wrote no result", hint=f"runs_dir must be shared: {work.parent}"
        )
    _check_device(result, gpu, location)
    return Calibration(
        result["node"], result["device"], gpu.name if gpu else "cpu", _rows(result, gpu, profile)
    )


def _command(profile: Profile, node_type: str | None, work: Path) -> list[str]:
    """Return the command that measures: a child process of this machine, or a job of one node."""
    software = profile.software.of_role(Role.TRAINER)
    request = type_request(profile, node_type)
    prefix, container_args = in_container(
        with_cache(software.container, profile.cache_path), request.node, str(work)
    )
    command = [*prefix, software.python or sys.executable, "-m", MODULE, str(work)]
    if profile.scheduler.type == "local":
        return command
    if shutil.which("srun") is None:
        raise SchedulerError(
            "srun is not on this machine", hint="run this command on a login node of the cluster"
        )
    srun = node_srun_command(profile, 1, request=request, minutes=MINUTES)
    return [*srun, "--ntasks=1", *container_args, *command]


def _run(command: list[str], profile: Profile, report: Callable[[str], None]) -> None:
    """Run the measuring process and report the lines of its stderr."""
    if profile.scheduler.type == "slurm":
        report("waiting for a node")
    try:
        child = subprocess.Popen(
            command,
            env=with_package(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise ConfigError(
            f"{command[0]} cannot be started: {error.strerror or error}",
            hint="set software.roles.trainer.python of the profile",
        ) from None
    lines: list[str] = []
    assert child.stderr is not None
    try:
        for line in child.stderr:
            lines.append(line.rstrip())
            report(lines[-1])
    finally:
        if child.poll() is None:
            child.terminate()  # interrupted: srun ends its job
        code = child.wait()
    if code:
        raise _failure(code, lines, is_slurm=profile.scheduler.type == "slurm")


def _failure(code: int, lines: list[str], *, is_slurm: bool) -> PrimerlError:
    """Return the error for the output of a failed measurement: SLURM's own, or that of the process on the node."""
    printed = [line for line in lines if line.strip()]
    last = printed[-1] if printed else f"exit code {code}"
    if is_slurm and printed and all(line.startswith("srun: ") and " task" not in line for line in printed):
        reason = re.sub(r"^srun: ((error|fatal): )?", "", last)
        return SchedulerError(
            f"SLURM started no job: {reason}",
            hint="check the profile with primerl-hpc doctor, or try again when a node is free",
        )
    return RoleError(f"the measurement failed: {last.removeprefix('error: ')}")


def _check_device(result: dict[str, Any], gpu: GpuSpec | None, location: str) -> None:
    """Raise ConfigError if the node has another GPU than the profile names, or one that is unknown."""
    if gpu is None:
        return
    found = spec_of_device(result["device"])
    if found is None or found.curves_from != gpu.curves_from:
        fix = f"set {location} to {found.name}" if found else "this GPU is not in plan/predict/hardware"
        raise ConfigError(
            f"{location} is {gpu.name}, but node {result['node']} has {result['device']}",
            hint=f"{fix}; nothing was saved",
        )


def _rows(result: dict[str, Any], gpu: GpuSpec | None, profile: Profile) -> tuple[LedgerRow, ...]:
    now = round(time.time(), 3)
    return tuple(
        LedgerRow(
            figure=probe["figure"],
            measured=probe["seconds"],
            predicted=probe_seconds(gpu, probe) if gpu is not None else None,
            unit="s",
            gpu=gpu.name if gpu is not None else "cpu",
            layout=probe_layout(probe),
            software={"torch": result["torch"]},
            time=now,
            source="calibrate",
            run=profile.name,
        )
        for probe in result["rows"]
    )
