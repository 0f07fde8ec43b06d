"""Ranks of a test as processes of their own, forked from a process that has imported what they need."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

from primerl_hpc.common.node.exiting import exit_process

IMPORTED = [
    "torch.distributed.tensor",
    "transformers",
    "primerl_hpc.trainer.main",
    "primerl_hpc.trainer.sft_loop",
]


def spawn_ranks(function: Callable[..., None], size: int, *arguments: Any) -> None:
    """Run ``function(rank, *arguments)`` in ``size`` new processes. Raises if one of them fails; its error is printed.

    They end as the trainer's ranks do, without finalizing the interpreter (`primerl_hpc.common.node.exiting`). The
    process that forks them is started once for all tests of a session: torch and transformers take seconds to import.
    With a GPU there is none, because a process that has used CUDA, as test modules do, cannot fork another user of it.
    """
    import torch
    from torch.multiprocessing import start_processes

    multiprocessing.set_forkserver_preload(IMPORTED)
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    start_processes(_run_rank, (function, arguments), nprocs=size, start_method=method)


def _run_rank(rank: int, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        function(rank, *arguments)
    except BaseException:  # noqa: BLE001 the process ends here
        traceback.print_exc()
        exit_process(1)
    exit_process()
