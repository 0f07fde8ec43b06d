"""One rank of the trainer: ``python -m primerl_hpc.trainer.main RUN_DIR PHASE PROCESS`` under torchrun.

Reads the plan, joins its peers, trains, exits. The result is in ``control/outcomes`` or ``control/errors``, because
torchrun's exit code is only 0 or 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.log import change_logging, dump_stacks_on_signal, setup_logging
from primerl_hpc.common.names import Kind
from primerl_hpc.common.node.binding import bind_rank
from primerl_hpc.common.node.compile_caches import kept_caches
from primerl_hpc.common.node.exiting import exit_process
from primerl_hpc.common.node.start_phases import own_phases
from primerl_hpc.common.node.transformers_folders import read_models_once
from primerl_hpc.common.safety.error_text import describe_error
from primerl_hpc.plan.plan import PhasePlan, load_plan
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.control import write_error, write_outcome
from primerl_hpc.trainer.perf import memory_snapshots
from primerl_hpc.trainer.setup import World, end_world, start_world
from primerl_hpc.trainer.watchdog import Watchdog

Loop = Callable[[PhasePlan, RunDir, World, Watchdog], tuple[str, int]]
"""Trains; returns the outcome (``done`` or ``stopped``) and the last finished step."""


def train_phase(phase: PhasePlan, run: RunDir, world: World, watchdog: Watchdog) -> tuple[str, int]:
    """Run the loop of the phase's kind."""
    if phase.recipe.kind == Kind.SFT:
        from primerl_hpc.trainer.sft_loop import train_sft as loop
    else:
        from primerl_hpc.trainer.rl_loop import train_rl as loop
    return loop(phase, run, world, watchdog)


class RankErrors(ErrorHandler):
    """Writes a rank's error file atomically: torchrun reads it when any rank exits, and fails on a partial file."""

    def record_exception(self, e: BaseException) -> None:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            report = {"message": describe_error(e), "extraInfo": more}
            with contextlib.suppress(OSError):  # `main` reports the exception anyway
                write_json(Path(path), {"message": report})


@partial(record, error_handler=RankErrors())
def train(root: RunDir, phase_name: str, process: str, loop: Loop) -> None:
    rank = int(os.environ["RANK"])
    bind_rank(int(os.environ["LOCAL_RANK"]))
    dump_stacks_on_signal()
    setup_logging("trainer", level=logging.INFO if rank == 0 else logging.WARNING)
    phase = load_plan(root).phase(phase_name)
    log, role = phase.recipe.log, phase.process(process).role
    least = logging.NOTSET if rank == 0 else logging.WARNING
    change_logging(log.level_of(role), verifiers=log.verifiers, is_json=log.format == "json", least=least)
    run = root.phase(phase_name)
    own_phases().end("imports")
    world = start_world(phase.recipe)
    own_phases().end("process group")
    watchdog = Watchdog(
        root,
        process,
        rank=world.rank,
        size=world.size,
        timeout_s=phase.recipe.timeouts.trainer_hang_s,
        end=lambda sentence: exit_with_error(
            root, process, rank, int(ExitCode.FAILED), sentence, is_cause=True
        ),
    )
    caches = kept_caches("trainer", phase.recipe.model.name)
    with rank_memory_snapshots(root, phase, world):
        outcome, step = loop(phase, run, world, watchdog)
    watchdog.pause()
    if caches is not None and world.is_leader:
        caches.save()
    if world.is_leader:
        write_outcome(root, process, outcome, step)
    end_world()


def rank_memory_snapshots(root: RunDir, phase: PhasePlan, world: World) -> AbstractContextManager[None]:
    """Return the context that writes a snapshot when this rank's GPU is out of memory."""
    if world.device.type != "cuda":
        return contextlib.nullcontext()
    path = root.memory_snapshot(env.attempt(), world.rank)
    return memory_snapshots(path, phase.recipe.trainer.memory_history)


def main(arguments: list[str], loop: Loop = train_phase) -> None:
    """Train and exit. Does not return."""
    run_dir, phase_name, process = arguments
    root, rank = RunDir(Path(run_dir)), int(os.environ["RANK"])
    read_models_once()
    try:
        train(root, phase_name, process, loop)
    except PrimerlError as error:
        exit_with_error(root, process, rank, int(error.exit_code), str(error), is_cause=True)
    except Exception as error:  # noqa: BLE001 the process ends here: report the cause to the supervisor
        traceback.print_exc()
        exit_with_error(root, process, rank, int(ExitCode.FAILED), describe_error(error), is_cause=False)
    exit_process(ExitCode.DONE)


def exit_with_error(
    root: RunDir, process: str, rank: int, code: int, message: str, *, is_cause: bool
) -> None:
    """Report the error and exit immediately: a normal interpreter exit would abort in the live process group."""
    write_error(root, process, rank=rank, exit_code=code, message=message, is_cause=is_cause)
    if env.is_debug() and is_cause:
        traceback.print_exc()
    print(message, file=sys.stderr)
    exit_process(code)


if __name__ == "__main__":
    main(sys.argv[1:])
