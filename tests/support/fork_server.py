"""A process that has imported what tests start again and again, and forks instead of importing it each time.

The server is a module run with ``python -m``. It reads one request per line from stdin (a JSON object) and writes one
line per reply to stdout. It ends at the end of its stdin, therefore with the process of the tests.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from select import select
from typing import Any

from tests.support.helpers import ROOT


class ForkServer:
    """The client of one server, which starts at the first request and after each ``stop``."""

    def __init__(self, module: str, **environ: str) -> None:
        self.module = module
        self.environ = environ
        self.process: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def ask(self, request: dict[str, Any], timeout_s: float | None) -> str:
        """Return the reply; return "" after stopping the server and what it forked if no reply arrived in time."""
        with self.lock:
            process = self._process()
            print(json.dumps(request), file=process.stdin, flush=True)
            has_reply, _, _ = select([process.stdout], [], [], timeout_s)
            reply = process.stdout.readline() if has_reply else ""
            if not reply:
                self.stop()
            return reply

    def _process(self) -> subprocess.Popen[str]:
        if self.process is None:
            atexit.register(self.stop)
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module],
                cwd=ROOT,
                env={**os.environ, **self.environ},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        return self.process

    def stop(self) -> None:
        atexit.unregister(self.stop)
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None
