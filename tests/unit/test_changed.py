"""tests/support/changed.py: which tests a change reaches, and the end of a run whose time is over."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import changed
from tests.support.helpers import ROOT, captured

IMPORTED_BY = {
    "primerl_hpc.plan": set(),
    "primerl_hpc.plan.memory": {"primerl_hpc.plan.planner", "tests.unit.plan.test_memory"},
    "primerl_hpc.plan.planner": {"tests.unit.plan.test_planner", "tests.slurm.test_submission"},
    "tests.unit.plan.test_memory": set(),
    "tests.unit.plan.test_planner": set(),
    "tests.slurm.test_submission": set(),
}
SOURCES = {f"{name.replace('.', '/')}.py": "" for name in IMPORTED_BY} | {
    "tests/unit/plan/test_planner.py": 'open(ROOT / "recipes" / "rl.yaml")'
}
SUBMISSION = "tests/slurm/test_submission.py"
MEMORY, PLANNER = "tests/unit/plan/test_memory.py", "tests/unit/plan/test_planner.py"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("primerl_hpc/plan/memory.py", {MEMORY: 1, PLANNER: 2}),
        ("primerl_hpc/plan/planner.py", {PLANNER: 1}),
        ("primerl_hpc/plan/__init__.py", {MEMORY: 1, PLANNER: 1}),
        ("recipes/debug/rl.yaml", {PLANNER: 0}),
        ("recipes/debug/sft.yaml", {PLANNER: 0}),
        ("tests/slurm/test_submission.py", {SUBMISSION: 0}),
        ("primerl_hpc/launch/submit.py", {SUBMISSION: changed.FURTHEST}),
        ("templates/sbatch/job.sbatch.j2", {SUBMISSION: changed.FURTHEST}),
        ("LICENSE", {}),
    ],
)
def test_a_change_reaches_importers_and_tests_that_name_the_file(path: str, expected: dict[str, int]) -> None:
    assert changed.reached([path], SOURCES, IMPORTED_BY) == expected


def test_the_nearest_of_several_changes_counts() -> None:
    both = changed.reached(
        ["primerl_hpc/plan/memory.py", "primerl_hpc/plan/planner.py"], SOURCES, IMPORTED_BY
    )
    assert both == {MEMORY: 1, PLANNER: 1}


def test_the_import_graph_has_the_modules_and_imports_inside_functions() -> None:
    imported_by = changed.importers(ROOT)
    assert "tests.unit.test_changed" in imported_by["tests.support.changed"]
    assert "primerl_hpc.trainer.rl_loop" in imported_by


def test_committed_uncommitted_and_new_files_differ_from_main(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init", "--initial-branch", "main")
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("")
    git("add", ".")
    git("commit", "-m", "first")
    assert changed.find_base(tmp_path) == "HEAD"
    git("switch", "-c", "work")
    (tmp_path / "a").write_text("committed")
    git("commit", "-a", "-m", "second")
    (tmp_path / "b").write_text("uncommitted")
    (tmp_path / "d").write_text("new")
    assert changed.find_base(tmp_path) == "main"
    assert changed.changed_files(tmp_path, "main") == ["a", "b", "d"]


FILES = {
    "primerl_hpc/__init__.py": "",
    "primerl_hpc/near.py": "",
    "primerl_hpc/far.py": "from primerl_hpc import near",
    "primerl_hpc/other.py": "",
    "tests/__init__.py": "",
    "tests/support/__init__.py": "",
    "tests/unit/__init__.py": "",
    "tests/unit/test_a_far.py": "from primerl_hpc import far\ndef test_far(): print('ran far')",
    "tests/unit/test_b_near.py": "from primerl_hpc import near\ndef test_near(): print('ran near')",
    "tests/unit/test_c_other.py": "from primerl_hpc import other\ndef test_other(): print('ran other')",
}


def test_the_command_runs_what_a_change_reaches(tmp_path: Path) -> None:
    for name, text in {**FILES, "tests/support/changed.py": Path(changed.__file__).read_text()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (("init", "--initial-branch", "main"), ("add", "."), ("commit", "-m", "first")):
        subprocess.run([*git, *words], check=True, capture_output=True)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return captured(
            [sys.executable, "-m", "tests.support.changed", *words],
            cwd=tmp_path,
            env={**environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": "-rP"},
        )

    assert "reach 0 test modules" in run().stdout
    (tmp_path / "primerl_hpc" / "near.py").write_text("VALUE = 1\n")
    done = run()
    assert done.returncode == 0 and "reach 2 test modules" in done.stdout, done.stdout + done.stderr
    assert set(re.findall(r"^ran (\w+)", done.stdout, re.MULTILINE)) == {"near", "far"}
    done = run("no-such-commit")
    error, hint = done.stderr.splitlines()
    assert done.returncode == 2 and "no-such-commit" in error and hint.startswith("hint: ")


def test_the_nearest_modules_run_first(tmp_path: Path) -> None:
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (tmp_path / name).write_text("def test(): pass")
    options = ("-p", "tests.support.changed", "--rootdir", str(tmp_path), "-q", "--collect-only")
    done = captured(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, changed.ORDER: os.pathsep.join(("test_c.py", "test_a.py"))},
        check=True,
    )
    assert re.findall(r"test_\w\.py", done.stdout) == ["test_c.py", "test_a.py", "test_b.py"]


def test_tests_are_left_out_when_the_time_for_their_kind_is_over(tmp_path: Path) -> None:
    for folder in ("e2e", "unit"):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text("def test(): pass")

    def run(left_s: float) -> str:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.support.changed",
            "-rs",
            f"--rootdir={tmp_path}",
        ]
        command += [f"--confcutdir={tmp_path}", str(tmp_path)]
        environ = {**os.environ, changed.END: str(time.time() + left_s)}
        return captured(command, cwd=ROOT, env=environ, check=True).stdout

    assert "2 passed" in run(3600)
    after_the_unit_tests = run(-1)
    assert "1 passed, 1 skipped" in after_the_unit_tests and changed.NO_TIME in after_the_unit_tests
    assert "test_unit.py" in after_the_unit_tests.partition("SKIPPED")[2]
    assert "2 skipped" in run(changed.PROGRAM_S - changed.END_TO_END_S - 1)


def test_the_table_of_end_to_end_tests_names_existing_files() -> None:
    for beginning, tests in changed.END_TO_END.items():
        assert (ROOT / beginning).exists()
        assert [test for test in tests if not (ROOT / test).exists()] == []
        assert all(test.startswith(changed.STARTS_PROGRAMS) for test in tests)
