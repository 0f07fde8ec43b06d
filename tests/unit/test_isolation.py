"""tests/support/isolation.py: what the shell, the job or the user of a test run has set reaches no test."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.helpers import ROOT, captured
from tests.support.isolation import isolate

SHOWS = """
import json, os
from pathlib import Path
def test_shows():
    seen = {"umask": os.umask(0o022), "environ": dict(os.environ), "home": os.listdir(Path.home())}
    Path("seen.json").write_text(json.dumps(seen))
"""
HOSTILE = {
    "SLURM_JOB_ID": "7",
    "SBATCH_CLUSTERS": "all",
    "http_proxy": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "LC_ALL": "C",
    "LANG": "tr_TR.ISO-8859-9",
    "XDG_CACHE_HOME": "/proc/1",
    "PRIMERL_PROFILE": "theirs",
    "HF_HOME": "/proc/1",
    "OMP_NUM_THREADS": "64",
    "COLUMNS": "20",
    "PRIMERL_TEST_PATIENCE": "2",
}


def run_shows(folder: Path, workers: str) -> dict[str, object]:
    (folder / "conftest.py").write_text("from tests.conftest import pytest_configure")
    (folder / "test_shows.py").write_text(SHOWS)
    (folder / "home").mkdir()
    (folder / "home" / ".netrc").write_text("machine")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ |= {**HOSTILE, "HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        workers,
        "--rootdir",
        str(folder),
    ]
    done = captured(command, cwd=folder, env=environ, umask=0o077)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "seen.json").read_text())


def test_nothing_of_the_shell_reaches_a_test_or_a_worker(tmp_path: Path) -> None:
    for workers in ("0", "1"):
        folder = tmp_path / workers
        folder.mkdir()
        seen = run_shows(folder, workers)
        environ = seen["environ"]
        assert seen["umask"] == 0o022 and seen["home"] == []
        assert environ["HOME"] != str(folder / "home") and not Path(environ["HOME"]).exists()
        kept = {name: value for name, value in HOSTILE.items() if environ.get(name) == value}
        assert not kept and environ["TEST_PATIENCE"] == "2.0"
        assert (environ["LANG"], environ["OMP_NUM_THREADS"]) == ("C.UTF-8", "1")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PRIMERL_TEST_PATIENCE", "long", "PRIMERL_TEST_PATIENCE=long is not a number above zero"),
        ("PRIMERL_TEST_POLL_S", "0", "PRIMERL_TEST_POLL_S=0 is not a number above zero"),
        ("PRIMERL_TEST_PATIENC", "2", "PRIMERL_TEST_PATIENC is unknown"),
    ],
)
def test_a_wrong_variable_of_the_test_run_is_named(
    tmp_path: Path, name: str, value: str, message: str
) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        isolate(tmp_path, {name: value})
