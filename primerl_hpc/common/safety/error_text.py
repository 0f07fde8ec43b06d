"""Summarize exceptions and tracebacks in one sentence, with causes and without native stack frames.

describe_error(error)      # "RuntimeError: cannot load the model (caused by FileNotFoundError: no such file …)"
last_error(lines)          # the same from the traceback in a log
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MAX_CHARS = 1000
_NATIVE_FRAME = re.compile(
    r"^(?:\[\w+\] ?|\([^()]* pid=\d+\) ?)*\s*"
    r"(?:frame #\d+: |<omitting python frames>|Exception raised from .+ \(most recent call first\):)"
)
_NATIVE_STACK = re.compile(r"\s*Exception raised from [^\n]+ \(most recent call first\):.*", re.S)
_PREFIX = re.compile(
    r"^(?:\[\w+\] ?|\([^()]* pid=\d+\) ?|(?:CRITICAL|ERROR|WARNING) [\d-]+ [\d:.]+ \[[^\]]*\] ?)*"
)
_CAUSE = "The above exception was the direct cause of the following exception:"
_LOOKS_LIKE_ERROR = re.compile(r"(Error|Exception|refused|failed)\b|error:")
_EXCEPTION = re.compile(r"(?:\w+\.)*[A-Z]\w*(?:Error|Exception)(?:: |$)")
_ECHO = re.compile(
    r"See root cause above|Engine core initialization failed|EngineDeadError|ChildFailedError|"
    r"resource_tracker|returned non-zero exit status|closing signal SIG"
)
"""Lines that report the exit of another process, whose own error is further up."""
_VALIDATION = re.compile(r"\d+ validation errors? for ")
"""First line of an error of pydantic; the next two lines contain the key and the problem."""


def is_native_frame(line: str) -> bool:
    """True for a line of a C++ stack, as torch appends it to warnings and errors of its stores and collectives."""
    return _NATIVE_FRAME.match(line) is not None


def without_native_frames(lines: Iterable[str]) -> list[str]:
    return [line for line in lines if not is_native_frame(line)]


def describe_error(error: BaseException) -> str:
    """Return class and message, followed by those of causes that the message does not already contain."""
    parts: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        message = " ".join(_NATIVE_STACK.sub("", str(current)).split())
        if not (parts and message and message in parts[-1]):
            parts.append(f"{type(current).__name__}: {message}" if message else type(current).__name__)
        current = current.__cause__
    return _joined(parts)


def last_error(lines: Sequence[str]) -> str:
    """Return the last error in a log with the causes above it; an empty text if no line looks like an error."""
    texts = [_PREFIX.sub("", line).rstrip() for line in without_native_frames(lines)]
    found = [index for index, text in enumerate(texts) if _LOOKS_LIKE_ERROR.search(text)]
    own = [index for index in found if not _ECHO.search(texts[index])]
    if not found:
        return ""
    index: int | None = (own or found)[-1]
    parts: list[str] = []
    while index is not None:
        message = _with_continuation(texts, index)
        if not (parts and message.partition(": ")[2] and message.partition(": ")[2] in parts[-1]):
            parts.append(message)
        index = _cause_above(texts, index)
    return _joined(parts)


def _with_continuation(texts: Sequence[str], index: int) -> str:
    """Return the message of an exception, which continues in indented lines."""
    lines = [texts[index].strip()]
    is_validation = _VALIDATION.search(texts[index]) is not None
    if not _EXCEPTION.match(lines[0]):
        return lines[0]
    for number, text in enumerate(texts[index + 1 : index + 4]):
        if not (text.startswith((" ", "\t")) or (is_validation and number == 0)):
            break
        lines.append(text.strip())
    return " ".join(lines)


def _cause_above(texts: Sequence[str], index: int) -> int | None:
    """Return the line of the exception that caused the one at ``index``."""
    for above in range(index - 1, -1, -1):
        if texts[above].strip() == _CAUSE:
            raised = [number for number in range(above) if _EXCEPTION.match(texts[number])]
            return raised[-1] if raised else None
        if _EXCEPTION.match(texts[above]):
            return None  # belongs to an earlier traceback
    return None


def _joined(parts: Sequence[str]) -> str:
    text = parts[0] + "".join(f" (caused by {part}" for part in parts[1:]) + ")" * (len(parts) - 1)
    return cut_middle(text, MAX_CHARS)


def cut_middle(text: str, width: int) -> str:
    """Shorten a text to ``width`` characters in its middle, because the problem is often at the end of a long line."""
    if len(text) <= width:
        return text
    head = (width - 3) // 2
    return f"{text[:head]} … {text[len(text) - (width - 3 - head) :]}"
