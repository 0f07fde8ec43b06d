"""A small reader of ``#SBATCH`` lines by the rules of sbatch itself (``get_argument`` in its source).

Directives end at the first line that is neither empty nor a comment. Words end at spaces outside quotes, a ``#``
outside quotes starts a comment, and a backslash escapes the next character, inside single quotes too.
"""

from __future__ import annotations


def read_directives(script: str) -> list[tuple[str, str | None]]:
    """Return (option, value) in order; the value is None for an option without one."""
    found: list[tuple[str, str | None]] = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            for word in _words(line.removeprefix("#SBATCH")):
                name, equals, value = word.removeprefix("--").partition("=")
                found.append((name, value if equals else None))
        elif line.strip() and not line.strip().startswith("#"):
            break
    return found


def _words(line: str) -> list[str]:
    words, at = [], 0
    while at < len(line):
        word, at = _word(line, at)
        if word is None:
            break
        words.append(word)
    return words


def _word(line: str, at: int) -> tuple[str | None, int]:
    while at < len(line) and line[at] in " \t\v\f\r":
        at += 1
    if at == len(line) or line[at] == "#":
        return None, len(line)
    word, quote, is_escaped = "", "", False
    while at < len(line) and (quote or line[at] not in " \t\v\f\r"):
        char = line[at]
        if is_escaped:
            word, is_escaped = word + char, False
        elif char == "\\":
            is_escaped = True
        elif quote:
            word, quote = (word, "") if char == quote else (word + char, quote)
        elif char in "\"'":
            quote = char
        elif char == "#":
            return word, len(line)
        else:
            word += char
        at += 1
    return word, at
