"""Compare an all-reduce over all nodes with its known result, because a network can corrupt sums without an error.

    python -m primerl_hpc.checks.sums CONTROL/preflight/sums.json     # by a task on each node (`ranks`)

NCCL's protocol LL128 returned wrong sums between GH200 nodes (NVIDIA/nccl issue 2001, pull request 2053), from eight
nodes upward and only for some message sizes. So all ranks of the run sum tensors of several sizes, several times, and
compare every element. Element i of rank r is ``i % 251 + r``, so the sum over n ranks is ``n (i % 251) + n (n - 1)/2``,
which float32 represents exactly for up to 5,000 ranks.
"""

from __future__ import annotations

import sys
from typing import Any

from primerl_hpc.checks.findings import Finding, bad, ok, warn
from primerl_hpc.checks.ranks import NodeTask, run_task

MODULE = "primerl_hpc.checks.sums"
PERIOD = 251
NUM_ELEMENTS = {"gpu": (1 << 8, 1 << 14, 1 << 18, 1 << 22, 1 << 24), "cpu": (1 << 8, 1 << 16)}
"""Lengths of the float32 tensors: 1 KiB to 64 MiB."""
REPEATS = {"gpu": 20, "cpu": 2}
WRONG_HINT = (
    "on GH200 nodes set NCCL_PROTO: ^LL128 in network.env; otherwise compare network.env with the site's "
    "documentation and report it to the site"
)
UNKNOWN_HINT = (
    "the trainer's interpreter must have torch (software.roles.trainer); "
    "raise preflight.timeout_s if it is slow"
)


def judge_sums(results: list[dict[str, Any] | None]) -> Finding:
    """Judge the results of all nodes; None for a node without one."""
    present = [result for result in results if result is not None]
    if wrong := [result for result in present if result["wrong"]]:
        hosts = ", ".join(sorted({result["node"] for result in wrong}))
        return bad(f"wrong sums on {hosts}: {wrong[0]['wrong'][0]}", WRONG_HINT)
    errors = [f"{result['node']}: {result['error']}" for result in present if result["error"]]
    if missing := len(results) - len(present):
        errors.append(f"{missing} of {len(results)} nodes did not respond")
    if errors:
        return warn(f"the sums could not be checked: {errors[0]}", UNKNOWN_HINT)
    ranks, seconds = present[0]["ranks"], max(result["seconds"] for result in present)
    return ok(f"sums over {ranks} ranks on {len(results)} nodes are right ({seconds:.1f} s)")


# -- on a node -------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    return run_task(argv, _on_node, _on_rank)


def _on_node(task: NodeTask) -> dict[str, Any]:
    error, reports = task.run_ranks(MODULE)
    wrong = [fault for report in reports if report is not None for fault in report]
    return {"ranks": task.num_ranks, "wrong": wrong, "error": error}


def _on_rank(task: NodeTask, device: Any) -> list[str]:
    """All-reduce tensors over the default process group; return a description of each wrong sum. Collective."""
    import torch
    import torch.distributed as dist

    rank, world, accelerator = dist.get_rank(), task.num_ranks, task.request["accelerator"]
    wrong = []
    for size in NUM_ELEMENTS[accelerator]:
        pattern = torch.arange(size, device=device) % PERIOD
        values = (pattern + rank).to(torch.float32)
        expected = (world * pattern + world * (world - 1) // 2).to(torch.float32)
        most = 0
        for _ in range(REPEATS[accelerator]):  # as often on every rank, whatever one of them finds
            total = values.clone()
            dist.all_reduce(total)
            most = max(most, int((total != expected).sum()))
        if most:
            wrong.append(f"{most} of {size} elements (rank {rank} of {world})")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
