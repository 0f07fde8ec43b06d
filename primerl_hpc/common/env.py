"""All environment variables of the project. No other module reads them from os.environ, except the guard
(`runtime/steps`), which uses the standard library only.

Users may set ``PRIMERL_HOME`` (state, default ``~/.local/state/primerl-hpc``), ``PRIMERL_RUNS_DIR`` (parent folder of
run directories), ``PRIMERL_PROFILE``, ``PRIMERL_TEMPLATES`` (a folder of custom sbatch templates) and
``PRIMERL_DEBUG``. ``PRIMERL_LOG_LEVEL`` and ``PRIMERL_VF_LOG_LEVEL`` set the recipe keys ``log.level`` and
``log.verifiers`` if no file sets them. ``PRIMERL_<KEY>`` with ``__`` between levels sets a recipe key that no file sets
(``PRIMERL_OPTIMIZER__LR=1e-5``, ``PRIMERL_ENV__HF_HOME=/x``), see ``recipe/load.py``; ``PRIMERL_PROFILE__<KEY>``
does the same for a key of the cluster profile (``PRIMERL_PROFILE__SCHEDULER__ACCOUNT=proj``), see
``cluster/load.py``.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RUN_DIR = "PRIMERL_RUN_DIR"  # set for all processes of a run
PROCESS = "PRIMERL_PROCESS"  # name of the process, e.g. inference-0
PHASE = "PRIMERL_PHASE"
ATTEMPT = "PRIMERL_ATTEMPT"
INCARNATION = "PRIMERL_INCARNATION"  # counts restarts of one process inside an attempt
ENGINE_API_KEY = "PRIMERL_ENGINE_API_KEY"  # set only for child processes; stored only in a file of mode 0600
NO_KEY = "PRIMERL_NO_KEY"  # never set: used as the key's variable by clients that need no key

PACKAGE = "PRIMERL_PACKAGE"  # copy of the package that a process must run (`common/package.py`)
PYTHONPATH = "PYTHONPATH"
INTERFACE = "PRIMERL_INTERFACE"  # network.interface of the profile
HOST_SUFFIX = "PRIMERL_HOST_SUFFIX"  # network.host_suffix of the profile
BINDING = "PRIMERL_BINDING"  # JSON: CPUs of the accelerators of a process (common/node/binding.py)
SCRATCH = "PRIMERL_SCRATCH"  # node-local folder of the profile, with variables that the guard expands
PRIVATE_TMP = (
    "PRIMERL_PRIVATE_TMP"  # name of the run's temporary folder on each node (run/access/private_tmp.py)
)
STAGE_MODELS = "PRIMERL_STAGE_MODELS"  # JSON: nodes that copy the base model (transport/base_models)
COMPILE_STORE = "PRIMERL_COMPILE_STORE"  # JSON: folder and size of kept compile caches (common/node)
KEPT = "PRIMERL_KEPT_ENV"  # patterns of the variables that the guard passes to a process
WITHHELD = "PRIMERL_WITHHELD_ENV"  # names of variables with secrets that the guard does not pass to a process
STORE = "PRIMERL_STORE"  # host:port of the rendezvous store of a trainer's ranks, set by their agent
MIRROR = "PRIMERL_MIRROR"  # node-local folder of an engine, inherited by its workers

HOME = "PRIMERL_HOME"
RUNS_DIR = "PRIMERL_RUNS_DIR"
PROFILE = "PRIMERL_PROFILE"
TEMPLATES = "PRIMERL_TEMPLATES"
DEBUG = "PRIMERL_DEBUG"
ENV_INDEX = "PRIMERL_ENV_INDEX"  # index of packages of environments
VENV = "PRIMERL_VENV"  # read by tools/install; users may have exported it
WANDB_MODE = "WANDB_MODE"  # of wandb: online, offline, disabled, shared
NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"  # of torch, read when an NCCL process group is created
_PROFILE_PREFIX = "PRIMERL_PROFILE__"
_SHORT_NAMES = {"PRIMERL_LOG_LEVEL": "LOG__LEVEL", "PRIMERL_VF_LOG_LEVEL": "LOG__VERIFIERS"}
"""Variables of recipe keys whose names do not follow from the keys."""

RESERVED = frozenset(
    {
        RUN_DIR,
        PROCESS,
        PHASE,
        ATTEMPT,
        INCARNATION,
        ENGINE_API_KEY,
        NO_KEY,
        PACKAGE,
        INTERFACE,
        HOST_SUFFIX,
        SCRATCH,
        BINDING,
        KEPT,
        WITHHELD,
        STAGE_MODELS,
        COMPILE_STORE,
        PRIVATE_TMP,
        STORE,
        MIRROR,
        HOME,
        RUNS_DIR,
        PROFILE,
        TEMPLATES,
        DEBUG,
        ENV_INDEX,
        VENV,
    }
)


Override = tuple[str, str, str]
"""Name of a variable, the part that names a key (``OPTIMIZER__LR``), and the value."""


def recipe_overrides(environ: Mapping[str, str] | None = None) -> list[Override]:
    """Return ``PRIMERL_OPTIMIZER__LR`` and other overrides of recipe keys, sorted by name, without reserved
    variables."""
    found = _starting_with("PRIMERL_", environ)
    return [
        (name, _SHORT_NAMES.get(name, key), value)
        for name, key, value in found
        if name not in RESERVED and not name.startswith(_PROFILE_PREFIX)
    ]


def profile_overrides(environ: Mapping[str, str] | None = None) -> list[Override]:
    """Return ``PRIMERL_PROFILE__SCHEDULER__TIME`` and other overrides of profile keys, sorted by name."""
    return _starting_with(_PROFILE_PREFIX, environ)


def _starting_with(prefix: str, environ: Mapping[str, str] | None) -> list[Override]:
    variables = sorted((os.environ if environ is None else environ).items())
    return [(name, name.removeprefix(prefix), value) for name, value in variables if name.startswith(prefix)]


def state_home() -> Path:
    """Return the folder of the run registry and of the user's recipes, profiles and templates, without creating it."""
    if home := os.environ.get(HOME):
        return Path(home).expanduser()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "primerl-hpc"


def runs_dir() -> Path:
    return Path(os.environ.get(RUNS_DIR) or "runs").expanduser()


def default_profile() -> str | None:
    return os.environ.get(PROFILE) or None


def templates() -> Path | None:
    return Path(folder).expanduser() if (folder := os.environ.get(TEMPLATES)) else None


def wandb_mode() -> str | None:
    return os.environ.get(WANDB_MODE) or None


def is_debug() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0", "false")


def integer(name: str, default: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the number in a variable: ``8``, the first of ``4,2`` (one for each nested level in OMP_NUM_THREADS) or of
    ``4(x2)``.

    ``default`` if the variable is unset, empty, or no number.
    """
    match = re.match(r"\s*(\d+)", (os.environ if environ is None else environ).get(name, ""))
    return int(match[1]) if match else default


def num_threads() -> int:
    """Return OMP_NUM_THREADS, 1 if it is unset. Sites also set it to an empty text or one number for each level."""
    return max(1, integer("OMP_NUM_THREADS", 1))


def attempt() -> int:
    return integer(ATTEMPT, 1)


def incarnation() -> int:
    return integer(INCARNATION, 0)


def instance_id() -> str:
    """Return the unique id of this process instance: ``<attempt>.<incarnation>``."""
    return f"{attempt()}.{incarnation()}"


def process() -> str:
    return os.environ.get(PROCESS, "")


def model_readers() -> dict[str, Any] | None:
    """Return which nodes load the model of this process (`plan.env.readers_env`); None if it is not copied to them."""
    text = os.environ.get(STAGE_MODELS)
    return json.loads(text) if text else None


def compile_store() -> dict[str, Any] | None:
    """Return ``{"folder", "max_gib"}`` of the compile caches that the profile keeps; None if it keeps none."""
    text = os.environ.get(COMPILE_STORE)
    return json.loads(text) if text else None


def private_tmp() -> Path | None:
    """Return the run's private folder on this node; None for a process without a guard."""
    folder = os.environ.get("TMPDIR")
    return Path(folder) if os.environ.get(PRIVATE_TMP) and folder else None


def package() -> str | None:
    return os.environ.get(PACKAGE) or None


def join_pythonpath(*values: str | None) -> str:
    """Join several values of PYTHONPATH in this order, without duplicate folders."""
    folders = [folder for value in values if value for folder in value.split(os.pathsep) if folder]
    return os.pathsep.join(dict.fromkeys(folders))


def role_pythonpath(*own: str | None) -> dict[str, str]:
    """Return PYTHONPATH for a process that requests the folders ``own``; empty if it inherits this process's value.

    If this package was found through PYTHONPATH, its folder remains first, so that a role imports the same copy.
    """
    inherited = os.environ.get(PYTHONPATH)
    if not any(own):
        return {}
    root = Path(__file__).resolve().parents[2]
    folders = (inherited or "").split(os.pathsep)
    first = next((folder for folder in folders if folder and Path(folder).resolve() == root), None)
    return {PYTHONPATH: join_pythonpath(first, *own, inherited)}


def leave_open_folder() -> None:
    """Replace paths through a file descriptor in PYTHONPATH and ``sys.path`` by those of their folders.

    A batch script imports the run's code through the folder that it has opened and checked. Child processes do not have
    that descriptor.
    """
    sys.path[:] = map(_without_descriptor, sys.path)
    if PYTHONPATH in os.environ:
        paths = os.environ[PYTHONPATH].split(os.pathsep)
        os.environ[PYTHONPATH] = os.pathsep.join(map(_without_descriptor, paths))


def _without_descriptor(path: str) -> str:
    return os.path.realpath(path) if path.startswith("/proc/self/fd/") else path


def interface() -> str | None:
    return os.environ.get(INTERFACE) or None


def host_suffix() -> str | None:
    return os.environ.get(HOST_SUFFIX) or None


def binding() -> dict[str, Any] | None:
    """Return the values of a `common/node/binding.Binding`, the process's ``accelerators`` and ``is_engine``."""
    text = os.environ.get(BINDING)
    return json.loads(text) if text else None


def set_engine_api_key(key: str) -> None:
    """Set the key for clients inside this process that read it from a variable, such as verifiers."""
    os.environ[ENGINE_API_KEY] = key


def run_dir() -> Path | None:
    """Return the run directory that this process belongs to."""
    return Path(folder) if (folder := os.environ.get(RUN_DIR)) else None


def set_store(host: str, port: int) -> None:
    os.environ[STORE] = f"{host}:{port}"


def store() -> tuple[str, int] | None:
    """Return the address of the store of this process's group; None if it was not started by an agent of the
    project."""
    host, _, port = os.environ.get(STORE, "").rpartition(":")
    return (host, int(port)) if host else None


def mirror() -> Path:
    """Return the folder with this engine's copy of the served weights (`inference.worker.mirror`); its role creates
    it."""
    return Path(os.environ[MIRROR])


def mirror_or_none() -> Path | None:
    """Return `mirror`, or None outside of an engine."""
    return Path(os.environ[MIRROR]) if MIRROR in os.environ else None


def set_mirror(folder: Path) -> None:
    os.environ[MIRROR] = str(folder)


def slurm_allocation() -> tuple[str, int] | None:
    """Return (job id, number of nodes) of the SLURM job in which this process is; None outside of a job."""
    job = os.environ.get("SLURM_JOB_ID")
    return (job, integer("SLURM_JOB_NUM_NODES", 1)) if job else None


def slurm_node_rank() -> int:
    """Return the index of this node within its SLURM step; 0 outside SLURM."""
    return integer("SLURM_NODEID", 0)


@contextmanager
def nccl_waits_on_the_host() -> Iterator[None]:
    """Make ``wait`` of process groups created in this context block until the work is done, or raise at its limit.

    They have no watchdog thread of torch, which would terminate the process at that limit.
    """
    before = os.environ.get(NCCL_BLOCKING_WAIT)
    os.environ[NCCL_BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NCCL_BLOCKING_WAIT]
        else:
            os.environ[NCCL_BLOCKING_WAIT] = before


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process, for libraries that read them when they are imported."""
    os.environ.update(values)


def variable(name: str) -> str | None:
    """Return a variable named by a recipe (the key of a model server); None if it is unset or empty."""
    return os.environ.get(name) or None
