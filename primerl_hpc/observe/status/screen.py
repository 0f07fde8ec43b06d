"""``--watch``: redraw a view on the terminal's alternate screen, less often while nothing changes."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Protocol

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from primerl_hpc.common.safety.terminal import raw, without_control

SLOWEST_S = 15.0


class View(Protocol):
    """A screen: all runs, or one run."""

    def refresh(self) -> None:
        """Read the current state. The other methods return what was read last."""

    def text(self) -> str:
        """Return lines of at most 80 columns, with ANSI colors."""
        ...

    def as_json(self) -> object:
        """Return the data for ``--json``."""
        ...

    def change_key(self) -> object:
        """Return a value that differs after a change that a user wants to see."""


def next_pause(pause_s: float, interval_s: float, *, is_changed: bool) -> float:
    """Return ``interval_s`` after a change, else 1.5 × the last pause, up to `SLOWEST_S` (or ``interval_s``)."""
    return interval_s if is_changed else min(1.5 * pause_s, max(interval_s, SLOWEST_S))


def fit(screen: str, columns: int, rows: int) -> list[str]:
    """Return the lines that fit into a terminal of this size without scrolling. The last one counts the omitted
    ones.
    """
    lines = screen.split("\n")
    lines = [line if len(click.unstyle(line)) <= columns else line[:columns] for line in lines]
    if len(lines) < rows:
        return lines
    return [*lines[: rows - 2], f"… {len(lines) - rows + 2} more lines; the window is too small"]


def watch(view: View, interval_s: float, *, as_json: bool = False) -> None:
    """Show ``view`` until ^C: in a terminal on its alternate screen, after which the last state remains.

    In a file or pipe, the screen is written again after each change; with ``as_json`` one line of JSON.
    """
    if sys.stdout.isatty() and not as_json:
        click.echo(_watch_on_screen(view, interval_s))
        return
    with contextlib.suppress(KeyboardInterrupt):
        for is_changed in _polls(view, interval_s):
            if is_changed:
                click.echo(json.dumps(view.as_json(), ensure_ascii=False) if as_json else view.text() + "\n")


def _watch_on_screen(view: View, interval_s: float) -> str:
    """Redraw the view until ^C; return its last text."""
    text, console = "", Console(file=raw(sys.stdout))
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        for _ in _polls(view, interval_s):
            text = without_control(view.text())
            lines = fit(text, console.width, console.height)
            live.update(Text.from_ansi("\n".join(lines), no_wrap=True), refresh=True)
    return text


def _polls(view: View, interval_s: float) -> Iterator[bool]:
    """Refresh the view repeatedly, with `next_pause` in between. Yields True after a change."""
    pause_s, last_key = interval_s, None
    while True:
        view.refresh()
        previous_key, last_key = last_key, view.change_key()
        is_changed = last_key != previous_key
        yield is_changed
        pause_s = next_pause(pause_s, interval_s, is_changed=is_changed)
        time.sleep(pause_s)
