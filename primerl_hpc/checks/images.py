"""Processor architecture of container images, as far as a login node can find it out.

    image_arch(profile.software.default.container)      # 'aarch64'; None if it is not known here

shifter does not show the architecture of an image; there, and for images that are not known here, the preflight of the
nodes starts the interpreter in the container (`checks/surroundings.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

from primerl_hpc.checks.surroundings import elf_machine
from primerl_hpc.cluster.software_schema import Container

_SIF_MAGIC = b"SIF_MAGIC\0"
_SIF_ARCHES = {b"02": "x86_64", b"04": "aarch64", b"01": "386", b"03": "arm"}
"""Architectures in the header of an apptainer image (SIF)."""
_PROGRAMS = ("usr/bin/env", "usr/bin/bash", "bin/bash", "bin/busybox")
"""Programs of which an image has at least one, as a file and not as a link."""
_OCI_ARCHES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Names of architectures in OCI images that differ from those of the kernel."""
_UENV_ARM = ("gh200",)
"""Node types of CSCS with ARM processors; the others (zen2, zen3, a100, mi200, mi300) are x86_64."""
QUERY_S = 20.0


def image_arch(container: Container) -> str | None:
    """Return the architecture of a container's image, as ``uname -m`` prints it; None if it is not known here."""
    image = str(container.image)
    match container.kind:
        case "apptainer":
            return sif_arch(image)
        case "pyxis":
            return squashfs_arch(image)
        case "podman-hpc":
            return podman_arch(container.command or container.kind, image)
        case "container-engine":
            return edf_arch(image)
        case "uenv":
            return uenv_arch(image)
    return None


def sif_arch(image: str) -> str | None:
    """Return the architecture of an apptainer image; None for another file or an address.

    The header of a SIF file is 32 bytes of the interpreter line, the magic (10), the version (3) and the architecture
    (3, with a final NUL): github.com/apptainer/sif, pkg/sif/sif.go.
    """
    try:
        with open(image, "rb") as file:
            header = file.read(48)
    except OSError:
        return None
    if header[32:42] != _SIF_MAGIC:
        return None
    return _SIF_ARCHES.get(header[45:47], f"SIF architecture {header[45:47].decode(errors='replace')}")


def squashfs_arch(image: str) -> str | None:
    """Return the architecture of a squashfs image (enroot), from a program that every system has; None if unknown."""
    if shutil.which("unsquashfs") is None or not os.path.isfile(image):
        return None
    for program in _PROGRAMS:
        try:
            with subprocess.Popen(
                ["unsquashfs", "-cat", image, program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            ) as child:
                assert child.stdout is not None
                header = child.stdout.read(20)
                child.kill()
        except OSError:
            return None
        if (found := elf_machine(header)) is not None:
            return found
    return None


def podman_arch(command: str, image: str) -> str | None:
    """Return the architecture that ``podman image inspect`` prints; None if the image is not in the local store."""
    inspect = [command, "image", "inspect", "--format", "{{.Architecture}}", image]
    try:
        done = subprocess.run(inspect, capture_output=True, text=True, timeout=QUERY_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    found = done.stdout.strip()
    return _OCI_ARCHES.get(found, found) if done.returncode == 0 and found else None


def edf_arch(name: str) -> str | None:
    """Return the architecture of the squashfs image that an EDF file of the Container Engine names."""
    folders = (os.environ.get("EDF_PATH") or os.path.expanduser("~/.edf")).split(":")
    is_path = "/" in name or name.endswith(".toml")
    paths = [Path(name).expanduser()] if is_path else [Path(folder, f"{name}.toml") for folder in folders]
    for path in paths:
        try:
            image = tomllib.loads(path.read_text()).get("image")
        except (OSError, ValueError):
            continue
        return squashfs_arch(os.path.expandvars(image)) if isinstance(image, str) else None
    return None


def uenv_arch(label: str) -> str | None:
    """Return the architecture of ``name/version:tag@system%uarch``; None for a label without ``%uarch``."""
    found = re.search(r"%(\w+)$", label)
    if found is None:
        return None
    return "aarch64" if found[1] in _UENV_ARM else "x86_64"
