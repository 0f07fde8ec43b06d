"""Run paths of ELF files become relative, without a change of anything else."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.offline.bundle.run_path import origin_path, with_relative_run_path

OLD = "/opt/site/python/3.11/lib"


def compiled(folder: Path, run_path: str) -> bytes:
    """Return a program that a linker has given this run path."""
    if shutil.which("cc") is None or shutil.which("readelf") is None:
        pytest.skip("cc or readelf is not installed")
    source, program = folder / "main.c", folder / "main"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run(["cc", f"-Wl,-rpath,{run_path}", "-o", program, source], check=True)
    return program.read_bytes()


def run_path_of(data: bytes, folder: Path) -> str:
    program = folder / "changed"
    program.write_bytes(data)
    program.chmod(0o755)
    assert subprocess.run([program], check=False).returncode == 0
    told = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout
    return next(line.partition("[")[2].rstrip("]") for line in told.splitlines() if "path: [" in line)


@pytest.mark.parametrize(
    "before, after",
    [
        (OLD, "$ORIGIN/../lib"),
        (f"/usr/local/cuda/lib64:{OLD}/", "/usr/local/cuda/lib64:$ORIGIN/../lib"),
        (f"{OLD}:/x:{OLD}", "$ORIGIN/../lib:/x"),
        ("/elsewhere/lib", "/elsewhere/lib"),
    ],
)
def test_the_folder_of_the_interpreter_is_replaced_in_place(before: str, after: str, tmp_path: Path) -> None:
    data = compiled(tmp_path, before)
    changed = with_relative_run_path(data, Path(OLD), "$ORIGIN/../lib")
    assert len(changed) == len(data) and run_path_of(changed, tmp_path) == after


def test_a_path_that_is_too_short_for_the_new_one_stays(tmp_path: Path) -> None:
    data = compiled(tmp_path, "/py/lib")
    assert with_relative_run_path(data, Path("/py/lib"), "$ORIGIN/../lib") is data


@given(st.binary(max_size=200))
def test_any_other_file_stays(data: bytes) -> None:
    for content in (data, b"\x7fELF\x02\x01" + data):
        assert with_relative_run_path(content, Path(OLD), "$ORIGIN") is content


def test_run_paths_lead_from_the_file_to_the_libraries() -> None:
    assert origin_path("bin/python3.11", "lib") == "$ORIGIN/../lib"
    assert origin_path("lib/python3.11/lib-dynload/_ssl.so", "lib") == "$ORIGIN/../.."
    assert origin_path("lib/libpython3.11.so.1.0", "lib") == "$ORIGIN"
