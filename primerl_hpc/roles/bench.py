"""The torchrun group of benchmark mode: ``python -m primerl_hpc.roles.bench RUN_DIR PHASE NAME``.

For a trainer of kind rl, its first node writes the synthetic batches before the ranks start.
"""

from __future__ import annotations

import sys
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.files import read_json
from primerl_hpc.common.names import Kind
from primerl_hpc.plan.bench_plans import BenchRequest
from primerl_hpc.plan.plan import load_plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.torchrun import run_torchrun


def main(arguments: list[str]) -> None:
    run_dir, phase_name, _ = arguments
    root = RunDir(Path(run_dir))
    phase = load_plan(root).phase(phase_name)
    if phase.recipe.kind == Kind.RL and env.slurm_node_rank() == 0:
        from primerl_hpc.orchestrator.batches.synthetic import send_batches
        from primerl_hpc.transport.rollouts.filesystem import FilesystemSender

        request = BenchRequest.model_validate(read_json(root.bench_request))
        run = root.phase(phase_name)
        send_batches(FilesystemSender(run), phase.recipe, request, num_ranks=phase.num_data_ranks)
    run_torchrun(arguments, module="primerl_hpc.trainer.bench")


if __name__ == "__main__":
    main(sys.argv[1:])
