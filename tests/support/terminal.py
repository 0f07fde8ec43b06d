"""A command in a real terminal (pty) of 80 columns, with keys.

with Terminal("primerl_hpc", "status", "--watch", cwd=folder) as terminal:
    terminal.wait_for("running")
    terminal.press("\\x03")  # Ctrl-C: the kernel signals the terminal's foreground process group
    assert terminal.end() == 0
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Self

from tests.support.cluster_user import ClusterUser
from tests.support.helpers import PATIENCE_S, ROOT


class Terminal:
    def __init__(
        self, module: str, *words: str, cwd: Path, columns: int = 80, user: ClusterUser | None = None
    ) -> None:
        """``user``: the user of a virtual cluster who types there, on its login node."""
        self.keyboard, screen = os.openpty()
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        variables = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TERM": "xterm", "COLUMNS": ""}
        environ = os.environ if user is None else user.environ

        def enter() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            if user is not None:
                user.enter()

        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=cwd,
            env={name: value for name, value in {**environ, **variables}.items() if value},
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=enter,  # noqa: PLW1509 - system calls only
        )
        os.close(screen)
        self.shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.keyboard)

    def press(self, keys: str) -> None:
        os.write(self.keyboard, keys.encode())

    def wait_for(self, text: str) -> None:
        """Wait until ``text`` was shown."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.shown:
            assert time.monotonic() < deadline and self._read(1.0), f"no {text!r} in:\n{self.shown}"

    def end(self) -> int:
        """Read to the end; return the exit code."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(1.0):
            assert time.monotonic() < deadline, f"does not end:\n{self.shown}"
        return self.process.wait(PATIENCE_S)

    def _read(self, seconds: float) -> bool:
        """Wait for output; return False at its end."""
        if select.select([self.keyboard], [], [], seconds)[0]:
            data = b""
            with contextlib.suppress(OSError):  # EIO: the last process of the terminal has closed it
                data = os.read(self.keyboard, 65536)
            self.shown += data.decode(errors="replace").replace("\r\n", "\n")
            return bool(data)
        return True
