"""Blocks about models: the policy (``model``), settings of its engines (``inference``), ``teacher`` and ``judge``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from primerl_hpc.common import env
from primerl_hpc.common.block import (
    Auto,
    Block,
    Bool,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Scalar,
)
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.schema.evaluation import BaseUrl, TokenLimit
from primerl_hpc.recipe.schema.layout import FrozenLayout

# vLLM options that `extra_args` may not set → the recipe key to use instead. An empty key: the run sets the option
# itself, because another value would break token identity, authentication, or the plan.
_RESERVED_ENGINE_OPTIONS = {
    "model": "model.name",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "max-model-len": "inference.max_model_len",
    "tensor-parallel-size": "layout.inference.tensor_parallel",
    "data-parallel-size": "layout.inference.data_parallel",
    "enable-expert-parallel": "layout.inference.expert_parallel",
    **dict.fromkeys(
        ("enable-lora", "max-lora-rank", "max-loras", "lora-modules"), "lora or inference.max_adapters"
    ),
    "max-cpu-loras": "inference.max_adapters",
    **dict.fromkeys(("served-model-name", "host", "port", "uds", "api-key", "middleware"), ""),
    **dict.fromkeys(("worker-extension-cls", "api-server-count", "headless", "config"), ""),
    **dict.fromkeys(("generation-config", "override-generation-config", "logprobs-mode"), ""),
    **dict.fromkeys(("enable-scale-out", "enable-return-routed-experts", "kv-transfer-config"), ""),
    **dict.fromkeys(("data-parallel-size-local", "data-parallel-address", "data-parallel-rpc-port"), ""),
    **dict.fromkeys(("data-parallel-start-rank", "pipeline-parallel-size"), ""),
    **dict.fromkeys(("trust-request-chat-template",), ""),
    **dict.fromkeys(("nnodes", "node-rank", "master-addr", "master-port"), ""),
}


class Renderer(Block):
    """How messages are converted to tokens and back (package ``renderers``), in rollouts and in SFT."""

    name: str = "auto"
    """Renderer family: ``qwen3``, ``llama-3``, ``gpt-oss``, …, or ``chatml``, which is part of primerl-hpc. ``auto``
    looks up the model's hub name and is an error if there is no match, because a wrong renderer silently breaks
    multi-turn training."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the renderer's config, for example ``{thinking_retention: all}`` for multi-turn Qwen3."""


class Model(Block):
    """The policy: its weights, tokenizer, data types and chat format."""

    removed: ClassVar[dict[str, str]] = {"untested": "set model.accept_uncompared"}
    name: str
    """Hub id, or a folder with config.json, safetensors and tokenizer. Relative paths are resolved against the folder
    in which you submit."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer. Default: the model's own."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type in which weights are exported and engines compute."""
    attention: Literal["auto", "varlen", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Attention implementation of the trainer. ``auto``: varlen on GPUs, unless ``trainer.param_dtype`` is float32, the
    heads are wider than 256, or the model keeps attention dropout (``sft.model_dropout``); otherwise sdpa. ``varlen``:
    flash attention that is part of torch, or the faster FlashAttention-4 (Hopper and Blackwell GPUs; the extra
    ``flash-attn-4``) or FlashAttention-3 (Hopper) where its package is installed.
    ``flash_attention_2`` and ``flash_attention_3`` require the packages flash-attn and flash-attn-interface."""
    renderer: Renderer = Renderer()
    accept_uncompared: Bool = False
    """Train a model family that no test compares with transformers (docs/models.md) without comparing it. Default: the
    trainer compares it on the run's weights when it starts, and ends if it computes something else."""
    trust_remote_code: Bool = False
    """Execute modeling code that the model folder or hub repository contains. Default: refuse such models."""


DEFAULT_ADAPTERS = 4
MAX_SERVED_RANK = 512
"""Largest value of vLLM 0.31's --max-lora-rank."""


class Inference(Block):
    """Settings of the vLLM engines."""

    max_model_len: Auto | PositiveInt = "auto"
    """Maximum length of prompt plus completion, in tokens. ``auto``: ``seq_len``."""
    gpu_memory_utilization: PositiveFraction = 0.9
    """Share of a GPU's memory that an engine may use."""
    kv_cache_gib: PositiveFloat | None = None
    """Size of the KV cache of each engine rank, in GiB. Default: what ``gpu_memory_utilization`` leaves on a GPU, 1 on
    a CPU."""
    kv_offload_gib: PositiveFloat | None = None
    """Host memory per engine (all its ranks together), in GiB, to which KV blocks evicted from the GPU cache are
    offloaded. Default (null): evicted blocks are recomputed."""
    enforce_eager: Auto | Bool = "auto"
    """Disable CUDA graph capture. ``auto``: only on CPU."""
    recompute_kv_on_update: Bool = False
    """Recompute the KV cache of running requests after a weight update. Default: they continue with the cache of the
    previous weights."""
    adapter_dirs: tuple[str, ...] = ()
    """Folders from which adapters may be loaded with ``POST /load_lora_adapter``, in addition to the run directory;
    relative paths are resolved against the folder in which you submit."""
    max_adapters: Auto | NonNegativeInt = "auto"
    """Number of adapters that an engine serves in addition to the policy (docs/adapters.md). ``auto``: 4 with
    ``adapter_dirs``, otherwise 0."""
    max_adapter_rank: Annotated[PositiveInt, Field(le=MAX_SERVED_RANK)] = 16
    """Greatest rank of these adapters, at most 512. Each of them reserves memory for it."""
    extra_args: dict[str, Scalar] = Field(default_factory=dict)
    """Additional vLLM engine arguments, by command-line name without leading dashes: ``{max-num-seqs: 64}``. Options
    that have their own key, or that the run sets itself, are refused."""

    @field_validator("extra_args")
    @classmethod
    def _extra_args_set_no_reserved_option(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            option = name.lstrip("-").replace("_", "-").removeprefix("no-")
            if (key := _RESERVED_ENGINE_OPTIONS.get(option)) is not None:
                why = f"use its own key instead: {key}" if key else "the run sets it itself; remove it"
                raise ValueError(f"may not set '{option}': {why}")
        return value

    @property
    def num_adapters(self) -> int:
        """``max_adapters``, or its default."""
        if self.max_adapters == "auto":
            return DEFAULT_ADAPTERS if self.adapter_dirs else 0
        return self.max_adapters

    @property
    def quantization(self) -> Scalar:
        """The value of ``quantization`` in `extra_args`, or None."""
        return {name.lstrip("-"): value for name, value in self.extra_args.items()}.get("quantization")


class FrozenModel(Block):
    """A model that is not trained, served by engines that the run starts or by an external server at ``base_url``."""

    model: Model
    """The model to serve. With ``base_url``, only ``name`` is used: the model's name on that server."""
    base_url: BaseUrl | None = None
    """URL of an OpenAI-compatible server, including ``/v1``; algorithm opd needs a vLLM server. Default (null): the run
    starts its own engines."""
    key_variable: str | None = None
    """Environment variable that holds the API key of ``base_url``, read when the job runs. Default (null): no key."""
    layout: FrozenLayout = FrozenLayout()
    """Shape and number of the run's own engines. They use the accelerators after those of the trainer."""
    inference: Inference = Inference()
    """Settings of the run's own engines. ``max_model_len: auto`` is ``seq_len`` + 1 for a teacher, because vLLM must
    sample one token to score a sequence, and twice the policy's for a judge, because its prompt contains prompt and
    reply."""

    @model_validator(mode="after")
    def _own_engines_or_an_address(self) -> Self:
        if self.base_url is None and self.key_variable is not None:
            raise ValueError(
                "key_variable belongs to a base_url: the run's own engines use the run's key; remove key_variable "
                "or set base_url"
            )
        if self.base_url is not None and (self.layout != FrozenLayout() or self.inference != Inference()):
            raise ValueError(
                "layout and inference configure engines that the run starts, but there is a base_url; "
                "remove one or the other"
            )
        return self

    def key(self) -> str | None:
        """Return the API key of ``base_url``, or None without ``key_variable``.

        Raises ConfigError if the variable is not set in this process.
        """
        if self.key_variable is not None and env.variable(self.key_variable) is None:
            raise ConfigError(
                f"the environment variable {self.key_variable}, which must hold the API key of {self.base_url}, "
                "is not set",
                location=f"{type(self).__name__.lower()}.key_variable",
                hint="export it where you submit",
            )
        return env.variable(self.key_variable) if self.key_variable else None


class Teacher(FrozenModel):
    """Teacher model for algorithms ``opd`` and ``sft_distill``."""

    timeout_s: PositiveFloat = 120.0
    """Timeout of one request of the orchestrator, in seconds."""
    max_concurrent: PositiveInt = 64
    """Maximum number of concurrent scoring requests of the orchestrator (opd)."""
    token_limit: TokenLimit = "max_tokens"
    """Parameter by which requests to ``base_url`` limit the tokens of a reply (sft_distill); APIs of reasoning models
    need ``max_completion_tokens``."""


class Judge(FrozenModel):
    """Model that scores replies for environments whose judges (verifiers' ``rubric``, ``reference``, …, or a reward
    function) name no server of their own."""


__all__ = ["FrozenModel", "Inference", "Judge", "Model", "Renderer", "Teacher"]
