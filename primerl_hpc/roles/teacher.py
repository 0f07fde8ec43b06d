"""One engine of the teacher: ``python -m primerl_hpc.roles.teacher RUN_DIR PHASE NAME``.

The same server as the policy's, of a model that never changes; the router and the orchestrator's weight updates do not
know it.
"""

from __future__ import annotations

import sys

from primerl_hpc.roles.inference import serve_engine
from primerl_hpc.roles.start import RoleProcess, start_role


def main(argv: list[str]) -> int:
    return start_role("teacher", argv, _serve)


def _serve(role: RoleProcess) -> None:
    serve_engine(role, role.phase.for_teacher(), is_frozen=True)


if __name__ == "__main__":  # vLLM's processes are spawned and import this module again
    sys.exit(main(sys.argv[1:]))
