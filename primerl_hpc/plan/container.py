"""Run a role in a container: a command in front of its own (apptainer, shifter, podman-hpc), or arguments of its srun
(pyxis, the Container Engine and uenv of CSCS).

The run directory is always mounted. Containers communicate with the run only through it and over HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from primerl_hpc.cluster.directives import gpu_vendor
from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.software_schema import Container
from primerl_hpc.common.errors import ConfigError

_GPU_OPTION = {"nvidia": "--nv", "amd": "--rocm", "nv": "--nv", "rocm": "--rocm"}
"""Option of apptainer that mounts the driver, by vendor or by the profile's ``gpu``."""
_PODMAN_ENV = ("PRIMERL_*", "SLURM_*", "NCCL_*", "GLOO_*", "FI_*", "HF_*", "CUDA_VISIBLE_DEVICES", "TMPDIR")
_PODMAN_ENV += ("PYTHONPATH",)  # names the run's copy of the code
"""Variables that podman passes from its own environment, besides those of the plan."""
LAUNCH_VARIABLES = ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONUTF8")
"""Variables of each process that are not in the plan, and that an image may set."""
_PYXIS_ENV = "--container-env="
"""Option of pyxis: variables whose value in the job replaces that in the image; by default the image's wins."""


def with_cache(container: Container, cache: str | None, folders: Collection[str] = ()) -> Container:
    """Return the container with the shared cache and ``folders`` mounted, and the file in the cache of an image that is
    an address.

    `primerl-hpc prefetch` writes this file. Other kinds than apptainer and pyxis keep images in a store of their own.
    """
    if container.kind not in ("none", "container-engine", "uenv"):
        mounts = [f"{folder}:{folder}" for folder in dict.fromkeys((*([cache] if cache else []), *folders))]
        container = container.model_copy(update={"mounts": (*container.mounts, *mounts)})
    image = container.image
    is_address = image is not None and (
        "://" in image if container.kind == "apptainer" else not image.startswith(("/", "./", "~"))
    )
    if cache is None or not is_address or container.kind not in ("apptainer", "pyxis"):
        return container
    suffix = "sif" if container.kind == "apptainer" else "sqsh"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", str(image)).strip("-")
    return container.model_copy(update={"image": f"{cache}/images/{name}.{suffix}"})


def in_container(
    container: Container, node: Node, run_dir: str, variables: Collection[str] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (prefix of argv, srun arguments of the container).

    ``node``: hardware of the process's nodes; ``variables``: names that the process needs.

    Raises ConfigError for a run directory that no container can mount.
    """
    if container.kind == "none" or container.image is None:
        return (), ()
    if set(run_dir) & set(",:") and container.kind not in ("container-engine", "uenv"):
        raise ConfigError(
            f"a container cannot mount {run_dir}, because ',' and ':' separate mounts",
            hint="choose another --run-dir",
        )
    if container.is_step_option:
        return (), _step_arguments(container, run_dir, variables)
    return (
        container.command or container.kind,
        *_command_arguments(container, node, run_dir, variables),
    ), ()


def _step_arguments(container: Container, run_dir: str, variables: Collection[str] = ()) -> tuple[str, ...]:
    """Return the arguments of srun for kinds that are options of it."""
    if container.kind == "pyxis":
        mounts = ",".join((f"{run_dir}:{run_dir}", *container.mounts))
        given = [f"--container-image={container.image}", f"--container-mounts={mounts}"]
        if variables:
            own = [word.partition("=")[2] for word in container.args if word.startswith(_PYXIS_ENV)]
            names = ",".join(dict.fromkeys((*own, *sorted({*variables, *LAUNCH_VARIABLES}))))
            others = [word for word in container.args if not word.startswith(_PYXIS_ENV)]
            return (*given, *others, f"{_PYXIS_ENV}{names}")
    elif container.kind == "container-engine":
        given = [f"--environment={container.image}"]
    else:
        given = [f"--uenv={container.image}", *([f"--view={container.view}"] if container.view else [])]
    return (*given, *container.args)


def _command_arguments(
    container: Container, node: Node, run_dir: str, variables: Collection[str]
) -> tuple[str, ...]:
    """Return the arguments of the command in front of the process, up to the image."""
    image = str(container.image)
    has_gpus = node.gpus > 0
    if container.kind == "shifter":
        volumes = [f"--volume={mount}" for mount in (f"{run_dir}:{run_dir}", *container.mounts)]
        return (*volumes, *container.args, f"--image={image}")
    if container.kind == "podman-hpc":
        volumes = [f"--volume={mount}" for mount in (f"{run_dir}:{run_dir}", *container.mounts)]
        environment = [f"--env={name}" for name in (*_PODMAN_ENV, *variables)]
        gpu = ["--gpu"] if has_gpus else []
        return (
            "run",
            "--rm",
            "--network=host",
            "--ipc=host",
            *gpu,
            *volumes,
            *environment,
            *container.args,
            image,
        )
    option = gpu_vendor(node) if container.gpu == "auto" else container.gpu
    gpu = [_GPU_OPTION[option]] if has_gpus and option in _GPU_OPTION else []
    binds = [word for mount in (run_dir, *container.mounts) for word in ("--bind", mount)]
    return ("exec", *gpu, *binds, *container.args, image)


def batch_options(container: Container) -> tuple[str, ...]:
    """Return the sbatch options that the batch process itself needs: a uenv is mounted for it, too."""
    return _step_arguments(container, "") if container.kind == "uenv" else ()
