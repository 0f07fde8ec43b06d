"""Environments: how a recipe's block becomes a verifiers environment, and the small offline ones that we ship.

Reading order: config (recipe → verifiers config, pure) → tasks (what there is to do, for the orchestrator) → check (one
rollout without a run) → shipped/ (reverse_text, alphabet_sort, calculator, nim; and inproc_chat, the agent loop that runs
inside the environment server) → calculator_tools.

verifiers finds an environment by importing the module its id names: ``reverse-text`` → ``reverse_text``. So that the
shipped ones answer to plain ids without being installed at top level, `expose_shipped` appends their folder to
``sys.path``, in the processes that load environments only (environment servers, orchestrator, evaluator). It comes
last, so a package of the same name that a user installed wins.
"""

from __future__ import annotations

import sys
from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"


def expose_shipped() -> None:
    """Make the shipped environments importable by their plain ids, after everything that is installed."""
    if str(SHIPPED) not in sys.path:
        sys.path.append(str(SHIPPED))
