"""Caches, scratch folders and adapters that other users can write: nothing is deleted, executed or blocked by them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from starlette.applications import Starlette

from primerl_hpc.checks.doctor import examine
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import Role
from primerl_hpc.inference import routes
from primerl_hpc.offline.prefetch.inventory import look, marker_path
from primerl_hpc.offline.prefetch.needs import Need, NeedKind
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.transport.base_models.hub_cache import open_cache
from primerl_hpc.transport.tensor_file import write_parts
from tests.support.hub import COMMIT, cache_model, serve_hub
from tests.support.stranger import as_stranger
from tests.unit.offline.bundle.test_bundle import bundle, planned, python, unpack  # noqa: F401 (fixtures)
from tests.unit.offline.test_prefetch import LOCAL_ROWS, MODELS, end, here, start  # noqa: F401 (a fixture)

# -- the hub cache ---------------------------------------------------------------------------------


def test_prefetch_deletes_no_file_that_a_planted_link_names(here: Path) -> None:  # noqa: F811
    """Its content differs from the hub's checksum, and a file that differs is deleted."""
    snapshot = here / "cache" / "hub" / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (here / "precious").write_text("mine")
    (snapshot / "config.json").symlink_to(here / "precious")
    with serve_hub({}, models=MODELS) as url:
        code, items, err = end(start(url, *LOCAL_ROWS))
        assert (here / "precious").read_text() == "mine"
        assert code != 0 and "link to a file outside of the cache" in str(items), (items, err)
        code, items, _ = end(start(url, *LOCAL_ROWS))
    assert code == 0 and (snapshot / "config.json").read_bytes() == MODELS["org/model"]["config.json"]


@pytest.mark.parametrize(
    "marker",
    [
        [1],
        {"commit": COMMIT},
        {"commit": COMMIT, "files": 3},
        {"commit": COMMIT, "files": {"config.json": 3}},
        {"commit": COMMIT, "files": {"../../../../precious": {"size": 4}}},
    ],
    ids=str,
)
def test_a_marker_of_another_user_is_read_or_ignored(tmp_path: Path, marker: Any) -> None:
    need = Need(NeedKind.MODEL, "org/model", Role.TRAINER, {"HF_HUB_CACHE": str(tmp_path / "hub")})
    cache_model(tmp_path / "hub", "org/model")
    write_json(marker_path(need), marker)
    assert look(need).is_complete


def test_a_cache_that_others_can_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from primerl_hpc.cluster.load import load_profile

    cache_model(tmp_path / "hub", "org/model")
    assert open_cache(tmp_path / "hub") is None and open_cache(tmp_path / "none") is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in (tmp_path / "hub", tmp_path / "hub" / "models--org--model"):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(0o777)
        assert f"other users may write to {path}" in str(open_cache(tmp_path / "hub"))
        results = list(examine(load_profile("local", environ={}).profile))
        assert any(f"other users may write to {path}" in result.message for result in results)
        path.chmod(mode)


# -- adapters --------------------------------------------------------------------------------------


class Served:
    """The fields of vLLM's table of models that the routes read."""

    lora_requests: ClassVar[dict[str, Any]] = {}
    base_model_paths: ClassVar[list[Any]] = []


def test_an_engine_loads_no_adapter_that_vllm_would_unpickle_or_that_leads_elsewhere(tmp_path: Path) -> None:
    run, outside = RunDir(tmp_path / "run"), tmp_path / "outside"
    outside.mkdir()
    write_parts(outside / "adapter_model.safetensors", {}, {})
    for name in ("pickled", "linked", "configured"):
        (run.root / name).mkdir(parents=True)
        write_json(run.root / name / "adapter_config.json", {})
    write_parts(run.root / "pickled" / "other.safetensors", {}, {})
    (run.root / "pickled" / "adapter_model.bin").write_bytes(b"pickle")
    (run.root / "linked" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (run.root / "folder").symlink_to(outside)
    routes.install(
        routes.EngineState("inference-0", 1, 0, 0, api_key="k", adapter_roots=(run.root,), max_adapters=2)
    )
    app = Starlette()
    app.add_middleware(routes.EngineRoutes)
    app.state.openai_serving_models = Served()

    async def ask(path: str, folder: Path) -> httpx.Response:
        transport, headers = httpx.ASGITransport(app=app), {"Authorization": "Bearer k"}
        async with httpx.AsyncClient(transport=transport, base_url="http://e", headers=headers) as client:
            return await client.post(path, content=json.dumps({"lora_name": "a", "lora_path": str(folder)}))

    for folder, status, cause in (
        (run.root / "pickled", 422, "it contains no adapter_model.safetensors"),
        (run.root / "linked", 422, "adapter_model.safetensors is a link out of the permitted folders"),
        (run.root / "folder", 403, "neither in the run directory"),
        (run.root / ".." / "outside", 403, "neither in the run directory"),
    ):
        answer = asyncio.run(ask("/load_lora_adapter", folder))
        assert answer.status_code == status and cause in answer.json()["error"], folder
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        answer = asyncio.run(ask(path, outside))
        assert answer.status_code == 404 and "use /load_lora_adapter" in answer.json()["error"]


# -- scratch ---------------------------------------------------------------------------------------


def test_a_folder_that_another_user_created_first_does_not_stop_the_unpacking(
    bundle: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)  # pytest's own
    scratch, plan = tmp_path / "scratch", planned(bundle)
    scratch.mkdir()
    scratch.chmod(0o1777)
    name = f"primerl-bundle-{os.getuid()}-77-{plan.sha256[:12]}"
    as_stranger((scratch / name).mkdir)
    folders = set()
    for _ in range(2):
        done = unpack(plan, tmp_path, str(scratch), SLURM_JOB_ID="77")
        assert done.returncode == 0, done.stderr
        folders.add(done.stdout.strip())
    assert len(folders) == 2, "the name can be guessed"


# -- requests in the run directory -----------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"id": "../../../home"},
        {"id": "/tmp/x"},
        {"id": 7},
        {"id": ["x"]},
        {"ranks": 3},
        {"ranks": ["0"]},
        {"steps": "many"},
        {"steps": -1},
    ],
    ids=str,
)
def test_a_request_for_a_trace_names_no_other_folder_and_does_not_end_the_trainer(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    perf = pytest.importorskip("primerl_hpc.trainer.perf")
    run, request = RunDir(tmp_path), {"id": "20260101-000000", "steps": 2, "ranks": [0]}
    write_json(run.profile_request, request)
    assert perf.StepProfiler(run, 0).find_request() == request
    write_json(run.profile_request, request | change)
    assert perf.StepProfiler(run, 0).find_request() is None
    write_json(run.profile_request, [1])
    assert perf.StepProfiler(run, 0).find_request() is None
