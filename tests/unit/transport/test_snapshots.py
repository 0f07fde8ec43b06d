"""Downloads and look-ups of a hub model agree on its files: a filtered download is found, a damaged one is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from primerl_hpc.transport.base_models.snapshots import local_snapshot
from tests.support.helpers import ROOT
from tests.support.hub import serve_hub

FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights",
    "consolidated.safetensors": b"the same weights",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"the same weights again",
}
FOUND = """
import logging, sys
from primerl_hpc.transport.base_models.snapshots import download_snapshot, local_snapshot
logging.basicConfig(stream=sys.stdout)
folder = {call}
print(sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) if folder else None)
"""


def call(code: str, cache: Path, url: str = "http://127.0.0.1:9") -> str:
    """Run the code in a process of its own, whose hub libraries read these variables when they are imported."""
    environ = {
        "HF_HUB_CACHE": str(cache),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    environ |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FOUND.format(call=code)]
    return subprocess.check_output(command, env=os.environ | environ, text=True)


def test_a_filtered_download_is_found_without_the_files_that_it_left_out(tmp_path: Path) -> None:
    expected = "['config.json', 'model.safetensors', 'tokenizer.json']\n"
    with serve_hub({}, models={"org/model": FILES}) as url:
        assert call("download_snapshot('org/model')", tmp_path, url) == expected
    assert call("local_snapshot('org/model')", tmp_path) == expected


def test_a_snapshot_without_weights_is_named(tmp_path: Path) -> None:
    with serve_hub({}, models={"org/model": FILES}) as url:
        call("download_snapshot('org/model', has_weights=False)", tmp_path, url)
    found = call("local_snapshot('org/model')", tmp_path)
    assert found.endswith("None\n") and "Model org/model is incomplete on this machine" in found
    assert "model.safetensors" in found


def test_a_folder_is_its_own_snapshot_and_an_unknown_name_has_none(tmp_path: Path) -> None:
    assert local_snapshot(str(tmp_path)) == tmp_path
    assert call("local_snapshot('org/other')", tmp_path) == "None\n"
    assert call("local_snapshot('/no/such/folder')", tmp_path) == "None\n"
