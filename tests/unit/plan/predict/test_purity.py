"""The planner runs on login nodes: no heavy imports, no clock, no network; its data files are installed."""

from __future__ import annotations

import ast
import configparser
import sys
from pathlib import Path

from tests.support.helpers import ROOT, captured

PLAN = ROOT / "primerl_hpc" / "plan"
IMPURE = {"asyncio", "httpx", "time", "datetime", "random", "socket", "subprocess", "RunDir"}


def modules() -> list[Path]:
    return sorted((PLAN / "predict").rglob("*.py"))


def test_planning_loads_neither_torch_nor_numpy():
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted(PLAN.rglob("*.py"))
    ]
    code = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'numpy', 'vllm', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    done = captured([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr


def test_the_command_plan_loads_no_heavy_package():
    """Nor the OpenAI client, which package renderers imports, or httpx if the nodes are offline."""
    code = (
        "import sys\nfrom primerl_hpc.cli.main import cli\n"
        "cli(sys.argv[1:], standalone_mode=False)\n"
        "heavy = {'torch', 'numpy', 'vllm', 'transformers', 'openai', 'httpx'} & set(sys.modules)\n"
        "sys.exit(f'loads {sorted(heavy)}' if heavy else 0)"
    )
    recipe = ROOT / "recipes" / "reverse_text" / "qwen3_0.6b_one_gpu.yaml"
    words = ("plan", str(recipe), "-p", "h200x8", "--profile-set", "offline=true")
    done = captured([sys.executable, "-c", code, *words])
    assert done.returncode == 0 and "predicted for" in done.stdout, done.stderr


def test_predictions_depend_on_their_arguments_alone():
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            impure = IMPURE & {name.split(".")[0] for name in names}
            assert not impure, f"{path.relative_to(ROOT)} imports {sorted(impure)}"


def test_data_files_are_part_of_the_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["primerl_hpc.plan.predict"].split()
    installed = {path for pattern in patterns for path in (PLAN / "predict").glob(pattern)}
    assert installed == set((PLAN / "predict").rglob("*.json"))
