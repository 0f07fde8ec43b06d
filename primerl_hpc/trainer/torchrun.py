"""The trainer under torchrun: the command, built from the plan, and a rendezvous without discovery.

The trainer and SFT roles call `run_torchrun`, which replaces their process by this module's own command::

    python -m primerl_hpc.trainer.torchrun RUN_DIR PROCESS [torchrun's arguments]

torchrun's own rendezvous discovers ranks through a store that listens on every interface without authentication, and it
unpickles the values that it reads there. Ranks and nodes are in the plan, so nothing has to be discovered: node 0
serves the attempt's store (`transport.store`), on its loopback address when the run has one node; the other nodes read
its address in the run directory, and the ranks use the same store.

torchrun restarts nothing here: after a failure the supervisor restarts the group from the last complete checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError, TimeoutWaitingError
from primerl_hpc.common.names import Role
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.common.waiting import wait_until
from primerl_hpc.plan.plan import PhasePlan, ProcessPlan, load_plan
from primerl_hpc.recipe.schema.training import TrainerConfig
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.access.ownership import check_own
from primerl_hpc.run.endpoints import read_endpoint
from primerl_hpc.run.ports import set_collective_interfaces
from primerl_hpc.run.rendezvous import meet
from primerl_hpc.run.rundir import RunDir

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

BACKEND = "primerl"
FEW_CORES = 4
"""With fewer cores, the processes of a run start slowly because they start at the same time."""
MAX_DELAY_S = 10.0


def run_torchrun(arguments: list[str], module: str = "primerl_hpc.trainer.main") -> None:
    """Replace this process by torchrun, whose ranks run ``module``. Does not return.

    ``arguments``: ``RUN_DIR PHASE NAME``. A PrimerlError is printed and ends the process with its exit code.
    """
    run_dir, phase, name = arguments
    try:
        root = RunDir(Path(run_dir))
        check_own(root)
        plan = load_plan(root)
        process = plan.phase(phase).process(name)
        delete_exit_reports(root, name)
        trainer = plan.phase(phase).recipe.trainer
        if trainer.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
            os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")  # transformers reads it at every call
        set_collective_interfaces(plan.num_hosts)
        if (
            plan.accelerator == "cpu"
            and process.role == Role.TRAINER
            and len(os.sched_getaffinity(0)) < FEW_CORES
        ):
            wait_for_environments(root.phase(phase), plan.phase(phase))
        # also replaces a value that is no number, such as the empty text that some sites set
        os.environ["OMP_NUM_THREADS"] = str(
            env.integer("OMP_NUM_THREADS", num_rank_threads(trainer, process))
        )
        os.environ.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
        command = torchrun_command(root, process)
    except PrimerlError as error:
        print(error, file=sys.stderr)
        sys.exit(int(error.exit_code))
    sys.stdout.flush()
    os.execv(command[0], [*command, "-m", module, run_dir, phase, name])


def wait_for_environments(run: RunDir, phase: PhasePlan) -> None:
    """Wait until the environment servers of this phase serve, but not for long.

    Rollouts begin when the engine has started, which takes longest. On few cores the start of the trainer, which is
    needed after the first rollouts, would delay it.
    """
    servers = [process.name for process in phase.processes if process.role == Role.ENV_SERVER]
    with contextlib.suppress(TimeoutWaitingError):
        wait_until(
            lambda: all(read_endpoint(run, name) is not None for name in servers),
            what="the environment servers",
            timeout_s=MAX_DELAY_S,
        )


def delete_exit_reports(root: RunDir, name: str) -> None:
    """Delete the outcome, error and hang reports of earlier incarnations; the supervisor reads them after the exit."""
    if env.slurm_node_rank() == 0:
        for path in (root.outcome(name), root.error(name)):
            path.unlink(missing_ok=True)
        shutil.rmtree(root.hangs(name), ignore_errors=True)


def num_node_ranks(process: ProcessPlan) -> int:
    """Return the number of ranks on each node."""
    return max(1, len(process.accelerators))


def num_rank_threads(trainer: TrainerConfig, process: ProcessPlan) -> int:
    """Return the CPU threads of a rank: 1, or its share of the node's cores when the optimizer runs on the CPU."""
    if not trainer.cpu_offload:
        return 1
    return max(1, len(os.sched_getaffinity(0)) // num_node_ranks(process))


def torchrun_command(root: RunDir, process: ProcessPlan) -> list[str]:
    """Return the command up to the module of the ranks. Rank 0 of each node also writes to the role's log."""
    logs = root.torchrun_logs(env.attempt(), process.name, env.slurm_node_rank())
    logs.mkdir(parents=True, exist_ok=True)
    return [
        sys.executable,
        *("-m", "primerl_hpc.trainer.torchrun", str(root.root), process.name),
        *("--rdzv-id", f"{process.name}-{env.attempt()}-{env.incarnation()}"),
        *("--nproc-per-node", str(num_node_ranks(process))),
        *("--nnodes", str(len(process.nodes))),
        *("--max-restarts", "0"),
        *("--log-dir", str(logs), "--redirects", "3", "--tee", "0:3"),
        *("--local-addr", "localhost"),  # otherwise torchrun resolves the host name; nothing connects there
    ]


# -- the process that this command starts ----------------------------------------------------------


def run_agent(arguments: list[str]) -> None:
    """Run torchrun with the planned rendezvous. ``arguments``: ``RUN_DIR PROCESS`` and torchrun's own.

    Only here is torch imported: `run_torchrun` needs none of it.
    """
    run_dir, process, *torchrun_arguments = arguments
    if load_plan(RunDir(Path(run_dir))).accelerator == "cpu":
        from primerl_hpc.trainer.forked_ranks import fork_ranks, start_by_fork

        number = torchrun_arguments[torchrun_arguments.index("--nproc-per-node") + 1]
        if ranks := fork_ranks(int(number)):
            start_by_fork(ranks)
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    def create(parameters: RendezvousParameters) -> RendezvousHandler:
        return planned_rendezvous(RunDir(Path(run_dir)), process, parameters.max_nodes, parameters.run_id)

    rendezvous_handler_registry.register(BACKEND, create)
    run.main(["--rdzv-backend", BACKEND, "--rdzv-endpoint", "planned", *torchrun_arguments])


def planned_rendezvous(root: RunDir, process: str, num_nodes: int, run_id: str) -> RendezvousHandler:
    """Return a rendezvous handler whose ranks are those of the plan."""
    from torch.distributed import PrefixStore
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

    from primerl_hpc.transport.store import SecureStore, serve_store

    class PlannedRendezvous(RendezvousHandler):
        store: SecureStore | None = None

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            """Raise TimeoutWaitingError when node 0 publishes no store, RoleError when the store does not respond."""
            keys, node = run_keys(root), env.slurm_node_rank() if num_nodes > 1 else 0

            def serve(host: str) -> int:
                self.store = serve_store(keys, process, host, num_clients=load_plan(root).max_ranks)
                return self.store.port

            address = meet(root, process, node_rank=node, num_nodes=num_nodes, listen=serve)
            if self.store is None:
                self.store = SecureStore(keys, address["host"], address["port"])
            env.set_store(address["host"], address["port"])  # for the ranks, which inherit the environment
            unused = RendezvousStoreInfo(address["host"], 0)
            return RendezvousInfo(PrefixStore("agents", self.store), node, num_nodes, unused)

        def is_closed(self) -> bool:
            return False

        def set_closed(self) -> None:
            pass

        def num_nodes_waiting(self) -> int:
            return 0

        def get_run_id(self) -> str:
            return run_id

        def shutdown(self) -> bool:
            return True

    return PlannedRendezvous()


def main(arguments: list[str]) -> NoReturn:
    """Run the agent and end the process: triton would print hundreds of lines if the interpreter were finalized."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run_agent(arguments)
    except ChildFailedError as error:  # torchrun's report, which the supervisor reads in the log
        print("".join(traceback.format_exception_only(error)), file=sys.stderr)
        exit_process(ExitCode.FAILED)
    except Exception:  # noqa: BLE001 the process ends here
        traceback.print_exc()
        exit_process(ExitCode.FAILED)
    exit_process()


if __name__ == "__main__":
    main(sys.argv[1:])
