"""GPU-hours that an account may still use, if the cluster limits them with ``GrpTRESMins`` (``gres/gpu``).

    gpu_budget("lab", timeout_s=5)      # None, or Budget(account="lab", holder="lab", limit_hours=100.0, …)

A limit may be on the account, on one of its parents, or on the user in the account; the one with the least left counts.
``sshare`` prints limits and decayed usage in minutes. Sites that limit only other resources (``cpu``, ``billing``)
have no GPU-hours to compare with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from primerl_hpc.common.errors import SchedulerError
from primerl_hpc.slurm.command_lines import shares_command
from primerl_hpc.slurm.commands import ask

GPU_TRES = "gres/gpu"


@dataclass(frozen=True)
class Budget:
    account: str
    holder: str
    """Account, parent account, or user that the limit is set on."""
    limit_hours: float
    used_hours: float

    @property
    def remaining_hours(self) -> float:
        return max(0.0, self.limit_hours - self.used_hours)


@dataclass(frozen=True)
class _Share:
    depth: int
    account: str
    user: str
    limit_minutes: float | None
    used_minutes: float


def gpu_budget(account: str | None, *, timeout_s: float) -> Budget | None:
    """Return the budget of an account, by default of the user's only one; None if it is unknown."""
    try:
        text = ask(shares_command(), timeout_s)
    except SchedulerError:
        return None
    return parse_budget(text, account)


def parse_budget(text: str, account: str | None) -> Budget | None:
    """Return the tightest limit of the output of `shares_command` for an account, or None.

    The output is a tree: a row is indented by one blank more than its parent account.
    """
    shares = list(_shares(text))
    accounts = dict.fromkeys(share.account for share in shares if share.user)
    if account is None and len(accounts) == 1:
        account = next(iter(accounts))
    path: list[_Share] = []
    found: list[Budget] = []
    for share in shares:
        path = [parent for parent in path if parent.depth < share.depth]
        path.append(share)
        if account is not None and share.account == account:
            found += [_budget(item, account) for item in path if item.limit_minutes is not None]
    return min(found, key=lambda budget: budget.remaining_hours, default=None)


def _shares(text: str) -> Iterator[_Share]:
    for line in text.splitlines():
        words = line.split("|")
        if len(words) != 4:
            continue
        name = words[0].lstrip()
        limit, used = (_gpu_minutes(word) for word in words[2:])
        yield _Share(len(words[0]) - len(name), name, words[1], limit, used or 0.0)


def _gpu_minutes(text: str) -> float | None:
    """Return the number of ``cpu=100,gres/gpu=6000``; None without GPUs or a number."""
    values = dict(word.split("=", 1) for word in text.split(",") if "=" in word)
    number = values.get(GPU_TRES, "")
    return float(number) if number.isascii() and number.isdigit() else None


def _budget(share: _Share, account: str) -> Budget:
    assert share.limit_minutes is not None
    return Budget(account, share.user or share.account, share.limit_minutes / 60, share.used_minutes / 60)
