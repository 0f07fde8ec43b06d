"""Run the unit tests that changed files can reach, nearest first, for at most three minutes.

    tools/test --changed              files changed since the branch left main, and uncommitted and new files
    tools/test --changed HEAD~3       files changed since that commit

A test module is reached by a module that it imports, directly or through others. A file that is no module reaches
those whose text has its name. Tests that import a changed module directly run before those that do so through others.
End-to-end, SLURM and GPU tests start programs instead of importing them: each change can reach them all, and they
take longer than three minutes, so only a change of such a test itself selects it, and it is skipped if less than two
minutes are left. The last lines say what did not run; `tools/test` runs everything.

The module is also the pytest plugin that ends a run when its time is over.
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
LIMIT_S = 150.0
"""Time for running tests; starting the workers and the last test of each take the rest of the three minutes."""
PROGRAM_S = 120.0
"""Time that must be left for a test that starts programs: it starts a cluster or an engine first."""
NO_TIME = "too little time is left for a test that starts programs"
END, ORDER = "CHANGED_END", "CHANGED_ORDER"
"""Variables that workers inherit: when the time is over, and the test modules from near to far."""


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

    ``sources``: file → text of all modules of package and tests.
    """
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
    return {
        file: distance
        for file, distance in distances.items()
        if Path(file).name.startswith("test_") and (distance == 0 or not file.startswith(STARTS_PROGRAMS))
    }


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
def pytest_runtest_protocol(item: Any) -> bool | None:
    """End the worker's session instead of running ``item`` when the time is over; skip what would take longer."""
    left_s = float(os.environ.get(END, "inf")) - time.time()
    if left_s < 0:
        item.session.shouldstop = "the time is over"
        return True
    if left_s < PROGRAM_S and item.nodeid.startswith(STARTS_PROGRAMS):
        item.add_marker(pytest.mark.skip(reason=NO_TIME))
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the nearest modules first."""
    order = os.environ.get(ORDER, "").split(os.pathsep)
    places = {file: place for place, file in enumerate(order)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


class Count:
    """The numbers of tests that ended, failed and were left out, in pytest's controlling process."""

    def __init__(self) -> None:
        self.num_tests = self.num_failed = self.num_left_out = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.skipped and NO_TIME in str(report.longrepr):
            self.num_left_out += 1
            return
        self.num_tests += report.when == "call" or report.skipped
        self.num_failed += report.failed


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
    os.environ[END] = str(time.time() + LIMIT_S)
    count = Count()
    options = ("-p", "tests.support.changed", "-q", "--numprocesses", "2", "--no-loadscope-reorder")
    status = pytest.main([*options, f"--rootdir={ROOT}", *chosen], plugins=[count])
    if count.num_left_out:
        print(f"{count.num_left_out} tests were left out: {NO_TIME}. Run all: tools/test")
    if time.time() > float(os.environ[END]):
        print(
            f"The time was over after {count.num_tests} tests: the furthest did not run. Run all: tools/test"
        )
        status = pytest.ExitCode.TESTS_FAILED if count.num_failed else pytest.ExitCode.OK
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
