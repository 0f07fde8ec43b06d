"""Run the tests that changed files can reach, nearest first: unit tests for three minutes, then end-to-end tests.

    tools/test --changed              files changed since the branch left main, and uncommitted and new files
    tools/test --changed HEAD~3       files changed since that commit

A test module is reached by a module that it imports, directly or through others. A file that is no module reaches
those whose text has its name. Tests that import a changed module directly run before those that do so through others.
End-to-end, SLURM and security tests start programs instead of importing them: `END_TO_END` names those of each folder,
which may take five minutes more. Tests marked slow are left out. The last line counts tests that did not run because
their time was over; `tools/test` runs the land gate, `tools/test --all` everything.

The module is also the pytest plugin that skips tests when their time is over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("primerl_hpc", "tests")
STARTS_PROGRAMS = ("tests/e2e/", "tests/slurm/", "tests/security/", "tests/gpu/")
END_TO_END = {
    "primerl_hpc/envs/": ("tests/e2e/test_env_server.py", "tests/security/test_env_servers.py"),
    "primerl_hpc/inference/": ("tests/e2e/test_inference.py", "tests/e2e/test_token_route.py"),
    "primerl_hpc/launch/": ("tests/slurm/test_submission.py",),
    "primerl_hpc/observe/": ("tests/e2e/test_chat.py", "tests/slurm/test_inside.py"),
    "primerl_hpc/orchestrator/": ("tests/e2e/test_run.py", "tests/e2e/test_evaluate.py"),
    "primerl_hpc/roles/": ("tests/e2e/test_by_hand.py", "tests/e2e/test_token_route.py"),
    "primerl_hpc/run/": ("tests/security/test_sockets.py", "tests/security/test_stores.py"),
    "primerl_hpc/runtime/": ("tests/slurm/test_lifecycle.py", "tests/security/test_temporary.py"),
    "primerl_hpc/slurm/": ("tests/slurm/test_submission.py", "tests/slurm/test_lifecycle.py"),
    "primerl_hpc/trainer/": ("tests/e2e/test_trainer.py", "tests/e2e/test_parallel.py"),
    "primerl_hpc/transport/": ("tests/e2e/test_served_updates.py", "tests/security/test_stores.py"),
    "templates/": ("tests/slurm/test_submission.py",),
    "tools/virtual-cluster": ("tests/slurm/test_virtual_cluster.py",),
}
"""Beginning of a path → the modules that start the programs in which a change of it has its effect."""
UNIT_S, END_TO_END_S = 150.0, 300.0
"""Times for unit tests and for end-to-end tests; starting the workers and the last test of each take a little more."""
PROGRAM_S = 60.0
"""Time that must be left for a test that starts programs: it starts a cluster or an engine first."""
FURTHEST = 1000
"""Distance of a test that a change reaches through a program."""
NO_TIME = "the time for tests of this kind is over"
END, ORDER = "CHANGED_END", "CHANGED_ORDER"
"""Variables that workers inherit: when the time for unit tests is over, and the test modules from near to far."""


# -- which files changed, and which tests they reach -------------------------------------------------


def changed_files(root: Path, base: str) -> list[str]:
    """Paths relative to ``root`` that differ from the merge base with ``base``, and files new to git."""
    git = ["git", "-C", str(root)]
    differ = subprocess.run(
        [*git, "diff", "--name-only", "--no-renames", "--merge-base", base],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    new = subprocess.run(
        [*git, "ls-files", "--others", "--exclude-standard"], check=True, capture_output=True, text=True
    )
    return sorted({*differ.stdout.splitlines(), *new.stdout.splitlines()})


def importers(root: Path) -> dict[str, set[str]]:
    """module → the modules of package and tests that import it, at the top or inside a function."""
    import grimp

    sys.path.insert(0, str(root))
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    return {module: set(graph.find_modules_that_directly_import(module)) for module in graph.modules}


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def reached(
    changed: Iterable[str], sources: dict[str, str], imported_by: dict[str, set[str]]
) -> dict[str, int]:
    """test file → number of imports between it and the nearest changed file (0: changed itself, or names it).

    ``sources``: file → text of all modules of package and tests. End-to-end tests of `END_TO_END` are the furthest.
    """
    changed = list(changed)
    distances: dict[str, int] = {}
    files = {module_name(path): path for path in sources}
    for path in changed:
        level = start(path, sources, imported_by)
        seen: set[str] = set()
        distance = 0
        while level:
            for module in level & files.keys():
                distances[files[module]] = min(distance, distances.get(files[module], distance))
            seen |= level
            level = {importer for module in level for importer in imported_by.get(module, ())} - seen
            distance += 1
    reached_tests = {
        file: distance
        for file, distance in distances.items()
        if Path(file).name.startswith("test_") and (distance == 0 or not file.startswith(STARTS_PROGRAMS))
    }
    named = {
        test
        for path in changed
        for beginning, tests in END_TO_END.items()
        if path.startswith(beginning)
        for test in tests
        if test in sources
    }
    return dict.fromkeys(named, FURTHEST) | reached_tests


def start(path: str, sources: dict[str, str], imported_by: dict[str, set[str]]) -> set[str]:
    """Modules that a change of ``path`` reaches without an import.

    A module reaches itself, an ``__init__`` all modules of its folder; any other file the modules whose text has its
    name, and the test modules whose text has the name of its top folder as a string.
    """
    module = module_name(path)
    if path.endswith("/__init__.py"):
        return {module} | {name for name in imported_by if name.startswith(f"{module}.")}
    if module in imported_by:
        return {module}
    name, top = Path(path).name, Path(path).parts[0]
    return {
        module_name(file)
        for file, text in sources.items()
        if name in text or (f'"{top}"' in text and file.startswith("tests/"))
    }


# -- the plugin --------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: Any) -> None:
    """Skip ``item`` when the time for tests of its kind is over, or too short for the programs that it starts."""
    left_s = float(os.environ.get(END, "inf")) - time.time()
    if item.nodeid.startswith(STARTS_PROGRAMS):
        left_s += END_TO_END_S - PROGRAM_S
    if left_s < 0:
        item.add_marker(pytest.mark.skip(reason=NO_TIME))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the nearest modules first."""
    order = os.environ.get(ORDER, "").split(os.pathsep)
    places = {file: place for place, file in enumerate(order)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


class LeftOut:
    """The number of tests that were skipped because their time was over, in pytest's controlling process."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.count += report.skipped and NO_TIME in str(report.longrepr)


# -- the command -------------------------------------------------------------------------------------


def find_base(root: Path) -> str:
    """Return main on a branch, and the last commit on main itself."""
    git = ["git", "-C", str(root)]
    name = subprocess.run([*git, "branch", "--show-current"], check=True, capture_output=True, text=True)
    has_main = subprocess.run(
        [*git, "rev-parse", "--verify", "--quiet", "main"], check=False, stdout=subprocess.DEVNULL
    )
    return "HEAD" if name.stdout.strip() == "main" or has_main.returncode else "main"


def main() -> int:
    base = sys.argv[1] if len(sys.argv) > 1 else find_base(ROOT)
    try:
        changed = changed_files(ROOT, base)
    except subprocess.CalledProcessError as failure:
        said = failure.stderr.strip().splitlines()[0].removeprefix("fatal: ")
        print(f"error: git: {said}\nhint: tools/test --changed [COMMIT]", file=sys.stderr)
        return 2
    sources = {
        str(file.relative_to(ROOT)): file.read_text()
        for name in PACKAGES
        for file in sorted((ROOT / name).rglob("*.py"))
    }
    distances = reached(changed, sources, importers(ROOT))
    print(f"{len(changed)} files differ from {base} and reach {len(distances)} test modules", flush=True)
    if not distances:
        return 0
    chosen = sorted(distances, key=lambda file: (distances[file], file))
    os.environ[ORDER] = os.pathsep.join(chosen)
    os.environ[END] = str(time.time() + UNIT_S)
    left_out = LeftOut()
    options = ("-p", "tests.support.changed", "-q", "--numprocesses", "2", "--no-loadscope-reorder")
    status = pytest.main([*options, "-m", "not slow", f"--rootdir={ROOT}", *chosen], plugins=[left_out])
    if left_out.count:
        print(f"{left_out.count} tests did not run: {NO_TIME}. Run all: tools/test")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
