"""Container runtimes for the virtual cluster, where none can be installed: they really change the root (bubblewrap).

    runtimes = make_runtimes(folder)          # programs `apptainer` and `srun`, which knows --container-image
    runtimes.image, runtimes.python           # the image, and its interpreter, which exists only inside

A process sees the system's programs, its interpreter's environment at another place than outside, and what is mounted.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

PREFIX = "/opt/primerl"
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/sys", "/run")
APPTAINER = """\
#!/bin/bash
# apptainer exec [OPTION]... [--bind FROM[:TO]]... IMAGE COMMAND...
set -eu
shift
mounts=()
while [[ $1 == -* ]]; do
    case $1 in
        --bind)
            IFS=: read -r from to <<<"$2"
            mounts+=(--bind "$from" "${{to:-$from}}")
            shift
            ;;
    esac
    shift
done
image=$1
shift
exec {bwrap} --tmpfs / {system} --ro-bind {base} {base} --ro-bind "$(cat "$image")" {prefix} --dev-bind /dev /dev \\
    --bind /proc /proc --bind /tmp /tmp "${{mounts[@]}}" "$@"
"""
SRUN = """\
#!/bin/bash
# srun with the options of pyxis
set -eu
options=() mounts=() image=
while [[ ${{1:-}} == -* ]]; do
    case $1 in
        --container-image=*) image=${{1#*=}} ;;
        --container-mounts=*)
            IFS=, read -ra pairs <<<"${{1#*=}}"
            for pair in "${{pairs[@]}}"; do mounts+=(--bind "$pair"); done
            ;;
        --container-*) ;;
        *) options+=("$1") ;;
    esac
    shift
done
[ -n "$image" ] || exec {srun} "${{options[@]}}" "$@"
exec {srun} "${{options[@]}}" {apptainer} exec "${{mounts[@]}}" "$image" "$@"
"""


@dataclass(frozen=True)
class Runtimes:
    folder: Path
    """Folder with the programs."""
    image: Path
    python: str = f"{PREFIX}/bin/python"


def make_runtimes(folder: Path) -> Runtimes:
    """Write the programs and an image into ``folder``, which all nodes mount. Skips the test without bubblewrap."""
    if (bwrap := shutil.which("bwrap")) is None:
        pytest.skip("needs bubblewrap, as a container runtime")
    folder.mkdir()
    existing = [path for path in SYSTEM if Path(path).exists()]
    system = " ".join(f"--ro-bind {path} {path}" for path in existing)
    apptainer = folder / "apptainer"
    apptainer.write_text(APPTAINER.format(bwrap=bwrap, system=system, base=sys.base_prefix, prefix=PREFIX))
    (folder / "srun").write_text(SRUN.format(srun=shutil.which("srun"), apptainer=apptainer))
    image = folder / "image.sqsh"
    image.write_text(sys.prefix)
    for path in (apptainer, folder / "srun"):
        path.chmod(0o755)
    return Runtimes(folder, image)
