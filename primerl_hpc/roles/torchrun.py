"""Becomes torchrun: the trainer and SFT roles are this file with the plan's numbers filled in.

One node meets itself on a port that torchrun binds; several nodes meet at the first one (`common/rendezvous.py`).
No restarts here: after a fault the supervisor starts the whole group again from the last complete checkpoint.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from primerl_hpc.common import env
from primerl_hpc.common.errors import PrimerlError
from primerl_hpc.common.rendezvous import meet
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import ProcessPlan, load_plan
from primerl_hpc.recipe.training_schema import Trainer


def run_torchrun(arguments: list[str], module: str = "primerl_hpc.trainer.main") -> None:
    """``RUN_DIR PHASE NAME``, and what each rank is. Does not return; a PrimerlError ends as one sentence and its exit code."""
    run_dir, phase, name = arguments
    try:
        root = RunDir(Path(run_dir))
        plan = load_plan(root)
        process = plan.phase(phase).process(name)
        clear_endings(root, name)
        trainer = plan.phase(phase).recipe.trainer
        if trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
            os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it at every call
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_of_rank(trainer, process)))
        os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
        command = torchrun_command(root, process, rendezvous(root, process))
    except PrimerlError as error:
        print(error, file=sys.stderr)
        sys.exit(int(error.exit_code))
    sys.stdout.flush()
    os.execv(command[0], [*command, "-m", module, run_dir, phase, name])


def clear_endings(root: RunDir, name: str) -> None:
    """Forget how an earlier life of this process ended; the supervisor reads these files after its exit."""
    if env.slurm_node_rank() == 0:
        for path in (root.outcome(name), root.error(name)):
            path.unlink(missing_ok=True)
        shutil.rmtree(root.hangs(name), ignore_errors=True)


def ranks_of_node(process: ProcessPlan) -> int:
    return max(1, len(process.accelerators))


def threads_of_rank(trainer: Trainer, process: ProcessPlan) -> int:
    """One, since a GPU does the work; an optimizer that steps on the host gets the rank's share of the node's cores."""
    if not trainer.cpu_offload:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // ranks_of_node(process))


def torchrun_command(root: RunDir, process: ProcessPlan, meeting: list[str]) -> list[str]:
    """Everything up to the ranks' module. Rank 0 of a node also speaks on the role's log."""
    logs = root.torchrun_logs(env.attempt(), process.name, env.slurm_node_rank())
    logs.mkdir(parents=True, exist_ok=True)
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nproc-per-node", str(ranks_of_node(process))),
        *("--nnodes", str(len(process.nodes))),
        *("--max-restarts", "0"),
        *("--log-dir", str(logs), "--redirects", "3", "--tee", "0:3"),
        *meeting,
    ]


def rendezvous(root: RunDir, process: ProcessPlan) -> list[str]:
    if len(process.nodes) == 1:
        address = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
        return [*address, "--rdzv-id", f"{process.name}-{env.attempt()}-{env.incarnation()}"]
    node_rank = env.slurm_node_rank()
    address = meet(root, process.name, node_rank=node_rank)
    host, port = address["host"], str(address["port"])
    return ["--node-rank", str(node_rank), "--master-addr", host, "--master-port", port]
