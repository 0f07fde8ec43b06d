"""Environments: translate a recipe's block to a verifiers environment, and the small offline environments that we ship.

Reading order: config (recipe → verifiers config, pure) → tasks (load environments and their tasks, for the
orchestrator) → tools, processes (what an environment requires of the renderer and of the node) → check (one rollout
without a run) → install (install a package without changing this Python's versions) → hub (packages of the
Environments Hub) → lookup (check ids and arguments, for submit) → generated (helpers for generated tasks) → shipped/
(reverse_text, alphabet_sort, calculator, color_squares, math_problems, local_search, nim, multiple_choice,
synthetic_rollouts; and inproc_chat, the agent loop inside the environment server) → tool_servers/ → judges → serving/
(what makes verifiers' environment server cheaper) → tls, curve, visitors (TLS and CURVE of an environment server's
connections, and limits of those without keys).

verifiers finds an environment by importing the module that its id names: ``reverse-text`` → ``reverse_text``. To make
the shipped environments importable by plain ids without installing them as top-level packages, `expose_shipped` appends
their folder to ``sys.path`` in processes that load environments. The folder comes last, so an installed package of the
same name takes precedence.
"""

from __future__ import annotations

import sys
from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"


def expose_shipped() -> None:
    """Make the shipped environments importable by their plain ids, with lower precedence than installed packages."""
    if str(SHIPPED) not in sys.path:
        sys.path.append(str(SHIPPED))
