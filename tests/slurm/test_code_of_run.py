"""Attempts of a run execute the code that was copied for it, whatever happens to the checkout meanwhile."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import load_profile
from primerl_hpc.common.files import read_json, write_text
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.common.package import PACKAGE_ZIP
from primerl_hpc.launch.submit import resume_run
from primerl_hpc.offline.bundle.build import build
from primerl_hpc.offline.bundle.environment import inspect_environment
from primerl_hpc.offline.bundle.formats import Format
from primerl_hpc.offline.bundle.manifest import plan_bundle
from primerl_hpc.offline.code.keep import CodeChoice
from primerl_hpc.plan.plan import BUNDLE_MANIFEST, BUNDLE_PYTHON, OnExit
from tests.support.cluster_user import ClusterUser
from tests.support.helpers import ROOT, TOY_RECIPE, wait_for
from tests.support.small_environment import make_environment
from tests.support.virtual_slurm import SlurmToy, run_cli

TRAIN = """
import os, sys, time
from pathlib import Path
import my_losses, primerl_hpc
from primerl_hpc.common import package
from primerl_hpc.common.env import package as expected
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
package.check_package(expected())
run, name = RunDir(Path(sys.argv[1])), sys.argv[3]
print("package", Path(primerl_hpc.__file__).parents[1], getattr(package, "EDITION", "none"), flush=True)
print("losses", my_losses.EDITION, my_losses.__file__, flush=True)
publish_endpoint(run, name, "http://x:1")
while not run.stop_request.exists():
    time.sleep(0.05)
sys.exit(75)
"""
SAY_PREFIX = """
import sys, time
from pathlib import Path
from primerl_hpc.run.endpoints import publish_endpoint
from primerl_hpc.run.rundir import RunDir
run, name = RunDir(Path(sys.argv[1])), sys.argv[3]
print("prefix", sys.prefix, flush=True)
publish_endpoint(run, name, "http://x:1")
while not run.stop_request.exists():
    time.sleep(0.05)
sys.exit(75)
"""


def edit(checkout: Path, edition: str) -> None:
    """Change the checkout without a commit: the package, and a module that the recipe names."""
    module = checkout / "primerl_hpc" / "common" / "package.py"
    text = module.read_text().partition("\nEDITION = ")[0]
    module.write_text(f"{text}\nEDITION = {edition!r}\n")
    (checkout / "lib" / "my_losses.py").write_text(f"EDITION = {edition!r}\n")


@pytest.mark.slow
def test_a_dirty_checkout_edited_between_two_attempts_does_not_change_the_run(
    new_toy: Callable[..., SlurmToy], tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("primerl_hpc", "templates", "cluster_profiles"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", checkout)
    (checkout / "lib").mkdir()
    git = ["git", "-C", str(checkout), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    edit(checkout, "as submitted")

    toy = new_toy()
    toy.recipe = {**TOY_RECIPE, "loss": {"type": "custom", "import_path": "my_losses:clipped"}}
    environment = {"PYTHONPATH": str(checkout / "lib")}
    toy.add(Role.TRAINER, TRAIN, OnExit.ENDS_PHASE, env=environment)
    toy.prepare()
    write_text(toy.run.profile, load_profile("virtual", overrides=["scheduler.time=00:10:00"]).text)

    def resume(*more: str) -> None:
        environ = {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
        done = run_cli("resume", str(toy.run.root), "--json", *more, **environ)
        assert done.returncode == 0 and json.loads(done.stdout)["job_id"], done.stdout + done.stderr

    def runs(attempt: int, copy: int, edition: str) -> None:
        toy.wait_until_ready("trainer-0", attempt=attempt)
        folder = toy.run.code_copy(copy)
        toy.wait_for_words(f"package {folder / PACKAGE_ZIP} {edition}", "trainer-0", attempt)
        toy.wait_for_words(f"losses {edition} {folder}/modules/1/my_losses.py", "trainer-0", attempt)
        assert toy.events("attempt_started")[-1]["code"] == f"code/{copy}"

    resume("--new-code")  # a run that the toy prepared has no copy yet
    assert read_json(toy.run.provenance)["code_copies"][0]["package"]["git"]["dirty"] is True
    runs(1, 1, "as submitted")

    edit(checkout, "of the day after")
    subprocess.run(["scontrol", "requeue", toy.job], check=True)
    runs(2, 1, "as submitted")

    stop_request(toy)
    resume()
    runs(3, 1, "as submitted")

    stop_request(toy)
    resume("--new-code")
    runs(4, 2, "of the day after")
    stop_request(toy)
    first, second = read_json(toy.run.provenance)["code_copies"]
    assert (first["folder"], second["folder"]) == ("code/1", "code/2") and first["digest"] != second["digest"]


def stop_request(toy: SlurmToy) -> None:
    toy.run.stop_request.write_text("{}")
    toy.wait_for_state(RunState.STOPPED)
    toy.cluster.wait_until_idle()
    wait_for(lambda: not toy.cluster.processes_of(toy.run), "the end of its processes")


def test_every_node_runs_from_its_own_copy_of_the_bundle_and_deletes_it(
    new_toy: Callable[..., SlurmToy], acting_user: ClusterUser, tmp_path: Path
) -> None:
    """And those that killed jobs left, but not that of a job which may still use it."""
    bundle = tmp_path / "env.tar.gz"
    build(inspect_environment(str(make_environment(tmp_path / "venv"))), bundle, Format.TAR_GZ)
    scratch = f"/mnt/bundles-{tmp_path.name}"  # /mnt is private to a node
    changes = [f"software.bundle={bundle}", f"scratch={scratch}"]
    profile = load_profile("virtual", overrides=["scheduler.time=00:10:00", *changes])
    toy = new_toy()
    toy.add(Role.TRAINER, SAY_PREFIX, OnExit.ENDS_PHASE, nodes=(0, 1))
    process = toy.processes[0]
    toy.processes = [process.model_copy(update={"argv": (BUNDLE_PYTHON, *process.argv[1:])})]
    toy.plan_changes = {"bundle": plan_bundle(bundle, profile.profile)}
    toy.profile = profile.profile
    toy.prepare()
    write_text(toy.run.profile, profile.text)
    hold = ("sbatch", "--parsable", "--hold", "-o", "/dev/null", "--wrap", "true")
    queued, cancelled = (toy.ask(*hold).strip() for _ in range(2))
    toy.ask("scancel", cancelled)
    prefix = f"{scratch}/primerl-bundle-{acting_user.uid}-"
    left = {job: f"{prefix}{job}-0123456789abcdef" for job in (queued, cancelled, "99999999")}
    for node in ("n1", "n2", "n3", "n4"):
        toy.cluster.on(node, "mkdir", "-p", *(f"{folder}/bin" for folder in left.values()))
        toy.cluster.on(node, "touch", *(f"{folder}/{BUNDLE_MANIFEST}" for folder in left.values()))
        toy.cluster.on(node, "chown", "-R", str(acting_user.uid), scratch)
    toy.as_user(lambda: resume_run(toy.run, code=CodeChoice.NEW))
    folder = f"{prefix}{toy.job}-"
    toy.wait_until_ready("trainer-0")
    hosts = read_json(toy.run.state)["hosts"]
    for node, host in enumerate(hosts):
        log = toy.run.attempt_logs(1) / f"trainer-0_{node}.log"
        wait_for(lambda log=log: log.exists() and "prefix" in log.read_text(), "its prefix", tell=toy.words)
        assert f"prefix {folder}" in log.read_text()
        kept, own = sorted(toy.cluster.on(host, "ls", scratch).split())  # no archive is left
        assert f"{scratch}/{kept}" == left[queued] and f"{scratch}/{own}".startswith(folder)
    log = toy.run.attempt_logs(1) / "slurm" / "bundle.log"
    assert "sbcast" not in log.read_text(), "it was not sent from node to node"
    (event,) = toy.events("bundle_unpacked")
    assert (event["nodes"], event["bad"]) == (2, 0)
    stop_request(toy)
    for host in hosts:
        assert toy.cluster.on(host, "ls", scratch).split() == [Path(left[queued]).name]
    toy.ask("scancel", queued)
