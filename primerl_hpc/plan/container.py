"""A role inside a container: a prefix of its command line (apptainer) or arguments of its srun (pyxis).

The run directory is always mounted; containers meet the rest of the run only through it and over HTTP.
"""

from __future__ import annotations

from primerl_hpc.cluster.schema import Container, Profile
from primerl_hpc.common.errors import ConfigError


def in_container(
    container: Container, profile: Profile, run_dir: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(prefix of argv, srun arguments). Raises ConfigError for a run directory that no container can mount."""
    every = profile.scheduler.srun_extra
    if container.kind == "none" or container.image is None:
        return (), every
    if set(run_dir) & set(",:"):
        raise ConfigError(
            f"a container cannot mount {run_dir}: ',' and ':' separate mounts",
            mend="choose another --run-dir",
        )
    if container.kind == "pyxis":
        mounts = ",".join((f"{run_dir}:{run_dir}", *container.mounts))
        return (), (*every, f"--container-image={container.image}", f"--container-mounts={mounts}")
    gpu = ("--nv",) if profile.accelerator == "gpu" else ()
    binds = [word for mount in (run_dir, *container.mounts) for word in ("--bind", mount)]
    return ("apptainer", "exec", *gpu, *binds, container.image), every
