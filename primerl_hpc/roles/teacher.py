"""One engine of the teacher: ``python -m primerl_hpc.roles.teacher RUN_DIR PHASE NAME``.

The same server as the policy's, of a model that never changes; the router and the orchestrator's weight updates do not
know it.
"""

from __future__ import annotations

import sys

from primerl_hpc.common.names import Role
from primerl_hpc.roles.inference import serve_frozen


def main(argv: list[str]) -> int:
    return serve_frozen(Role.TEACHER, argv)


if __name__ == "__main__":  # vLLM's processes are spawned and import this module again
    sys.exit(main(sys.argv[1:]))
