"""The training half of a recipe: losses, optimizers, schedules, memory, checkpoints, weight transport."""

from __future__ import annotations

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
from primerl_hpc.recipe.sft_schema import SFT


class DPPOLoss(Block):
    """Policy gradient with a trust region on the probability difference: a token is dropped where its advantage would move π further from μ than the mask allows."""

    type: Literal["dppo"] = "dppo"
    mask_low: NonNegativeFloat = 0.2
    """Drop tokens with advantage ≤ 0 and π - μ below minus this."""
    mask_high: NonNegativeFloat = 0.2
    """Drop tokens with advantage > 0 and π - μ above this."""
    adv_tau: NonNegativeFloat = 1.0
    """Factor on advantages."""
    kl_tau: NonNegativeFloat = 1e-3
    """Factor on (log π - log μ)², over all trained tokens."""


class IPOLoss(Block):
    """Like dppo, with one mask on the absolute difference, whatever the advantage's sign."""

    type: Literal["ipo"] = "ipo"
    threshold: NonNegativeFloat = 0.1
    """Drop tokens with |π - μ| above this."""
    adv_tau: NonNegativeFloat = 1.0
    """Factor on advantages."""
    kl_tau: NonNegativeFloat = 1e-3
    """Factor on (log π - log μ)², over all trained tokens."""


class GRPOLoss(Block):
    """Clipped importance ratio per token (PPO's surrogate; clip-higher when the two sides differ)."""

    type: Literal["grpo"] = "grpo"
    clip_low: NonNegativeFloat = 0.2
    """A token to be made less likely counts no more where π/μ is below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """A token to be made likelier counts no more where π/μ is above 1 + clip_high."""
    kl_tau: NonNegativeFloat = 0.0
    """Factor on (log π - log μ)², over all trained tokens."""


class GSPOLoss(Block):
    """Clipped length-normalised ratio per sequence (arXiv 2507.18071)."""

    type: Literal["gspo"] = "gspo"
    clip_low: NonNegativeFloat = 3e-4
    """A sequence to be made less likely counts no more where its ratio is below 1 - clip_low."""
    clip_high: NonNegativeFloat = 4e-4
    """A sequence to be made likelier counts no more where its ratio is above 1 + clip_high."""
    kl_tau: NonNegativeFloat = 0.0
    """Factor on (log π - log μ)², over all trained tokens."""


class CISPOLoss(Block):
    """Clipped and detached ratio times log π (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    clip_low: NonNegativeFloat = 1.0
    """1 - clip_low is the smallest weight; 1 means no lower clip."""
    clip_high: NonNegativeFloat = 4.0
    """1 + clip_high is the largest weight."""
    kl_tau: NonNegativeFloat = 0.0
    """Factor on (log π - log μ)², over all trained tokens."""


class CustomLoss(Block):
    """A function of yours, tried on a few made-up tokens before the first step."""

    type: Literal["custom"] = "custom"
    import_path: str
    """``package.module:function``: gets the tokens of a forward (`trainer.losses.LossInputs`), returns the loss of each, or a `TokenLoss`."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """More keyword arguments of the function."""


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
    """Each step takes lr times this share off every weight."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.999)
    """Decay of the means of gradients and of their squares."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square, against division by 0."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this; null: no clipping."""


class SGD(Block):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    lr: PositiveFloat = 1e-3
    """Learning rate at the peak of the schedule."""
    momentum: Fraction = 0.9
    """Share of the last step's direction in the next."""
    nesterov: Bool = True
    """Look ahead along the momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Added to the gradient as this times the weight."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this; null: no clipping."""


class Muon(Block):
    """Momentum orthogonalised by Newton-Schulz for matrices (experts one by one), AdamW for embeddings, head and vectors (arXiv 2502.16982). Updates are scaled to AdamW's size: the same rates serve."""

    type: Literal["muon"] = "muon"
    lr: PositiveFloat = 1e-6
    """Learning rate at the peak of the schedule."""
    weight_decay: NonNegativeFloat = 0.01
    """Each step takes lr times this share off every weight."""
    momentum: Fraction = 0.95
    """Share of the last step's direction in the next, for matrices."""
    nesterov: Bool = True
    """Look ahead along the momentum."""
    betas: tuple[FractionBelowOne, FractionBelowOne] = (0.9, 0.95)
    """AdamW's, for what is no matrix."""
    eps: PositiveFloat = 1e-8
    """AdamW's, for what is no matrix."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this; null: no clipping."""


class SignSGD(Block):
    """The sign of the gradient alone (arXiv 1802.04434): no optimizer state, half of AdamW's memory. Every weight moves by lr in each step: ask for less than of AdamW."""

    type: Literal["sign_sgd"] = "sign_sgd"
    lr: PositiveFloat = 1e-6
    """By how much every weight moves in a step."""
    weight_decay: NonNegativeFloat = 0.01
    """Each step takes lr times this share off every weight."""
    max_norm: PositiveFloat | None = None
    """Clip the global gradient norm to this; null: no clipping."""


Optimizer = Annotated[
    Annotated[AdamW | SGD | Muon | SignSGD, Field(discriminator="type")], default_type("adamw")
]


class Constant(Block):
    """Warm-up, then the same rate to the end."""

    type: Literal["constant"] = "constant"
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises from 0."""


class Linear(Block):
    """Warm-up, stable, decay."""

    type: Literal["linear"] = "linear"
    warmup_steps: NonNegativeInt = 10
    """Steps over which the rate rises from 0."""
    decay_steps: NonNegativeInt = 10
    """Steps at the end over which the rate falls towards min_lr_ratio of its peak."""
    min_lr_ratio: Fraction = 0.0
    """Share of the peak that a step after the last one would have: with 0 the last step still trains."""


class Cosine(Block):
    """Warm-up, then half a cosine down to the end."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: NonNegativeInt = 10
    """Steps over which the rate rises from 0."""
    min_lr_ratio: Fraction = 0.0
    """Share of the peak that a step after the last one would have."""


Scheduler = Annotated[
    Annotated[Constant | Linear | Cosine, Field(discriminator="type")], default_type("constant")
]


class Trainer(Block):
    """Precision, memory and robustness of the trainer."""

    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights in forward and backward; master weights and optimizer state are always float32."""
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type in which gradients are reduced over ranks."""
    reshard_after_forward: Auto | Bool = "auto"
    """Free gathered weights of a block between forward and backward; auto: true, but models of at most 0.5 B parameters are gathered as a whole, once a step."""
    activation_checkpointing: Literal["none", "full"] | tuple[str, ...] = "full"
    """full: keep only each block's input and recompute the rest in backward; a list of module names (``[mlp, self_attn]``): recompute those parts of each block."""
    activation_offload: Bool = False
    """Keep the blocks' inputs in host memory between forward and backward; with activation_checkpointing full."""
    optimizer_offload: Bool = False
    """Keep the optimizer's state in host memory between steps; it visits the GPU in portions of 1 GiB."""
    cpu_offload: Bool = False
    """Keep master weights, gradients and optimizer state in host memory, and step there: the least GPU memory, the slowest steps."""
    head_chunk_tokens: Auto | PositiveInt = "auto"
    """Tokens whose logits exist at one time; auto: bounds a chunk's logits to about 256 MiB."""
    compile: Bool = False
    """torch.compile every block."""
    router_replay: Bool = False
    """Of a mixture of experts: every token is trained through the experts that the engine sent it to, weighed by the trainer's own router (arXiv 2510.11370). For kind rl; needs engines on GPUs without kv_offload_gib; rollouts grow by layers × experts per token bytes a token."""
    vision: Literal["frozen", "trained"] = "frozen"
    """Of a vision-language model: whether its vision tower, with the merger at its end, is trained as well."""
    max_skipped_steps: PositiveInt = 10
    """A step with a NaN or infinite loss or gradient on any rank is skipped by all; so many in a row stop the run."""
    gc_interval: PositiveInt = 50
    """Steps between garbage collections, made on all ranks at once."""
    deterministic: Bool = False
    """The same inputs give the same bits, at some cost in speed: torch's deterministic kernels only."""

    @model_validator(mode="after")
    def _offloads_fit_together(self) -> Self:
        if self.activation_offload and self.activation_checkpointing != "full":
            raise ValueError(
                "activation_offload needs activation_checkpointing full: it moves the blocks' inputs"
            )
        if self.cpu_offload and self.optimizer_offload:
            raise ValueError(
                "cpu_offload keeps the optimizer's state on the host already: leave out optimizer_offload"
            )
        return self


class LoRA(Block):
    """Train low-rank adapters, W + alpha/rank · B A (arXiv 2106.09685), and leave the model's own weights as they are."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The adapter's product is scaled by alpha / rank."""
    dropout: FractionBelowOne = 0.0
    """Share of an adapter's inputs that training leaves out at random; kind sft only."""
    target_modules: Auto | Annotated[tuple[str, ...], Field(min_length=1)] = "auto"
    """What gets an adapter, by the ends of module names: ``[q_proj, v_proj, mlp.experts]``; ``auto``: every linear layer of the decoder's blocks, and fused experts."""


class Fork(Block):
    """Start from a checkpoint of another run. Its files are linked (or copied) into the new run when it is submitted."""

    run: str
    """The other run's directory; relative paths are seen from where you submit."""
    step: PositiveInt | None = None
    """Null: its latest complete checkpoint."""
    skip: tuple[Literal["optimizer", "scheduler", "progress", "data"], ...] = ()
    """Parts not taken over: optimizer state; scheduler (warm-up and decay begin anew after the step); progress (the count of trained tokens); data (the position in datasets and environments). The step number stays."""


class Checkpoint(Block):
    """When the state of trainer and orchestrator is saved, and how much of it is kept."""

    interval: PositiveInt | None = None
    """Steps between checkpoints; null: only on request, for walltime, and at the end."""
    keep_last: PositiveInt = 2
    """Complete checkpoints to keep."""
    keep_interval: PositiveInt | None = None
    """Besides those, keep every checkpoint whose step is a multiple of this for ever."""
    at_end: Bool = True
    """Save after the last step."""
    asynchronous: Bool = True
    """Train on as soon as the state is copied to host memory (its size once per node); off: wait for the files."""
    weights_only: Bool = False
    """Save without the optimizer's state: a third of AdamW's size, but a resume from it starts that from zero."""
    fork: Fork | None = None


class Warmup(Block):
    """Supervised fine-tuning before RL, in the same job; its last weights are policy v0."""

    sft: SFT
    """Its data."""
    max_steps: PositiveInt
    """Its trainer steps, beside the recipe's own."""
    optimizer: Optimizer = AdamW()
    """Its own; RL starts with fresh state."""
    scheduler: Scheduler = Constant()
    """Its own learning rate schedule."""
    checkpoint: Checkpoint = Checkpoint(at_end=False)
    """Its own checkpoints."""


class Weights(Block):
    """How policy versions travel to the engines, and which stay on disk."""

    transport: Literal["filesystem", "delta", "broadcast"] = "filesystem"
    """How a new policy reaches the engines: filesystem, every version as a model folder; delta, as what changed since the one before, of which every engine keeps a copy in its node's temporary folder; broadcast, from the trainer's memory into the engines' (NCCL between GPUs, gloo between CPUs). The last two are for kind rl without lora, which writes adapters alone."""
    full_interval: PositiveInt = 10
    """With transport delta or broadcast: versions at multiples of this are model folders too, as are the last and those of checkpoints."""
    keep_last: PositiveInt = 2
    """Policy versions kept on disk; versions of kept checkpoints and the last one stay as well."""
    interval: PositiveInt | None = None
    """Policy versions at multiples of this are kept for ever; kind sft, which otherwise writes the last one only, writes them for this."""

    @model_validator(mode="after")
    def _two_versions_are_in_use(self) -> Self:
        if self.keep_last < 2:
            raise ValueError(
                "keep_last must be at least 2: engines may still read the version before the newest"
            )
        return self


__all__ = [
    "SGD",
    "AdamW",
    "CISPOLoss",
    "Checkpoint",
    "Constant",
    "Cosine",
    "CustomLoss",
    "DPPOLoss",
    "Fork",
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
    "Trainer",
    "Warmup",
    "Weights",
]
