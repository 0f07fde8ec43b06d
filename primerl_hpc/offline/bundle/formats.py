"""Formats of a bundle, and the programs that write and read them."""

from __future__ import annotations

import shutil
from enum import StrEnum

from primerl_hpc.common.errors import ConfigError


class Format(StrEnum):
    """Format of a bundle, which is also the ending of its file name."""

    TAR_ZST = "tar.zst"
    TAR_GZ = "tar.gz"
    SQUASHFS = "squashfs"


WRITERS: dict[Format, tuple[str, ...]] = {
    Format.TAR_ZST: ("zstd", "-q", "-T0", "-f", "-o"),
    Format.TAR_GZ: ("gzip", "-1", "-c"),
    Format.SQUASHFS: ("sqfstar", "-quiet", "-no-progress", "-comp", "lz4"),
}
"""Program that reads a tar archive from its standard input; the target follows, gzip writes to its output."""


def choose_format(name: str | None, file_name: str) -> Format:
    """Return the requested format, or that of the file's ending, or the best one whose program is here.

    Raises ConfigError if its program is missing.
    """
    if name is None:
        ending = next((kind for kind in Format if file_name.endswith(f".{kind}")), None)
        found = next(kind for kind in (Format.TAR_ZST, Format.TAR_GZ) if shutil.which(WRITERS[kind][0]))
        chosen = ending or found
    else:
        chosen = Format(name)
    program = WRITERS[chosen][0]
    if shutil.which(program) is None:
        others = [kind.value for kind in Format if shutil.which(WRITERS[kind][0])]
        raise ConfigError(
            f"format {chosen} needs {program}, which is not installed",
            hint=f"install it, or use --format {others[0]}" if others else "install zstd or gzip",
        )
    return chosen
