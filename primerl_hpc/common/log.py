"""Logging of a run's processes: lines on stderr, which the supervisor redirects to the role's log file.

Commands of users print sentences to stderr with `notice`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import math
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterable

from primerl_hpc.common import env
from primerl_hpc.common.safety.printable import one_line

_COMMAND = re.compile(r"primerl-hpc( [^\s;,()]+)+")
STACKS_THREAD = "primerl-stacks"
"""Name in /proc (at most 15 bytes) of the thread that prints the stacks of its process when it receives SIGUSR2."""
_PR_SET_NAME = 15
FORMAT, TIME = "%(asctime)s %(name)s %(levelname)s %(message)s", "%H:%M:%S"


class JsonLines(logging.Formatter):
    """Formats a message as ``{"time": "2026-01-31T12:03:44", "logger": …, "level": …, "text": …}``."""

    def format(self, record: logging.LogRecord) -> str:
        text = logging.Formatter("%(message)s").format(record)  # with the traceback
        time = self.formatTime(record, "%Y-%m-%dT%H:%M:%S")
        entry = {"time": time, "logger": record.name, "level": record.levelname.lower(), "text": text}
        return json.dumps(entry, ensure_ascii=False)


def setup_logging(role: str, *, level: int = logging.INFO) -> logging.Logger:
    """Log as ``12:03:44 trainer INFO step 3 …`` and return the role's logger. Other libraries log from WARNING up."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=FORMAT, datefmt=TIME, force=True)
    logging.captureWarnings(True)
    logger = logging.getLogger("primerl_hpc")
    logger.setLevel(logging.DEBUG if env.is_debug() else level)
    return logging.getLogger(f"primerl_hpc.{role}")


def change_logging(level: str, *, verifiers: str, is_json: bool, least: int = logging.NOTSET) -> None:
    """Apply the levels and the format of a recipe's ``log`` block after `setup_logging`.

    ``least``: the level of this package's messages is at least this one, as on ranks other than the first.
    """
    logging.getLogger("primerl_hpc").setLevel(
        logging.DEBUG if env.is_debug() else max(least, logging.getLevelName(level.upper()))
    )
    logging.getLogger("verifiers").setLevel(verifiers.upper())
    for handler in logging.getLogger().handlers if is_json else ():
        handler.setFormatter(JsonLines())


def dump_stacks_on_signal() -> None:
    """Print the Python stacks of all threads to stderr on SIGUSR2.

    Sent to the thread `STACKS_THREAD`, the signal cannot harm the process: that thread prints while it holds the
    interpreter lock, and no other thread is interrupted. Sent to the process, it works even if a call that holds the
    lock hangs, but the handler may crash the process, so only a process that is about to be killed receives it.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    threading.Thread(target=_print_stacks_on_request, name=STACKS_THREAD, daemon=True).start()


def _print_stacks_on_request() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    # the name comes last: a thread that has it accepts the signal
    ctypes.CDLL(None).prctl(_PR_SET_NAME, STACKS_THREAD.encode(), 0, 0, 0)
    while True:
        signal.sigwait({signal.SIGUSR2})
        faulthandler.dump_traceback(all_threads=True)


class MalformedRequests(logging.Filter):
    """Reduces a server's records about malformed requests to one line a minute, with their number and no traceback.

    logging.getLogger("aiohttp.server").addFilter(MalformedRequests(errors=(HttpProcessingError,)))
    """

    EVERY_S = 60.0

    def __init__(self, *, errors: tuple[type[BaseException], ...] = (), texts: tuple[str, ...] = ()) -> None:
        """``errors``: classes of exceptions in such records; ``texts``: how their messages begin."""
        super().__init__()
        self.errors, self.texts = errors, texts
        self._num, self._next = 0, -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if error is None else f"{type(error).__name__}: {error}"
        if not isinstance(error, self.errors) and not text.startswith(self.texts):
            return True
        self._num += 1
        if time.monotonic() < self._next:
            return False
        record.exc_info = record.exc_text = None
        record.msg, record.args = "malformed requests: %d, the last one: %s", (self._num, one_line(text))
        self._num, self._next = 0, time.monotonic() + self.EVERY_S
        return True


def notice(sentence: str) -> None:
    """Print a warning, an error or a note to stderr: one line in a file, in a terminal lines of its width.

    Commands of this package stay on one line, so that they can be copied.
    """
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        sentence = "\n".join(fold(line, width) for line in sentence.splitlines())
    print(sentence, file=sys.stderr)


def show_warnings(warnings: Iterable[str]) -> None:
    """Print warnings to stderr."""
    for warning in warnings:
        notice(f"warning: {warning}")


def hang(text: str, column: int) -> str:
    """Return ``text``, which is printed from ``column`` on, with later lines that start there.

    In a terminal it is folded to the terminal's width.
    """
    lines = text.splitlines()
    if sys.stdout.isatty():
        width = max(20, shutil.get_terminal_size().columns - column)
        lines = [part for line in lines for part in fold(line, width, "").splitlines()]
    return f"\n{'':<{column}}".join(lines)


def fold(text: str, width: int, indent: str = "  ") -> str:
    """Break ``text`` at blanks outside of commands into lines of ``width`` columns; later lines have an indent."""
    hard = _COMMAND.sub(lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        hard, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
    return "\n".join(lines).replace("\0", " ")
