"""``export --push``: the exported folder on a local hub that accepts uploads, with the real package huggingface_hub."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from primerl_hpc.common.errors import ExitCode
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.weights.filesystem import MANIFEST
from tests.support.upload_hub import UploadHub, serve_uploads
from tests.unit.cli.test_cli import primerl
from tests.unit.export.test_export import run  # noqa: F401

TOKEN = "hf_" + "0" * 34


def export(
    run: RunDir,  # noqa: F811
    tmp_path: Path,
    hub: UploadHub | None,
    *words: str,
    token: str = TOKEN,
) -> subprocess.CompletedProcess[str]:
    environ = {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    environ |= {"HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": token}
    environ |= {} if hub is None else {"HF_ENDPOINT": hub.url}
    return primerl("export", str(run.root), "--to", str(tmp_path / "model"), *words, cwd=tmp_path, **environ)


@pytest.mark.parametrize("public", [False, True])
def test_every_file_of_an_export_is_in_a_private_repository_unless_a_public_one_was_requested(
    run: RunDir,  # noqa: F811
    tmp_path: Path,
    public: bool,
) -> None:
    with serve_uploads(token=TOKEN) as hub:
        words = ("--push", "me/model", *(("--public",) if public else ()))
        done = export(run, tmp_path, hub, *words, "--json")
        assert done.returncode == 0, done.stderr
        pushed = json.loads(done.stdout)["pushed"]
    assert (pushed["repository"], pushed["url"]) == ("me/model", f"{hub.url}/me/model")
    repository = hub.repositories["me/model"]
    assert repository.private is not public and repository.messages == ["Policy version 6 of run run"]
    folder = tmp_path / "model"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}
    assert repository.files == files and "model-00001-of-00001.safetensors" in files


def test_a_second_push_adds_a_commit_to_the_existing_repository(
    run: RunDir,  # noqa: F811
    tmp_path: Path,
) -> None:
    with serve_uploads(token=TOKEN) as hub:
        for step in ("3", "6"):
            target = ("--to", str(tmp_path / f"model-{step}"))  # the last --to counts
            done = export(run, tmp_path, hub, *target, "--step", step, "--push", "me/model")
            assert done.returncode == 0, done.stderr
            assert f"{hub.url}/me/model, commit " in done.stdout
    assert [text.split()[2] for text in hub.repositories["me/model"].messages] == ["3", "6"]


def test_nothing_is_uploaded_without_push(run: RunDir, tmp_path: Path) -> None:  # noqa: F811
    with serve_uploads(token=TOKEN) as hub:
        done = export(run, tmp_path, hub, "--json")
        assert done.returncode == 0 and json.loads(done.stdout)["pushed"] is None
        refused = export(run, tmp_path, hub, "--public")
    assert refused.returncode == ExitCode.USAGE and "--public needs --push" in refused.stderr
    assert hub.repositories == {}


def test_a_refused_token_or_name_is_one_sentence_and_the_export_is_kept(
    run: RunDir,  # noqa: F811
    tmp_path: Path,
) -> None:
    for token, name, sentence in (
        ("", "me/model", "--push needs a token of the Hugging Face hub with the right to write"),
        (TOKEN, "model", "--push model does not have the form owner/name"),
    ):
        done = export(run, tmp_path, None, "--push", name, token=token)
        assert done.returncode == ExitCode.CONFIG and sentence in done.stderr
        assert not (tmp_path / "model").exists()  # refused before the export
    with serve_uploads(token="hf_other") as hub:
        done = export(run, tmp_path, hub, "--push", "me/model")
    assert done.returncode == ExitCode.CONFIG
    assert "the hub refused to write to me/model (HTTP 403)" in done.stderr
    assert (tmp_path / "model" / "config.json").is_file() and hub.repositories == {}
