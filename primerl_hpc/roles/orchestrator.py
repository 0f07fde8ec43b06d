"""The orchestrator's process: ``python -m primerl_hpc.roles.orchestrator RUN_DIR PHASE NAME``."""

from __future__ import annotations

import sys

from primerl_hpc.common.node.start_phases import own_phases
from primerl_hpc.envs.serving.deferred import defer_imports
from primerl_hpc.roles.start import RoleProcess, start_role


def main(argv: list[str]) -> int:
    return start_role("orchestrator", argv, _serve)


def _serve(role: RoleProcess) -> None:
    defer_imports()
    from primerl_hpc.orchestrator.event_loop import run_until_done
    from primerl_hpc.orchestrator.train_loop import run_orchestrator

    own_phases().end("imports")
    run_until_done(run_orchestrator(role.run, role.phase))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
