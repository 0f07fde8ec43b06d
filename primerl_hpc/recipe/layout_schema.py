"""Blocks of the recipe about what runs where: engines of the policy, of a teacher and of a judge, trainer, orchestrator."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from primerl_hpc.common.block import Auto, Block, Bool, PositiveInt


class EngineLayout(Block):
    """The shape of one engine."""

    tensor_parallel: PositiveInt = 1
    """Accelerators that share one engine's matrices."""
    data_parallel: PositiveInt = 1
    """Data-parallel ranks inside one engine (mixture-of-experts models); dense models use ``replicas``."""
    expert_parallel: Bool = False
    """Spread experts over the tensor and data parallel ranks of an engine."""

    @property
    def accelerators_per_replica(self) -> int:
        return self.tensor_parallel * self.data_parallel


class PrefillLayout(EngineLayout):
    """Engines of the policy that read prompts for the others, which pull their KV cache (vLLM's NIXL connector)."""

    replicas: PositiveInt = 1
    """Prefill engines; a session stays with one of them."""


class InferenceLayout(EngineLayout):
    """The policy's engines."""

    nodes: Auto | PositiveInt = "auto"
    """Nodes for engines; ``auto``: what the other roles leave, or a share of a single node."""
    replicas: Auto | PositiveInt = "auto"
    """Independent engines behind the router; ``auto``: as many as fit."""
    prefill: PrefillLayout | None = None
    """More engines that read the prompts, while the replicas decode; null: each engine does both. Needs the package nixl (extra ``prefill``)."""
    routing: Literal["prefix", "session"] = "prefix"
    """Which engine a request goes to. ``prefix``: the one that has most of its prompt in its cache, so a group's rollouts meet, unless that one has much more to do than another; ``session``: a hash of the rollout, whose turns then never change engine while it lives."""
    elastic: Bool = False
    """Engines in a job array of their own, which join and leave a running trainer job; needs ``replicas``."""
    partition: str | None = None
    """Partition of the elastic engines; default: the profile's ``elastic.partition``, else the run's own."""

    @model_validator(mode="after")
    def _elastic_engines_are_counted(self) -> Self:
        if self.partition is not None and not self.elastic:
            raise ValueError("partition is for elastic engines; set elastic: true")
        if self.elastic and (self.replicas == "auto" or self.nodes != "auto"):
            raise ValueError("elastic engines need replicas, a number, and nodes: auto")
        return self

    @model_validator(mode="after")
    def _prefilled_blocks_fit(self) -> Self:
        if self.prefill is None:
            return self
        if self.elastic:
            raise ValueError(
                "prefill engines are part of the run's job, and so must be those that decode: elastic: false"
            )
        low, high = sorted((self.tensor_parallel, self.prefill.tensor_parallel))
        if high % low:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} and prefill.tensor_parallel {self.prefill.tensor_parallel}: one must divide the other"
            )
        return self


class FrozenLayout(EngineLayout):
    """Engines of a teacher or judge."""

    replicas: PositiveInt = 1
    """Engines; requests go to them in turn."""


class TrainerLayout(Block):
    """The trainer's ranks and how they share the model."""

    nodes: Auto | PositiveInt = "auto"
    """Nodes for the trainer; ``auto``: one, or a share of a single node."""
    ranks: Auto | PositiveInt = "auto"
    """Trainer processes in all, one per accelerator; ``auto``: every accelerator of its nodes."""
    replicate: PositiveInt = 1
    """HSDP: copies of the sharded model; must divide ranks."""
    context_parallel: Auto | PositiveInt = 1
    """Ranks that share one sequence; ``auto``: as many as leave each at most 32,768 of its tokens."""
    context_style: Literal["auto", "ulysses", "ring"] = "auto"
    """How they share it: heads for tokens by all-to-all (ulysses), or keys and values handed round (ring); ``auto``: ulysses where the heads divide."""
    expert_parallel: Auto | PositiveInt = "auto"
    """Ranks that share the experts of a mixture-of-experts model; ``auto``: the most, within a node and up to 8, that divide experts and ranks."""
    expert_backend: Literal["torch", "deepep"] = "torch"
    """What carries tokens to their experts: all-to-all of torch, or DeepEP (NVIDIA, bfloat16, to be installed by hand)."""


class OrchestratorLayout(Block):
    """Where the processes run that need no accelerator."""

    place: Literal["head", "trainer", "cpu-partition"] = "head"
    """Which node runs the orchestrator, the router and the environment servers."""


class Layout(Block):
    """What runs on how many nodes and accelerators."""

    inference: InferenceLayout = InferenceLayout()
    trainer: TrainerLayout = TrainerLayout()
    orchestrator: OrchestratorLayout = OrchestratorLayout()
