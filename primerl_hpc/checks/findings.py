"""Findings of checks of a machine, a site or a node: the lines of `doctor`, and the results of the preflight.

yield warn("9 GiB free", "delete files")      # `table.findings` adds the name of the check
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Finding:
    level: str
    """``ok``; ``warn``: reported only; ``bad``: runs would fail here."""
    message: str
    hint: str = ""
    details: str = ""
    """Further lines, such as SLURM's complete output."""
    check: str = ""
    """Name of the check, as in ``GPU driver``. Empty until the table sets its own."""

    @property
    def is_ok(self) -> bool:
        return self.level != "bad"

    def as_json(self) -> dict[str, str]:
        facts = {"check": self.check, "level": self.level, "said": self.message}
        return {**facts, "hint": self.hint, "details": self.details}

    @classmethod
    def from_json(cls, row: dict[str, str]) -> Self:
        return cls(row["level"], row["said"], row["hint"], row.get("details", ""), row["check"])


def ok(message: str, hint: str = "") -> Finding:
    return Finding("ok", message, hint)


def warn(message: str, hint: str = "") -> Finding:
    return Finding("warn", message, hint)


def bad(message: str, hint: str = "", check: str = "") -> Finding:
    return Finding("bad", message, hint, check=check)


def judged(is_ok: bool, message: str, hint: str = "", check: str = "", details: str = "") -> Finding:
    return Finding("ok" if is_ok else "bad", message, hint, details, check)
