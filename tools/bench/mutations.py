#!/usr/bin/env python3
"""Measure how many random faults in the pure modules the unit tests of the land gate detect.

    tools/bench/mutations.py                                  # 24 mutants of every module below
    tools/bench/mutations.py --module runtime/policy --all
    tools/bench/mutations.py --module runtime/policy --line 118 --line 121      # all mutants of these lines
    tools/bench/mutations.py --count 20 --update docs/measurements/mutations.json

A mutant is the module with one comparison, operator, condition or constant changed (cosmic-ray's operators), drawn at
random from all that exist. The tests of the module run against it in a copy of the checkout, until the first one fails
or takes far longer than without the change. A mutant that passes them survives. A survivor whose change has no effect
on behavior is listed in EQUIVALENT with the reason, and does not count.

Exits with 1 when fewer than 90 % of the mutants of any module are detected.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from machine import ROOT, conclude, describe_machine

TESTS = {
    "runtime/policy": "runtime/test_policy.py",
    "runtime/job/chain": "runtime/test_chain.py launch/test_chain.py",
    "runtime/job/walltime": "runtime/test_final_save.py runtime/test_walltime.py",
    "orchestrator/scheduling/dispatcher": "orchestrator/test_dispatcher.py",
    "orchestrator/scheduling/concurrency": "orchestrator/test_concurrency.py",
    "orchestrator/scheduling/curriculum": "orchestrator/test_curriculum.py orchestrator/test_sampler.py",
    "orchestrator/batches/packing": "orchestrator/test_packing.py",
    "orchestrator/scoring/filters": "orchestrator/test_selection.py",
    "trainer/losses/policy_losses": "trainer/test_losses.py",
    "trainer/losses/step_loss": "trainer/test_losses.py",
    "recipe/schedules": "recipe/test_schedules.py",
    "recipe/schema/cross_checks": "recipe/test_cross_checks.py",
    "cluster/directives": "cluster/test_directives.py",
    "transport/weights/delta_codec": "transport/test_delta_codec.py",
}
"""Module of the package → its unit tests."""

FLIPS = tuple(
    ("Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is").split()
)
OPERATORS = [
    *(f"core/ReplaceComparisonOperator_{flip}" for flip in FLIPS),
    *(
        f"core/ReplaceBinaryOperator_{swap}"
        for swap in ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul")
    ),
    *("core/AddNot", "core/ReplaceUnaryOperator_Delete_Not", "core/ReplaceTrueWithFalse"),
    *("core/ReplaceFalseWithTrue", "core/ReplaceAndWithOr", "core/ReplaceOrWithAnd", "core/NumberReplacer"),
    *("core/ZeroIterationForLoop", "core/ReplaceBreakWithContinue", "core/ReplaceContinueWithBreak"),
    "core/ExceptionReplacer",
]
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "runtime/policy",
        "step: int = 0 → step: int = -1",
    ): "a step below the highest one so far is no new step, and the highest one is 0 at first",
    (
        "runtime/policy",
        "_highest_step: int = 0 → _highest_step: int = -1",
    ): "at the first fault there is no earlier one to forget",
    **{
        ("runtime/policy", f"served_s: float = 0.0 → served_s: float = {value}"): "only 600 s and more count"
        for value in ("1.0", "-1.0")
    },
    **{
        (
            "runtime/job/walltime",
            f'self.deadline = Deadline(margin_s or 0, context.journal.state.get("slowest_save_s")) → '
            f'self.deadline = Deadline(margin_s or {value}, context.journal.state.get("slowest_save_s"))',
        ): "a watch without a margin never uses its deadline"
        for value in (" 1", " -1")
    },
    **{
        (
            "orchestrator/scheduling/concurrency",
            f"self._turnovers = 0.0  # since pressure was observed → self._turnovers = {value}  "
            "# since pressure was observed",
        ): "turnovers count from the first reduction, which sets them to 0"
        for value in ("1.0", "-1.0")
    },
    **{
        (
            "orchestrator/scheduling/curriculum",
            "if self._order is None or self._order[0] != epoch: → "
            f"if self._order is None or self._order[{index}] != epoch:",
        ): "the order is computed again with the same result"
        for index in (" 1", " -1")
    },
    **{
        (
            "orchestrator/batches/packing",
            "row = np.zeros((lengths.sum(), *known[0].shape[1:]), np.result_type(*known)) → "
            f"row = np.zeros((lengths.sum(), *known[{index}].shape[1:]), np.result_type(*known))",
        ): "all parts have the same layers and experts"
        for index in (" 1", " -1")
    },
}
"""(module, changed line as it was → as it is) → why no test can tell the mutant from the module."""
EQUIVALENT_LINES: dict[tuple[str, str], str] = {
    (
        "trainer/losses/step_loss",
        line,
    ): "try_loss reads the names of the metrics and whether there is a gradient, whatever the values"
    for line in (
        "logprobs=torch.tensor([-0.1, -0.7, -1.2, -2.0], requires_grad=True),",
        "inference_logprobs=torch.tensor([-0.2, -0.6, -1.2, -2.5]),",
    )
} | {
    (
        "orchestrator/batches/packing",
        "COST_UNITS = 1 << 20",
    ): "the unit in which costs are rounded to integers"
}
"""(module, line) → why no change of a number in this line has an effect."""
DETECTED = 0.9
SKIPPED = ("TYPE_CHECKING", "@dataclass")
"""Lines whose change has no effect at run time, or none that matters."""
UNCHANGED_TIMEOUT_S = 300.0
PATIENCE, LEAST_TIMEOUT_S = 5, 10.0
"""A mutant whose tests take this many times as long as without the change is detected; shorter than that never."""
LIBRARIES = ("pytest", "hypothesis.stateful", "numpy.testing", "pydantic", "yaml", "jinja2", "httpx")
"""Imported once, before the forks that run tests."""


PROFILE = "mutations"
"""Name of the settings of hypothesis for tests of mutants."""


@dataclass(frozen=True)
class Mutant:
    module: str
    operator: str
    occurrence: int
    line: int


def list_mutants(module: str) -> list[Mutant]:
    """Return every mutant of a module."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator

    source = (ROOT / "primerl_hpc" / f"{module}.py").read_text()
    lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
    found = []
    for name in OPERATORS:
        operator = get_operator(name)()
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for occurrence, (line, column) in enumerate(starts):
            text = lines[line - 1]
            # of parameters, which cosmic-ray multiplies; zip's strict only asserts that lengths are equal
            is_marker = text[column:].startswith("*,") or text[:column].endswith("strict=")
            if not is_marker and not any(word in text for word in SKIPPED):
                found.append(Mutant(module, name, occurrence, line))
    return found


def run_tests(copy: Path, module: str, timeout_s: float) -> bool:
    """True if the module's tests pass in the copy. They run in a fork, which has imported the libraries already."""
    child = multiprocessing.get_context("fork").Process(target=_run_tests_here, args=(copy, module))
    child.start()
    child.join(timeout_s)
    if child.is_alive():
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        return False
    return child.exitcode == 0


def _run_tests_here(copy: Path, module: str) -> None:
    import pytest
    from hypothesis import HealthCheck, Phase, settings

    os.setpgid(0, 0)
    # one counterexample is enough: do not look for the smallest
    settings.register_profile(
        PROFILE,
        phases=(Phase.explicit, Phase.generate),
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tests = [f"tests/unit/{name}" for name in TESTS[module].split()]
    words = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:anyio", "--hypothesis-seed=0"]
    words.append(f"--hypothesis-profile={PROFILE}")
    os._exit(pytest.main([*words, *tests]))


def try_mutant(mutant: Mutant, timeout_s: float) -> dict[str, Any]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    path = _copy / "primerl_hpc" / f"{mutant.module}.py"
    original = path.read_text()
    changed = mutate_code(original, get_operator(mutant.operator)(), mutant.occurrence)
    pairs = zip(original.splitlines(), changed.splitlines(), strict=False)
    before, after = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    path.write_text(changed)
    # bytecode is compared by size and whole seconds: that of the mutant before may look current
    for bytecode in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        bytecode.unlink()
    try:
        is_detected = not run_tests(_copy, mutant.module, timeout_s)
    finally:
        path.write_text(original)
    return {
        "module": mutant.module,
        "line": mutant.line,
        "change": f"{before.strip()} → {after.strip()}",
        "is_detected": is_detected,
    }


def make_copies(folder: Path, count: int) -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    copies = [folder / str(index) for index in range(count)]
    for copy in copies:
        for name in filter(None, names):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copies


_copy = Path()
"""The copy of the checkout that belongs to this process."""


def _take_copy(free: SimpleQueue[Path], module: str) -> None:
    """Prepare this process for mutants of ``module``: each test process is a fork of it."""
    global _copy
    _copy = free.get()
    os.chdir(_copy)
    sys.path.insert(0, str(_copy))
    for name in unaffected_modules(module):
        importlib.import_module(name)


def unaffected_modules(module: str) -> list[str]:
    """Return what the module's tests import of the package and does not import the module, directly or not."""
    mutated = f"primerl_hpc.{module.replace('/', '.')}"
    imports: dict[str, set[str]] = {}
    for path in (_copy / "primerl_hpc").rglob("*.py"):
        name = _module_name(path)  # whose import also imports the packages above it
        imports[name] = _imports_of(path) | {name.rsplit(".", up)[0] for up in range(1, name.count(".") + 1)}
    affected, is_larger = {mutated}, True
    while is_larger:
        users = {name for name, used in imports.items() if name not in affected and used & affected}
        affected |= users
        is_larger = bool(users)
    wanted: set[str] = set()
    pending = set().union(*(_imports_of(_copy / f"tests/unit/{name}") for name in TESTS[module].split()))
    while pending := (pending & imports.keys()) - wanted:
        wanted |= pending
        pending = set().union(*(imports[name] for name in pending))
    return sorted(wanted - affected)


def _module_name(path: Path) -> str:
    return ".".join(path.relative_to(_copy).with_suffix("").parts).removesuffix(".__init__")


def _imports_of(path: Path) -> set[str]:
    """Return the modules of the package, and names that may be modules, which a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name.startswith("primerl_hpc.")}


def time_unchanged(module: str, timeout_s: float) -> float | None:
    """Return the seconds that the module's tests take without a change; None if they fail."""
    start = time.monotonic()
    return time.monotonic() - start if run_tests(_copy, module, timeout_s) else None


def why_equivalent(module: str, change: str) -> str | None:
    """Return why a change has no effect; None if it has one."""
    line = change.split(" → ", maxsplit=1)[0]
    return EQUIVALENT.get((module, change)) or EQUIVALENT_LINES.get((module, line))


def summarize(module: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the row of a module: the share of mutants detected, without those that are equivalent."""
    survivors = [
        {"line": row["line"], "change": row["change"], "equivalent": why_equivalent(module, row["change"])}
        for row in results
        if not row["is_detected"]
    ]
    counted = len(results) - sum(row["equivalent"] is not None for row in survivors)
    detected = sum(row["is_detected"] for row in results)
    share = detected / counted if counted else 1.0
    return {"module": module, "mutants": len(results), "detected": share, "survivors": survivors}


def choose_mutants(module: str, options: argparse.Namespace) -> list[Mutant]:
    mutants = list_mutants(module)
    if options.line:
        return [mutant for mutant in mutants if mutant.line in options.line]
    if options.all:
        return mutants
    return random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))


def measure(module: str, mutants: list[Mutant], copies: list[Path]) -> dict[str, Any] | None:
    """Return the row of a module; None if its tests fail without a change."""
    fork = multiprocessing.get_context("fork")
    free = fork.SimpleQueue()
    for copy in copies:
        free.put(copy)
    with ProcessPoolExecutor(len(copies), fork, _take_copy, (free, module)) as pool:
        seconds = pool.submit(time_unchanged, module, UNCHANGED_TIMEOUT_S).result()
        if seconds is None:
            return None
        timeout_s = max(LEAST_TIMEOUT_S, PATIENCE * seconds)
        return summarize(module, list(pool.map(try_mutant, mutants, repeat(timeout_s))))


def update(path: Path, row: dict[str, Any]) -> None:
    """Replace the row of a module in a file that this bench wrote, or add it."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {known["module"]: known for known in [*rows, row]}
    document = {"what": "mutants that unit tests detect", "command": "tools/bench/mutations.py --count 20"}
    document |= describe_machine() | {"rows": [rows[module] for module in TESTS if module in rows]}
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--module", action="append", choices=TESTS, help="[default: all]")
    parser.add_argument("--count", type=int, default=24, help="mutants of each module [default: 24]")
    parser.add_argument("--all", action="store_true", help="all mutants of each module")
    parser.add_argument("--line", type=int, action="append", help="all mutants of this line, repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time [default: 2]")
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="replace the modules' rows in this JSON file"
    )
    parser.add_argument("--json", dest="as_json", action="store_true")
    options = parser.parse_args()
    rows, wrong = [], []
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        copies = make_copies(Path(temporary), options.jobs)
        for module in options.module or TESTS:
            row = measure(module, choose_mutants(module, options), copies)
            if row is None:
                wrong.append(f"{module}: its tests fail without a change")
                continue
            rows.append(row)
            row["of"] = len(list_mutants(module))
            if options.update:
                update(options.update, row)
            print(f"{module}: {row['detected']:.0%} of {row['mutants']}", file=sys.stderr, flush=True)
            for each in row["survivors"]:
                print(f"    {each['line']}: {each['change']}", file=sys.stderr, flush=True)
            if row["detected"] < DETECTED:
                wrong.append(f"{module}: {row['detected']:.0%} detected, at least {DETECTED:.0%} wanted")
    shown = rows if options.as_json else [{**row, "survivors": len(row["survivors"])} for row in rows]
    which = "all mutants" if options.all else f"random mutants, seed {options.seed},"
    what = f"{which} of {len(rows)} pure modules"
    return conclude(what, shown, wrong, as_json=options.as_json)


if __name__ == "__main__":
    sys.exit(main())
