"""Raise the soft resource limits of this process to the hard limits. Standard library only: guards use it.

SLURM propagates the soft limits of the login shell to every step (PropagateResourceLimits). The usual 64 KiB of locked
memory or 1024 open files are too few for engines and ranks.
"""

from __future__ import annotations

import contextlib
import resource

RAISED = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)
"""Locked memory (RDMA registers its buffers there), open files, processes and threads of this user."""


def raise_limits() -> None:
    """Set each soft limit to its hard limit; keep it if the kernel or container refuses."""
    for limit in RAISED:
        soft, hard = resource.getrlimit(limit)
        if soft != hard:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(limit, (hard, hard))
