"""Modules by name, and what they import, as an interpreter finds them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from primerl_hpc.offline.code import find_modules as script
from primerl_hpc.offline.code.find_modules import find_modules


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "my_env_a6/__init__.py": "from .rows import ROWS\nimport os, json, helper_a6.deep\n",
        "my_env_a6/rows.py": "def load():\n    import pool_a6\nROWS = 1\n",
        "helper_a6/__init__.py": "import primerl_hpc, torch\n",
        "helper_a6/deep.py": "",
        "pool_a6.py": "import pydantic, helper_a6\n",
        "unused_a6.py": "",
    }
    monkeypatch.syspath_prepend(str(write(tmp_path / "lib", files)))
    return tmp_path / "lib"


def test_a_module_comes_with_the_modules_that_it_imports(library: Path) -> None:
    found = find_modules(["my_env_a6"], [])
    paths = {name: str(library / name) for name in ("my_env_a6", "helper_a6")}
    assert found == {**paths, "pool_a6": str(library / "pool_a6.py")}


def test_installed_modules_are_copied_only_if_they_are_the_package_of_an_environment(tmp_path: Path) -> None:
    assert find_modules([], ["pydantic", "json", "torch.nn", "no_such_module"]) == {}
    assert set(find_modules(["annotated_types"], [])) == {"annotated_types"}
    installed = {
        "tool_a6/__init__.py": "",
        "tool_a6-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tool_a6\nVersion: 1.0\n",
        "tool_a6-1.0.dist-info/RECORD": "tool_a6/__init__.py,,\n",
        "mine_a6.py": "import tool_a6\n",
    }
    target = str(write(tmp_path / "target", installed))  # as made by pip install --target
    assert find_modules([], ["mine_a6"], [target]) == {"mine_a6": f"{target}/mine_a6.py"}
    assert set(find_modules(["tool_a6"], [], [target])) == {"tool_a6"}


def test_only_the_given_folders_are_searched_for_a_container(library: Path, tmp_path: Path) -> None:
    assert find_modules(["my_env_a6"], [], []) == {}
    assert find_modules(["pool_a6"], [], [str(library)]).keys() == {"pool_a6", "helper_a6"}


def test_namespace_packages_and_unreadable_source_do_not_stop_the_search(tmp_path: Path) -> None:
    files = {"space_a6/part/__init__.py": "import broken_a6\n", "broken_a6.py": "def (\n"}
    folder = write(tmp_path / "lib", files)
    assert find_modules(["space_a6"], [], [str(folder)]) == {
        "space_a6": str(folder / "space_a6"),
        "broken_a6": str(folder / "broken_a6.py"),
    }


def test_it_runs_in_an_interpreter_that_has_nothing_installed(library: Path) -> None:
    call = f"find_modules(['my_env_a6'], [], [{str(library)!r}])"
    code = f"{Path(script.__file__).read_text()}\nimport json\nprint(json.dumps({call}))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == find_modules(["my_env_a6"], [], [str(library)])
