"""One prefill engine: ``python -m primerl_hpc.roles.prefill RUN_DIR PHASE NAME``.

The policy's server with its own layout. It receives weight updates like the others, but the router does not use it:
decode engines send requests to it (`inference/prefill.py`).
"""

from __future__ import annotations

import sys

from primerl_hpc.inference.stores import secure_stores
from primerl_hpc.roles.inference import serve_engine
from primerl_hpc.roles.start import start_role


def main(argv: list[str]) -> int:
    return start_role("prefill", argv, lambda role: serve_engine(role, role.phase.for_prefill()))


if __name__ == "__mp_main__":  # a process that vLLM spawns imports this module again
    secure_stores()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
