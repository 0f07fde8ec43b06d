"""Every environment variable the project reads or writes for itself. No other module reads os.environ for these.

Variables a user may set: ``PRIMERL_HOME`` (state, default ``~/.local/state/primerl-hpc``), ``PRIMERL_RUNS_DIR``
(where run directories are made), ``PRIMERL_PROFILE``, ``PRIMERL_TEMPLATES`` (a folder of your own sbatch templates),
``PRIMERL_DEBUG``; and ``PRIMERL_<KEY>`` with ``__`` between
levels for recipe keys (``PRIMERL_OPTIMIZER__LR=1e-5``, ``PRIMERL_ENV__HF_HOME=/x``), see ``recipe/load.py``; ``PRIMERL_PROFILE__<KEY>`` for keys of
the cluster profile (``PRIMERL_PROFILE__SCHEDULER__TIME=02:00:00``), see ``cluster/load.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

RUN_DIR = "PRIMERL_RUN_DIR"  # set for every process of a run
PROCESS = "PRIMERL_PROCESS"  # its name, e.g. inference-0
PHASE = "PRIMERL_PHASE"
ATTEMPT = "PRIMERL_ATTEMPT"
INCARNATION = "PRIMERL_INCARNATION"  # counts restarts of one process inside an attempt
ENGINE_API_KEY = (
    "PRIMERL_ENGINE_API_KEY"  # only ever set for child processes, never written to a file but the 0600 one
)
NO_KEY = "PRIMERL_NO_KEY"  # never set: a client that names its key by this variable has none

INTERFACE = "PRIMERL_INTERFACE"  # network.interface of the profile, for every process of a run
MIRROR = "PRIMERL_MIRROR"  # an engine's folder on its node, inherited by its workers

HOME = "PRIMERL_HOME"
RUNS_DIR = "PRIMERL_RUNS_DIR"
PROFILE = "PRIMERL_PROFILE"
TEMPLATES = "PRIMERL_TEMPLATES"
DEBUG = "PRIMERL_DEBUG"
VENV = "PRIMERL_VENV"  # of tools/install: who exported it for that runs us next
NCCL_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"  # torch's, read when a process group of NCCL is made
_PROFILE_PREFIX = "PRIMERL_PROFILE__"

RESERVED = frozenset(
    {
        RUN_DIR,
        PROCESS,
        PHASE,
        ATTEMPT,
        INCARNATION,
        ENGINE_API_KEY,
        NO_KEY,
        INTERFACE,
        MIRROR,
        HOME,
        RUNS_DIR,
        PROFILE,
        TEMPLATES,
        DEBUG,
        VENV,
    }
)


Override = tuple[str, str, str]
"""A variable's name, the part of it that names a key (``OPTIMIZER__LR``), and its value."""


def recipe_overrides(environ: Mapping[str, str] | None = None) -> list[Override]:
    """Of ``PRIMERL_OPTIMIZER__LR`` and its like, sorted by name; the variables above are not overrides."""
    every = _starting_with("PRIMERL_", environ)
    return [each for each in every if each[0] not in RESERVED and not each[0].startswith(_PROFILE_PREFIX)]


def profile_overrides(environ: Mapping[str, str] | None = None) -> list[Override]:
    """Of ``PRIMERL_PROFILE__SCHEDULER__TIME`` and its like, sorted by name."""
    return _starting_with(_PROFILE_PREFIX, environ)


def _starting_with(prefix: str, environ: Mapping[str, str] | None) -> list[Override]:
    every = sorted((os.environ if environ is None else environ).items())
    return [(name, name.removeprefix(prefix), value) for name, value in every if name.startswith(prefix)]


def state_home() -> Path:
    """Folder for the registry of runs, the user's own recipes, profiles and templates. Not created here."""
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


def is_debug() -> bool:
    return os.environ.get(DEBUG, "") not in ("", "0", "false")


def attempt() -> int:
    return int(os.environ.get(ATTEMPT, "1"))


def incarnation() -> int:
    return int(os.environ.get(INCARNATION, "0"))


def life() -> str:
    """Of this process among all that had its name in the run: incarnations are counted anew in every attempt."""
    return f"{attempt()}.{incarnation()}"


def process() -> str:
    return os.environ.get(PROCESS, "")


def interface() -> str | None:
    return os.environ.get(INTERFACE) or None


def set_engine_api_key(key: str) -> None:
    """For clients inside this process that name their key by its variable (verifiers does)."""
    os.environ[ENGINE_API_KEY] = key


def mirror() -> Path:
    """Where this engine keeps its own copy of what it serves (`inference.mirror`); its role has made it."""
    return Path(os.environ[MIRROR])


def set_mirror(folder: Path) -> None:
    os.environ[MIRROR] = str(folder)


def slurm_node_rank() -> int:
    """Index of this node within its SLURM step; 0 outside SLURM."""
    return int(os.environ.get("SLURM_NODEID", "0"))


@contextmanager
def nccl_waits_on_the_host() -> Iterator[None]:
    """For groups made meanwhile: a wait blocks its caller until the work is done, and ends with an error at its time limit.

    They have no watchdog thread of torch's either, which would end the whole process at that limit.
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


def variable(name: str) -> str | None:
    """A variable that a recipe names (the key of a model's server); None when it is not set, or empty."""
    return os.environ.get(name) or None
