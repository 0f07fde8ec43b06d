"""A process group of one rank in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from primerl_hpc.trainer.parallel.mesh import World


@contextmanager
def one_rank_world() -> Iterator[World]:
    import torch
    import torch.distributed as dist

    from primerl_hpc.recipe.schema.layout import TrainerLayout
    from primerl_hpc.trainer.parallel.mesh import make_world

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_world(TrainerLayout(), torch.device("cpu"), local_rank=0, local_size=1)
    dist.destroy_process_group()
