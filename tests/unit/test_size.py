"""The budget of code lines: a feature removes as many lines as it adds, or its commit gives the reason."""

from __future__ import annotations

import runpy

import pytest

from tests.support.helpers import ROOT

# What the project wants to be: primerl_hpc 50,000, tests 43,000, tools 5,000. Lower a limit when code is deleted.
LIMITS = {"primerl_hpc": 62_340, "tests": 55_220, "tools": 7_700}
"""Folder → the most lines that hold more than comments and docstrings, as tools/counts prints them."""


@pytest.mark.parametrize("folder", LIMITS)
def test_a_folder_stays_within_its_budget_of_code_lines(folder: str) -> None:
    counts = runpy.run_path(str(ROOT / "tools" / "counts"))["lines_by_folder"](folder)
    assert counts.total() <= LIMITS[folder], (
        f"{folder} has {counts.total():,} code lines, {counts.total() - LIMITS[folder]:,} more than its budget: "
        f"{dict(counts.most_common())}. Delete what no user needs, or raise the limit in this file and give the "
        "reason in the commit message. tools/counts prints the counts of all folders."
    )


def test_comments_docstrings_and_blank_lines_do_not_count() -> None:
    code_lines = runpy.run_path(str(ROOT / "tools" / "counts"))["code_lines"]
    assert code_lines('"""Text.\n\nMore.\n"""\n\n# why\nx = 1  # reason\n') == 1
    assert code_lines('x = """\n\n# no comment\n"""\n') == 4
