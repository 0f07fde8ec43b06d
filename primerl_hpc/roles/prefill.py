"""One engine that prefills: ``python -m primerl_hpc.roles.prefill RUN_DIR PHASE NAME``.

The policy's server in a shape of its own. Weight updates reach it like the others; the router does not know it: engines that
decode ask it (`inference/prefill.py`).
"""

from __future__ import annotations

import sys

from primerl_hpc.roles.inference import serve_engine
from primerl_hpc.roles.start import start_role


def main(argv: list[str]) -> int:
    return start_role("prefill", argv, lambda role: serve_engine(role, role.phase.for_prefill()))


if __name__ == "__main__":  # vLLM's processes are spawned and import this module again
    sys.exit(main(sys.argv[1:]))
