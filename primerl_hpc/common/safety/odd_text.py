"""Detect unintended characters that change how a text is parsed, displayed or stored.

    odd_character("a\\x00b")                # "U+0000 (control character)"
    check_path_text("runs\\n2", "--run-dir")  # raises ConfigError

Control characters end or overwrite lines of scripts and terminals. Bidirectional controls change the displayed order
of a text (CVE-2021-42574). Surrogates represent bytes that are not UTF-8, and cannot be written to JSON files.
"""

from __future__ import annotations

import unicodedata

from primerl_hpc.common.errors import ConfigError

BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters with Unicode's property Bidi_Control."""
_LINES = frozenset("\u2028\u2029")


def odd_character(text: str, *, is_path: bool = False) -> str | None:
    """Describe the first such character; None without one. Tabs and line breaks are allowed except in paths."""
    return next((describe(char) for char in text if is_odd(char, is_path=is_path)), None)


def is_odd(char: str, *, is_path: bool = False) -> bool:
    if char.isascii():
        return (char < " " and (is_path or char not in "\t\n")) or char == "\x7f"
    if char in BIDIRECTIONAL or (is_path and char in _LINES):
        return True
    return unicodedata.category(char) in ("Cc", "Cs")


def describe(char: str) -> str:
    if unicodedata.category(char) == "Cs":
        return (
            "a byte that is not UTF-8" if "\udc80" <= char <= "\udcff" else "half a character (a surrogate)"
        )
    kind = "bidirectional control" if char in BIDIRECTIONAL else "line break" if char in _LINES else "control"
    return f"U+{ord(char):04X} ({kind}{' character' if kind != 'line break' else ''})"


def shown(text: str) -> str:
    """Escape such characters of a text for one line of an error message."""
    return "".join(
        char.encode("unicode_escape", "surrogatepass").decode() if is_odd(char, is_path=True) else char
        for char in text
    )


def check_path_text(path: object, what: str) -> None:
    """Raise ConfigError for a path with such a character. ``what``: option or key with the path."""
    if (found := odd_character(str(path), is_path=True)) is not None:
        raise ConfigError(
            f"{what}: the path {shown(str(path))} contains {found}",
            hint="rename it, or use another path",
        )
