"""Act as an ordinary user of a virtual cluster, on its login node.

user = ClusterUser("alice", cluster.folder)
user.run(lambda: resume_run(run))                                   # in a forked process; returns its result
subprocess.Popen(command, env=user.environ, preexec_fn=user.enter)  # signals reach the command itself

The process joins the name spaces of the login node except for that of processes, with a `/proc` of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.stranger import run_in_child

Result = TypeVar("Result")
FIRST_UID = 61001
NEW_MOUNTS = 0x00020000


class ClusterUser:
    """``number``: place among the users of the cluster (option ``--users``)."""

    def __init__(self, name: str, folder: Path, number: int = 0) -> None:
        self.name, self.folder = name, folder
        self.uid = FIRST_UID + number
        self.home = folder / "home" / name

    @property
    def environ(self) -> dict[str, str]:
        """Variables of this process with those of the user's login."""
        mine = {"HOME": str(self.home), "USER": self.name, "LOGNAME": self.name}
        return {**os.environ, **mine, "VIRTUAL_CLUSTER_USER": self.name}

    def act_here(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the toolkit and SLURM's commands act for the user, whose state is in ``folder``, until the test ends."""
        monkeypatch.setenv("PRIMERL_HOME", str(folder / "state"))
        monkeypatch.setenv("VIRTUAL_CLUSTER_USER", self.name)  # of squeue, scancel and others

    def enter(self) -> None:
        """Become the user on the login node. Only in a forked process: there is no way back."""
        libc, folder = ctypes.CDLL(None, use_errno=True), os.getcwd()
        login = _first_child(int((self.folder / "holder.pid").read_text()))
        for kind in ("net", "uts", "mnt"):
            with open(f"/proc/{login}/ns/{kind}") as namespace:
                _check(libc.setns(namespace.fileno(), 0))
        _check(libc.unshare(NEW_MOUNTS))
        _check(libc.mount(b"proc", b"/proc", b"proc", 0, None))
        os.chdir(folder)
        os.setgroups([])
        os.setgid(self.uid)
        os.setuid(self.uid)

    def run(self, act: Callable[[], Result]) -> Result:
        """Return the result of ``act()`` in a forked process of the user, or raise its exception."""

        def enter() -> None:
            os.environ.update(self.environ)
            self.enter()

        return run_in_child(act, enter)

    def command(self, *words: str) -> str:
        """Return the output of a command."""
        return subprocess.run(
            words, env=self.environ, preexec_fn=self.enter, capture_output=True, text=True, check=True
        ).stdout

    def own(self, *paths: Path) -> None:
        """Give files or folders to the user."""
        for path in paths:
            os.chown(path, self.uid, self.uid, follow_symlinks=False)

    def take_over(self, folder: Path) -> None:
        """Give the user everything in ``folder`` that the test has created there as root."""
        for parent, folders, files in os.walk(folder):
            for path in [Path(parent, name) for name in (*folders, *files)]:
                with contextlib.suppress(FileNotFoundError):  # a run is working there
                    if path.lstat().st_uid == 0:
                        self.own(path)


def _first_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def _check(code: int) -> None:
    if code:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
