"""A tmux session with panes that follow the logs of runs: four for each run, in a window of its own.

    panes = panes_of(run)                          # trainer, orchestrator, inference, environment servers
    open_session("primerl-my-run", {run: panes})   # raises NotFoundError without tmux

The panes wait while a run is in the queue, and follow it across restarts and attempts, as ``logs -f`` does.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from primerl_hpc.common.errors import NotFoundError, RoleError
from primerl_hpc.common.names import Role
from primerl_hpc.observe.inside.steps import python_path
from primerl_hpc.observe.log_files import LogFiles
from primerl_hpc.run.rundir import RunDir

_SHOWN = (
    (Role.TRAINER, Role.SFT),
    (Role.ORCHESTRATOR, Role.EVALUATOR),
    (Role.INFERENCE,),
    (Role.ENV_SERVER,),
)
"""One pane for each entry: the first of its roles that the run has."""
_PASSED = ("PATH", "PRIMERL_HOME", "PRIMERL_RUNS_DIR", "SLURM_CONF")
"""Variables of this process that a tmux server which is already running does not have."""


@dataclass(frozen=True)
class Pane:
    run: RunDir
    role: str

    @property
    def command(self) -> str:
        """The command as users type it."""
        return shlex.join(["primerl-hpc", "logs", str(self.run.root), self.role, "-f"])

    @property
    def started(self) -> str:
        """The command that tmux starts."""
        variables = {name: os.environ[name] for name in _PASSED if name in os.environ}
        assignments = [
            f"{name}={value}" for name, value in {**variables, "PYTHONPATH": python_path()}.items()
        ]
        words = ["logs", str(self.run.root), self.role, "-f"]
        return shlex.join(["env", *assignments, sys.executable, "-m", "primerl_hpc", *words])


def panes_of(run: RunDir) -> list[Pane]:
    """Return the panes of a run, for the roles in its plan. Raises NotFoundError if it has none of them."""
    roles = {process["role"] for process in LogFiles(run).processes.values()}
    chosen = [next((role.value for role in group if role.value in roles), None) for group in _SHOWN]
    panes = [Pane(run, role) for role in chosen if role is not None]
    if not panes:
        raise NotFoundError("the plan of this run has no processes", location=str(run.root))
    return panes


def session_name(runs: Sequence[RunDir]) -> str:
    return plain_name(f"primerl-{runs[0].root.name}" + (f"-and-{len(runs) - 1}" if len(runs) > 1 else ""))


def plain_name(name: str) -> str:
    """Return a name for a session or window. tmux executes ``#(command)`` in one, and '.' and ':' end it."""
    return re.sub(r"[^\w-]", "-", name)


def open_session(name: str, runs: Mapping[str, Sequence[Pane]]) -> bool:
    """Start a detached session with a window for each run (name → panes); False if it exists already.

    Raises NotFoundError if tmux is not installed, RoleError if it fails.
    """
    if shutil.which("tmux") is None:
        raise NotFoundError("tmux is not installed on this machine", hint="start the commands in terminals")
    if (
        subprocess.run(["tmux", "has-session", "-t", f"={name}"], capture_output=True, check=False).returncode
        == 0
    ):
        return False
    for index, (run, panes) in enumerate(runs.items()):
        first = ["new-window", "-d", "-t", f"={name}:"] if index else ["new-session", "-d", "-s", name]
        window = _tmux(*first, "-n", plain_name(run), "-P", "-F", "#{window_id}", panes[0].started)
        _tmux("set-option", "-w", "-t", window, "remain-on-exit", "on")
        for pane in panes[1:]:
            _tmux("split-window", "-d", "-t", window, pane.started)
            _tmux("select-layout", "-t", window, "tiled")
    return True


def attach_command(name: str) -> list[str]:
    """Return the command that shows the session in this terminal, also inside another session."""
    return ["tmux", "switch-client" if os.environ.get("TMUX") else "attach-session", "-t", f"={name}"]


def _tmux(*words: str) -> str:
    done = subprocess.run(["tmux", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RoleError(f"tmux {words[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()
