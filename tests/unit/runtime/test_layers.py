"""Imports of the runtime folder run in one direction: supervisor, phase, engine host, job, steps, then the shared
modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[3] / "primerl_hpc" / "runtime"
ELASTIC = ("engine_host", "elastic_members")
ABOVE = {
    "phase": ("supervisor",),
    "phase_files": ("supervisor", "phase"),
    "engine_host": ("supervisor", "phase", "phase_files"),
    "elastic_members": ("supervisor", "phase", "phase_files", "engine_host"),
    "job": ("supervisor", "phase", "phase_files", *ELASTIC),
    "steps": ("supervisor", "phase", *ELASTIC, "job", "context"),
    "context": ("supervisor", "phase", *ELASTIC, "job", "steps"),
    "files": ("supervisor", "phase", *ELASTIC, "job", "steps", "context"),
    "failures": ("supervisor", "phase", *ELASTIC, "job", "steps", "context", "files", "allocation"),
    "allocation": ("supervisor", "phase", *ELASTIC, "job", "steps", "context", "files", "failures"),
    "step": ("supervisor", "phase", *ELASTIC, "job", "steps", "context", "files", "failures", "allocation"),
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
