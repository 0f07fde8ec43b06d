"""Findings of checks of a machine, a site or a node: the lines of `doctor`, and the results of the preflight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Finding:
    check: str
    """Name of the check, as in ``GPU driver``."""
    level: str
    """``ok``; ``warn``: reported only; ``bad``: runs would fail here."""
    message: str
    hint: str = ""
    details: str = ""
    """Further lines, such as SLURM's complete output."""

    @classmethod
    def judged(cls, check: str, is_ok: bool, message: str, hint: str = "", details: str = "") -> Self:
        return cls(check, "ok" if is_ok else "bad", message, hint, details)

    @property
    def is_ok(self) -> bool:
        return self.level != "bad"

    def as_json(self) -> dict[str, str]:
        facts = {"check": self.check, "level": self.level, "said": self.message}
        return {**facts, "hint": self.hint, "details": self.details}

    @classmethod
    def from_json(cls, row: dict[str, str]) -> Self:
        return cls(row["check"], row["level"], row["said"], row["hint"], row.get("details", ""))
