"""Verify a complete policy version by reading its files."""

from __future__ import annotations

from pathlib import Path

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import crc32_of_file, listed_file
from primerl_hpc.common.safety.decoding import decoding
from primerl_hpc.transport.weights.filesystem import manifest_files


def verify_checksums(folder: Path) -> None:
    """Read every file and compare its CRC-32 with the manifest. Raises DataError naming the first file that differs."""
    for entry in manifest_files(folder):
        path = listed_file(folder, entry["name"])
        with decoding("cannot be read", location=path, more=(OSError,)):
            found = crc32_of_file(path)
        if found != entry["crc32"]:
            raise DataError(
                f"CRC-32 is {found:08x}, but the manifest lists {entry['crc32']:08x}", location=str(path)
            )
