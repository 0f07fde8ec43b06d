"""One engine of the teacher: ``python -m primerl_hpc.roles.teacher RUN_DIR PHASE NAME``.

The same server as the policy's, for a model that never changes; the router and the orchestrator's weight updates do not
use it.
"""

from __future__ import annotations

import sys

from primerl_hpc.common.names import Role
from primerl_hpc.inference.stores import secure_stores
from primerl_hpc.roles.inference import serve_frozen


def main(argv: list[str]) -> int:
    return serve_frozen(Role.TEACHER, argv)


if __name__ == "__mp_main__":  # a process that vLLM spawns imports this module again
    secure_stores()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
