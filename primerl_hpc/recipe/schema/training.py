"""Blocks about training: losses, optimizers, schedules, the trainer, LoRA and weight transport.

Notation: π is a token's probability under the trainer's policy, μ under the policy that sampled it.
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from primerl_hpc.common.block import (
    Auto,
    Block,
    Bool,
    Fraction,
    FractionBelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    default_type,
)
from primerl_hpc.common.model_families import family_of
from primerl_hpc.recipe.schema.run import Checkpoint, KeepBest
from primerl_hpc.recipe.schema.sft import SFT


class DPPOLoss(Block):
    """Policy gradient with a trust region on the probability difference π - μ: tokens whose update would move π further
    away from μ than the mask allows are dropped."""

    type: Literal["dppo"] = "dppo"
    mask_low: NonNegativeFloat = 0.2
    """Drop tokens with advantage ≤ 0 and π - μ < -mask_low."""
    mask_high: NonNegativeFloat = 0.2
    """Drop tokens with advantage > 0 and π - μ > mask_high."""
    adv_tau: NonNegativeFloat = 1.0
    """Factor on the advantages."""
    kl_tau: NonNegativeFloat = 1e-3
    """Weight of the penalty (log π - log μ)² over all trained tokens; 0 disables it."""


class IPOLoss(Block):
    """Like dppo, with one mask on the absolute difference |π - μ|, for advantages of either sign."""

    type: Literal["ipo"] = "ipo"
    threshold: NonNegativeFloat = 0.1
    """Drop tokens with |π - μ| > threshold."""
    adv_tau: NonNegativeFloat = 1.0
    """Factor on the advantages."""
    kl_tau: NonNegativeFloat = 1e-3
    """Weight of the penalty (log π - log μ)² over all trained tokens; 0 disables it."""


class GRPOLoss(Block):
    """Clipped importance ratio per token: PPO's surrogate objective, or clip-higher if ``clip_high`` > ``clip_low``."""

    type: Literal["grpo"] = "grpo"
    clip_low: NonNegativeFloat = 0.2
    """Lower clip: no gradient for tokens with negative advantage once π/μ < 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """Upper clip: no gradient for tokens with positive advantage once π/μ > 1 + clip_high."""
    kl_tau: NonNegativeFloat = 0.0
    """Weight of the penalty (log π - log μ)² over all trained tokens; 0 disables it."""


class GSPOLoss(Block):
    """Clipped, length-normalized importance ratio per sequence (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: NonNegativeFloat = 3e-4
    """Lower clip: no gradient for sequences with negative advantage once their ratio is below 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """Upper clip: no gradient for sequences with positive advantage once their ratio is above 1 + clip_high."""
    kl_tau: NonNegativeFloat = 0.0
    """Weight of the penalty (log π - log μ)² over all trained tokens; 0 disables it."""


class CISPOLoss(Block):
    """Clipped and detached importance ratio times log π (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: NonNegativeFloat = 1.0
    """The smallest weight of a token is 1 - clip_low; 1 disables the lower clip."""
    clip_high: NonNegativeFloat = 4.0
    """The largest weight of a token is 1 + clip_high."""
    kl_tau: NonNegativeFloat = 0.0
    """Weight of the penalty (log π - log μ)² over all trained tokens; 0 disables it."""


class CustomLoss(Block):
    """Your own loss function. It is tested on a few synthetic tokens before the first step."""

    type: Literal["custom"] = "custom"
    import_path: str
    """``package.module:function``. The function receives the tokens of one forward pass (`trainer.losses.LossInputs`)
    and returns the loss of each token, or a `TokenLoss`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the function in addition."""


Loss = Annotated[
    Annotated[DPPOLoss | IPOLoss | GRPOLoss | GSPOLoss | CISPOLoss | CustomLoss, Field(discriminator="type")],
    default_type("dppo"),
]


class AdamW(Block):
    """Adam with decoupled weight decay (arXiv 1711.05101)."""

    type: Literal["adamw"] = "adamw"
    lr: PositiveFloat = 1e-6
    """Learning rate at the peak of the schedule."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay: each step subtracts lr × weight_decay × weight from every weight."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """Decay rates of the running means of the gradient and of its square."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean squared gradient, to avoid a division by 0."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this. null: no clipping."""


class SGD(Block):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 1e-3
    """Learning rate at the peak of the schedule."""
    momentum: Fraction = 0.9
    """Momentum factor: share of the previous update direction in the next one."""
    nesterov: Bool = True
    """Use Nesterov momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty: this times the weight is added to the gradient."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this. null: no clipping."""


class Muon(Block):
    """Muon (arXiv 2502.16982): momentum orthogonalized by Newton-Schulz for matrices, where experts and the parts of
    fused projections are separate matrices; AdamW for embeddings, head and vectors. Updates are scaled to the size of
    AdamW's, so the same learning rates apply."""

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 1e-6
    """Learning rate at the peak of the schedule."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay: each step subtracts lr × weight_decay × weight from every weight."""
    momentum: Fraction = 0.95
    """Momentum factor for matrices: share of the previous update direction in the next one."""
    nesterov: Bool = True
    """Use Nesterov momentum."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """``betas`` of AdamW, for parameters that are not matrices."""
    eps: PositiveFloat = 1e-8
    """``eps`` of AdamW, for parameters that are not matrices."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this. null: no clipping."""


class SignSGD(Block):
    """Update by the sign of the gradient (arXiv 1802.04434): no optimizer state, half of AdamW's memory. Every weight
    changes by ``lr`` in each step, so use a smaller ``lr`` than with AdamW."""

    type: Literal["sign_sgd"] = "sign_sgd"
    lr: PositiveFloat = 1e-6
    """Amount by which every weight changes in a step, at the peak of the schedule."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay: each step subtracts lr × weight_decay × weight from every weight."""
    max_norm: PositiveFloat | None = None
    """Clip the global gradient norm to this. null: no clipping."""


Optimizer = Annotated[
    Annotated[AdamW | SGD | Muon | SignSGD, Field(discriminator="type")], default_type("adamw")
]


class Constant(Block):
    """Warm-up, then a constant learning rate."""

    type: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate increases linearly from 0."""


class Linear(Block):
    """Linear warm-up, constant learning rate, linear decay."""

    type: Literal["linear"] = "linear"
    warmup_steps: NonNegativeInt = 10
    """Number of steps over which the learning rate increases linearly from 0."""
    decay_steps: NonNegativeInt = 10
    """Number of steps at the end over which the learning rate decreases to ``min_lr_ratio`` of its peak."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate that a step after the last one would have, as a share of the peak. With 0 the last step still
    trains."""


class Cosine(Block):
    """Linear warm-up, then a half-cosine decay until the last step."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 10
    """Number of steps over which the learning rate increases linearly from 0."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate that a step after the last one would have, as a share of the peak."""


Scheduler = Annotated[
    Annotated[Constant | Linear | Cosine, Field(discriminator="type")], default_type("constant")
]


class TrainerConfig(Block):
    """Precision, memory and robustness of the trainer."""

    param_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the weights in forward and backward. Master weights and optimizer state are always float32."""
    loss_scale: Annotated[float, Field(ge=1)] = 65536.0
    """First factor of the loss with ``param_dtype: float16``. An overflow of gradients skips the step and halves it."""
    loss_scale_growth: PositiveInt = 2000
    """Consecutive steps without an overflow after which the factor of ``loss_scale`` is doubled."""
    fp8: Literal["none", "blockwise", "mxfp8"] = "none"
    """Compute linear layers and experts of the decoder's blocks in FP8, forward and backward; weights stay as they are.
    ``blockwise``: tiles of 128 values and blocks of 128 × 128 weights, as DeepSeek-V3; Hopper GPUs and later.
    ``mxfp8``: tiles of 32 values; B200, B300, GB200 and GB300. CPUs emulate both, slowly."""
    float32: tuple[Literal["router", "head", "norm"], ...] = ()
    """Modules whose weights and products are float32 instead of ``param_dtype``. Engines use ``model.dtype``."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Data type in which gradients are reduced across ranks."""
    reshard_after_forward: Auto | Bool = "auto"
    """Free the gathered weights of a block between forward and backward: less memory, more communication. ``auto``:
    true, except that models of at most 0.5 B parameters are gathered completely, once per step."""
    activation_checkpointing: Literal["none", "full", "auto"] | tuple[str, ...] = "full"
    """Activations that are recomputed in backward instead of kept in memory.
    ``none``: all activations are kept.
    ``full``: only the input of each block is kept, the rest is recomputed. A list of module names, such as
    ``[mlp, self_attn]``, recomputes those parts of each block.
    ``auto``: none if that is predicted to fit, else full."""
    activation_checkpointing_every: PositiveInt = 1
    """Apply activation checkpointing to the first block and every n-th block after it, and keep the activations of all
    others. 1: every block, the least memory. 2: half of the blocks."""
    activation_offload: Auto | Bool = False
    """Keep the inputs of blocks in host memory between forward and backward. Needs ``activation_checkpointing:
    full``. ``auto``: only if the prediction shows that the trainer does not fit otherwise."""
    optimizer_offload: Auto | Bool = False
    """Keep the optimizer state in host memory between steps; the step moves it to the GPU in parts, two of
    512 MiB at a time. ``auto``: as for ``activation_offload``."""
    cpu_offload: Auto | Bool = False
    """Keep master weights, gradients and optimizer state in host memory and run the optimizer on the CPU: the least GPU
    memory, the slowest steps. ``auto``: as for ``activation_offload``, after the other offloads."""
    head_chunk_tokens: Auto | PositiveInt = "auto"
    """Number of tokens whose logits are computed at a time. ``auto``: as many as need about 256 MiB for their
    logits."""
    compile: Auto | Bool = "auto"
    """Compile every block, and the head's operations on logits, with torch.compile. ``auto``: on NVIDIA GPUs, the
    head's for all models without tensor parallelism, blocks of dense Qwen3 and Llama models with ``model.attention:
    auto``, without adapters and without context or tensor parallelism; what torch cannot compile runs as it is."""
    router_replay: Bool = False
    """For mixture-of-experts models in kind rl: route every token to the experts that the engine chose for it, weighted
    by the trainer's own router (arXiv 2510.11370). Needs engines on GPUs without ``inference.kv_offload_gib``. Rollouts
    become larger by (number of layers × experts per token) bytes per token."""
    router_bias_rate: NonNegativeFloat = 0.0
    """For mixtures whose routers add a bias to the score of each expert (DeepSeek-V3, GLM-4 MoE): after each step,
    raise the bias of experts with fewer tokens than the mean by this rate, and lower the others (arXiv 2408.15664,
    which uses 0.001). 0: the biases stay as they are."""
    vision: Literal["auto", "frozen", "trained", "none"] = "auto"
    """The vision tower of a vision-language model. ``trained``: with its final merger; ``frozen``: batches may contain
    images; ``none``: not loaded. ``auto``: frozen in the Qwen-VL family unless ranks share rows or matrices, else
    none."""
    max_skipped_steps: PositiveInt = 10
    """A step with a NaN or infinite loss or gradient on any rank is skipped on all ranks. Abort the run after this many
    consecutive skipped steps."""
    gc_interval: PositiveInt = 50
    """Steps between Python garbage collections, which run on all ranks at the same time."""
    memory_history: NonNegativeInt = 20_000
    """GPU memory events kept with their Python stacks for the snapshot of a rank that runs out of memory. 0: none."""
    deterministic: Bool = False
    """Use only deterministic kernels of torch: the same inputs give bitwise identical results, at some cost in
    speed."""

    @model_validator(mode="after")
    def _keys_fit_together(self) -> Self:
        if self.activation_offload is True and self.activation_checkpointing not in ("full", "auto"):
            raise ValueError(
                "activation_offload needs activation_checkpointing full, because it moves the inputs of blocks"
            )
        if self.activation_checkpointing_every > 1 and self.activation_checkpointing == "none":
            raise ValueError(
                f"activation_checkpointing_every {self.activation_checkpointing_every} needs "
                "activation_checkpointing full or a list of modules: with none, nothing is recomputed"
            )
        if self.fp8 != "none" and (self.param_dtype != "bfloat16" or self.compile is True):
            key = "compile false or auto" if self.compile is True else "param_dtype bfloat16"
            raise ValueError(f"fp8 {self.fp8} needs {key}; change it, or set fp8 to none")
        if self.cpu_offload is True and self.optimizer_offload is True:
            raise ValueError(
                "cpu_offload already keeps the optimizer state in host memory; leave out optimizer_offload"
            )
        return self

    def loads_tower(self, model_type: object, *, is_shared: bool) -> bool:
        """True if the trainer loads the family's vision tower. ``is_shared``: ranks share rows or matrices."""
        is_possible = family_of(model_type).has_images and not is_shared
        return self.vision in TOWER_KEYS or (self.vision == "auto" and is_possible)

    @property
    def full_training_key(self) -> str | None:
        """A key that is set and has no meaning for adapters."""
        keys = {"vision trained": self.vision == "trained", "router_bias_rate": bool(self.router_bias_rate)}
        keys[f"fp8 {self.fp8}"] = self.fp8 != "none"
        return next((key for key, is_set in keys.items() if is_set), None)


TOWER_KEYS = ("frozen", "trained")
"""Values of ``trainer.vision`` that ask for the tower."""
ABSORBED = "kv_b_proj"
"""Projection of multi-head latent attention (DeepSeek V2, V3; GLM-4 MoE Lite) that vLLM absorbs into other matrices."""


def is_target(path: str, name: str) -> bool:
    """True if the entry ``name`` of ``lora.target_modules`` names the module at ``path``; patterns omit `ABSORBED`.

    >>> is_target("layers.0.self_attn.q_proj", "self_attn.?_proj")
    True
    """
    if f".{path}".endswith(f".{name}"):
        return True
    return not path.endswith(f".{ABSORBED}") and fnmatchcase(f".{path}", f"*.{name}")


class LoRA(Block):
    """Train low-rank adapters, W + alpha/rank · B A (arXiv 2106.09685), and keep the model's own weights frozen."""

    rank: PositiveInt = 16
    """Rank of the adapters: rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The adapter's output is scaled by alpha / rank."""
    rank_stabilized: Bool = False
    """Scale by alpha / √rank instead, so that the size of updates does not shrink with the rank (arXiv 2312.03732)."""
    dropout: FractionBelowOne = 0.0
    """Dropout rate on the adapters' inputs; kind sft only."""
    target_modules: Auto | Annotated[tuple[str, ...], Field(min_length=1)] = "auto"
    """Modules that get an adapter, as suffixes of module names, with wildcards ``*``, ``?`` and ``[…]`` of the shell:
    ``[q_proj, v_proj, mlp.experts]``, ``["self_attn.*_proj"]``. ``auto``: every linear layer of the decoder's blocks,
    and fused experts. ``auto`` and wildcards leave out ``kv_b_proj``."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return adapter_scale(self.alpha, self.rank, is_stabilized=self.rank_stabilized)


def adapter_scale(alpha: float, rank: int, *, is_stabilized: bool) -> float:
    return alpha / (math.sqrt(rank) if is_stabilized else rank)


class Warmup(Block):
    """Supervised fine-tuning before RL, in the same job. Its last weights become policy v0."""

    sft: SFT
    """Data and batching of the warm-up."""
    max_steps: PositiveInt
    """Trainer steps of the warm-up; they do not count toward the recipe's ``max_steps``."""
    optimizer: Optimizer = AdamW()
    """Optimizer of the warm-up. RL starts with a new optimizer state."""
    scheduler: Scheduler = Constant()
    """Learning rate schedule of the warm-up."""
    checkpoint: Checkpoint = Checkpoint(at_end=False)
    """Checkpoints of the warm-up."""


class Weights(Block):
    """How policy versions are sent to the engines, and which are kept on disk."""

    transport: Literal["filesystem", "delta", "broadcast"] = "filesystem"
    """How a new policy version is sent to the engines. ``delta`` and ``broadcast`` are for kind rl without ``lora``,
    which sends only adapters.
    ``filesystem``: every version is written as a model folder.
    ``delta``: only changes since the previous version are written; every engine keeps a copy of the weights in its
    node's temporary folder.
    ``broadcast``: directly from the trainer's memory to the engines' (NCCL between GPUs, gloo between CPUs)."""
    full_interval: PositiveInt = 10
    """With transport ``delta`` or ``broadcast``: also write versions at multiples of this step as model folders. The
    last version and versions of checkpoints are always written."""
    keep_last: PositiveInt = 2
    """Number of policy versions to keep on disk, at least 2; kind rl keeps at least ``rollouts.async_level`` + 1.
    Versions of kept checkpoints and the last version are always kept."""
    interval: PositiveInt | None = None
    """Keep policy versions at multiples of this step permanently. kind sft writes these versions in addition to the
    last one. Default (null): none."""
    keep_best: KeepBest | None = None
    """Also keep the versions with the best values of a metric. With a metric of an evaluation, versions that are due
    for it stay until they are evaluated. Default (null): none."""

    @model_validator(mode="after")
    def _two_versions_are_in_use(self) -> Self:
        if self.keep_last < 2:
            raise ValueError("keep_last must be at least 2: engines may still read the previous version")
        return self


__all__ = [
    "SGD",
    "AdamW",
    "CISPOLoss",
    "Constant",
    "Cosine",
    "CustomLoss",
    "DPPOLoss",
    "GRPOLoss",
    "GSPOLoss",
    "IPOLoss",
    "Linear",
    "LoRA",
    "Loss",
    "Muon",
    "Optimizer",
    "Scheduler",
    "SignSGD",
    "TrainerConfig",
    "Warmup",
    "Weights",
]
