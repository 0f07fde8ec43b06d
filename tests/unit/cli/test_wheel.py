"""The wheel contains what a user needs, and the package finds it from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install only the wheel built from this tree, into a separate prefix."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in files.stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", str(source), "-w", str(folder)], check=True
    )
    (wheel,) = folder.glob("*.whl")
    prefix = folder / "prefix"
    subprocess.run(
        [*pip, "install", "-q", "--no-deps", "--ignore-installed", "--prefix", str(prefix), str(wheel)],
        check=True,
    )
    return prefix


def run_installed(prefix: Path, *words: str, cwd: Path) -> str:
    packages = sysconfig.get_path("purelib", vars={"base": str(prefix), "platbase": str(prefix)})
    done = subprocess.run(
        [sys.executable, "-m", "primerl_hpc", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_recipe_profile_and_template_is_in_the_wheel(installed: Path) -> None:
    share = installed / "share" / "primerl-hpc"
    for kind, pattern in (("recipes", "*.yaml"), ("cluster_profiles", "*.yaml"), ("templates", "*.j2")):
        here = {path.relative_to(ROOT) for path in (ROOT / kind).rglob(pattern)}
        there = {path.relative_to(share) for path in (share / kind).rglob(pattern)}
        assert here and here == there


def test_an_installed_package_renders_a_shipped_recipe_from_any_folder(
    installed: Path, tmp_path: Path
) -> None:
    words = (
        "plan --scripts reverse_text/tiny -p h100x64 --set model.name=owner/model --set warmup=null".split()
    )
    script = run_installed(installed, *words, cwd=tmp_path)
    assert script.startswith("#!/bin/bash\n#SBATCH")
    assert "/code/1/" in script and str(installed) not in script  # it executes the run's copy
