"""End a process without the teardown of its libraries.

A rank that has used torch.distributed must end this way. A worker thread of gloo may hold the tensors of the last
operation for a moment after it has reported its end, and with them the process group, also after
``destroy_process_group``. If the interpreter is finalized in that moment, the thread asks for Python's lock to release
the tensors, and the process aborts: "terminate called without an active exception", signal 6
(github.com/pytorch/pytorch/issues/190489). The peers and the supervisor would take that for a crash.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def exit_process(code: int = 0) -> NoReturn:
    """End the process with the exit code after writing what stdout and stderr hold. Runs no ``atexit`` handler."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
