"""Compile caches are kept between jobs: a second process in another folder compiles nothing."""

from __future__ import annotations

import json
import os
import sys
import tarfile
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common import env
from primerl_hpc.common.node.compile_caches import CompileCaches, accelerator_facts, cache_key
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from tests.support.helpers import PATIENCE_S, ROOT, captured

COMPILE = """
import json, os, sys, tempfile
import torch, torch._inductor.compile_fx  # the jobs fork: this import takes most of their time
from torch._dynamo.utils import counters
def compile_in_job(variables):
    os.environ.update(variables)
    tempfile.tempdir = None
    from primerl_hpc.common.node.compile_caches import kept_caches
    caches = kept_caches("trainer", "org/model")
    function = torch.compile(lambda x: (x.sin() * 2 + x.cos()).sum())
    value = float(function(torch.arange(64.0)))
    is_saved = caches.save()
    found = {name: counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")}
    print(json.dumps({**found, "value": value, "saved": is_saved}), flush=True)
context = torch.multiprocessing.get_context("fork")
for variables in json.loads(sys.argv[1]):
    job = context.Process(target=compile_in_job, args=(variables,))
    job.start()
    job.join()
    if job.exitcode:
        sys.exit(job.exitcode)
"""


def compile_in_jobs(folders: list[Path], store: Path) -> list[dict[str, float]]:
    """Compile a function in one job after the other, whose private folders are ``folders``."""
    jobs = []
    for folder in folders:
        folder.mkdir(mode=0o700)
        jobs.append({"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")})
    variables = {
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # more are processes, which import torch too
        env.PRIVATE_TMP: "x",
        env.COMPILE_STORE: json.dumps({"folder": str(store), "max_gib": 1}),
    }
    done = captured(
        [sys.executable, "-c", COMPILE, json.dumps(jobs)],
        env={**os.environ, **variables},
        check=True,
        timeout=PATIENCE_S,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_a_second_job_compiles_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    first, second = compile_in_jobs([tmp_path / "job-1", tmp_path / "job-2"], tmp_path / "compile")
    assert (first["fxgraph_cache_hit"], first["fxgraph_cache_miss"], first["saved"]) == (0, 1, True)
    assert (second["fxgraph_cache_hit"], second["fxgraph_cache_miss"], second["saved"]) == (1, 0, False)
    assert second["value"] == first["value"]
    with tarfile.open(next((tmp_path / f"compile-{os.getuid()}").glob("*.tar"))) as archive:
        assert any(
            name.endswith(".so") for name in archive.getnames()
        )  # compiled C++, which was not built again


def caches(tmp_path: Path, job: str, max_bytes: int = 1 << 20, key: str = "k") -> CompileCaches:
    local = tmp_path / job
    local.mkdir(exist_ok=True)
    return CompileCaches(local, tmp_path / "store", key, max_bytes)


def put(one: CompileCaches, name: str, data: bytes) -> None:
    path = one.local / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_text_files_name_the_folder_of_the_new_job(tmp_path: Path) -> None:
    """Triton's group files contain absolute paths; with those of the old job it would compile again."""
    first, second = caches(tmp_path, "job-1"), caches(tmp_path, "job-2")
    put(
        first,
        "triton/x/__grp__k.json",
        json.dumps({"child_paths": {"k.cubin": f"{first.local}/triton/x/k.cubin"}}).encode(),
    )
    put(first, "triton/x/k.cubin", b"\0binary")
    put(first, "triton/x/k.lock", b"")
    put(first, "other/secret", b"")
    assert first.save() and not first.save()
    assert second.restore()
    paths = json.loads((second.local / "triton/x/__grp__k.json").read_text())["child_paths"]
    assert Path(paths["k.cubin"]).read_bytes() == b"\0binary" and paths["k.cubin"].startswith(
        str(second.local)
    )
    assert (
        set(second.files()) == {"triton/x/__grp__k.json", "triton/x/k.cubin"}
        and not (second.local / "other").exists()
    )
    put(second, "triton/y/l.cubin", b"")
    assert second.save()


@pytest.mark.usefixtures("no_locks")
def test_caches_are_kept_on_a_filesystem_without_locks(tmp_path: Path) -> None:
    first, second = caches(tmp_path, "job-1"), caches(tmp_path, "job-2")
    put(first, "inductor/a", b"a")
    assert first.save() and second.restore() and set(second.files()) == {"inductor/a"}


def test_archives_that_others_can_write_are_ignored(tmp_path: Path) -> None:
    first, second = caches(tmp_path, "job-1"), caches(tmp_path, "job-2")
    put(first, "inductor/a", b"a")
    assert first.save()
    first.archive.chmod(0o666)
    assert not second.restore()
    first.archive.chmod(0o600)
    first.store.chmod(0o777)
    assert not second.restore() and list(second.local.iterdir()) == []
    first.store.chmod(0o700)
    first.archive.write_bytes(b"no archive")
    assert not second.restore()


def test_the_size_is_bounded_and_one_process_writes(tmp_path: Path) -> None:
    for number in range(4):
        one = caches(tmp_path, f"job-{number}", 50_000, key=f"k{number}")
        put(one, "inductor/a", bytes(15_000))
        assert one.save()
        os.utime(one.archive, (number, number))
    assert sorted(path.name for path in (tmp_path / "store").glob("*.tar")) == ["k2.tar", "k3.tar"]
    large = caches(tmp_path, "large", 10_000, key="large")
    put(large, "inductor/a", bytes(15_000))
    assert not large.save()
    busy = caches(tmp_path, "busy", key="busy")
    put(busy, "inductor/a", b"a")
    (tmp_path / "store" / "busy.lock").touch()
    assert not busy.save()
    os.utime(tmp_path / "store" / "busy.lock", (1, 1))  # its writer died
    assert busy.save() and not (tmp_path / "store" / "busy.lock").exists()


def test_the_key_depends_on_role_model_and_gpu(tmp_path: Path) -> None:
    assert len({cache_key("trainer", "a"), cache_key("trainer", "b"), cache_key("inference", "a")}) == 3
    for model in ("NVIDIA H100", "NVIDIA A100"):
        folder = tmp_path / model / "driver/nvidia/gpus/0000:01"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t {model}\nGPU UUID: \t unique\n")
    h100, a100 = (accelerator_facts(tmp_path / model, tmp_path) for model in ("NVIDIA H100", "NVIDIA A100"))
    assert "Model: NVIDIA H100" in h100 and h100 != a100 and "unique" not in str(h100)


def test_engines_and_trainers_of_such_a_profile_know_the_store() -> None:
    loaded = load_profile(
        "h100x64", overrides=["cache={path: /shared, keep_compiled: true, compiled_gib: 5}"]
    )
    recipe = load_recipe("reverse_text/qwen3_0.6b").recipe
    phase = compile_plan(recipe, loaded.profile, run_dir="/r", python="/py").phases[-1]
    values = {process.name: process.env.get(env.COMPILE_STORE) for process in phase.processes}
    assert json.loads(values["trainer-0"] or "") == {"folder": "/shared/compile", "max_gib": 5.0}
    assert values["inference-0"] == values["trainer-0"] and values["router-0"] is None
