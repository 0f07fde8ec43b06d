"""The orchestrator's process: ``python -m primerl_hpc.roles.orchestrator RUN_DIR PHASE NAME``."""

from __future__ import annotations

import sys

from primerl_hpc.roles.start import RoleProcess, start_role


def main(argv: list[str]) -> int:
    return start_role("orchestrator", argv, _serve)


def _serve(role: RoleProcess) -> None:
    from primerl_hpc.orchestrator.event_loop import run_until_done
    from primerl_hpc.orchestrator.loop import run_orchestrator

    run_until_done(run_orchestrator(role.run, role.phase))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
