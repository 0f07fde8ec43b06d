"""The recipe, model shape and GPU types of a prediction, and the inputs of the formulas for one layout choice.

case = make_case(recipe, profile, shape)              # ConfigError names what is unknown
case.trainer_setup(choice), case.engine_setup(choice), case.workload(choice, running)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from primerl_hpc.cluster.node_types import Node
from primerl_hpc.cluster.schema import Profile
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.common.names import Kind
from primerl_hpc.plan.assess.choice import LayoutChoice, PrefillChoice
from primerl_hpc.plan.pools import Pools, nodes_of
from primerl_hpc.plan.predict.figure import Figure, Tier, estimate, exact
from primerl_hpc.plan.predict.hardware import GpuSpec, gpu_spec
from primerl_hpc.plan.predict.layouts import FORWARD_TOKENS, EngineSetup, TrainerSetup
from primerl_hpc.plan.predict.ledger import Correction
from primerl_hpc.plan.predict.memory_engine import default_limits
from primerl_hpc.plan.predict.shape import ModelShape
from primerl_hpc.plan.simulation.lengths import Lengths
from primerl_hpc.plan.simulation.sides import Workload
from primerl_hpc.recipe.schema.layout import FrozenLayout
from primerl_hpc.recipe.schema.recipe import Recipe

ASSUMED_SHARE, ASSUMED_FACTOR = 0.5, 2.0
"""Assumed mean length as a share of the maximum, and the factor of its interval."""
ASSUMED_PROMPT_SHARE, MAX_ASSUMED_PROMPT = 8, 1024


@dataclass(frozen=True)
class Case:
    recipe: Recipe
    shape: ModelShape
    trainer_gpu: GpuSpec
    trainer_node: Node
    engine_gpu: GpuSpec
    engine_node: Node
    lengths: Lengths | None = None
    """Measured lengths of an earlier run; None: those of ``rollouts.expected``."""
    lengths_source: str = ""
    prefill_gpu: GpuSpec | None = None
    """GPU of prefill engines; None: that of the engines."""
    prefill_node: Node | None = None
    frozen_gpus: int = 0
    """GPUs of the nodes of teacher and judge."""
    corrections: Mapping[str, Correction] = field(default_factory=dict)
    """Corrections of the ledger by figure; empty: the formulas as they are."""

    # -- rollouts ----------------------------------------------------------------------------------

    @cached_property
    def longest(self) -> int:
        """Most tokens that a rollout can generate."""
        most = self.recipe.rollouts.sampling.max_tokens
        turns = self.recipe.rollouts.expected.turns
        return min(self.recipe.max_model_len, most * turns if most is not None else self.recipe.max_model_len)

    @cached_property
    def completion(self) -> Figure:
        """Mean tokens that a rollout generates."""
        expected, name = self.recipe.rollouts.expected, "rollouts.completion_tokens"
        if self.lengths is not None:
            mean = self.lengths.mean
            return estimate(
                name, mean, 1.1, "tokens", "measured", source=self.lengths_source, tier=Tier.MEASURED
            )
        if expected.completion_tokens is not None:
            return exact(name, float(expected.completion_tokens), "tokens", "rollouts.expected")
        return estimate(
            name,
            ASSUMED_SHARE * self.longest,
            ASSUMED_FACTOR,
            "tokens",
            "assumed: longest / 2; set rollouts.expected.completion_tokens or use --like RUN",
            {"longest": self.longest},
            source="assumption",
        )

    @cached_property
    def prompt(self) -> Figure:
        """Mean tokens of the first prompt."""
        expected, name = self.recipe.rollouts.expected, "rollouts.prompt_tokens"
        if expected.prompt_tokens is not None:
            return exact(name, float(expected.prompt_tokens), "tokens", "rollouts.expected")
        value = max(1, min(MAX_ASSUMED_PROMPT, self.recipe.max_model_len // ASSUMED_PROMPT_SHARE))
        return estimate(
            name,
            float(value),
            ASSUMED_FACTOR,
            "tokens",
            "assumed: max_model_len / 8, at most 1,024; set rollouts.expected.prompt_tokens",
            {"max_model_len": self.recipe.max_model_len},
            source="assumption",
        )

    @cached_property
    def distribution(self) -> Lengths:
        if self.lengths is not None:
            return self.lengths
        return Lengths.lognormal(self.completion.value, self.recipe.rollouts.expected.cv, float(self.longest))

    @property
    def is_assumed(self) -> bool:
        """True if the lengths of rollouts are an assumption."""
        return self.lengths is None and self.recipe.rollouts.expected.completion_tokens is None

    def workload(self, choice: LayoutChoice) -> Workload:
        rollouts, expected = self.recipe.rollouts, self.recipe.rollouts.expected
        return Workload(
            batch_size=self.batch_size,
            group_size=rollouts.group_size,
            max_in_flight=choice.max_in_flight,
            # engines that sleep during a step do not work ahead
            max_off_policy_steps=0 if self.recipe.layout.takes_turns else rollouts.max_age,
            async_level=0 if self.recipe.layout.takes_turns else rollouts.explicit_level,
            lengths=self.distribution,
            turns=expected.turns,
            env_s=expected.env_s,
        )

    @property
    def batch_tokens(self) -> float:
        """Tokens that a trainer step processes, prompts included."""
        if self.recipe.kind == Kind.SFT:
            return float(self._sft_tokens)
        return self.batch_size * (self.prompt.value + self.distribution.mean)

    @cached_property
    def batch_size(self) -> int:
        """Rollouts of a batch; with ``batch_tokens`` the expected number, rounded to complete groups."""
        rollouts = self.recipe.rollouts
        if rollouts.batch_tokens is None:
            return rollouts.batch_size
        expected = rollouts.batch_tokens / (self.prompt.value + self.distribution.mean)
        return max(1, round(expected / rollouts.group_size)) * rollouts.group_size

    @cached_property
    def sample_tokens(self) -> float:
        """Mean length of the sample of a token: prompt and completion, long samples weighted by their tokens."""
        if self.recipe.kind == Kind.SFT:
            return float(self.recipe.seq_len)
        weighted = 2 * self.distribution.mean_position
        return min(self.prompt.value + weighted, float(self.recipe.seq_len))

    @cached_property
    def _sft_tokens(self) -> int:
        sft = self.recipe.sft
        assert sft is not None
        return sft.batch_size * self.recipe.seq_len  # an upper bound with batch_unit samples

    # -- both sides --------------------------------------------------------------------------------

    def trainer_setup(self, choice: LayoutChoice) -> TrainerSetup:
        recipe, config = self.recipe, self.recipe.trainer
        tensor = choice.trainer_tensor_parallel
        shard = choice.trainer_ranks // choice.replicate // tensor
        data = max(1, choice.trainer_ranks // choice.context_parallel // tensor)
        rows = max(1, -(-int(self.batch_tokens) // self.recipe.seq_len))
        rank_rows = max(1, -(-rows // data))
        micro_rows = min(rank_rows, max(1, FORWARD_TOKENS // recipe.seq_len))
        policy = choice.checkpointing
        return TrainerSetup(
            ranks=choice.trainer_ranks,
            ranks_per_node=choice.ranks_per_node,
            seq_len=recipe.seq_len,
            shard=shard,
            replicate=choice.replicate,
            context_parallel=choice.context_parallel,
            tensor_parallel=tensor,
            expert_parallel=choice.trainer_expert_parallel,
            micro_rows=micro_rows,
            micro_batches=-(-rank_rows // micro_rows),
            checkpointing=policy if isinstance(policy, str) else "selective",
            checkpointed_modules=() if isinstance(policy, str) else policy,
            every=choice.checkpointing_every,
            activation_offload=choice.activation_offload,
            optimizer_offload=choice.optimizer_offload,
            cpu_offload=choice.cpu_offload,
            optimizer=recipe.optimizer.type,
            param_dtype=config.param_dtype,
            fp8=config.fp8,
            float32_head="head" in config.float32,
            reduce_dtype=config.reduce_dtype,
            reshard_after_forward=config.reshard_after_forward,
            lora_rank=recipe.lora.rank if recipe.lora else None,
            lora_targets=recipe.lora.target_modules if recipe.lora else "auto",
            loss="sft" if recipe.kind == Kind.SFT else "rl",
            head_chunk_tokens=config.head_chunk_tokens,
            is_compiled=config.compile is True,  # with auto a block may run as it is
            saves_copy_of=recipe.checkpoint.copied_state,
            trains_vision=config.vision == "trained",
        )

    def engine_setup(self, choice: LayoutChoice | PrefillChoice) -> EngineSetup:
        """Return the inputs of one of the policy's engines; with a `PrefillChoice`, of a prefill engine."""
        recipe, inference = self.recipe, self.recipe.inference
        options = {name.lstrip("-").replace("_", "-"): value for name, value in inference.extra_args.items()}
        gpu = self.gpu_of_prefill if isinstance(choice, PrefillChoice) else self.engine_gpu
        sequences, tokens = default_limits(gpu.memory_bytes, gpu.name)
        return EngineSetup(
            gpus=choice.engine_gpus,
            tensor_parallel=choice.tensor_parallel,
            max_model_len=recipe.max_model_len,
            data_parallel=choice.data_parallel,
            expert_parallel=choice.engine_gpus if choice.expert_parallel else 1,
            dtype=self._weights_dtype(options),
            kv_dtype="fp8" if str(options.get("kv-cache-dtype", "")).startswith("fp8") else self._dtype,
            max_num_seqs=int(str(options.get("max-num-seqs", sequences))),
            max_num_batched_tokens=int(str(options.get("max-num-batched-tokens", tokens))),
            gpu_memory_utilization=recipe.engine_memory_share,
            kv_cache_bytes=None if inference.kv_cache_gib is None else int(inference.kv_cache_gib * 2**30),
            enforce_eager=inference.enforce_eager is True,
            max_loras=inference.num_adapters + (recipe.lora is not None),
            lora_rank=max(
                recipe.lora.rank if recipe.lora else 0,
                inference.max_adapter_rank if inference.num_adapters else 0,
            ),
        )

    @property
    def gpu_of_prefill(self) -> GpuSpec:
        return self.prefill_gpu or self.engine_gpu

    @property
    def node_of_prefill(self) -> Node:
        return self.prefill_node or self.engine_node

    @property
    def _dtype(self) -> Any:
        return self.recipe.model.dtype

    def _weights_dtype(self, options: Mapping[str, Any]) -> Any:
        wanted = str(options.get("quantization") or self.shape.quantization or "")
        if wanted.startswith("fp8") or wanted == "compressed-tensors":
            return "fp8"
        if wanted in ("mxfp4", "modelopt_fp4", "nvfp4"):
            return "fp4"
        if wanted in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
            return "int4"
        return self._dtype


def make_case(
    recipe: Recipe,
    profile: Profile,
    shape: ModelShape,
    *,
    lengths: Lengths | None = None,
    lengths_source: str = "",
) -> Case:
    """Return the case. Raises ConfigError for a profile without GPUs or of an unknown GPU type."""
    pools, layout = Pools(profile), recipe.layout
    nodes = {
        "trainer": pools.of(layout.trainer.node_type, "layout.trainer").node,
        "engine": pools.of(layout.inference.node_type, "layout.inference").node,
    }
    if (prefill := layout.inference.prefill) is not None:
        nodes["prefill"] = pools.of(prefill.node_type, "layout.inference.prefill").node
    for node in nodes.values():
        if not node.gpus:
            raise ConfigError(f"profile '{profile.name}' has no GPUs, and only GPUs are predicted")
    gpus = {side: gpu_spec(node.gpu, location=f"profile '{profile.name}'") for side, node in nodes.items()}
    is_training = recipe.kind in (Kind.RL, Kind.SFT)
    if is_training and not recipe.trainer.loads_tower(shape.family, is_shared=False):
        shape = replace(shape, vision=0)
    return Case(
        recipe,
        shape,
        gpus["trainer"],
        nodes["trainer"],
        gpus["engine"],
        nodes["engine"],
        lengths,
        lengths_source,
        prefill_gpu=gpus.get("prefill"),
        prefill_node=nodes.get("prefill"),
        frozen_gpus=sum(_gpus_of(served.layout, pools) for served in recipe.served_models.values()),
    )


def _gpus_of(layout: FrozenLayout, pools: Pools) -> int:
    node = pools.of(layout.node_type, "layout").node
    return node.gpus * nodes_of(layout.replicas, layout.accelerators_per_replica, node.gpus)
