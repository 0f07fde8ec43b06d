"""Dependencies go one way, and the login-node half of the package loads nothing heavy."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "primerl_hpc"
FOLDERS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists())

# folder → what it may import besides itself and the standard library
MAY_IMPORT = {
    "common": set(),
    "recipe": {"common"},
    "cluster": {"common"},
    "plan": {"common", "recipe", "cluster"},
    "render": {"common", "recipe", "cluster", "plan"},
    "launch": {"common", "recipe", "cluster", "plan", "render", "observe", "runtime", "transport"},
    "cli": {"common", "recipe", "cluster", "plan", "render", "launch", "observe", "runtime", "envs"},
    "runtime": {"common", "recipe", "plan"},
    "roles": {"common", "recipe", "plan", "inference", "orchestrator", "trainer", "transport", "envs"},
    "observe": {"common", "cluster"},
    "transport": {"common"},
    "envs": {"common", "recipe"},
    "inference": {"common", "recipe", "plan", "transport"},
    "orchestrator": {"common", "recipe", "plan", "transport", "envs"},
    "trainer": {"common", "recipe", "plan", "transport"},
}


def imported_folders(path: Path) -> set[str]:
    """Folders of our package that a module imports, for types only or for real."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name and name.startswith("primerl_hpc.")}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_comes_before_it(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder}
    for path in (PACKAGE / folder).rglob("*.py"):
        wrong = imported_folders(path) - allowed
        assert not wrong, f"{path.relative_to(PACKAGE)} imports {sorted(wrong)}"


@pytest.mark.parametrize(
    "folder", ["cli", "recipe", "cluster", "plan", "render", "launch", "observe", "runtime"]
)
def test_the_login_node_half_loads_no_torch(folder: str) -> None:
    modules = [
        "primerl_hpc." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in (PACKAGE / folder).glob("*.py")
        if path.name != "__init__.py"
    ]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'verifiers', 'datasets', 'renderers'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_a_module_can_be_held_in_the_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 420


@pytest.mark.parametrize("folder", ["common", "recipe", "cluster", "plan", "render"])
def test_a_reading_order_names_the_modules_that_are_there(folder: str) -> None:
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())) or ""
    order = re.sub(r"\([^()]*\)", "", text.partition("Reading order")[2])
    there = {path.stem for path in (PACKAGE / folder).glob("*.py")} - {"__init__"}
    assert set(re.findall(r"\w+", order)) == there
