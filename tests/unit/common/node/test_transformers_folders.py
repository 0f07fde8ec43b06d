"""The names of transformers' models are read once for an installed version."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from primerl_hpc.common.node import transformers_folders
from primerl_hpc.common.node.transformers_folders import cache_file, decode, encode
from tests.support.helpers import ROOT, captured

STRUCTURE = {
    frozenset(): {"cache": {"Cache"}},
    "llama": {
        frozenset({"torch", "vision"}): {"modeling_llama": {"LlamaModel", "LlamaForCausalLM"}},
        "deep": {},
    },
}
COMPARE = """
import builtins, json, sys
from primerl_hpc.common.node.transformers_folders import decode, read_models_once
read_models_once(may_write=sys.argv[1] != "read")
read_models_once()
sys.modules["torch"] = None
opened, plain = [], builtins.open
builtins.open = lambda file, *rest, **more: opened.append(str(file)) or plain(file, *rest, **more)
from transformers import AutoTokenizer, Qwen3Config
builtins.open = plain
from transformers.utils import import_utils
from pathlib import Path
models = Path(import_utils.__file__).parents[1] / "models"
scan = import_utils.create_import_structure_from_path
if sys.argv[1] == "compare":
    assert scan(str(models)) == scan.__wrapped__(str(models))
    assert scan(str(models / "__init__.py")) == scan(models) and scan(models) is not scan(models)
    assert scan(models / "llama") == scan.__wrapped__(models / "llama")
print(sum("models" in name for name in opened))
"""


def count_opened(caches: Path, mode: str) -> int:
    done = captured(
        [sys.executable, "-c", COMPARE, mode],
        env={**os.environ, "XDG_CACHE_HOME": str(caches), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.splitlines()[-1])


def test_a_second_process_reads_no_source_and_has_the_same_names(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert count_opened(tmp_path, "read") > 1000 and not (tmp_path / "primerl-hpc").exists()
    first, second = (count_opened(tmp_path, mode) for mode in ("import", "compare"))
    assert first > 1000 and second < 50
    (cache,) = (tmp_path / "primerl-hpc").iterdir()
    assert cache.stat().st_mode & 0o777 == 0o600
    cache.write_text(cache.read_text()[:-9])  # as after a full disk
    assert count_opened(tmp_path, "compare") > 1000
    assert json.loads(cache.read_text())


def test_names_survive_the_file() -> None:
    assert decode(json.loads(json.dumps(encode(STRUCTURE)))) == STRUCTURE


def test_another_installation_has_another_file_and_an_editable_one_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    package = tmp_path / "site-packages" / "transformers"
    package.mkdir(parents=True)
    assert cache_file(package) is None
    record = package.parent / "transformers-5.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("a")
    first = cache_file(package)
    record.write_text("ab")
    assert first != cache_file(package) is not None


def test_the_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "names.json"
    cache.write_text(json.dumps(encode(STRUCTURE)))
    assert transformers_folders._read(cache)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert transformers_folders._read(cache) == ""


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert count_opened(tmp_path / "file" / "caches", "compare") > 1000
