"""Sends metrics to Weights & Biases: ``python -m primerl_hpc.roles.tracker RUN_DIR PHASE tracker-0``.

It follows the metrics files like any other reader, so a tracker that is slow, offline or down costs the run nothing. How
far it has come is kept in the run directory: a restart or a resume sends every row once more at most.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.files import read_json_or_none, write_json
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.common.tail import Tail
from primerl_hpc.recipe.run_schema import Wandb
from primerl_hpc.roles.start import RoleProcess, start_role

POLL_S = 2.0
SOURCES = ("sft", "trainer", "orchestrator", "eval")


def main(argv: list[str]) -> int:
    return start_role("tracker", argv, track)


def track(role: RoleProcess) -> None:
    """Follow the metrics until SIGTERM. Raises ConfigError when wandb is not installed or refuses the login."""
    settings = role.recipe.tracking.wandb
    if settings is None:
        raise ConfigError("this run is not tracked", mend="set tracking.wandb in the recipe")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    session = open_session(role, settings)
    offsets = read_json_or_none(role.run.tracker_offsets) or {}
    tails = {name: Tail(role.run.metrics(name), offset=offsets.get(name, 0)) for name in SOURCES}
    while not ended.wait(POLL_S):
        send(session, tails, role.run)
    send(session, tails, role.run)
    session.finish()


def open_session(role: RoleProcess, settings: Wandb) -> Any:
    """One wandb run per run directory, continued by later attempts."""
    try:
        import wandb
    except ImportError:
        raise ConfigError(
            "tracking.wandb is set, but wandb is not installed", mend="pip install 'primerl-hpc[wandb]'"
        ) from None
    root: Path = role.run.root
    try:
        session = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=list(settings.tags),
            name=root.name,
            id=hashlib.sha256(str(root).encode()).hexdigest()[:16],
            resume="allow",
            mode="offline" if settings.offline else "online",
            dir=str(root),
            config=role.recipe.model_dump(mode="json"),
        )
    except (wandb.errors.Error, ValueError) as error:
        raise ConfigError(
            f"wandb refused: {error}", mend="log in with WANDB_API_KEY, or set offline: true"
        ) from error
    for name in SOURCES:
        session.define_metric(f"{name}/*", step_metric=f"{name}/step")
    return session


def send(session: Any, tails: dict[str, Tail], run: RunDir) -> None:
    for name, tail in tails.items():
        for row in tail.read():
            session.log(
                {f"{name}/{key}": value for key, value in row.items() if isinstance(value, int | float)}
            )
    write_json(run.tracker_offsets, {name: tail.offset for name, tail in tails.items()})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
