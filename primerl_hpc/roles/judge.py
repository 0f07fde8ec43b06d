"""One engine of the judge: ``python -m primerl_hpc.roles.judge RUN_DIR PHASE NAME``.

Like a teacher engine; its clients are the environment servers (`envs/judges.py`).
"""

from __future__ import annotations

import sys

from primerl_hpc.common.names import Role
from primerl_hpc.inference.stores import secure_stores
from primerl_hpc.roles.inference import serve_frozen


def main(argv: list[str]) -> int:
    return serve_frozen(Role.JUDGE, argv)


if __name__ == "__mp_main__":  # a process that vLLM spawns imports this module again
    secure_stores()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
