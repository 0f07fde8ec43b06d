"""Protect the terminal of a command: control characters in its output are escaped.

    protect_output()                      # in the entry point of a command
    Console(file=raw(sys.stdout))         # for a program that draws the screen itself

Commands print text of models, environments, log files and of other users' runs. An escape sequence in it could change
the title of the terminal, hide lines, or write to the clipboard. Only line breaks, tabs and sequences for colors (SGR)
pass; everything else is printed as ``\\u001b``, which is also valid in JSON.
"""

from __future__ import annotations

import codecs
import io
import locale
import os
import re
import sys
from typing import Any, TextIO, cast

from primerl_hpc.common.safety.odd_text import is_odd, shown

_CONTROL = re.compile(r"(\x1b\[[0-9;]*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def without_control(text: str) -> str:
    """Return ``text`` with control characters escaped, except for line breaks, tabs and colors."""
    return _CONTROL.sub(lambda found: found[1] or f"\\u{ord(found[0]):04x}", text)


def plain(text: str) -> str:
    """Return text of a model or of a program that it controls: colors and bidirectional controls are escaped, too."""
    return "".join(shown(char) if is_odd(char) else char for char in text)


class ProtectedStream:
    """A text stream whose control characters are escaped. Everything else is that of the inner stream."""

    def __init__(self, inner: TextIO) -> None:
        self.inner = inner

    def write(self, text: str) -> int:
        self.inner.write(without_control(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __iter__(self) -> Any:
        return iter(self.inner)


def protect_output() -> None:
    """Escape control characters in everything that this process prints to stdout and stderr from now on."""
    sys.stdout, sys.stderr = (_protected(stream) for stream in (sys.stdout, sys.stderr))


def _protected(stream: TextIO | None) -> TextIO:
    if stream is None:  # the file descriptor is closed
        return cast(TextIO, stream)
    inner = raw(stream)
    if isinstance(inner, io.TextIOWrapper):
        # a character that the locale lacks is printed as "?" instead of ending the command
        inner.reconfigure(encoding=_terminal_encoding(inner.encoding), errors="replace")
    return cast(TextIO, ProtectedStream(inner))


def _terminal_encoding(encoding: str) -> str:
    """Return the encoding of the locale if Python has UTF-8 mode for files (`cli.main.use_utf8`), but the locale is
    another 8-bit one. Output in the POSIX locale is UTF-8, as Python's default is (PEP 540)."""
    own = codecs.lookup(locale.getencoding()).name
    is_chosen = "PYTHONIOENCODING" in os.environ
    return encoding if is_chosen or not sys.flags.utf8_mode or own in ("ascii", "utf-8") else own


def raw(stream: TextIO) -> TextIO:
    """Return the stream without protection."""
    return stream.inner if isinstance(stream, ProtectedStream) else stream
