"""Base models are read once from the shared folder, whatever the number of nodes and processes."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common import env
from primerl_hpc.common.errors import DataError
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.base_models import chunks, peers, staging
from primerl_hpc.transport.base_models.chunks import LocalCopy, list_chunks, read_chunk, rotate
from tests.support.helpers import PATIENCE_S

CHUNK = 1000


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A snapshot of the hub cache with two large files and a small one, in chunks of 1000 bytes."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for name, size in (("a.safetensors", 20_500), ("b.safetensors", 9_000)):
        data = name.encode() * (size // len(name)) + b"x" * (size % len(name))
        blob = blobs / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / name).symlink_to(blob)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(staging, "list_chunks", lambda folder: list_chunks(folder, CHUNK))
    monkeypatch.setattr(staging, "LOOK_EVERY_S", 0.01)
    return snapshot


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    (tmp_path / "run" / "control").mkdir(parents=True)
    return run


def meeting(run: RunDir, nodes: int, node: int | None) -> staging.Meeting:
    folder = run.control / "base_models" / "x"
    return staging.Meeting(folder, tuple(range(nodes)), node, "127.0.0.1", f"p-{node}", run_keys(run))


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_chunk_is_in_one_share(num_chunks: int, num_nodes: int) -> None:
    table = chunks.ChunkTable({}, {}, tuple(chunks.Chunk("f", n, 1) for n in range(num_chunks)))
    shares = [table.share(index, num_nodes) for index in range(num_nodes)]
    assert sorted(index for share in shares for index in share) == list(range(num_chunks))
    assert sorted(rotate(shares[0], 3)) == shares[0]


def test_nodes_read_the_shared_folder_once_together(
    model: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight nodes with two processes each; a node that joins later reads nothing from the shared folder."""
    table = list_chunks(model, CHUNK)
    read: list[tuple[str, int]] = []
    lock = threading.Lock()

    def count(folder: Path, chunk: chunks.Chunk) -> bytes:
        with lock:
            read.append((chunk.file, chunk.offset))
        return read_chunk(folder, chunk)

    monkeypatch.setattr(staging, "read_chunk", count)
    copies: list[Path] = []

    def start(node: int | None) -> None:
        copies.append(staging.stage(model, tmp_path / f"node-{node}", meeting(run, 8, node)))

    threads = [threading.Thread(target=start, args=(node,)) for node in range(8) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(copies) == 16 and len(set(copies)) == 8
    assert sorted(read) == sorted((chunk.file, chunk.offset) for chunk in table.chunks)
    start(None)
    assert len(read) == len(table.chunks)
    for copy in copies:
        assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
            path.name: path.read_bytes() for path in model.iterdir()
        }


def test_the_share_of_a_node_that_never_comes_is_read_from_the_shared_folder(
    model: Path, run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PEER_WAIT_S", 0.1)
    copy = staging.stage(model, tmp_path / "node", meeting(run, 3, 1))
    assert (copy / "a.safetensors").read_bytes() == (model / "a.safetensors").read_bytes()


@pytest.mark.usefixtures("no_locks")
def test_a_model_is_copied_on_a_filesystem_without_locks(model: Path, run: RunDir, tmp_path: Path) -> None:
    copies = [staging.stage(model, tmp_path / "node", meeting(run, 1, 0)) for _ in range(2)]
    assert copies[0] == copies[1] and (copies[0] / "config.json").read_text() == "{}"


def test_a_damaged_shared_file_is_refused_and_the_shared_folder_is_used(
    model: Path,
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blob = (model / "b.safetensors").resolve()
    blob.write_bytes(b"y" * blob.stat().st_size)
    with pytest.raises(DataError, match=r"b\.safetensors has the checksum"):
        staging.stage(model, tmp_path / "node", meeting(run, 1, 0))
    assert [path.suffix for path in (tmp_path / "node").iterdir()] == [".lock"]
    monkeypatch.setattr(staging, "SMALL_BYTES", 0)
    (tmp_path / "private").mkdir()
    for name, value in {
        "TMPDIR": str(tmp_path / "private"),
        env.PRIVATE_TMP: "x",
        env.RUN_DIR: str(run.root),
        env.STAGE_MODELS: json.dumps({"nodes": [0], "own": [0], "hosts": 1}),
    }.items():
        monkeypatch.setenv(name, value)
    assert staging.local_copy(str(model)) == str(model)
    assert "reading the shared folder" in caplog.text
    monkeypatch.delenv(env.STAGE_MODELS)
    assert staging.local_copy("org/model") == "org/model"


def test_a_peer_sends_chunks_only_to_processes_of_the_attempt(
    model: Path, run: RunDir, tmp_path: Path
) -> None:
    table, keys = list_chunks(model, CHUNK), run_keys(run)
    copy = LocalCopy(table, tmp_path / "copy")
    copy.create()
    copy.write(0, read_chunk(model, table.chunks[0]))
    with peers.serve_chunks(copy, keys, "p", "127.0.0.1") as url:
        client = peers.PeerClient(keys, table.digest)
        assert client.fetch(url, 0) == read_chunk(model, table.chunks[0])
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            client.fetch(url, len(table.chunks))
        answer = httpx.get(f"{url}/{table.digest}/0", verify=keys.client_context(), trust_env=False)
        assert answer.status_code == 401
        with pytest.raises(httpx.ConnectError):  # another certificate authority
            httpx.get(f"{url}/{table.digest}/0", trust_env=False)
        client.close()


def test_engines_and_trainer_know_the_nodes_that_load_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["cache={path: /shared/cache, stage_models: true}", "scratch=/local"]
    profile = load_profile("h100x64", overrides=overrides).profile
    recipe = load_recipe("reverse_text/qwen3_0.6b", overrides=["layout.trainer.ranks=8"]).recipe
    plan = compile_plan(recipe, profile, run_dir="/r", python="/py")
    phase = plan.phases[-1]
    values = {process.name: process.env.get(env.STAGE_MODELS) for process in phase.processes}
    readers = json.loads(values["trainer-0"] or "")
    assert readers["own"] == list(phase.process("trainer-0").nodes) and set(readers["own"]) <= set(
        readers["nodes"]
    )
    assert json.loads(values["inference-0"] or "")["nodes"] == readers["nodes"]
    assert values["router-0"] is None and values["orchestrator-0"] is None
    plain = compile_plan(recipe, load_profile("h100x64").profile, run_dir="/r", python="/py")
    assert not any(env.STAGE_MODELS in process.env for process in plain.phases[-1].processes)
