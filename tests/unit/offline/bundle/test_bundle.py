"""A bundle runs wherever it is unpacked, and a node that cannot use it reports why."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import pytest

from primerl_hpc.cluster.load import LoadedProfile, load_profile
from primerl_hpc.common.errors import ConfigError, DataError, NotFoundError
from primerl_hpc.launch.compose import make_scripts, with_bundle
from primerl_hpc.offline.bundle.build import build, try_bundle
from primerl_hpc.offline.bundle.environment import inspect_environment
from primerl_hpc.offline.bundle.formats import WRITERS, Format, choose_format
from primerl_hpc.offline.bundle.inspect_python import inspect
from primerl_hpc.offline.bundle.manifest import manifest_path, note_changes, plan_bundle, read_manifest
from primerl_hpc.plan.plan import BUNDLE_MANIFEST, BUNDLE_PYTHON, BundlePlan, Plan, with_interpreter
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.recipe.load import load_recipe
from primerl_hpc.render.bundle import render_unpack
from tests.support.forked_commands import run_command
from tests.support.helpers import ROOT, captured
from tests.support.small_environment import make_environment
from tests.support.stranger import as_stranger

ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT)}
GOLDEN = ROOT / "tests" / "golden" / "setup"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("environment") / "venv")


@pytest.fixture(scope="module")
def bundle(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("shared") / "env.tar.gz"
    build(inspect_environment(str(python)), target, Format.TAR_GZ)
    return target


def unpack(
    plan: BundlePlan, folder: Path, scratch: str | None = None, *, may_be_shared: bool = False, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the script of a node; without scratch it unpacks into ``folder``."""
    script = render_unpack(plan, owner="a test", scratch=scratch, may_be_shared=may_be_shared)
    arguments = [str(folder)] if scratch is None else []
    return captured(["bash", "-s", *arguments], input=script, env={**os.environ, **environ})


def planned(bundle: Path, **changes: object) -> BundlePlan:
    return plan_bundle(bundle, load_profile("virtual").profile).model_copy(update=changes)


@pytest.mark.parametrize("kind", list(Format))
def test_an_unpacked_bundle_needs_nothing_of_its_environment(
    kind: Format, bundle: Path, python: Path, tmp_path: Path
) -> None:
    target = bundle
    if kind != Format.TAR_GZ:
        reader = {"zstd": "zstd", "sqfstar": "unsquashfs"}[WRITERS[kind][0]]
        if shutil.which(WRITERS[kind][0]) is None or shutil.which(reader) is None:
            pytest.skip(f"{WRITERS[kind][0]} or {reader} is not installed")
        target = tmp_path / f"env.{kind}"
        build(inspect_environment(str(python)), target, kind)
    done = unpack(planned(target), tmp_path / "node" / "env")
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "node" / "env"), done.stderr
    moved = tmp_path / "elsewhere"
    (tmp_path / "node" / "env").rename(moved)
    hidden = python.parents[1].rename(tmp_path / "hidden")
    try:
        code = (
            "import json, sys, sysconfig, pydantic, os, ssl, sqlite3\n"
            "print(json.dumps([sys.prefix, sys.base_prefix, os.__file__, pydantic.__file__,"
            " sysconfig.get_path('include')]))\n"
            "print(open('/proc/self/maps').read())"
        )
        said = captured([str(moved / "bin" / "python"), "-I", "-c", code], check=True)
        first, _, maps = said.stdout.partition("\n")
        folders = json.loads(first)
        base = str(
            inspect_environment(sys.executable).base
        )  # the interpreter that was bundled is still there
        assert base == "/usr" or f"{base}/" not in maps, maps
        assert all(Path(folder).is_relative_to(moved) for folder in folders), folders
        assert (Path(folders[-1]) / "Python.h").is_file()  # of compilers
        script = [str(moved / "bin" / "say-prefix"), "a b"]
        assert subprocess.check_output(script, text=True) == f"{moved} a b\n"
    finally:
        hidden.rename(python.parents[1])
    assert (moved / "bin" / "say-prefix").stat().st_mtime == 1_700_000_000  # compiled files stay valid
    assert not [path for path in moved.rglob("*") if path.is_symlink() and not path.exists()]


def test_a_second_process_of_the_node_uses_the_same_folder(bundle: Path, tmp_path: Path) -> None:
    plan, folder = planned(bundle), tmp_path / "env"
    assert unpack(plan, folder).returncode == 0
    marker = folder / "marker"
    marker.touch()
    again = unpack(plan, folder)
    assert again.stdout.strip() == str(folder) and marker.exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["env"]  # nothing temporary is left


def test_the_scratch_folder_is_expanded_on_the_node(bundle: Path, tmp_path: Path) -> None:
    done = unpack(planned(bundle), tmp_path, "$JOB_DISK/it's ${NAME}/x", JOB_DISK=str(tmp_path), NAME="mine")
    assert Path(done.stdout.strip()).parent == tmp_path / "it's mine" / "x", done.stderr
    missing = unpack(planned(bundle), tmp_path, "/mnt/$NOT_SET_ANYWHERE")
    assert missing.returncode != 0 and "NOT_SET_ANYWHERE: is not set on this node" in missing.stderr


FAULTS = [
    ({"sha256": "0" * 64}, "was changed after this run was submitted"),
    ({"arch": "aarch64"}, "it is built for aarch64, this node is"),
    ({"glibc": "2.99"}, "it needs glibc 2.99, this node has"),
    ({"unpacked_bytes": 1 << 60}, "MiB free, the environment needs"),
    ({"path": "/nonexistent/env.tar.gz"}, "/nonexistent/env.tar.gz cannot be read on this node"),
]


@pytest.mark.parametrize(("changes", "words"), FAULTS, ids=[next(iter(fault)) for fault, _ in FAULTS])
def test_a_node_that_cannot_use_the_bundle_reports_why_and_keeps_nothing(
    changes: dict[str, object], words: str, bundle: Path, tmp_path: Path
) -> None:
    done = unpack(planned(bundle, **changes), tmp_path / "env", SLURMD_NODENAME="n7")
    assert done.returncode == 78 and done.stderr.startswith("error: bundle on n7: ") and words in done.stderr
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir()), done.stderr


ANSWERS = {
    "11": "echo CANCELLED",
    "12": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "13": "echo RUNNING",
    "14": "echo COMPLETED; echo COMPLETING",
    "15": "true",
    "16": "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1",
    "17": "exit 127",
}
"""Job → what squeue does when it is asked for it. The first two have ended."""


@pytest.mark.parametrize(
    ("filesystem", "ended"), [("xfs", {"11", "12"}), ("nfs", set()), ("UNKNOWN (0x19830326)", set())]
)
def test_the_bundle_of_another_job_is_deleted_only_if_slurm_reports_its_end(
    filesystem: str, ended: set[str], bundle: Path, tmp_path: Path
) -> None:
    commands, node = tmp_path / "bin", tmp_path / "node"
    commands.mkdir()
    cases = "".join(f"*--jobs={job}*) {answer} ;;\n" for job, answer in ANSWERS.items())
    scripts = {"squeue": f'case "$*" in\n{cases}esac', "stat": f"echo '{filesystem}'"}
    for name, script in scripts.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    own, *left = (node / f"primerl-bundle-{os.getuid()}-{job}-0123456789abcdef" for job in ("18", *ANSWERS))
    for folder, content in zip((own, *left), cycle([BUNDLE_MANIFEST, ".unpacking"]), strict=False):
        (folder / "bin").mkdir(parents=True)
        (folder / content).touch()
    path = f"{commands}:{os.environ['PATH']}"
    done = unpack(planned(bundle), node / "env", PATH=path, SLURM_JOB_ID="18")
    assert done.returncode == 0 and done.stdout == f"{node / 'env'}\n" and own.exists()
    assert {job for job, folder in zip(ANSWERS, left, strict=True) if not folder.exists()} == ended
    expected = [
        f"deleting the environment that job {job} left: {folder}"
        for job, folder in zip(ANSWERS, left, strict=True)
        if job in ended
    ]
    assert done.stderr.splitlines() == expected


@pytest.mark.parametrize("has_manifest", [False, True])
def test_a_folder_that_another_user_gave_the_name_of_a_bundle_is_kept(
    bundle: Path, tmp_path: Path, has_manifest: bool
) -> None:
    """In a scratch folder without the sticky bit, a stranger renames another folder of the user. A bundle is unpacked
    there only if the profile accepts that, and none is deleted."""
    node, commands = tmp_path / "node", tmp_path / "bin"
    (node / "results").mkdir(parents=True)
    (node / "results" / "paper").touch()
    if has_manifest:
        (node / "results" / BUNDLE_MANIFEST).touch()
    node.chmod(0o777)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)  # pytest's own
    name = f"primerl-bundle-{os.getuid()}-17-0123456789abcdef"
    as_stranger(lambda: (node / "results").rename(node / name))
    commands.mkdir()
    for program, script in (("squeue", "echo CANCELLED"), ("stat", "echo xfs")):
        (commands / program).write_text(f"#!/bin/sh\n{script}\n")
        (commands / program).chmod(0o755)
    path = f"{commands}:{os.environ['PATH']}"
    refused = unpack(planned(bundle), node / "env", PATH=path, SLURM_JOB_ID="18")
    assert refused.returncode == 78 and "other users can rename the entries of" in refused.stderr
    done = unpack(planned(bundle), node / "env", may_be_shared=True, PATH=path, SLURM_JOB_ID="18")
    assert done.returncode == 0 and done.stderr == "" and (node / name / "paper").exists()


def test_a_folder_of_another_kind_is_not_used(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    done = unpack(planned(bundle), tmp_path / "env")
    assert done.returncode == 78 and "is not a complete bundle of this user" in done.stderr


def test_bundles_that_no_run_can_use_are_refused_before_the_queue(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        read_manifest(tmp_path / "none.tar.gz")
    copy = tmp_path / "env.tar.gz"
    shutil.copy(bundle, copy)
    with pytest.raises(NotFoundError, match=r"env\.tar\.gz\.json does not exist"):
        read_manifest(copy)
    shutil.copy(manifest_path(bundle), manifest_path(copy))
    with copy.open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match="but its manifest names"):
        read_manifest(copy)
    profile = load_profile("virtual").profile
    grace = profile.model_copy(update={"node": profile.node.model_copy(update={"arch": "aarch64"})})
    if read_manifest(bundle).arch != "aarch64":
        with pytest.raises(ConfigError, match="nodes of profile 'virtual' are aarch64"):
            plan_bundle(bundle, grace)
    small = load_profile("virtual", overrides=["scratch={path: /mnt, size_gib: 0.001}"]).profile
    with pytest.raises(
        ConfigError, match=r"needs 0\.\d GiB on each node, but scratch \(/mnt\) has 0.001 GiB"
    ):
        plan_bundle(bundle, small)


def test_a_damaged_archive_is_found_when_it_is_tried(bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "env.tar.gz"
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 0xFF
    copy.write_bytes(data)
    shutil.copy(manifest_path(bundle), manifest_path(copy))
    with pytest.raises(DataError, match="checksum differs"):
        try_bundle(copy, tmp_path)


def test_environments_that_are_incomplete_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/bin/false cannot be run here"):
        inspect_environment("/bin/false")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(tmp_path / "v")],
        check=True,
    )
    with pytest.raises(ConfigError, match="include-system-site-packages"):
        inspect_environment(str(tmp_path / "v" / "bin" / "python"))


def test_the_format_follows_the_file_and_the_installed_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_format(None, "x.tar.gz") == choose_format("tar.gz", "x") == Format.TAR_GZ
    found = {"gzip": "/bin/gzip"}
    monkeypatch.setattr(shutil, "which", found.get)
    assert choose_format(None, "env") == Format.TAR_GZ
    with pytest.raises(ConfigError, match="needs sqfstar, which is not installed") as error:
        choose_format(None, "env.squashfs")
    assert "--format tar.gz" in str(error.value)


def test_packages_that_changed_since_the_bundle_was_written_are_named(bundle: Path, tmp_path: Path) -> None:
    assert note_changes(bundle, Path(sys.prefix)) is None  # it is another environment's
    copy = tmp_path / "env.tar.gz"
    shutil.copy(bundle, copy)
    facts = json.loads(manifest_path(bundle).read_text()) | {"source": str(Path(sys.prefix).resolve())}
    manifest_path(copy).write_text(json.dumps(facts | {"packages": inspect()["packages"]}))
    assert note_changes(copy, Path(sys.prefix)) is None
    packages = {**inspect()["packages"], "pydantic": "1.0"}
    manifest_path(copy).write_text(json.dumps(facts | {"packages": packages}))
    assert "1 packages" in (said := note_changes(copy, Path(sys.prefix)) or "") and "pydantic: 1.0 in" in said


# -- runs with a bundle ----------------------------------------------------------------------------


def with_profile(bundle: Path, *more: str) -> LoadedProfile:
    return load_profile("virtual", overrides=[f"software.bundle={bundle}", *more])


def plan_of(profile: LoadedProfile) -> Plan:
    plan = compile_plan(
        load_recipe("reverse_text/tiny").recipe,
        profile.profile,
        run_dir="/shared/runs/x",
        python=BUNDLE_PYTHON,
    )
    return with_bundle(plan, profile.profile)


def test_the_scripts_of_a_run_with_a_bundle_are_as_recorded(
    bundle: Path, request: pytest.FixtureRequest
) -> None:
    profile = with_profile(bundle, "scratch=/local/$USER", "software.setup=[ulimit -l unlimited]")
    plan = plan_of(profile)
    recorded = {"path": "/shared/env.tar.zst", "format": "tar.zst", "sha256": "ab" * 32, "glibc": "2.34"}
    recorded |= {"size_bytes": 1 << 30, "unpacked_bytes": 3 << 30, "arch": "x86_64", "python": "3.11.7"}
    assert plan.bundle is not None
    plan = plan.model_copy(update={"bundle": plan.bundle.model_copy(update=recorded)})
    scripts = make_scripts(plan, profile, "/shared/runs/x/code/1")
    import primerl_hpc

    for name, file in (("job.sbatch", "bundle.sbatch"), ("unpack-bundle.sh", "unpack-bundle.sh")):
        text = scripts[name].replace(f"primerl-hpc {primerl_hpc.__version__}", "primerl-hpc VERSION")
        if request.config.getoption("--update-golden"):
            (GOLDEN / file).write_text(text)
        assert text == (GOLDEN / file).read_text()
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(GOLDEN / "unpack-bundle.sh")], check=True)


def test_processes_run_from_the_folder_that_only_the_node_knows(bundle: Path) -> None:
    plan = plan_of(with_profile(bundle, "software.roles={trainer: {python: /opt/torch/bin/python}}"))
    here = with_interpreter(plan, "/local/env/bin/python")
    pythons = {process.name: process.argv[0] for process in here.phases[-1].processes}
    assert pythons.pop("trainer-0") == "/opt/torch/bin/python" and set(pythons.values()) == {
        "/local/env/bin/python"
    }
    assert here.preflight is not None and "/local/env/bin/python" in here.preflight.pythons
    assert BUNDLE_PYTHON not in here.model_dump_json().replace('"bundle":{', "")
    measured = plan_of(with_profile(bundle, "preflight={sums: always, bandwidth: always}"))
    assert BUNDLE_PYTHON in measured.model_dump_json()
    checks = with_interpreter(measured, "/local/env/bin/python").preflight
    assert checks is not None and checks.sums is not None and checks.bandwidth is not None
    assert checks.sums.argv == checks.bandwidth.argv == ("/local/env/bin/python",)


def test_profiles_that_contradict_their_bundle_are_refused(bundle: Path) -> None:
    with pytest.raises(ConfigError, match="bundle is the software of all roles"):
        with_profile(bundle, "software.default.python=/x/python")
    container = "software.roles={trainer: {container: {kind: apptainer, image: /x.sif}}}"
    with pytest.raises(ConfigError, match=r"set roles\.trainer\.python"):
        with_profile(bundle, container)
    with pytest.raises(ConfigError, match=r"software\.bundle: \$NOT_SET/env contains \$NOT_SET"):
        load_profile("virtual", overrides=["software.bundle=$NOT_SET/env"])
    local = load_profile("local", overrides=[f"software.bundle={bundle}"])
    plan = compile_plan(
        load_recipe("reverse_text/tiny").recipe, local.profile, run_dir="/r", python=BUNDLE_PYTHON
    )
    with pytest.raises(ConfigError, match="which only jobs of SLURM unpack"):
        with_bundle(plan, local.profile)


def test_the_command_writes_a_bundle_and_refuses_to_replace_it(python: Path, tmp_path: Path) -> None:
    target = tmp_path / "shared" / "env.tar.gz"
    words = ("bundle", str(target), "--python", str(python), "--no-try")
    done = run_command(*words, "--json", environ=ENVIRON)
    made = json.loads(done.stdout)
    assert done.returncode == 0 and made["format"] == "tar.gz" and made["base"] is None, done.stderr
    assert made["sha256"] == read_manifest(target).sha256 and made["unpacked_in_s"] is None
    assert sorted(path.name for path in target.parent.iterdir()) == ["env.tar.gz", "env.tar.gz.json"]
    refused = run_command(*words, environ=ENVIRON)
    assert refused.returncode == 73 and "--force" in refused.stderr
    folder = run_command("bundle", str(tmp_path), environ=ENVIRON)
    assert folder.returncode == 78 and "is a folder" in folder.stderr
