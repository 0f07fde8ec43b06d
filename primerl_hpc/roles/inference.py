"""One engine process: ``python -m primerl_hpc.roles.inference RUN_DIR PHASE NAME``."""

from __future__ import annotations

import sys

from primerl_hpc.roles.start import start_role


def main(argv: list[str]) -> int:
    return start_role("inference", argv, _serve)


def _serve(role) -> None:
    from primerl_hpc.inference.server import run_engine

    run_engine(role.run, role.plan, role.phase, role.process)


if __name__ == "__main__":  # vLLM's processes are spawned and import this module again
    sys.exit(main(sys.argv[1:]))
