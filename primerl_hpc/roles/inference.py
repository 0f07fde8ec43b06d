"""One engine process: ``python -m primerl_hpc.roles.inference RUN_DIR PHASE NAME``."""

from __future__ import annotations

import os
import sys

from primerl_hpc.common import env
from primerl_hpc.common.names import Role
from primerl_hpc.common.node.compile_caches import kept_caches
from primerl_hpc.common.node.transformers_folders import read_models_once
from primerl_hpc.inference.stores import secure_stores
from primerl_hpc.plan.plan import PhasePlan
from primerl_hpc.roles.scratch import scratch_folder
from primerl_hpc.roles.start import RoleProcess, start_role

# a job's own TMPDIR easily exceeds the 107 bytes of an AF_UNIX path
SOCKETS = "/tmp"


def main(argv: list[str]) -> int:
    return start_role("inference", argv, _serve)


def _serve(role: RoleProcess) -> None:
    serve_engine(role, role.phase)


def serve_frozen(kind: Role, argv: list[str]) -> int:
    """Serve one engine of the teacher or judge."""
    return start_role(
        kind.value, argv, lambda role: serve_engine(role, role.phase.for_frozen(kind), is_frozen=True)
    )


def serve_engine(role: RoleProcess, phase: PhasePlan, *, is_frozen: bool = False) -> None:
    """Serve until SIGTERM. ``phase``: the phase with the settings of this engine's model."""
    from primerl_hpc.inference.server import run_engine

    caches = kept_caches(Role.INFERENCE.value, phase.recipe.model.name)
    mirror = scratch_folder(role.run, f"{role.process}-mirror")
    with scratch_folder(role.run, role.process, SOCKETS) as folder, mirror as copies:
        env.set_mirror(copies)
        os.environ["VLLM_RPC_BASE_PATH"] = str(folder)  # sockets between the engine's processes
        run_engine(role.run, role.plan, phase, role.process, is_frozen=is_frozen, caches=caches)


if __name__ == "__mp_main__":  # a process that vLLM spawns imports this module again
    secure_stores()
    read_models_once()
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
