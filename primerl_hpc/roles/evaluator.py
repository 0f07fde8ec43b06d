"""The process of an evaluation run (kind eval): ``python -m primerl_hpc.roles.evaluator RUN_DIR PHASE NAME``."""

from __future__ import annotations

import sys

from primerl_hpc.envs.serving.deferred import defer_imports
from primerl_hpc.roles.start import RoleProcess, start_role


def main(argv: list[str]) -> int:
    return start_role("evaluator", argv, _serve)


def _serve(role: RoleProcess) -> None:
    defer_imports()
    from primerl_hpc.orchestrator.eval_loop import run_evaluation
    from primerl_hpc.orchestrator.event_loop import run_until_done

    run_until_done(run_evaluation(role.run, role.phase))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
