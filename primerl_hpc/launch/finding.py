"""One line of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    what: str
    is_ok: bool
    said: str
    mend: str = ""
