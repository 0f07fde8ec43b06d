"""Output of commands in a terminal of 80 columns, and their errors on a full disk."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, captured, unusable_sft_recipe
from tests.support.terminal import Terminal


@pytest.mark.parametrize(
    ("words", "column"),
    [(("explain", "rollouts.max_off_policy_steps"), 12), (("doctor", "--profile", "local"), 29)],
)
def test_long_values_are_folded_below_their_first_line(
    words: tuple[str, ...], column: int, tmp_path: Path
) -> None:
    with Terminal("primerl_hpc", *words, cwd=tmp_path) as terminal:
        terminal.end()
    lines = re.sub(r"\x1b\[\d*m", "", terminal.shown).splitlines()
    assert all(len(line) <= 80 or " " not in line[column:] for line in lines), lines  # paths are not broken
    assert any(line[:column].isspace() and len(line) > column and line[column] != " " for line in lines), (
        lines
    )


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root can mount a small disk"
)
def test_a_full_disk_is_reported_with_the_file_that_could_not_be_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    submit = (sys.executable, "-m", "primerl_hpc", "submit", unusable_sft_recipe(tmp_path), "-p", "local")
    mount = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$@"'
    done = captured(
        ["unshare", "--mount", "sh", "-c", mount, "sh", *submit, "--dry-run", "--run-dir", str(disk / "run")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"},
    )
    assert done.returncode == 1, done.stderr
    assert re.search(rf"error: {disk}/\S+: No space left on device", done.stderr), done.stderr
