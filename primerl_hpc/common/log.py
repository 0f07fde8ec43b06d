"""How processes of a run log: one plain line to stderr, which the supervisor puts into the role's file."""

from __future__ import annotations

import faulthandler
import logging
import signal
import sys

from primerl_hpc.common import env


def setup_logging(role: str, *, level: int = logging.INFO) -> logging.Logger:
    """``12:03:44 trainer INFO step 3 …``; third parties speak from WARNING up."""
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(name)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.captureWarnings(True)
    logger = logging.getLogger("primerl_hpc")
    logger.setLevel(logging.DEBUG if env.is_debug() else level)
    return logging.getLogger(f"primerl_hpc.{role}")


def dump_stacks_on_signal() -> None:
    """SIGUSR2: the Python stacks of all threads go to stderr, also when the interpreter hangs in a call."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
