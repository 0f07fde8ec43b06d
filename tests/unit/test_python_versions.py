"""The base package works on every Python version that setup.cfg names: plans, directives and scripts are the same."""

from __future__ import annotations

import configparser
import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, captured

TOOL = ROOT / "tools" / "python-versions"
TESTS = (
    "tests/unit/cluster/test_directives.py",
    "tests/unit/render/test_render.py::test_script_of_every_profile_is_as_recorded",
)
"""A few seconds of what a login node does; the tool's default has more."""


def named_versions() -> list[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])


def test_the_tool_runs_the_versions_that_the_package_names() -> None:
    words = re.search(r"^supported=\((.*)\)$", TOOL.read_text(), re.MULTILINE)
    assert words is not None and words[1].split() == named_versions()


@pytest.mark.slow
@pytest.mark.parametrize("version", [name for name in named_versions() if name != "3.11"])
def test_a_login_nodes_tests_pass_on_another_version(
    version: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        pytest.skip(f"the other tests run on Python {version}")
    venvs = Path(os.environ.get("PYTHON_VERSIONS_DIR") or tmp_path_factory.getbasetemp() / "venvs")
    done = captured([str(TOOL), version, "--", *TESTS], env={**os.environ, "PYTHON_VERSIONS_DIR": str(venvs)})
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode in (69, 77):  # no interpreter, or packages that cannot be fetched here
        pytest.skip(last)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout


def test_a_wrong_argument_is_refused_with_the_usage() -> None:
    done = captured([str(TOOL), "2.7"])
    assert done.returncode == 2 and done.stderr.startswith("usage: tools/python-versions"), done.stderr
