"""The block ``layout``: how many nodes and accelerators the engines and the trainer use, and where CPU roles run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from primerl_hpc.common.block import Auto, Block, Bool, PositiveInt
from primerl_hpc.common.names import Kind


class EngineLayout(Block):
    """The shape of one engine."""

    tensor_parallel: PositiveInt = 1
    """Accelerators over which an engine shards its weight matrices."""
    data_parallel: PositiveInt = 1
    """Data-parallel ranks within one engine, for mixture-of-experts models. For dense models use ``replicas``
    instead."""
    expert_parallel: Bool = False
    """Distribute the experts over the tensor-parallel and data-parallel ranks of an engine."""
    node_type: str | None = None
    """Type of the engine's nodes: a name in the profile's ``node_types``. Default (null): the profile's ``node``."""

    @property
    def accelerators_per_replica(self) -> int:
        return self.tensor_parallel * self.data_parallel


class PrefillLayout(EngineLayout):
    """Engines of the policy that only process prompts. The decoding engines fetch their KV cache through vLLM's NIXL
    connector."""

    replicas: Auto | PositiveInt = 1
    """Number of prefill engines. All turns of a session use the same one. ``auto``: the predicted fastest split of the
    engines' nodes; without a prediction 1."""
    tensor_parallel: Auto | PositiveInt = 1
    """Accelerators over which an engine shards its weight matrices. ``auto``: that of the decoding engines."""
    data_parallel: Auto | PositiveInt = 1
    """Data-parallel ranks within one engine. ``auto``: that of the decoding engines."""
    expert_parallel: Auto | Bool = False
    """Distribute the experts over the accelerators of an engine. ``auto``: as the decoding engines."""

    def settled(self, decoding: InferenceLayout) -> FrozenLayout:
        """Return the layout with numbers: ``auto`` is the shape of the decoding engines, and one replica."""
        keys = ("tensor_parallel", "data_parallel", "expert_parallel")
        shape = {
            key: getattr(decoding, key) if getattr(self, key) == "auto" else getattr(self, key)
            for key in keys
        }
        defaults = {"tensor_parallel": 1, "data_parallel": 1, "expert_parallel": False}
        shape = {key: defaults[key] if value == "auto" else value for key, value in shape.items()}
        replicas = 1 if self.replicas == "auto" else self.replicas
        return FrozenLayout(**shape, node_type=self.node_type, replicas=replicas)


class InferenceLayout(EngineLayout):
    """The policy's engines. ``auto`` is chosen by prediction where GPU type and model are known (docs/layouts.md)."""

    nodes: Auto | PositiveInt = "auto"
    """Nodes for engines. ``auto``: the predicted best split; without a prediction all nodes that the other roles leave
    free, or a share of a single node."""
    replicas: Auto | PositiveInt = "auto"
    """Independent engines behind the router. ``auto``: as many as fit on the nodes."""
    tensor_parallel: Auto | PositiveInt = 1
    """Accelerators over which an engine shards its weight matrices. ``auto``: the predicted fastest; without a
    prediction 1."""
    data_parallel: Auto | PositiveInt = 1
    """Data-parallel ranks within one engine, for mixture-of-experts models. For dense models use ``replicas`` instead.
    ``auto``: the predicted fastest; without a prediction 1."""
    expert_parallel: Auto | Bool = False
    """Distribute the experts over the tensor-parallel and data-parallel ranks of an engine. ``auto``: true for mixtures
    if the engine has several data-parallel ranks."""
    prefill: PrefillLayout | None = None
    """Additional engines that process prompts, so that the replicas only decode; needs the package nixl (extra
    ``prefill``). Default (null): every engine does both."""
    routing: Literal["prefix", "session"] = "prefix"
    """How the router assigns requests to engines.
    ``prefix``: to the engine that has the longest part of the prompt in its prefix cache, so that the rollouts of a
    group share an engine, unless that engine has much more work than another.
    ``session``: by a hash of the rollout, so that the turns of a rollout never change engine."""
    elastic: Bool = False
    """Run engines in a separate job array whose jobs join and leave a running trainer job. Needs ``replicas``."""
    partition: str | None = None
    """SLURM partition of elastic engines. Default: the profile's ``elastic.partition``, else the run's partition."""

    @model_validator(mode="after")
    def _elastic_engines_are_counted(self) -> Self:
        if self.partition is not None and not self.elastic:
            raise ValueError(
                "partition applies to elastic engines only; set elastic: true or remove partition"
            )
        if self.elastic and (self.replicas == "auto" or self.nodes != "auto"):
            raise ValueError("elastic engines need a number of replicas and nodes: auto")
        return self

    @model_validator(mode="after")
    def _prefilled_blocks_fit(self) -> Self:
        if self.prefill is None:
            return self
        if self.elastic:
            raise ValueError(
                "prefill engines run in the run's own job, so the decoding engines must too; set elastic: false"
            )
        if self.tensor_parallel == "auto" or self.prefill.tensor_parallel == "auto":
            return self
        low, high = sorted((self.tensor_parallel, self.prefill.tensor_parallel))
        if high % low:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} and prefill.tensor_parallel {self.prefill.tensor_parallel} "
                "do not match: one must divide the other"
            )
        return self


class FrozenLayout(EngineLayout):
    """Engines of a teacher or judge; of prefill engines, their layout without ``auto``."""

    replicas: PositiveInt = 1
    """Number of engines. Requests are distributed round-robin."""


class TrainerLayout(Block):
    """The trainer's ranks and how they shard the model."""

    nodes: Auto | PositiveInt = "auto"
    """Nodes for the trainer. ``auto``: the predicted best split; without a prediction one node, or a share of it if the
    run has a single node."""
    ranks: Auto | PositiveInt = "auto"
    """Total number of trainer processes, one per accelerator. ``auto``: every accelerator of the trainer's nodes."""
    node_type: str | None = None
    """Type of the trainer's nodes: a name in the profile's ``node_types``. Default (null): the profile's ``node``."""
    replicate: Auto | PositiveInt = 1
    """Number of replicas of the sharded model (HSDP). Must divide ``ranks``. 1: pure FSDP. ``auto``: the predicted
    fastest that fits, with complete nodes in each replica; without a prediction 1."""
    tensor_parallel: Auto | PositiveInt = 1
    """Adjacent ranks that divide the matrices of attention, MLPs, embeddings and head, and the tokens of norms and
    experts. Must divide the model's attention heads. ``auto``: the predicted fastest degree within a node that fits;
    without a prediction 1."""
    context_parallel: Auto | PositiveInt = 1
    """Ranks that share one sequence. ``auto``: the predicted fastest that fits; without a prediction the smallest
    number that leaves each rank at most 32,768 tokens of it."""
    context_style: Literal["auto", "ulysses", "ring"] = "auto"
    """How ranks share a sequence.
    ``auto``: ulysses if the number of attention heads is divisible, else ring.
    ``ulysses``: an all-to-all that exchanges attention heads for tokens.
    ``ring``: keys and values are passed from rank to rank."""
    expert_parallel: Auto | PositiveInt = "auto"
    """Ranks that share the experts of a mixture-of-experts model. ``auto``: the largest number up to 8, within a node,
    that divides both the number of experts and the number of ranks."""
    expert_backend: Literal["torch", "deepep"] = "torch"
    """How tokens are sent to their experts.
    ``torch``: torch's all-to-all.
    ``deepep``: DeepEP, for NVIDIA GPUs and bfloat16; install it separately."""

    @property
    def tensor_degree(self) -> int:
        """``tensor_parallel`` as a number; ``auto``, which is decided before a run starts, counts as 1."""
        return 1 if self.tensor_parallel == "auto" else self.tensor_parallel

    @property
    def num_replicas(self) -> int:
        """``replicate`` as a number; ``auto``, which is decided before a run starts, counts as 1."""
        return 1 if self.replicate == "auto" else self.replicate


class OrchestratorLayout(Block):
    """Where the processes run that need no accelerator."""

    place: Literal["head", "trainer", "cpu-partition"] = "head"
    """Node that runs the orchestrator, the router and the environment servers: the job's first node (``head``), the
    trainer's first node (``trainer``), or a node of the profile's CPU partition (``cpu-partition``)."""


class Colocated(Block):
    """How engines and trainer share the same accelerators."""

    mode: Literal["sleep", "share"] = "sleep"
    """``sleep``: they take turns. Engines free their memory while the trainer trains, and the trainer moves weights and
    optimizer state to host memory while the engines generate.
    ``share``: both run at the same time, each with a fixed share of the memory."""
    engine_share: Annotated[float, Field(strict=True, ge=0.1, le=0.9)] = 0.4
    """mode share: part of a GPU's memory for the engine; the trainer may use the rest. Replaces
    ``inference.gpu_memory_utilization``."""


def _from_switch(value: Any) -> Any:
    """Return the block for ``true`` and None for ``false``."""
    return {True: {}, False: None}[value] if isinstance(value, bool) else value


class Layout(Block):
    """Number of nodes and accelerators of each role."""

    inference: InferenceLayout = InferenceLayout()
    trainer: TrainerLayout = TrainerLayout()
    orchestrator: OrchestratorLayout = OrchestratorLayout()
    auto_split: Bool = False
    """Change the number of nodes of engines and trainer between jobs of a chain, or at a requeue, if the split advisor
    finds a faster split of the same nodes. For kind rl without elastic engines. The advice is shown in any case."""
    colocated: Annotated[
        Colocated | None, BeforeValidator(_from_switch, json_schema_input_type=bool | Colocated | None)
    ] = None
    """Run engines and trainer on the same accelerators, for example on a single GPU: ``true``, or a block with the
    mode. For kind rl. Default (null): each has accelerators of its own."""

    @property
    def takes_turns(self) -> bool:
        """True if engines and trainer use their accelerators in turn."""
        return self.colocated is not None and self.colocated.mode == "sleep"


def colocation_conflicts(recipe: Any) -> Iterator[str]:
    """Yield the reasons for which engines and trainer of a `schema.recipe.Recipe` cannot share accelerators."""
    layout, colocated = recipe.layout, recipe.layout.colocated
    assert colocated is not None
    inference, trainer = layout.inference, layout.trainer
    if recipe.kind != Kind.RL:
        yield f"layout.colocated belongs to kind rl, but the kind is {recipe.kind}; remove it"
    if inference.elastic:
        yield (
            "layout.colocated and layout.inference.elastic cannot be combined: elastic engines run in jobs of their "
            "own; remove one of them"
        )
    if inference.prefill is not None:
        yield (
            "layout.colocated and layout.inference.prefill cannot be combined: prefill engines would need accelerators "
            "of their own; remove one of them"
        )
    if inference.node_type != trainer.node_type:
        yield (
            "layout.colocated needs the same node_type in layout.inference and layout.trainer: both run on the same "
            "nodes"
        )
    if "auto" not in (inference.nodes, trainer.nodes) and inference.nodes != trainer.nodes:
        yield (
            f"layout.inference.nodes {inference.nodes} and layout.trainer.nodes {trainer.nodes} differ, but with "
            "layout.colocated both run on the same nodes; remove one of them"
        )
    if layout.auto_split:
        yield (
            "layout.colocated and layout.auto_split cannot be combined: there are no accelerators to exchange; remove "
            "one of them"
        )
    if recipe.served_models:
        role = next(iter(recipe.served_models)).value
        yield (
            f"layout.colocated and a {role} that the run serves cannot be combined: its engines would need "
            f"accelerators of their own; set {role}.base_url"
        )
    if inference.data_parallel not in (1, "auto"):
        yield (
            "layout.colocated supports engines with data_parallel 1 only; set layout.inference.replicas instead"
        )
    yield from _update_conflicts(recipe, colocated)


def _update_conflicts(recipe: Any, colocated: Colocated) -> Iterator[str]:
    """Yield the reasons of transports and caches."""
    if recipe.weights.transport == "broadcast":
        yield (
            "weights.transport broadcast needs the engines and the trainer on different accelerators, because NCCL "
            "accepts one rank per GPU; with layout.colocated use filesystem"
        )
    if colocated.mode == "sleep" and recipe.weights.transport != "filesystem":
        yield (
            f"weights.transport {recipe.weights.transport}: with layout.colocated in mode sleep, use filesystem, "
            "because an engine cannot ask for other files while it has the accelerator"
        )
    if colocated.mode == "sleep" and recipe.inference.kv_offload_gib is not None:
        yield (
            "inference.kv_offload_gib: with layout.colocated in mode sleep, engines drop their KV cache at every turn; "
            "remove the key"
        )
