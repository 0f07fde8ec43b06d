"""Container images as files in the profile's cache: an address becomes a SIF or squashfs file, by the site's own tools.

need.container.image      "docker://nvcr.io/nvidia/pytorch:25.10-py3"
plan                      /shared/cache/images/docker-nvcr.io-nvidia-pytorch-25.10-py3.sif
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from primerl_hpc.cluster.software_schema import Container
from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.common.files import private_place
from primerl_hpc.offline.prefetch.inventory import Found, Presence
from primerl_hpc.plan.container import with_cache

MIN_BYTES = 4096
_SITE_COMMANDS = {
    "shifter": "shifterimg pull",
    "podman-hpc": "podman-hpc pull",
    "uenv": "uenv image pull",
    "container-engine": "enroot import, and name the file in the EDF file",
}
"""Kinds whose images only the site's own command can fetch and list."""


def look_for_image(container: Container, cache: str | None) -> Found:
    """Return whether the image is a file on this machine. An address that only the site's command knows: UNKNOWN."""
    image = str(container.image)
    if container.kind in _SITE_COMMANDS:
        return Found(Presence.UNKNOWN, f"fetch it with: {_SITE_COMMANDS[container.kind]}")
    path = Path(with_cache(container, cache).image or "")
    if not path.is_absolute():
        if (cache is None and "://" in image) or container.kind == "pyxis":
            return Found(Presence.UNKNOWN, "the nodes fetch it themselves; with key cache it becomes a file")
        path = path.expanduser().resolve()
    try:
        size = path.stat().st_size if path.is_file() else 0
    except OSError as error:
        return Found(Presence.MISSING, f"{path}: {error.strerror}")
    if path.is_dir():  # a sandbox of apptainer
        return Found(Presence.COMPLETE, str(path))
    if size < MIN_BYTES:
        return Found(Presence.MISSING, f"{path} does not exist" if not size else f"{path} is not an image")
    return Found(Presence.COMPLETE, str(path), size)


def pull_image(container: Container, cache: str) -> None:
    """Fetch the image of an address into its file, under a temporary name.

    Raises ConfigError if the command is not on this machine, DataError if it fails.
    """
    path = Path(str(with_cache(container, cache).image))
    with private_place(path) as temporary:
        command = pull_command(container, temporary)
        try:
            done = subprocess.run(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
            )
        except FileNotFoundError as error:
            raise ConfigError(
                f"{command[0]} is not on this machine, so the image {container.image} cannot be fetched",
                hint="load its module first, or set container.command of the profile",
            ) from error
        if done.returncode != 0 or not temporary.is_file():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise DataError(
                f"{command[0]} cannot fetch {container.image} (exit code {done.returncode}): {last}",
                hint="run the command again, or fetch the image yourself and set its file as image",
            )
        os.replace(temporary, path)


def pull_command(container: Container, path: Path) -> list[str]:
    """Return the command that writes the image of an address to ``path``."""
    if container.kind == "pyxis":
        address = str(container.image).removeprefix("docker://")
        return ["enroot", "import", "--output", str(path), f"docker://{address}"]
    return [container.command or container.kind, "pull", str(path), str(container.image)]
