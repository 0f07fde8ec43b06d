"""Recent rollouts of a run as text: prompt, completion, reward and advantage.

ENVIRONMENT          VERSION  REWARD ADVANTAGE TOKENS TURNS
reverse-text              12   0.917    +0.420     14     1
    prompt      … Reverse the text: hello
    completion  olleh
"""

from __future__ import annotations

import shlex
import textwrap
from typing import Any, Literal

from rich.table import Table

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none, read_last_jsonl
from primerl_hpc.common.names import Kind
from primerl_hpc.common.safety.decoding import MALFORMED, is_number
from primerl_hpc.common.safety.terminal import plain
from primerl_hpc.observe.table import cell, column, make_table, render
from primerl_hpc.observe.text import WIDTH, cut
from primerl_hpc.run.records import messages_of
from primerl_hpc.run.rundir import RunDir

TraceSplit = Literal["train", "eval"]
SampleOrder = Literal["last", "best", "worst"]
WINDOW = 2000
"""Number of rows searched, counted from the end of the file."""
_SPLIT_NAMES = {"train": "training", "eval": "evaluations"}
_INDENT = " " * 16


def pick_samples(
    run: RunDir,
    count: int,
    *,
    split: TraceSplit | None = None,
    env: str | None = None,
    order: SampleOrder = "last",
) -> list[dict[str, Any]]:
    """Return the newest, best or worst ``count`` of the last `WINDOW` rows of traces/<split>.jsonl.

    ``split`` None: "eval" for evaluation and SFT runs, else "train". Raises NotFoundError if no row matches.
    """
    if split is None:
        kind = (read_json_or_none(run.plan) or {}).get("kind")
        split = "eval" if kind in (Kind.EVAL, Kind.SFT) else "train"
    rows = [row for row in read_last_jsonl(run.traces(split), WINDOW) if is_sample(row)]
    matching = [row for row in rows if env in (None, row["env"])]
    if not matching:
        known = ", ".join(dict.fromkeys(row["env"] for row in rows))
        raise NotFoundError(
            f"no finished rollouts of {f'environment {env}' if env else _SPLIT_NAMES[split]}",
            location=str(run.traces(split)),
            hint=f"environments with rollouts: {known}"
            if known
            else f"primerl-hpc status {shlex.quote(run.root.name)}",
        )
    if order != "last":  # newest first among equal rewards
        matching = sorted(reversed(matching), key=lambda row: row["reward"], reverse=order == "best")
        return matching[:count]
    return matching[-count:]


def is_sample(row: dict[str, Any]) -> bool:
    """True if ``row`` is a well-formed row of a finished rollout."""
    numbers = (row.get(name, 0) for name in ("version", "output_tokens", "turns"))
    optional = (row.get(name) for name in ("advantage", "last_version"))
    return (
        isinstance(row.get("env"), str)
        and is_number(row.get("reward"))
        and all(map(is_number, numbers))
        and all(value is None or is_number(value) for value in optional)
        and _has_messages(row)
    )


def _has_messages(row: dict[str, Any]) -> bool:
    """True if the row's messages can be shown."""
    try:
        return all(message["role"] + message_text(message) for message in messages_of(row))
    except MALFORMED:
        return False


def sample_text(rows: list[dict[str, Any]], *, is_full: bool) -> str:
    """Return a table with text below each row: prompt and completion on one line each, or all messages
    if ``is_full``."""
    header, *table = render(_table(rows))
    lines = [header]
    for row, line in zip(rows, table, strict=True):
        lines.append(line)
        messages = messages_of(row)
        if is_full and messages:
            for message in messages:
                lines += _text(message["role"], message_text(message), is_full=True)
            continue
        completion = message_text(messages[-1]) if messages else row.get("completion")
        for name, text in (("prompt", row.get("prompt")), ("completion", completion)):
            lines += _text(name, str(text or ""), is_full=is_full)
    return "\n".join(lines)


def message_text(message: dict[str, Any]) -> str:
    """Return reasoning and content of a message, and one line for each tool call."""
    parts = [f"(reasoning) {message['reasoning']}"] if message.get("reasoning") else []
    parts += [message["content"]] if message["content"] else []
    parts += [f"→ {call['name']}({call['arguments']})" for call in message.get("tool_calls", ())]
    return "\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> Table:
    numbers = (("VERSION", 11), ("REWARD", 7), ("ADVANTAGE", 9), ("TOKENS", 6), ("TURNS", 5))
    table = make_table(
        column("ENVIRONMENT", 20),
        *(column(name, width, is_number=True) for name, width in numbers),
        column("", 8),
    )
    for row in rows:
        first, last = row.get("version"), row.get("last_version")
        cells = (
            row["env"],
            f"{first}" if last in (None, first) else f"{first}-{last}",
            f"{row['reward']:.3f}",
            "-" if row.get("advantage") is None else f"{row['advantage']:+.3f}",
            str(row.get("output_tokens", 0)),
            str(row.get("turns", 1)),
            " cut off" if row.get("truncated") else "",
        )
        table.add_row(*map(cell, cells))
    return table


def _text(name: str, text: str, *, is_full: bool) -> list[str]:
    head, text = f"    {name:<12}", plain(text)
    if not is_full:
        flat, room = " ".join(text.split()), WIDTH - len(head)
        # keep the end of a prompt: the task follows instructions that all prompts share
        if name == "prompt" and len(flat) > room:
            return [f"{head}…{flat[-room + 1 :]}"]
        return [head + cut(flat, room)]
    lines = [
        part
        for line in text.splitlines() or [""]
        for part in textwrap.wrap(line, WIDTH - len(_INDENT), break_on_hyphens=False) or [""]
    ]
    return [head + lines[0], *(_INDENT + line for line in lines[1:])]
