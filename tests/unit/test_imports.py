"""Dependencies go one way, and the login-node half of the package loads nothing heavy."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "primerl_hpc"
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())

# folder → what it may import besides itself and the standard library
MAY_IMPORT = {
    "common": set(),
    "slurm": {"common"},
    "run": {"common", "slurm"},
    "recipe": {"common", "run"},
    "cluster": {"common", "slurm"},
    "plan": {"common", "recipe", "cluster", "run"},
    "render": {"common", "recipe", "cluster", "plan"},
    "checks": {
        *("common", "slurm", "run", "recipe", "cluster", "plan", "render", "observe", "tracking", "transport")
    },
    "offline": {"common", "run", "recipe", "cluster", "plan", "render", "transport"},
    "export": {"common", "run", "recipe", "plan", "transport"},
    "launch": {
        *("common", "slurm", "run", "recipe", "cluster", "plan", "render", "checks", "offline", "export"),
        *("observe", "runtime", "tracking"),
    },
    "cli": set(
        "common slurm run recipe cluster plan render checks offline export launch observe runtime envs tracking".split()
    ),
    "runtime": {"common", "slurm", "run", "recipe", "cluster", "plan", "checks", "transport"},
    "roles": {"common", "run", "recipe", "plan", "inference", "orchestrator", "trainer", "transport", "envs"}
    | {"tracking"},
    "tracking": {"common", "run", "recipe"},
    "observe": {"common", "slurm", "run", "cluster"},
    "transport": {"common", "run"},
    "envs": {"common", "run", "recipe", "transport"},
    "inference": {"common", "run", "recipe", "plan", "transport"},
    "orchestrator": {"common", "run", "recipe", "plan", "transport", "envs"},
    "trainer": {"common", "run", "recipe", "plan", "transport"},
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return all nodes of a module: a walk takes longer than what a test does with its nodes."""
    return list(ast.walk(tree_of(path)))


@pytest.fixture(scope="module", autouse=True)
def forget_nodes() -> Iterator[None]:
    """They are half a million objects, which garbage collections in later tests would visit."""
    yield
    nodes_of.cache_clear()
    tree_of.cache_clear()


def imported_folders(path: Path) -> set[str]:
    """Folders of our package that a module imports, for types only or for real."""
    found = set()
    for node in nodes_of(path):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name and name.startswith("primerl_hpc.")}
    return found


def test_a_folder_imports_only_what_comes_before_it() -> None:
    assert MAY_IMPORT.keys() == set(FOLDERS)
    wrong = {
        str(path.relative_to(PACKAGE)): sorted(imported)
        for folder, allowed in MAY_IMPORT.items()
        for path in (PACKAGE / folder).rglob("*.py")
        if (imported := imported_folders(path) - allowed - {folder})
    }
    assert not wrong


RENDERERS = ("chatml", "literal_renderer")
"""Modules of recipe that are imported only where package ``renderers`` is."""


LOGIN_NODE = ("cli", "slurm", "run", "recipe", "cluster", "plan", "render", "checks", "launch", "observe")
LOGIN_NODE += ("offline", "export", "runtime", "tracking")
LIBRARIES = ("anyio", "httpx", "jinja2", "pydantic_config", "rich", "submitit", "yaml")
"""Libraries that these folders may import, and that take most of their time."""
HEAVY = {"torch", "vllm", "transformers", "verifiers", "datasets", "renderers"}
IMPORT_FOLDERS = """
import importlib, json, os, sys, traceback
libraries, heavy, folders = json.loads(sys.argv[1])
for name in libraries: importlib.import_module(name)
found = {}
for folder, modules in folders.items():
    reading, writing = os.pipe()
    if not os.fork():
        try:
            for name in modules: importlib.import_module(name)
            said = f"loads {loaded}" if (loaded := sorted({*heavy} & {*sys.modules})) else ""
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file: said = file.read()
    _, status = os.wait()
    found[folder] = said or ("" if status == 0 else f"status {status}")
print(json.dumps(found))
"""


def test_the_login_node_half_loads_no_torch() -> None:
    """Import all modules of each folder in a process that has imported libraries only."""
    folders = {
        folder: [
            "primerl_hpc." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            for path in (PACKAGE / folder).rglob("*.py")
            if path.name != "__init__.py" and path.stem not in RENDERERS
        ]
        for folder in LOGIN_NODE
    }
    words = json.dumps([LIBRARIES, sorted(HEAVY), folders])
    command = [sys.executable, "-c", IMPORT_FOLDERS, words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(LOGIN_NODE, "")


USES_OWN_PATH = {
    "common/assets.py": "recipes and profiles of a checkout",
    "common/env.py": "PYTHONPATH",
    "common/package.py": "PYTHONPATH",
    "cli/role.py": "PYTHONPATH",
    "envs/__init__.py": "sys.path",
    "trainer/watchdog.py": "frames of tracebacks",
}


def test_data_of_the_package_is_read_as_resources() -> None:
    """Runs import the package from a zip file, in which paths next to a module do not exist."""
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes_of(path))
    }
    assert found == USES_OWN_PATH.keys()


SUPERVISOR_MODULES = 95


def test_the_supervisor_imports_little_and_no_planner() -> None:
    """It must not fail: what it does not import cannot break it."""
    code = "import sys, primerl_hpc.runtime.supervisor; print(*(m for m in sys.modules if m[:12] == 'primerl_hpc.'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = [name.removeprefix("primerl_hpc.") for name in done.stdout.split()]
    files = [name for name in modules if (PACKAGE / f"{name.replace('.', '/')}.py").is_file()]
    assert len(files) <= SUPERVISOR_MODULES, files
    assert not [
        name
        for name in files
        if name.startswith(("plan.planner", "plan.predict", "plan.simulation", "launch"))
    ]


MAX_MODULES, MAX_MODULE_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS = 20, 600, 60, 7


def test_a_module_can_be_held_in_the_head() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")
    }
    assert not {path: length for path, length in lengths.items() if length > MAX_MODULE_LINES}


PRESCRIBED = {
    "envs/shipped/inproc_chat/__init__.py: launch": "verifiers",
    "inference/stores.py: secure_store": "torch.distributed",
    "inference/vllm_compat.py: apply_local": "vLLM",
    "plan/predict/figure.py: estimate": "the fields of a Figure",
    "trainer/model/head.py: forward": "torch, whose functions take tensors with gradients as arguments",
    "trainer/parallel/attention.py: packed_attention": "transformers",
}
"""Functions with more parameters, and what prescribes their signature: a library, or a dataclass that they build."""


def functions_of(path: Path) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Functions and methods of a module with their names, as in ``roles/router.py: main``."""
    return [
        (f"{path.relative_to(PACKAGE)}: {node.name}", node)
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def parameter_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameters without ``self`` and ``cls``; ``*args`` and ``**kwargs`` count as one each."""
    arguments = function.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    listed += filter(None, (arguments.vararg, arguments.kwarg))
    return [argument.arg for argument in listed if argument.arg not in ("self", "cls")]


def is_click_command(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a command of the CLI. Its parameters are its options: click passes each one by name."""
    return any("command(" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_functions_have_at_most_seven_parameters() -> None:
    found = {
        name
        for path in PACKAGE.rglob("*.py")
        for name, function in functions_of(path)
        if len(parameter_names(function)) > MAX_PARAMETERS and not is_click_command(function)
    }
    assert found == PRESCRIBED.keys()


def test_functions_fit_on_a_screen() -> None:
    lengths = {
        name: (function.end_lineno or 0) - function.lineno + 1
        for path in PACKAGE.rglob("*.py")
        for name, function in functions_of(path)
    }
    assert not {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES}


ONE_FILE_AN_ENTRY = {"cli", "roles"}
"""Folders with one file for each entry of a table: they may hold any number of modules."""
MODULES = {
    str(path.parent.relative_to(PACKAGE)): sorted(
        each.stem for each in path.parent.glob("*.py") if each.stem not in ("__init__", "__main__")
    )
    for path in sorted(PACKAGE.rglob("__init__.py"))
    if path.parent != PACKAGE and "shipped" not in path.parts
}


def test_a_folder_lists_at_most_twenty_modules() -> None:
    counts = {folder: len(modules) for folder, modules in MODULES.items() if folder not in ONE_FILE_AN_ENTRY}
    assert not {folder: count for folder, count in counts.items() if count > MAX_MODULES}


def test_a_reading_order_names_the_modules_that_exist() -> None:
    missing = []
    for folder in MODULES.keys() - {"cli", "roles"}:
        text = ast.get_docstring(tree_of(PACKAGE / folder / "__init__.py")) or ""
        order = re.sub(r"\([^()]*\)", "", text.partition("Reading order")[2])
        missing += [f"{folder}/{name}" for name in MODULES[folder] if not re.search(rf"\b{name}\b", order)]
    assert not missing


PURE_FOLDERS = [f"orchestrator/{folder}" for folder in ("scheduling", "algorithms", "scoring", "batches")]
PURE_FOLDERS.append("plan")
PLAN_FILES = {"plan/plan.py": "reads plan.json", "plan/planner.py": "paths of files of the run"}
"""Modules of a pure folder that import RunDir, and why."""


def test_a_pure_folder_has_no_event_loop_client_clock_or_run_directory() -> None:
    for path in (path for folder in PURE_FOLDERS for path in (PACKAGE / folder).rglob("*.py")):
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            impure = {"asyncio", "httpx", "time", "RunDir"} & {name.split(".")[0] for name in names}
            if str(path.relative_to(PACKAGE)) in PLAN_FILES:
                impure -= {"RunDir"}
            assert not impure, f"{path.relative_to(PACKAGE)} imports {sorted(impure)}"


def modules_imported_by(path: Path) -> set[str]:
    """Modules of our package that a module imports, for types only or for real."""
    found: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("primerl_hpc."):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports in functions and for types count too."""
    imports = {
        "primerl_hpc." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts): modules_imported_by(path)
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    remaining = {name: imported & imports.keys() for name, imported in imports.items()}
    while free := {name for name, imported in remaining.items() if not imported & remaining.keys()}:
        remaining = {name: imported for name, imported in remaining.items() if name not in free}
    assert not remaining, f"in or behind a circle: {sorted(remaining)}"


def test_no_import_inside_a_folder_is_for_types_only() -> None:
    """Such an import would hide a circle."""
    found = {
        f"{path.relative_to(PACKAGE)}: {statement.module}"
        for path in PACKAGE.rglob("*/*.py")
        if "TYPE_CHECKING" in path.read_text()
        for node in nodes_of(path)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        and (statement.module or "").startswith(f"primerl_hpc.{path.relative_to(PACKAGE).parts[0]}.")
    }
    assert not found


SUBFOLDERS = {
    "common": {"node": set(), "safety": set()},
    "run": {"access": set(), "ledger": set()},
    "plan": {"predict": set(), "simulation": set(), "assess": {"predict", "simulation"}},
    "launch": {
        **{name: set() for name in ("planning", "storage")},
        "bench": set(),
        "new_recipe": {"planning"},
        "resume": set(),
    },
    "checks": {"recipe": set()},
    "offline": {"bundle": set(), "code": set(), "prefetch": set()},
    "envs": {"tool_servers": set(), "serving": set(), "shipped": {"serving", "tool_servers"}},
    "inference": {"worker": set(), "load": set()},
    "observe": {
        "status": set(),
        "inside": {"status"},
        "diagnose": {"status", "inside"},
        "report": {"status", "diagnose"},
    },
    "orchestrator": {
        "scheduling": set(),
        "rollouts": set(),
        "scoring": {"algorithms"},
        "algorithms": {"rollouts"},
    }
    | {
        "batches": {"scoring"},
        "engines": {"scheduling"},
        "checkpoint": {"batches", "rollouts", "scheduling"},
    },
    "recipe": {"schema": set(), "sft": {"schema"}},
    "runtime": {"files": set(), "steps": {"files"}, "job": {"files", "steps"}},
    "trainer": {
        "fp8": set(),
        "parallel": {"fp8"},
        "losses": set(),
        "sft": set(),
        "model": {"fp8", "parallel"},
        "optim": {"model", "parallel"},
        "weights": {"model", "parallel"},
        "checkpoint": {"optim", "parallel", "weights"},
    },
    "transport": {"rollouts": set(), "base_models": set(), "weights": {"base_models"}},
}
"""Subfolder → the other subfolders of its folder that it may import, at run time or for types."""


def test_a_subfolder_imports_only_what_comes_before_it() -> None:
    wrong = {}
    for folder, table in SUBFOLDERS.items():
        existing = {path.parent.name for path in (PACKAGE / folder).glob("*/__init__.py")}
        assert existing == set(table)
        for subfolder, allowed in table.items():
            pattern = re.compile(rf"^\s*(?:from|import) primerl_hpc\.{folder}\.(\w+)", re.M)
            for path in (PACKAGE / folder / subfolder).rglob("*.py"):
                if imported := {*pattern.findall(path.read_text())} & existing - allowed - {subfolder}:
                    wrong[str(path.relative_to(PACKAGE))] = sorted(imported)
    assert not wrong


SLURM_COMMANDS = {"sacct", "sacctmgr", "salloc", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun"}
SLURM_COMMANDS |= {"sshare"}


def slurm_command_lines(nodes: list[ast.AST]) -> list[int]:
    """Lines where a SLURM command is the first word of a list, tuple or call, as in ``run("squeue", ...)``."""
    types = {id(node.slice) for node in nodes if isinstance(node, ast.Subscript)}
    lines = []
    for node in nodes:
        if not isinstance(node, ast.List | ast.Tuple | ast.Call):
            continue
        words = node.args if isinstance(node, ast.Call) else node.elts if id(node) not in types else []
        first, *others = [word.value if isinstance(word, ast.Constant) else None for word in words] or [None]
        if first not in SLURM_COMMANDS or not others or set(others) & SLURM_COMMANDS:
            continue
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "shutil.which"):
            lines.append(node.lineno)
    return lines


def test_only_the_slurm_folder_and_srun_steps_write_command_lines_of_slurm() -> None:
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := slurm_command_lines(nodes_of(path)))
    }
    assert {path for path in found if not path.startswith("slurm/")} == {"runtime/steps/srun.py"}
    assert slurm_command_lines(list(ast.walk(ast.parse('run_slurm("squeue", "--noheader")')))) == [1]


STAND_INS_FOR_OTHERS = {
    "unit/transport/test_broadcast.py": "process groups of torch",
    "security/test_control_tokens.py": "a tokenizer",
}
"""Tests with a SimpleNamespace, and the object of another library that it stands in for."""


def test_tests_build_objects_of_the_package_with_their_constructors() -> None:
    tests = PACKAGE.parent / "tests"
    texts = {str(path.relative_to(tests)): path.read_text() for path in sorted(tests.rglob("*.py"))}
    del texts["unit/test_imports.py"]
    assert [name for name, text in texts.items() if ".__new__(" in text] == []
    assert {name for name, text in texts.items() if "SimpleNamespace" in text} == {*STAND_INS_FOR_OTHERS}
