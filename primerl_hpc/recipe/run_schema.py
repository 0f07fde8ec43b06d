"""Blocks of the recipe about the run as a whole: tracking, how long is waited, what follows a fault."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from primerl_hpc.common.block import Block, Bool, PositiveInt


class Wandb(Block):
    """Where in Weights & Biases a run is shown."""

    project: str = "primerl-hpc"
    """Project there."""
    entity: str | None = None
    """User or team that owns the project; null: the key's own."""
    group: str | None = None
    """Group of runs in the project."""
    tags: tuple[str, ...] = ()
    """Words to find the run by."""
    offline: Bool = False
    """Write to disk alone, for ``wandb sync`` afterwards."""


class Tracking(Block):
    """Where metrics go besides the run directory."""

    wandb: Wandb | None = None
    """Also send metrics to Weights & Biases (extra ``wandb``); the key is read from WANDB_API_KEY at run time."""


class Timeouts(Block):
    """How long a silent peer is waited for before the run stops with its name."""

    inference_ready_s: PositiveInt = 1800
    """For an engine or the router, from its start until it answers."""
    env_server_ready_s: PositiveInt = 600
    """For an environment server, from its start until it answers."""
    weights_s: PositiveInt = 1200
    """Orchestrator: for the next policy version. Trainer: for the next batch is unlimited while the run lives."""
    weight_update_s: PositiveInt = 720
    """One engine's load of one policy version."""
    stall_s: PositiveInt = 3600
    """Supervisor: for the next finished rollout or step, or ten times the longest wait so far where that is longer. Then the role that holds the run up writes down its stacks and is ended like one that died."""
    health_s: Annotated[int, Field(strict=True, ge=10)] = 300
    """For an engine, the router, the teacher, the judge or an environment server that answers nobody, and an engine that makes no token of its requests. Then it is started again. On a busy machine a working server may be silent for seconds."""
    distributed_s: PositiveInt = 3600
    """A collective of the trainer."""
    trainer_hang_s: PositiveInt = 1200
    """Trainer: for one micro-batch, weight export or save. Then every rank writes down its stacks and the run stops with the rank and the collective that hang."""


class Recovery(Block):
    """What follows when the trainer or the orchestrator of a run dies."""

    in_place: Bool = True
    """Both start again from the last complete checkpoint while engines, router and environment servers stay up, as long as the run shows a new step between its faults. False: the attempt ends, and `resume` goes on."""
