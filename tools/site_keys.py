"""Print the table of sites and profile keys of docs/site-keys.md: what a site requires, and what a profile can express.

    python tools/site_keys.py > docs/site-keys.md

`NEEDS` lists for each shipped profile of a real site the keys that the site's documents require beyond the usual ones.
A key counts as expressed if the profile sets it, or if it is a choice of the user (``software.default.container``) that
the schema has. `BEFORE` are those of these keys that the schema had on 2026-11-23.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.validate import all_paths

BEFORE = frozenset(
    (
        "network.interface",
        "scheduler.constraint",
        "scheduler.gpu_type",
        "scheduler.hint",
        "node.gpu_vendor",
        "network.env",
    )
)
CONTAINER = "software.default.container"
BUNDLE = "software.bundle"
CHOICES = frozenset((f"{CONTAINER}.kind", f"{CONTAINER}.command", f"{CONTAINER}.gpu", BUNDLE))
"""Keys that a shipped profile leaves to the user."""
KIND, COMMAND, GPU = (f"software.default.container.{key}" for key in ("kind", "command", "gpu"))
GRACE = ("node.arch", "node.host_memory_gib")
NEEDS: dict[str, tuple[str, ...]] = {
    "lumi": (
        BUNDLE,
        COMMAND,
        GPU,
        "software.module_paths",
        "limits",
        "variants",
        "node.gpu_vendor",
        "node.numa_of_gpu",
        "scratch",
        "storage",
        "network.interface",
        "network.interfaces",
        "scheduler.max_jobs",
    ),
    "clariden": (
        KIND,
        "limits",
        "variants",
        "node.arch",
        "node.numa_of_gpu",
        "scratch",
        "storage",
        "network.env",
    ),
    "leonardo": (
        COMMAND,
        "limits",
        "variants",
        "scratch",
        "storage",
        "network.interface",
        "network.interfaces",
        "scheduler.per_gpu",
    ),
    "marenostrum5": (
        BUNDLE,
        COMMAND,
        "software.module_purge",
        "limits",
        "variants",
        "scratch",
        "node.numa_of_gpu",
        "network.interface",
        "network.interfaces",
        "scheduler.per_gpu",
    ),
    "juwels-booster": ("software.module_purge", "limits", "node.threads_per_core", "network.interface"),
    "jupiter": (
        "software.module_purge",
        "limits",
        *GRACE,
        "node.threads_per_core",
        "node.numa_of_gpu",
        "storage",
        "network.interface",
        "network.env",
    ),
    "perlmutter": (
        KIND,
        "variants",
        "scheduler.constraint",
        "storage",
        "network.interfaces",
        "network.plugin",
    ),
    "frontier": (
        BUNDLE,
        GPU,
        "limits",
        "variants",
        "network.proxy",
        "node.gpu_vendor",
        "scratch",
        "storage",
        "network.interfaces",
        "network.plugin",
        "scheduler.max_jobs",
    ),
    "vista": (
        "limits",
        "variants",
        *GRACE,
        "scratch",
        "storage",
        "scheduler.may_name_nodes",
        "scheduler.step_memory",
        "scheduler.step_gres",
        "scheduler.max_jobs",
        "network.env",
    ),
    "delta": (
        "limits",
        "variants",
        "scratch",
        "storage",
        "scheduler.account_suffix",
        "scheduler.cpu_account_suffix",
        "scheduler.constraint",
        "network.interfaces",
        "network.plugin",
    ),
    "deltaai": (
        "limits",
        "variants",
        *GRACE,
        "scratch",
        "node.numa_of_gpu",
        "scheduler.account_suffix",
        "network.interfaces",
        "network.plugin",
        "network.env",
    ),
    "isambard-ai": (
        KIND,
        "limits",
        *GRACE,
        "scratch",
        "scheduler.ask_every_s",
        "scheduler.gpu_request",
        "scheduler.per_gpu",
        "network.interfaces",
        "network.plugin",
        "network.env",
    ),
    "jean-zay-h100": (
        COMMAND,
        "software.before_modules",
        "limits",
        "variants",
        "scheduler.account_suffix",
        "scheduler.submit_env",
        "scheduler.per_gpu",
        "scheduler.hint",
        "scheduler.constraint",
    ),
    "snellius": ("limits", "variants", "network.interface"),
    "fir": ("limits", "scratch", "scheduler.gpu_type", "scheduler.ask_every_s", "scheduler.max_jobs"),
    "della": ("scheduler.constraint", "scratch"),
}
NOT_EXPRESSED = {
    "clariden": "a second shared folder for checkpoints",
    "juwels-booster": "a word for psslurm: untried",
    "jupiter": "a word for psslurm: untried",
    "jean-zay-h100": "copying images into the permitted folder",
}


def is_set(values: dict[str, Any], path: str) -> bool:
    """True if the profile's file sets this key."""
    current: Any = values
    for part in path.split("."):
        if not isinstance(current, dict) or part not in current:
            return False
        current = current[part]
    return True


def rows() -> list[tuple[str, int, int, int, str]]:
    """Return (site, keys required, expressed before, expressed now, what is not expressed)."""
    known = set(all_paths(Profile))
    found = []
    for site, needs in NEEDS.items():
        values = load_profile(site, environ={}).document.values
        now = [key for key in needs if key in known and (key in CHOICES or is_set(values, key))]
        before = [key for key in needs if key in BEFORE]
        missing = [f"`{key}`" for key in needs if key not in now]
        other = NOT_EXPRESSED.get(site, "")
        required = len(needs) + bool(other)
        found.append((site, required, len(before), len(now), "; ".join(filter(None, [*missing, other]))))
    return found


def table() -> str:
    lines = [
        "# Which keys do real sites require?",
        "",
        "Written by `tools/site_keys.py`; a test compares it. Properties beyond the usual ones (partition, account,",
        "walltime, GPUs) that the documents of a site require, how many of them the schema could express on",
        "2026-11-23, and how many the shipped profile expresses now. No profile was tried on its machine.",
        "",
        "| profile | required | could be expressed before | expressed now | not expressed |",
        "|---|---:|---:|---:|---|",
    ]
    found = rows()
    lines += [
        f"| {site} | {needed} | {before} | {now} | {missing} |"
        for site, needed, before, now, missing in found
    ]
    sums = [sum(row[1] for row in found), sum(row[2] for row in found), sum(row[3] for row in found)]
    lines.append(f"| **sum** | **{sums[0]}** | **{sums[1]}** | **{sums[2]}** | |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    print(table(), end="")
