"""The last rollouts of a run, for people: what was asked, what the policy said, and what it got for it.

ENVIRONMENT          VERSION  REWARD ADVANTAGE TOKENS TURNS
reverse-text              12   0.917    +0.420     14     1
    prompt      … Reverse the text: hello
    completion  olleh
"""

from __future__ import annotations

import textwrap
from typing import Any, Literal

from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json_or_none, read_last_jsonl
from primerl_hpc.common.names import Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.observe.text import WIDTH, cut

Split = Literal["train", "eval"]
Order = Literal["last", "best", "worst"]
WINDOW = 2000
"""Last rows of the file that are looked at."""
_OF = {"train": "training", "eval": "evaluations"}
_INDENT = " " * 16
_HEADER = f"{'ENVIRONMENT':<20} {'VERSION':>8} {'REWARD':>7} {'ADVANTAGE':>9} {'TOKENS':>6} {'TURNS':>5}"


def pick_samples(
    run: RunDir, count: int, *, split: Split | None = None, env: str | None = None, order: Order = "last"
) -> list[dict[str, Any]]:
    """Rows of traces/<split>.jsonl as they are; of the last `WINDOW` ones the newest, best or worst ``count``.

    ``split`` None: of training, or of evaluation where nothing is trained. Raises NotFoundError when there are none.
    """
    if split is None:
        kind = (read_json_or_none(run.plan) or {}).get("kind")
        split = "eval" if kind == Kind.EVAL else "train"
    rows = [row for row in read_last_jsonl(run.traces(split), WINDOW) if "reward" in row]
    fitting = [row for row in rows if env in (None, row["env"])]
    if not fitting:
        known = ", ".join(dict.fromkeys(row["env"] for row in rows))
        raise NotFoundError(
            f"no finished rollouts of {f'environment {env}' if env else _OF[split]}",
            place=str(run.traces(split)),
            mend=f"there are some of: {known}" if known else f"primerl-hpc status {run.root.name}",
        )
    if order != "last":  # of equal rewards the newer one
        fitting = sorted(reversed(fitting), key=lambda row: row["reward"], reverse=order == "best")
        return fitting[:count]
    return fitting[-count:]


def sample_text(rows: list[dict[str, Any]], *, is_full: bool) -> str:
    """A table with the texts under each line: their telling ends in a line, or ``is_full`` all of them."""
    lines = [_HEADER]
    for row in rows:
        lines.append(_line(row))
        for name in ("prompt", "completion"):
            lines += _text(name, str(row.get(name) or ""), is_full=is_full)
    return "\n".join(lines)


def _line(row: dict[str, Any]) -> str:
    first, last = row.get("version"), row.get("last_version")
    version = f"{first}" if last in (None, first) else f"{first}-{last}"
    advantage = "-" if row.get("advantage") is None else f"{row['advantage']:+.3f}"
    return (
        f"{cut(row['env'], 20):<20} {version:>8} {row['reward']:>7.3f} {advantage:>9}"
        f" {row.get('output_tokens', 0):>6} {row.get('turns', 1):>5}"
        + ("  cut off" if row.get("truncated") else "")
    )


def _text(name: str, text: str, *, is_full: bool) -> list[str]:
    head = f"    {name:<12}"
    if not is_full:
        flat, room = " ".join(text.split()), WIDTH - len(head)
        # the task stands at the end of a prompt, after what every prompt begins with
        if name == "prompt" and len(flat) > room:
            return [f"{head}…{flat[-room + 1 :]}"]
        return [head + cut(flat, room)]
    lines = [
        part
        for line in text.splitlines() or [""]
        for part in textwrap.wrap(line, WIDTH - len(_INDENT), break_on_hyphens=False) or [""]
    ]
    return [head + lines[0], *(_INDENT + line for line in lines[1:])]
