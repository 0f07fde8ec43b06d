"""One rank of the trainer: ``python -m primerl_hpc.trainer.main RUN_DIR PHASE PROCESS`` under torchrun.

Reads the plan, joins its peers, trains, leaves. How it ended is in ``control/outcomes`` or ``control/errors``, because
torchrun's exit code says only 0 or 1.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from primerl_hpc.common import env
from primerl_hpc.common.errors import ExitCode, PrimerlError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.log import dump_stacks_on_signal, setup_logging
from primerl_hpc.common.names import Kind
from primerl_hpc.common.rundir import RunDir
from primerl_hpc.plan.types import PhasePlan, load_plan
from primerl_hpc.trainer.control import write_error, write_outcome
from primerl_hpc.trainer.setup import World, end_world, start_world
from primerl_hpc.trainer.watchdog import Watchdog

Loop = Callable[[PhasePlan, RunDir, World, Watchdog], tuple[str, int]]
"""Trains; says how it ended (``done`` or ``stopped``) and after which step."""


def train_phase(phase: PhasePlan, run: RunDir, world: World, watchdog: Watchdog) -> tuple[str, int]:
    if phase.recipe.kind == Kind.SFT:
        from primerl_hpc.trainer.sft import train_sft as loop
    else:
        from primerl_hpc.trainer.rl import train_rl as loop
    return loop(phase, run, world, watchdog)


class RankErrors(ErrorHandler):
    """torchrun reads a rank's error file as soon as any rank has ended, and dies of a half-written one. This one is whole."""

    def record_exception(self, e: BaseException) -> None:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            more = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
            said = {"message": f"{type(e).__name__}: {e}", "extraInfo": more}
            with contextlib.suppress(OSError):  # `main` tells of the exception all the same
                write_json(Path(path), {"message": said})


@partial(record, error_handler=RankErrors())
def train(root: RunDir, phase_name: str, process: str, loop: Loop) -> None:
    rank = int(os.environ["RANK"])
    dump_stacks_on_signal()
    setup_logging("trainer", level=logging.INFO if rank == 0 else logging.WARNING)
    phase = load_plan(root).phase(phase_name)
    run = root.phase(phase_name)
    world = start_world(phase.recipe)
    watchdog = Watchdog(
        root,
        process,
        rank=world.rank,
        size=world.size,
        timeout_s=phase.recipe.timeouts.trainer_hang_s,
        end=lambda sentence: end_badly(root, process, rank, int(ExitCode.FAILED), sentence, is_cause=True),
    )
    outcome, step = loop(phase, run, world, watchdog)
    watchdog.rest()
    if world.is_leader:
        write_outcome(root, process, outcome, step)
    end_world()


def main(arguments: list[str], loop: Loop = train_phase) -> None:
    run_dir, phase_name, process = arguments
    root, rank = RunDir(Path(run_dir)), int(os.environ["RANK"])
    try:
        train(root, phase_name, process, loop)
    except PrimerlError as error:
        end_badly(root, process, rank, int(error.exit_code), str(error), is_cause=True)
    except Exception as error:  # noqa: BLE001 the process ends here: say why where the supervisor looks
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        end_badly(root, process, rank, int(ExitCode.FAILED), message, is_cause=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        ExitCode.DONE
    )  # all is saved and closed; libraries' own teardown would bury the log's last lines


def end_badly(root: RunDir, process: str, rank: int, code: int, message: str, *, is_cause: bool) -> None:
    """Say it once and leave at once: a normal interpreter exit would abort in the live process group."""
    write_error(root, process, rank=rank, exit_code=code, message=message, is_cause=is_cause)
    if env.is_debug() and is_cause:
        traceback.print_exc()
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
