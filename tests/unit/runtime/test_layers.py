"""Imports of the runtime folder run in one direction: supervisor, phase, elastic, job, steps, then the shared
modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[3] / "primerl_hpc" / "runtime"
ABOVE = {
    "phase": ("supervisor",),
    "phase_files": ("supervisor", "phase"),
    "elastic": ("supervisor", "phase", "phase_files"),
    "job": ("supervisor", "phase", "phase_files", "elastic"),
    "steps": ("supervisor", "phase", "elastic", "job", "context"),
    "context": ("supervisor", "phase", "elastic", "job", "steps"),
    "files": ("supervisor", "phase", "elastic", "job", "steps", "context"),
    "failures": ("supervisor", "phase", "elastic", "job", "steps", "context", "files", "allocation"),
    "allocation": ("supervisor", "phase", "elastic", "job", "steps", "context", "files", "failures"),
    "types": (
        "supervisor",
        "phase",
        "elastic",
        "job",
        "steps",
        "context",
        "files",
        "failures",
        "allocation",
    ),
}


@pytest.mark.parametrize("part", ABOVE)
def test_no_part_of_the_runtime_imports_one_above_it(part: str) -> None:
    path = RUNTIME / part
    files = sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    for file in files:
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        names = [(node.module or "").split(".") for node in nodes]
        imported = {name[2] for name in names if name[:2] == ["primerl_hpc", "runtime"] and len(name) > 2}
        assert not imported & set(ABOVE[part]), file
