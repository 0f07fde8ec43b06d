"""Blocks of the recipe about models: the policy's, its engines' settings, and frozen ones that are asked."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from primerl_hpc.common import env
from primerl_hpc.common.block import Auto, Block, Bool, PositiveFloat, PositiveFraction, PositiveInt, Scalar
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.evaluation_schema import BaseUrl
from primerl_hpc.recipe.layout_schema import FrozenLayout

# options of vLLM → the recipe's own key, or none where the run itself decides: another value would break the identity of
# tokens, auth, or the plan
_ENGINE_OPTIONS_OF_OURS = {
    "model": "model.name",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "max-model-len": "inference.max_model_len",
    "tensor-parallel-size": "layout.inference.tensor_parallel",
    "data-parallel-size": "layout.inference.data_parallel",
    "enable-expert-parallel": "layout.inference.expert_parallel",
    **dict.fromkeys(("enable-lora", "max-lora-rank", "max-loras", "lora-modules"), "lora"),
    **dict.fromkeys(("served-model-name", "host", "port", "uds", "api-key", "middleware"), ""),
    **dict.fromkeys(("worker-extension-cls", "api-server-count", "headless", "config"), ""),
    **dict.fromkeys(("generation-config", "override-generation-config", "logprobs-mode"), ""),
    **dict.fromkeys(("enable-scale-out", "enable-return-routed-experts", "kv-transfer-config"), ""),
    **dict.fromkeys(("data-parallel-size-local", "data-parallel-address", "data-parallel-rpc-port"), ""),
    **dict.fromkeys(("data-parallel-start-rank", "pipeline-parallel-size"), ""),
    **dict.fromkeys(("nnodes", "node-rank", "master-addr", "master-port"), ""),
}


class Renderer(Block):
    """How messages become tokens and back (package ``renderers``), on the rollout side and in SFT alike."""

    name: str = "auto"
    """Renderer family (qwen3, llama-3, gpt-oss, …); ``chatml`` is ours; ``auto`` looks the model's hub name up and is refused where it finds nothing, because a guessed renderer silently breaks multi-turn training."""
    options: dict[str, Any] = Field(default_factory=dict)
    """More fields of that renderer's own config, e.g. ``{thinking_retention: all}`` for multi-turn Qwen3."""


class Model(Block):
    """The policy: its weights, tokenizer, types and chat format."""

    name: str
    """Hub id, or a folder with config.json, safetensors and tokenizer. A relative folder is seen from where you submit."""
    tokenizer: str | None = None
    """Hub id or folder of the tokenizer; default: the model's."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights that are exported, and that engines compute in."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    """Trainer's attention; ``auto``: flash attention where installed on a GPU, unless param_dtype is float32 or the model has attention sinks (GPT-OSS), else sdpa."""
    renderer: Renderer = Renderer()
    trust_remote_code: Bool = False
    """Run modelling code that comes with the model."""


class Inference(Block):
    """Settings of the vLLM engines."""

    max_model_len: Auto | PositiveInt = "auto"
    """Longest prompt + completion in tokens; ``auto``: seq_len."""
    gpu_memory_utilization: PositiveFraction = 0.9
    """Share of a GPU's memory that an engine may take."""
    kv_cache_gib: PositiveFloat | None = None
    """Size of the KV cache per engine rank in GiB instead of a share; on CPU the default is 1."""
    kv_offload_gib: PositiveFloat | None = None
    """Host memory of one engine, of all its ranks together, to which KV blocks that leave the GPU's cache go; null: they are recomputed."""
    enforce_eager: Auto | Bool = "auto"
    """No graph capture; ``auto``: on CPU only."""
    recompute_kv_on_update: Bool = False
    """After a weight update recompute the KV cache of requests in flight instead of keeping the stale one."""
    extra_args: dict[str, Scalar] = Field(default_factory=dict)
    """More vLLM engine arguments, by their command-line name without dashes: ``{max-num-seqs: 64}``."""

    @field_validator("extra_args")
    @classmethod
    def _extra_args_leave_the_run_its_own(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            option = name.lstrip("-").replace("_", "-").removeprefix("no-")
            if (key := _ENGINE_OPTIONS_OF_OURS.get(option)) is not None:
                why = f"it has a key of its own: {key}" if key else "the run decides it itself"
                raise ValueError(f"may not set '{option}': {why}")
        return value


class FrozenModel(Block):
    """A model that is asked and never changes, served by engines that the run starts, or by anybody at ``base_url``."""

    model: Model
    """What the engines serve; behind a ``base_url`` only ``name`` counts, the model's name there."""
    base_url: BaseUrl | None = None
    """An OpenAI-compatible server, up to and with ``/v1``; default: engines of the run's own. opd needs vLLM there."""
    key_variable: str | None = None
    """Variable that holds the key of ``base_url``, read at run time; default: no key."""
    layout: FrozenLayout = FrozenLayout()
    """The run's own engines, on accelerators after the trainer's."""
    inference: Inference = Inference()
    """Settings of the run's own engines; ``max_model_len: auto`` is for a teacher seq_len + 1, for vLLM samples one token where it scores, for a judge twice the policy's, for it reads prompt and reply."""

    @model_validator(mode="after")
    def _own_engines_or_an_address(self) -> Self:
        if self.base_url is None and self.key_variable is not None:
            raise ValueError("key_variable belongs to a base_url; the run's own engines have the run's key")
        if self.base_url is not None and (self.layout != FrozenLayout() or self.inference != Inference()):
            raise ValueError(
                "layout and inference are of engines that the run starts, and there is a base_url"
            )
        return self

    def key(self) -> str | None:
        """Of ``base_url``; None for none. Raises ConfigError when the variable is not set here."""
        if self.key_variable is not None and env.variable(self.key_variable) is None:
            raise ConfigError(
                f"the environment variable {self.key_variable}, which is to hold the key of {self.base_url}, is not set",
                place=f"{type(self).__name__.lower()}.key_variable",
                mend="export it where you submit from",
            )
        return env.variable(self.key_variable) if self.key_variable else None


class Teacher(FrozenModel):
    """Whom algorithms opd and sft_distill learn from."""

    timeout_s: PositiveFloat = 120.0
    """One request of the orchestrator."""
    max_concurrent: PositiveInt = 64
    """Most requests of the orchestrator at a time (opd)."""


class Judge(FrozenModel):
    """Whom the judges of environments ask that name no server of their own: verifiers' ``rubric``, ``reference``, … or a reward's."""


__all__ = ["FrozenModel", "Inference", "Judge", "Model", "Renderer", "Teacher"]
