"""One engine of the judge: ``python -m primerl_hpc.roles.judge RUN_DIR PHASE NAME``.

As the teacher's; who asks it are the environment servers (`envs/judges.py`).
"""

from __future__ import annotations

import sys

from primerl_hpc.common.names import Role
from primerl_hpc.roles.inference import serve_frozen


def main(argv: list[str]) -> int:
    return serve_frozen(Role.JUDGE, argv)


if __name__ == "__main__":  # vLLM's processes are spawned and import this module again
    sys.exit(main(sys.argv[1:]))
