"""Files that another user prepared or can write: they are not executed, and nothing is written outside a folder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common import assets
from primerl_hpc.common.errors import DataError, ExitCode, OccupiedError
from primerl_hpc.common.files import listed_file, read_json, write_json, write_text
from primerl_hpc.common.names import Role
from primerl_hpc.export.export import export_model
from primerl_hpc.inference import routes
from primerl_hpc.inference.server import weight_roots
from primerl_hpc.launch.submit import prepare_run
from primerl_hpc.recipe.load import load_recipe, parse_recipe
from primerl_hpc.render.job import render_job
from primerl_hpc.run.access.elsewhere import MARKER, link_part
from primerl_hpc.run.access.ownership import check_own, executed_paths, make_private, writable_by_others
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.runtime.step import Launch
from tests.support.helpers import TOY_RECIPE, captured, make_plan, process_plan, unusable_sft_recipe
from tests.support.stranger import NOBODY, as_stranger
from tests.unit.transport.test_weights_delta import write_full


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.fixture
def prepared(tmp_path: Path, open_umask: None, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run directory below a project's setgid folder, created by a user with umask 002 who accepts that."""
    project = tmp_path / "project"
    project.mkdir()
    os.chown(project, -1, NOBODY)
    project.chmod(0o2770)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)  # pytest's own
    monkeypatch.chdir(tmp_path)
    # the supervisor of this script ends at once, and records why
    changes = ["software.setup=[exit 3]", "allow_shared_parent=true"]
    profile = load_profile("local", environ={}, overrides=changes)
    run, _ = prepare_run(load_recipe(unusable_sft_recipe(tmp_path), environ={}), profile, project / "run")
    return run


def bits(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o777


def test_a_run_directory_is_private_below_a_setgid_folder_with_an_open_umask(prepared: RunDir) -> None:
    assert bits(prepared.root) == bits(prepared.launch) == bits(prepared.control) == 0o700
    with pytest.raises(PermissionError):
        as_stranger(prepared.plan.read_bytes)
    check_own(prepared)


@pytest.mark.parametrize("what", ["root", "plan", "launch", "script", "setup"])
def test_files_that_another_user_can_write_are_not_executed(prepared: RunDir, what: str) -> None:
    path = {
        "root": prepared.root,
        "plan": prepared.plan,
        "launch": prepared.launch,
        "script": prepared.launch / "job.sbatch",
        "setup": prepared.launch / "setup.sh",
    }[what]
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(OccupiedError, match="is writable by other users"):
        check_own(prepared)
    done = captured([sys.executable, "-m", "primerl_hpc.runtime.supervisor", str(prepared.root)])
    assert done.returncode == ExitCode.OCCUPIED and "chmod go-w" in done.stderr, done.stderr


def test_a_run_that_another_user_prepared_is_neither_resumed_nor_run_by_hand(
    prepared: RunDir, tmp_path: Path
) -> None:
    for path in executed_paths(prepared):
        if path.exists():
            os.chown(path, NOBODY, NOBODY)
    words = (["resume", str(prepared.root)], ["role", "trainer", str(prepared.root)])
    for command in words:
        done = captured([sys.executable, "-m", "primerl_hpc", *command])
        assert done.returncode == ExitCode.OCCUPIED, done.stderr
        assert "belongs to" in done.stderr and "checkpoint.fork" in done.stderr


def test_a_link_in_place_of_the_plan_is_refused(prepared: RunDir, tmp_path: Path) -> None:
    shutil.move(prepared.plan, tmp_path / "plan.json")
    prepared.plan.symlink_to(tmp_path / "plan.json")
    with pytest.raises(OccupiedError, match="symbolic link"):
        check_own(prepared)


def start_as_slurm_does(prepared: RunDir, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run the copy of the batch script that SLURM made at submission."""
    return captured(["bash", str(tmp_path / "spooled")], cwd=tmp_path)


def plant_package(prepared: RunDir, tmp_path: Path) -> None:
    """As a member of the project's group: put an own run directory in the place of the one whose job waits."""
    prepared.root.rename(prepared.root.with_name("taken"))
    runtime = prepared.root / "code" / "1" / "primerl_hpc" / "runtime"
    runtime.mkdir(parents=True)
    prepared.launch.mkdir()
    for folder in (runtime.parent, runtime):
        (folder / "__init__.py").touch()
    (runtime / "supervisor.py").write_text("print('code of the colleague')")


def test_a_run_directory_that_was_replaced_while_the_job_waited_runs_nothing(
    prepared: RunDir, tmp_path: Path
) -> None:
    shutil.copy(prepared.launch / "job.sbatch", tmp_path / "spooled")
    done = start_as_slurm_does(prepared, tmp_path)
    assert done.returncode == ExitCode.CONFIG, done.stderr
    state = read_json(prepared.state)
    assert state["state"] == "failed" and "exit 3" in json.dumps(state), "the run's own copy was executed"
    as_stranger(lambda: plant_package(prepared, tmp_path))
    done = start_as_slurm_does(prepared, tmp_path)
    assert_refused(done, "was replaced, or other users own or can write its parts: ., launch, code, ")
    shutil.rmtree(prepared.root / "launch")
    assert_refused(start_as_slurm_does(prepared, tmp_path), "can write its parts: ., code, ")
    shutil.rmtree(prepared.root)
    assert_refused(start_as_slurm_does(prepared, tmp_path), "cannot be opened: it was deleted, moved or")
    as_stranger(lambda: prepared.root.symlink_to("taken"))
    assert_refused(start_as_slurm_does(prepared, tmp_path), "was replaced by a symbolic link")


def assert_refused(done: subprocess.CompletedProcess[str], reason: str) -> None:
    """The last line states what happened and what to do; lines of other programs come before it."""
    last = done.stderr.splitlines()[-1]
    assert done.returncode == ExitCode.OCCUPIED and "colleague" not in done.stdout, done
    assert last.startswith("error: nothing of ") and reason in last and "primerl-hpc resume" in last, last


def test_a_folder_above_that_others_can_write_is_refused_unless_the_submission_accepted_it(
    prepared: RunDir,
) -> None:
    check_own(prepared)
    project = prepared.root.parent
    with pytest.raises(OccupiedError, match=r"other users may write to .*project \(mode 2770\)"):
        recipe = load_recipe("recipe.yaml", environ={})
        prepare_run(recipe, load_profile("local", environ={}), project / "other")
    assert not (project / "other").exists()
    write_json(prepared.plan, {**read_json(prepared.plan), "allow_shared_parent": False}, mode=0o600)
    with pytest.raises(OccupiedError, match="can replace the run directory") as caught:
        check_own(prepared)
    for way in ("chmod g-w,o-w", "chmod +t", "--run-dir", "--allow-shared-parent"):
        assert way in str(caught.value)
    project.chmod(0o3770)
    check_own(prepared)


def test_a_folder_in_which_others_can_plant_a_lock_is_not_taken_for_an_interrupted_submission(
    prepared: RunDir, tmp_path: Path
) -> None:
    results = RunDir(tmp_path / "results")
    write_text(results.root / "own" / "thesis", "text")
    results.root.chmod(0o777)

    def plant() -> None:
        results.submission_lock.write_text("{}")
        os.utime(results.submission_lock, (0, 0))

    as_stranger(plant)
    with pytest.raises(OccupiedError, match="not empty"):
        prepare_run(load_recipe("recipe.yaml", environ={}), load_profile("local", environ={}), results.root)
    assert (results.root / "own" / "thesis").exists()


def test_a_parent_folder_that_others_can_write_is_named(tmp_path: Path) -> None:
    make_private(tmp_path / "private")
    assert writable_by_others(tmp_path / "private" / "runs") is None
    open_folder = tmp_path / "open"
    make_private(open_folder, 0o777)
    assert writable_by_others(open_folder / "runs" / "x") == open_folder
    make_private(open_folder / "own" / "runs")
    assert writable_by_others(open_folder / "own" / "runs") == open_folder, (
        "a folder above can be replaced, too"
    )
    open_folder.chmod(0o1777)
    assert writable_by_others(open_folder / "runs") is None, "only an entry's owner may replace it there"
    open_folder.chmod(0o775)
    assert writable_by_others(open_folder) is None, "the group has no other members"
    os.chown(open_folder, -1, NOBODY)
    assert writable_by_others(open_folder) == open_folder


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "a/b", "..", ".", "", "a\0b", None, 7, ["a"]])
def test_a_listed_name_is_a_single_component(tmp_path: Path, name: object) -> None:
    with pytest.raises(DataError, match="not a plain file name"):
        listed_file(tmp_path, name)
    assert listed_file(tmp_path, "model-00001.safetensors") == tmp_path / "model-00001.safetensors"


def test_an_export_of_a_hostile_run_writes_nothing_outside_its_folder(
    prepared: RunDir, tmp_path: Path
) -> None:
    write_full(prepared, 1)
    folder, secret = prepared.weights_step(1), b"import os"
    (folder.parent / "evil.pth").write_bytes(secret)
    manifest = read_json(folder / "manifest.json")
    manifest["files"].append({"name": "../evil.pth", "size_bytes": len(secret), "crc32": zlib.crc32(secret)})
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(DataError, match=r"lists '\.\./evil\.pth'"):
        export_model(prepared, tmp_path / "out" / "model", step=1)
    assert not list((tmp_path / "out").rglob("*.pth")) and not (tmp_path / "out" / "model").exists()


def test_an_engine_loads_no_weights_from_outside_its_run(tmp_path: Path) -> None:
    """Otherwise a client with the API key could make an engine copy any folder of the run's user."""
    run = RunDir(tmp_path / "run")
    (run.root / "weights").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (run.root / "weights" / "step_9").symlink_to(tmp_path / "secret")
    state = routes.EngineState(
        "inference-0", 1, 0, 0, api_key="k", base_path="org/base", weight_roots=(run.root,)
    )
    routes.install(state)
    app = Starlette()
    app.add_middleware(routes.EngineRoutes)
    bodies = [
        {"path": str(tmp_path / "secret"), "version": 1},
        {"path": str(run.root / "weights" / ".." / ".." / "secret"), "version": 1},
        {"path": str(run.root / "weights" / "step_9"), "version": 9},
        {"path": "other/hub-id", "version": 1},
        {"path": str(run.root), "version": 2, "base": 1, "links": [[2, str(tmp_path / "secret")]]},
    ]

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        headers = {"Authorization": "Bearer k"}
        async with httpx.AsyncClient(transport=transport, base_url="http://e", headers=headers) as client:
            return [await client.post("/update_weights", content=json.dumps(body)) for body in bodies]

    for body, answer in zip(bodies, asyncio.run(ask()), strict=True):
        assert answer.status_code == 403, body
        assert "neither in a folder of this run nor its base model" in answer.json()["error"]


def test_an_engine_loads_versions_of_its_run_from_the_folder_that_holds_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    recipe = parse_recipe(TOY_RECIPE)
    link_part(run, "weights", tmp_path / "work")
    home = run.weights.resolve().parent
    assert weight_roots(run, recipe) == (run.root, home)
    write_text(home / MARKER, "/another/run\n")
    assert weight_roots(run, recipe) == (run.root,)


def test_an_engine_loads_the_folder_of_an_evaluation(tmp_path: Path) -> None:
    recipe = {
        "kind": "eval",
        "name": "x",
        "model": {"name": "m"},
        "seq_len": 1024,
        "environments": {"eval": [{"id": "reverse-text"}]},
        "evaluation": {"weights": "/other/run/weights"},
    }
    roots = weight_roots(RunDir(tmp_path), parse_recipe(recipe))
    assert roots == (tmp_path, Path("/other/run/weights"))


def test_a_module_in_the_submit_folder_does_not_replace_pythons_own(tmp_path: Path) -> None:
    """`python -m` searches the working directory first, and colleagues may be able to write to a project folder."""
    plan = make_plan(
        tmp_path / "run",
        {"kind": "inference", "name": "x", "model": {"name": "m"}},
        processes=[process_plan(Role.ROUTER)],
    )
    (tmp_path / "project").mkdir()
    for name in ("heapq", "json", "selectors"):
        (tmp_path / "project" / f"{name}.py").write_text("raise SystemExit('a planted module ran')\n")
    launch = Launch(plan.phases[0].processes[0], RunDir(tmp_path / "run"), "main", 1, 0)
    script = render_job(
        plan, load_profile("local", environ={}).profile, python=sys.executable, package_root=None
    )
    from_script = dict(re.findall(r"^export (\w+)=(\S+)", script, re.MULTILINE))
    for variables in (launch.environment, from_script):
        environment = {**os.environ, **variables}
        done = captured(
            [
                sys.executable,
                "-m",
                "primerl_hpc.runtime.steps.guard",
                "--",
                sys.executable,
                "-m",
                "primerl_hpc",
                "--help",
            ],
            cwd=tmp_path / "project",
            env=environment,
        )
        assert done.returncode == 0, done.stderr


def test_assets_above_a_checkout_are_used_only_if_owned_by_the_user_or_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "project" / "checkout" / "primerl_hpc" / "common" / "assets.py"
    shared = tmp_path / "project" / "share" / "primerl-hpc"
    for folder in (package.parent, shared):
        folder.mkdir(parents=True)
    monkeypatch.setattr(assets, "__file__", str(package))
    assets.shipped_roots.cache_clear()
    try:
        assert shared in assets.asset_roots()
        os.chown(shared, NOBODY, NOBODY)
        assets.shipped_roots.cache_clear()
        assert shared not in assets.asset_roots()
    finally:
        assets.shipped_roots.cache_clear()
