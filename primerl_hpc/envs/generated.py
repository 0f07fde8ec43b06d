"""Helpers of shipped environments with generated tasks: split of a task, distinct draws, count of tool calls."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Literal, TypeVar

import verifiers.v1 as vf

Split = Literal["train", "test"]
T = TypeVar("T")


def split_of(text: str, test_share: int) -> Split:
    """Return the split of a task, which depends only on its text: one of ``test_share`` tasks is a test task."""
    return "test" if zlib.crc32(text.encode()) % test_share == 0 else "train"


def draw_distinct(
    draw: Callable[[], T],
    text_of: Callable[[T], str],
    *,
    split: Split,
    test_share: int,
    num_tasks: int,
    max_draws: int,
    shortage: str,
) -> Iterator[T]:
    """Yield ``num_tasks`` results of ``draw`` that belong to the split and whose texts are distinct.

    Raises ValueError(shortage) if ``max_draws`` draws do not contain that many.
    """
    seen: set[str] = set()
    for _ in range(max_draws):
        drawn = draw()
        text = text_of(drawn)
        if text in seen or split_of(text, test_share) != split:
            continue
        seen.add(text)
        yield drawn
        if len(seen) == num_tasks:
            return
    raise ValueError(shortage)


def count_tool_calls(trace: vf.Trace) -> float:
    """Return the number of tool calls in all replies of a rollout."""
    return float(sum(len(getattr(node.message, "tool_calls", None) or []) for node in trace.nodes))
