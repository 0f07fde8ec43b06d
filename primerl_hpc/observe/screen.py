"""``--watch``: the same screen again and again, redrawn in place, and slower while nothing happens."""

from __future__ import annotations

import json
import shutil
import sys
import time
from typing import Protocol

import click

SLOWEST_S = 15.0
_HOME, _TO_END_OF_LINE, _TO_END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_HIDE_CURSOR, _SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class View(Protocol):
    """Something to look at: all runs, or one."""

    def look(self) -> None:
        """Read what there is now; the other methods tell what was read last."""

    def text(self) -> str: ...

    def as_json(self) -> object: ...

    def mark(self) -> object:
        """Differs when something happened that a person waits for."""


def next_pause(pause_s: float, interval_s: float, *, is_changed: bool) -> float:
    """``interval_s`` after a change, then half as long again each time, up to `SLOWEST_S` (or ``interval_s``)."""
    return interval_s if is_changed else min(1.5 * pause_s, max(interval_s, SLOWEST_S))


def fit(screen: str, columns: int, rows: int) -> list[str]:
    """Lines that a terminal of this size shows without scrolling; the last one says what it cannot."""
    lines = screen.split("\n")
    lines = [line if len(click.unstyle(line)) <= columns else line[:columns] for line in lines]
    if len(lines) < rows:
        return lines
    return [*lines[: rows - 2], f"… {len(lines) - rows + 2} more lines; the window is too low"]


def watch(view: View, interval_s: float, *, as_json: bool = False) -> None:
    """Until ^C. In a terminal every line is written over in place: no blank screen in between, hence no flicker. Into a
    file or pipe a screen is written when something changed, and so is a line of JSON with ``as_json``."""
    is_terminal, pause_s, seen = sys.stdout.isatty() and not as_json, interval_s, None
    try:
        if is_terminal:
            click.echo(_HIDE_CURSOR + _HOME + _TO_END_OF_SCREEN, nl=False)
        while True:
            view.look()
            before, seen = seen, view.mark()
            if is_terminal:
                size = shutil.get_terminal_size()
                lines = fit(view.text(), size.columns, size.lines)
                text = "".join(f"{line}{_TO_END_OF_LINE}\n" for line in lines)
                click.echo(_HOME + text + _TO_END_OF_SCREEN, nl=False)
            elif seen != before:
                click.echo(json.dumps(view.as_json(), ensure_ascii=False) if as_json else view.text() + "\n")
            pause_s = next_pause(pause_s, interval_s, is_changed=seen != before)
            time.sleep(pause_s)
    except KeyboardInterrupt:
        if not as_json:
            click.echo()
    finally:
        if is_terminal:
            click.echo(_SHOW_CURSOR, nl=False)
