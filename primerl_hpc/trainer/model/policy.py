"""The policy: an HF causal LM from a folder, sharded by FSDP2, with the chunked log-probability head on top.

It is built on the meta device, sharded, then filled by `load_weights`: no rank ever holds the full model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.common.model_families import ALIASES, check_tower, family_of
from primerl_hpc.recipe.schema.model import Model as ModelBlock
from primerl_hpc.recipe.schema.recipe import Recipe
from primerl_hpc.recipe.schema.training import TOWER_KEYS
from primerl_hpc.trainer.batch import ForwardInputs
from primerl_hpc.trainer.fp8.layers import apply_fp8
from primerl_hpc.trainer.fp8.products import format_of
from primerl_hpc.trainer.model.dropout import rates, remove_dropout_from_config, remove_dropout_from_modules
from primerl_hpc.trainer.model.families import (
    check_head,
    check_layers,
    check_rope,
    check_sharing,
    decoder_blocks,
    decoder_of,
    fused_sizes,
    has_capped_scores,
    head_bias,
    head_shape,
    head_weight,
    head_width,
    logit_form,
    prepare_attention,
    tensor_plan,
)
from primerl_hpc.trainer.model.float32_modules import compute_in_float32, float32_modules
from primerl_hpc.trainer.model.head import (
    ChunkedLogprob,
    FusedHead,
    LogitForm,
    auto_chunk_tokens,
    choose_head,
)
from primerl_hpc.trainer.model.load import has_weights, init_random_weights, joins_experts, load_weights
from primerl_hpc.trainer.model.lora import attach_adapters, cast_frozen_params, init_adapters, is_adapter
from primerl_hpc.trainer.model.memory import apply_activation_checkpointing, init_buffers, materialize
from primerl_hpc.trainer.model.replay import Replay
from primerl_hpc.trainer.model.rope import fix_rope
from primerl_hpc.trainer.model.routing import Routing
from primerl_hpc.trainer.model.vision import Vision, auto_class, vision_of
from primerl_hpc.trainer.parallel.attention import ATTENTION_NAME, VARLEN, register_attention
from primerl_hpc.trainer.parallel.context import Context, Share, make_context, make_packing, pad
from primerl_hpc.trainer.parallel.expert import (
    distribute_experts,
    expert_modules,
    may_overlap_shared,
    num_experts,
    overlap_shared_experts,
)
from primerl_hpc.trainer.parallel.flash import (
    FLASH_PACKAGES,
    MAX_HEAD_WIDTH,
    check_flash_package,
    choose_kernels,
)
from primerl_hpc.trainer.parallel.fsdp import (
    PARAM_DTYPES,
    apply_fsdp,
    gather_float32,
    release_reduced,
    shard_float32,
)
from primerl_hpc.trainer.parallel.lora_experts import use_sorted_experts
from primerl_hpc.trainer.parallel.mesh import (
    World,
    choose_expert_degree,
    local_rank_zero_first,
    make_expert_mesh,
    to_local,
)
from primerl_hpc.trainer.parallel.tensor.divide import DivisionPlan, divide_model
from primerl_hpc.trainer.parallel.tensor.tokens import TensorGroup, gather_tokens
from primerl_hpc.transport.base_models.quantized import without_quantization
from primerl_hpc.transport.base_models.snapshots import download_snapshot

log = logging.getLogger("primerl_hpc.trainer")


class Policy(nn.Module):
    """The FSDP root around an HF causal LM, so that the head's weight is gathered when `forward` uses it."""

    def __init__(self, hf: PreTrainedModel, chunk_tokens: int, attention: str, context: Context) -> None:
        super().__init__()
        self.hf, self.chunk_tokens = hf, chunk_tokens
        self.attention, self.context = attention, context
        self.form = LogitForm(*logit_form(hf.config.get_text_config()))
        self.routing = Routing(hf)
        self.replay: Replay | None = None
        self.vision: Vision | None = None
        self.in_float32: Sequence[nn.Module] = ()
        self.fused_head: FusedHead | None = None

    def forward(self, batch: ForwardInputs | Tensor) -> Any:
        """Return log π [T] and entropy [T], float32, of the T trained tokens.

        Ranks that share a sequence all pass and return the full sequence. For token ids [1, N], which `comparison`
        passes: transformers' own logits [1, N, V].
        """
        if isinstance(batch, Tensor):
            positions = torch.arange(batch.shape[1], device=batch.device)[None]
            self.routing.begin_forward(make_packing(positions, self.context, self.attention))
            return self.hf(input_ids=batch, use_cache=False).logits
        gather_float32(self.in_float32)
        host, input_ids = batch.on_host(), batch.input_ids
        targets, temperatures, images = batch.targets, batch.temperatures, batch.images
        packing = make_packing(batch.position_ids, self.context, self.attention, host.position_ids)
        self.routing.begin_forward(packing)
        if self.replay is not None:
            self.replay.begin_forward(batch.routed_experts, packing)
        inputs: dict[str, Any] = {"position_ids": packing.positions[:, packing.own]}
        if self.vision is not None:
            inputs = self.vision.inputs(input_ids, packing, images)
        elif images is not None:
            raise DataError(
                f"rollouts contain images, but no tower of {type(self.hf).__name__} is loaded",
                hint="use a model of the Qwen-VL family, and leave out trainer.vision none",
            )
        model = decoder_of(self.hf) if self.vision is None else self.vision.model
        hidden = model(
            input_ids=pad(input_ids, self.context)[:, packing.own], use_cache=False, packing=packing, **inputs
        ).last_hidden_state
        if self.vision is not None and self.vision.is_trained and images is None:
            hidden = hidden + self.vision.zero(hidden)
        release_reduced(self)
        tensor, vocabulary = self.context.tensor, None
        weight, bias = head_weight(self.hf), head_bias(self.hf)
        if tensor.size > 1:
            hidden, vocabulary = gather_tokens(hidden, tensor), (tensor, len(weight))
            bias = None if bias is None else bias[tensor.part_of(len(weight))]
        weight = to_local(weight)
        rest = (self.chunk_tokens, vocabulary, bias, self.form, self.fused_head)
        if self.context.size == 1:
            hidden = (
                hidden[:, : input_ids.shape[1]].flatten(0, 1)[batch.predictors].to(weight)
            )  # without padding
            return ChunkedLogprob.apply(hidden, weight, targets, temperatures, *rest)
        share = Share(packing, host.predictors, length=input_ids.shape[1])
        hidden = hidden.flatten(0, 1)[share.predictors].to(weight)
        own_temperatures = None if temperatures is None else temperatures[share.own]
        logprobs, entropies = ChunkedLogprob.apply(
            hidden, weight, targets[share.own], own_temperatures, *rest
        )
        logprobs, entropies = share.gather(torch.stack([logprobs, entropies], 1)).unbind(1)
        return logprobs, entropies.detach()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers of the model itself by their HF names; tied ones once."""
        parameters = dict(self.hf.named_parameters())
        yield from ((name, value) for name, value in parameters.items() if not is_adapter(name))
        tied = set(self.hf.all_tied_weights_keys) if hasattr(self.hf, "all_tied_weights_keys") else set()
        for name, value in self.hf.state_dict().items():
            if name not in parameters and name not in tied:
                yield name, value

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters of adapters, by the names of what they adapt; see `lora`."""
        return ((name, value) for name, value in self.hf.named_parameters() if is_adapter(name))


def model_folder(model_path: str, world: World) -> Path:
    """Return ``model_path`` as a folder: itself, or the hub snapshot, fetched by one rank of each node.

    Raises DataError if it is neither.
    """
    path = Path(model_path)
    if path.is_absolute() or path.is_dir():
        if not (path / "config.json").is_file():
            is_adapter_folder = (path / "adapter_config.json").is_file()
            hint = (
                "create a model from an adapter with primerl-hpc export --merge" if is_adapter_folder else ""
            )
            raise DataError("not a model folder: config.json is missing", location=str(path), hint=hint)
        return path
    return hub_folder(model_path, world)


def tokenizer_folder(block: ModelBlock, world: World) -> Path | None:
    """Return the tokenizer's folder, if the recipe names one other than the model's."""
    if block.tokenizer is None:
        return None
    path = Path(block.tokenizer)
    return path if path.is_dir() else hub_folder(block.tokenizer, world, has_weights=False)


def hub_folder(name: str, world: World, *, has_weights: bool = True) -> Path:
    """Return the hub snapshot's folder, fetched by one rank of each node. Raises DataError if there is none."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    with local_rank_zero_first(world):
        try:
            return download_snapshot(name, has_weights=has_weights)
        except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
            raise DataError(f"{name} is neither a folder nor on the hub ({error})") from error


def read_config(folder: Path, recipe: Recipe) -> PreTrainedConfig:
    """Return the model's configuration, without the quantization of its files, which `load_weights` reads.

    Raises DataError if there is none, or transformers does not know the model.
    """
    try:
        content = without_quantization(json.loads((folder / "config.json").read_text("utf-8")))
        if (alias := ALIASES.get(str(content.get("model_type")))) is not None:
            content.pop("auto_map", None)  # the repository's own code is that of an older transformers
            return CONFIG_MAPPING[alias].from_dict(content | {"model_type": alias})
        config = AutoConfig.from_pretrained(folder, trust_remote_code=recipe.model.trust_remote_code)
    except (ValueError, OSError) as error:
        raise DataError(" ".join(str(error).split()), location=f"model {recipe.model.name}") from error
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)
    return config


def build_policy(recipe: Recipe, folder: Path, world: World, *, may_be_random: bool = False) -> Policy:
    """Build the policy: meta init, adapters, checkpointing, compile, FSDP2, load.

    Trained parameters are float32; see `TrainerConfig.param_dtype`. ``may_be_random``: a folder without weights gets
    random ones. Raises ConfigError or DataError for a model that this version cannot train.
    """
    config = read_config(folder, recipe)
    check_rope(config.get_text_config(), recipe)
    check_sharing(config.get_text_config(), world, recipe.model.name)
    hf = build_on_meta(config, recipe)
    blocks = decoder_blocks(hf)
    vision = choose_vision(hf, recipe, world)
    if recipe.lora is not None:
        attach_adapters(hf, blocks, recipe.lora, has_joined_experts=joins_experts(folder))
    dtype = PARAM_DTYPES[recipe.trainer.param_dtype]
    in_float32 = float32_modules(hf, blocks, recipe)
    kept = list(chain.from_iterable(in_float32.values()))
    cast_frozen_params(hf, dtype, kept)
    experts = apply_expert_parallel(hf, recipe, world)
    tensor = apply_tensor_parallel(hf, blocks, world)
    compute_in_float32(in_float32, dtype)
    apply_fp8(blocks, expert_modules(hf), recipe.trainer.fp8, world.device)
    if experts is None and any(map(format_of, expert_modules(hf))):
        use_sorted_experts(hf)
    # before checkpointing, so that a recomputed block replays too
    replay = Replay(blocks) if recipe.replays_routers else None
    attention = choose_attention(recipe, config, world.device)
    is_compiled = compiles_blocks(recipe, config, attention)
    options = {"has_dropout": recipe.has_dropout, "is_compiled": is_compiled}
    apply_activation_checkpointing(hf, blocks, recipe.trainer, **options)
    if is_compiled:
        compile_blocks(blocks, may_fail=recipe.trainer.compile == "auto")
    chunk = recipe.trainer.head_chunk_tokens
    if chunk == "auto":
        chunk = auto_chunk_tokens(-(-head_weight(hf).shape[0] // tensor.size), world.device)
    if attention == VARLEN:
        choose_kernels(world.device, *head_shape(config.get_text_config()))
    context = make_context(recipe.layout.trainer, config.get_text_config(), world, tensor)
    policy = Policy(hf, chunk, attention, context)
    policy.vision, policy.replay, policy.in_float32 = vision, replay, kept
    policy.fused_head = choose_head(recipe, world.device)
    shard_float32(kept, recipe.trainer, world)
    apply_fsdp(policy, blocks, experts, recipe.trainer, world)
    policy.routing.attach(world.device, recipe.trainer.router_bias_rate)
    materialize(policy, recipe.trainer, world.device)
    init_buffers(hf)
    fix_rope(hf, recipe)
    if may_be_random and not has_weights(folder):
        init_random_weights(policy.tensors())
    else:
        load_weights(hf, policy.tensors(), folder)
    init_adapters(hf, recipe.seed)
    return policy


def build_on_meta(config: PreTrainedConfig, recipe: Recipe) -> PreTrainedModel:
    """Build the model on the meta device, without dropout unless the recipe keeps it.

    Raises ConfigError for a family that is not supported.
    """
    if not recipe.keeps_dropout:
        remove_dropout_from_config(config)
    register_attention()
    auto_model, attention_of_parts = auto_class(config)
    options = {"dtype": torch.float32, "trust_remote_code": recipe.model.trust_remote_code}
    try:
        with torch.device("meta"):
            hf = auto_model.from_config(config, attn_implementation=attention_of_parts, **options)
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        raise ConfigError(
            f"{type(config).__name__} does not use transformers' attention interface, which packed rows need"
        ) from error
    check_head(hf, recipe.model.name)
    check_layers(decoder_blocks(hf), config.get_text_config(), recipe.model.name)
    prepare_attention(decoder_blocks(hf), config.get_text_config())
    hf.train()
    if not recipe.keeps_dropout:
        remove_dropout_from_modules(hf)
    return hf


def choose_vision(hf: PreTrainedModel, recipe: Recipe, world: World) -> Vision | None:
    """Return the vision inputs, or leave the towers out. Raises ConfigError for images that cannot be trained."""
    family, key = str(hf.config.model_type), recipe.trainer.vision
    if key in TOWER_KEYS:
        degrees = {"context": world.context_size, "tensor": world.tensor_size}
        check_tower(family, recipe.model.name, f"trainer.vision is {key}", degrees)
    is_shared = world.context_size * world.tensor_size > 1
    is_loaded = recipe.trainer.loads_tower(family, is_shared=is_shared)
    return vision_of(hf, is_loaded=is_loaded, is_trained=key == "trained")


def apply_expert_parallel(hf: PreTrainedModel, recipe: Recipe, world: World) -> DeviceMesh | None:
    """Distribute the experts if the layout and the model ask for it. Return the experts' mesh, or None."""
    degree = choose_expert_degree(
        recipe.layout.trainer, num_experts(hf), shard=world.shard_mesh.size(), local=world.local_size
    )
    if degree == 1:
        return None
    mesh = make_expert_mesh(world, degree)
    distribute_experts(hf, mesh["expert"], recipe.layout.trainer.expert_backend)
    overlapped = overlap_shared_experts(hf) if may_overlap_shared(recipe) else 0
    log.info(
        "%d experts on each of %d ranks; shared experts of %d layers run while tokens are sent",
        num_experts(hf) // degree,
        degree,
        overlapped,
    )
    return mesh


def apply_tensor_parallel(hf: PreTrainedModel, blocks: Sequence[nn.Module], world: World) -> TensorGroup:
    """Divide the model's matrices if the layout asks for it."""
    if world.tensor_mesh is None:
        return TensorGroup()
    plan = DivisionPlan(tensor_plan(hf.config.get_text_config()), fused_sizes)
    ranks = divide_model(hf, blocks, world.tensor_mesh["tensor"], plan)
    log.info("matrices divided among %d ranks", ranks.size)
    return ranks


def choose_attention(recipe: Recipe, config: PreTrainedConfig, device: torch.device) -> str:
    """Return the attention implementation.

    ``auto``: on a GPU torch's own flash attention, unless the model computes in float32, its heads are too wide, or it
    keeps dropout in its attention; else sdpa if the model supports it; else eager. Raises ConfigError for a flash
    package that cannot be imported.
    """
    wanted = recipe.model.attention
    if wanted in FLASH_PACKAGES:
        check_flash_package(wanted)
    if wanted != "auto":
        return wanted
    text = config.get_text_config()
    has_dropout = recipe.keeps_dropout and any(name.startswith("att") for name in rates(text))
    is_supported = recipe.trainer.param_dtype != "float32" and head_width(text) <= MAX_HEAD_WIDTH
    is_supported &= not has_capped_scores(text)
    if device.type == "cuda" and is_supported and not has_dropout:
        return VARLEN
    if has_capped_scores(text):
        return "eager"
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if getattr(known, "_supports_sdpa", True) else "eager"


def compiles_blocks(recipe: Recipe, config: PreTrainedConfig, attention: str) -> bool:
    """True if blocks are compiled.

    ``auto``: families with `is_compiled`, with torch's flash attention, if no ranks share rows or matrices (it is one
    operator then), and without adapters, dropout, FP8 and float32 modules, which change the modules of blocks.
    """
    if recipe.trainer.compile != "auto":
        return recipe.trainer.compile
    layout = recipe.layout.trainer
    is_alone = layout.context_parallel == layout.tensor_parallel == 1
    return (
        family_of(config.model_type).is_compiled
        and attention == VARLEN
        and is_alone
        and recipe.lora is None
        and recipe.trainer.fp8 == "none"
        and not recipe.keeps_dropout
        and not recipe.trainer.float32
    )


def compile_blocks(blocks: Sequence[nn.Module], *, may_fail: bool) -> None:
    """Compile each block. ``may_fail``: a block that torch cannot compile runs as it is, with a warning."""
    import torch._dynamo

    torch._dynamo.config.suppress_errors = may_fail
    for block in blocks:
        block.compile()
