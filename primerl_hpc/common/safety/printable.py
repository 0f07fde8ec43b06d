"""Escape external text (errors of environments, replies of servers) for log lines and terminals."""

from __future__ import annotations

ERROR_CHARS = 300


def one_line(text: str, limit: int = ERROR_CHARS) -> str:
    """Return ``text`` on one line of at most ``limit`` characters.

    White space is replaced by single blanks, unprintable characters by their escapes (``\\x1b``). A longer text is
    cut in the middle, because errors have their type at the beginning and their cause at the end.
    """
    escaped = "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in " ".join(text.split())
    )
    if len(escaped) <= limit:
        return escaped
    tail = limit // 3
    return f"{escaped[: limit - tail - 3]} … {escaped[-tail:]}"


def last_error(error: str, count: int) -> str:
    """Return ``last error (80 of this kind): HarnessError: …``."""
    return f"last error ({count} of this kind): {one_line(error)}"


def kind_of(error: str) -> str:
    """Return ``HarnessError`` for ``HarnessError: harness 'inproc-chat' exited 1``."""
    return one_line(error.split(":", 1)[0], 80)
