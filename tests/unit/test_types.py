"""Exemptions from pyright, which `tools/test` runs: each names its rule and a reason, and there are few."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_EXEMPTIONS = 14
EXEMPTION = re.compile(r"#\s*pyright:\s*ignore(?P<rules>\[\w+(?:,\s*\w+)*\])?(?P<reason>.*)")


def exemptions() -> list[tuple[str, re.Match[str], str]]:
    """Location, match and preceding line of each exemption in the package."""
    found = []
    for path in sorted((ROOT / "primerl_hpc").rglob("*.py")):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, start=1):
            if match := EXEMPTION.search(line):
                found.append((f"{path.relative_to(ROOT)}:{number}", match, lines[number - 2]))
    return found


def test_every_exemption_names_its_rule_and_a_reason() -> None:
    wrong = [
        location
        for location, match, before in exemptions()
        if not match["rules"] or not (match["reason"].strip() or before.strip().startswith("#"))
    ]
    assert not wrong


def test_exemptions_are_few() -> None:
    assert len(exemptions()) <= MAX_EXEMPTIONS, [location for location, _, _ in exemptions()]


def test_no_file_weakens_the_mode() -> None:
    """Comments of mypy would exempt a line from every rule; file-level comments of pyright, a file."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "basic"
    assert settings["enableTypeIgnoreComments"] is False
    weaker = re.compile(r"#\s*(type:\s*ignore|pyright:(?!\s*ignore\[))")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in sorted((ROOT / "primerl_hpc").rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if weaker.search(line)
    ]
    assert not found
