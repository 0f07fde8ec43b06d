"""The policy: an HF causal LM from a folder, sharded by FSDP2, with our log-probability head on top.

Built on the meta device, sharded, then filled by `load_weights`: no rank ever holds the whole model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.recipe.model_schema import Model as ModelBlock
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.recipe.training_schema import Trainer
from primerl_hpc.trainer.batch import ImageBatch
from primerl_hpc.trainer.head import ChunkedLogprob, auto_chunk_tokens
from primerl_hpc.trainer.load import fill_with_noise, has_weights, load_weights
from primerl_hpc.trainer.lora import attach_adapters, init_adapters, is_adapter, shrink_frozen
from primerl_hpc.trainer.memory import allocate, offload_policy, save_activations
from primerl_hpc.trainer.parallel.attention import register_attention
from primerl_hpc.trainer.parallel.context import Context, Share, make_context, make_packing, pad
from primerl_hpc.trainer.parallel.expert import expert_modules, num_experts, shard_experts, spread_experts
from primerl_hpc.trainer.parallel.mesh import (
    World,
    choose_expert_degree,
    make_expert_mesh,
    one_of_each_node_first,
)
from primerl_hpc.trainer.replay import Replay
from primerl_hpc.trainer.routing import Routing
from primerl_hpc.trainer.vision import Vision, auto_class, vision_of

log = logging.getLogger("primerl_hpc.trainer")

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken"]
"""Of a model on the hub, besides weights."""

SMALL_BYTES = 2 << 30
"""Up to this size of all float32 gradients, they stay whole until the last micro-batch and are reduced once.

Up to this size of all float32 weights, these are one group, gathered once a step (`Trainer.reshard_after_forward`).
"""


class Policy(nn.Module):
    """FSDP root around an HF causal LM, so that the head's weight is gathered when `forward` uses it."""

    def __init__(self, hf: nn.Module, chunk_tokens: int, attention: str, context: Context) -> None:
        super().__init__()
        self.hf, self.chunk_tokens = hf, chunk_tokens
        self.attention, self.context = attention, context
        self.routing = Routing(hf)
        self.replay: Replay | None = None
        self.vision: Vision | None = None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        routed_experts: Tensor | None = None,
        images: ImageBatch | None = None,
    ) -> tuple[Tensor, Tensor]:
        """ids and positions [B, N]; predictors, targets, temperatures (None: all 1) [T] → log π [T], entropy [T], float32.

        ``routed_experts`` [B, N, layers, k]: see `replay`.

        Ranks that share a sequence all get the whole of it, and give the whole of it.
        """
        packing = make_packing(position_ids, self.context, self.attention)
        self.routing.begin_forward(packing)
        if self.replay is not None:
            self.replay.begin_forward(routed_experts, packing)
        inputs: dict[str, Any] = {"position_ids": packing.positions[:, packing.own]}
        if self.vision is not None:
            inputs = self.vision.inputs(input_ids, packing, images)
        elif images is not None:
            raise DataError(f"rollouts show images, and {type(self.hf).__name__} is a model of text alone")
        hidden = self.hf.base_model(
            input_ids=pad(input_ids, self.context)[:, packing.own], use_cache=False, packing=packing, **inputs
        ).last_hidden_state
        if self.vision is not None and self.vision.is_trained and images is None:
            hidden = hidden + self.vision.nothing(hidden)
        weight = self.hf.get_output_embeddings().weight
        if self.context.size == 1:
            hidden = hidden.flatten(0, 1)[predictors]
            return ChunkedLogprob.apply(hidden, weight, targets, temperatures, self.chunk_tokens)
        share = Share(packing, predictors, length=input_ids.shape[1])
        logprobs, entropies = ChunkedLogprob.apply(
            hidden.flatten(0, 1)[share.predictors],
            weight,
            targets[share.mine],
            None if temperatures is None else temperatures[share.mine],
            self.chunk_tokens,
        )
        logprobs, entropies = share.gather(torch.stack([logprobs, entropies], 1)).unbind(1)
        return logprobs, entropies.detach()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers of the model itself by their HF names; tied ones once."""
        parameters = dict(self.hf.named_parameters())
        yield from ((name, value) for name, value in parameters.items() if not is_adapter(name))
        tied = set(self.hf.all_tied_weights_keys) if hasattr(self.hf, "all_tied_weights_keys") else set()
        for name, value in self.hf.state_dict().items():
            if name not in parameters and name not in tied:
                yield name, value

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters of adapters, by the names of what they adapt; see `lora`."""
        return ((name, value) for name, value in self.hf.named_parameters() if is_adapter(name))


def model_folder(model_path: str, world: World) -> Path:
    """``model_path`` as a folder: itself, or the hub snapshot, fetched by one rank of each node.

    Raises DataError when it is neither.
    """
    path = Path(model_path)
    if path.is_absolute() or path.is_dir():
        if not (path / "config.json").is_file():
            is_adapter_folder = (path / "adapter_config.json").is_file()
            mend = "primerl-hpc export --merge makes a model of an adapter" if is_adapter_folder else ""
            raise DataError("not a model folder: config.json is missing", place=str(path), mend=mend)
        return path
    return hub_folder(model_path, ["*.safetensors", *SMALL_FILES], world)


def tokenizer_folder(block: ModelBlock, world: World) -> Path | None:
    """Where the tokenizer lies, if the recipe says another place than the model's."""
    if block.tokenizer is None:
        return None
    path = Path(block.tokenizer)
    return path if path.is_dir() else hub_folder(block.tokenizer, SMALL_FILES, world)


def hub_folder(name: str, patterns: list[str], world: World) -> Path:
    """The hub snapshot's folder, fetched by one rank of each node. Raises DataError when there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    with one_of_each_node_first(world):
        try:
            return Path(snapshot_download(name, allow_patterns=patterns))
        except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
            raise DataError(f"{name} is neither a folder nor on the hub ({error})") from error


def read_config(folder: Path, recipe: Recipe) -> PreTrainedConfig:
    """Raises DataError when there is none, or transformers does not know the model."""
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=recipe.model.trust_remote_code)
    except (ValueError, OSError) as error:
        raise DataError(" ".join(str(error).split()), place=f"model {recipe.model.name}") from error


def build_policy(recipe: Recipe, folder: Path, world: World, *, may_be_random: bool = False) -> Policy:
    """Meta init, adapters, checkpointing, compile, FSDP2, load. What is trained is float32; see `Trainer.param_dtype`."""
    config = read_config(folder, recipe)
    register_attention()
    kind, attention_of_parts = auto_class(config)
    with torch.device("meta"):
        hf = kind.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention_of_parts,
            trust_remote_code=recipe.model.trust_remote_code,
        )
    check_head(hf, recipe.model.name)
    blocks = decoder_blocks(hf)
    check_layers(blocks, config.get_text_config(), recipe.model.name)
    hf.train()
    vision = vision_of(hf, recipe.model.name, is_trained=recipe.trainer.vision == "trained")
    if recipe.lora is not None:
        attach_adapters(hf, blocks, recipe.lora)
    shrink_frozen(hf, DTYPES[recipe.trainer.param_dtype])
    experts = spread(hf, recipe, world)
    replay = Replay(blocks) if recipe.replays_routers else None  # first: what is recomputed is replayed again
    save_activations(hf, blocks, recipe.trainer)
    if recipe.trainer.compile:
        for block in blocks:
            block.compile()
    chunk = recipe.trainer.head_chunk_tokens
    if chunk == "auto":
        chunk = auto_chunk_tokens(hf.get_output_embeddings().weight.shape[0])
    attention = choose_attention(recipe, config, world.device)
    context = make_context(recipe.layout.trainer, config.get_text_config(), world)
    policy = Policy(hf, chunk, attention, context)
    policy.vision = vision
    if vision is not None and context.size > 1:
        raise ConfigError(
            f"layout.trainer.context_parallel is {context.size}, and rows with images are not shared by ranks",
            mend="set it to 1",
        )
    policy.replay = replay
    shard(policy, blocks, experts, recipe.trainer, world)
    policy.routing.attach(world.device)
    allocate(policy, recipe.trainer, world.device)
    init_buffers(hf)
    if may_be_random and not has_weights(folder):
        fill_with_noise(policy)
    else:
        load_weights(policy, folder)
    init_adapters(hf, recipe.seed)
    return policy


def spread(hf: nn.Module, recipe: Recipe, world: World) -> DeviceMesh | None:
    """Expert parallelism, where the layout and the model ask for it: the experts' mesh, or None."""
    degree = choose_expert_degree(
        recipe.layout.trainer, num_experts(hf), shard=world.shard_mesh.size(), local=world.local_size
    )
    if degree == 1:
        return None
    mesh = make_expert_mesh(world, degree)
    spread_experts(hf, mesh["expert"], recipe.layout.trainer.expert_backend)
    log.info("%d experts on each of %d ranks", num_experts(hf) // degree, degree)
    return mesh


def shard(
    policy: Policy, blocks: list[nn.Module], experts: DeviceMesh | None, config: Trainer, world: World
) -> None:
    """FSDP: one group of weights per block, one more per block for experts with a mesh of their own, and the rest.

    Blocks of a small model are part of the rest: what many short gathers would cost is more than they save.
    """
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[config.param_dtype],
        reduce_dtype=DTYPES[config.reduce_dtype],
        cast_forward_inputs=False,  # temperatures stay float32; hidden states follow the weights anyway
    )
    offload, reshard = offload_policy(config), config.reshard_after_forward in (True, "auto")
    is_one_group = config.reshard_after_forward == "auto" and are_small(policy.parameters())
    groups: list[list[FSDPModule]] = []
    for block in blocks:
        inner = []
        if experts is not None:
            inner = expert_modules(block)
            mesh = experts["replicate", "expert_shard"] if world.replicate > 1 else experts["expert_shard"]
            for module in inner:
                shard_experts(module, mesh, precision, offload, reshard=reshard)
        if not is_one_group:
            fully_shard(
                block,
                mesh=world.mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshard,
            )
        if group := [each for each in (block, *inner) if isinstance(each, FSDPModule)]:
            groups.append(group)
    fully_shard(policy, mesh=world.mesh, mp_policy=precision, offload_policy=offload)
    for module in fsdp_modules(policy) if world.size > 1 else ():  # torch divides by 1 with a copy
        # summed, not averaged: losses are parts of a sum, and experts' gradients are sums over more ranks than reduce them
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if experts is not None:
        # the wait for the all-to-all's sizes would hold back gathers that are issued only when their block begins
        for group, following in pairwise(groups):
            group[0].set_modules_to_forward_prefetch(following)
            following[0].set_modules_to_backward_prefetch(group)


def choose_attention(recipe: Recipe, config: PreTrainedConfig, device: torch.device) -> str:
    """``auto``: flash attention where installed on a GPU and of use to the model, else sdpa where it has it, else eager."""
    if recipe.model.attention != "auto":
        return recipe.model.attention
    from importlib.util import find_spec

    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    flash = "flash_attention_2"
    suited = getattr(known, "_compatible_flash_implementations", None)  # None: any
    is_served = recipe.trainer.param_dtype != "float32" and (suited is None or flash in suited)
    if device.type == "cuda" and is_served and find_spec("flash_attn"):
        return flash
    return "sdpa" if getattr(known, "_supports_sdpa", True) else "eager"


def decoder_blocks(hf: nn.Module) -> list[nn.Module]:
    layers = getattr(getattr(hf.base_model, "language_model", hf.base_model), "layers", None)
    if layers is None:
        raise ConfigError(
            f"{type(hf).__name__} has no list of decoder layers: this architecture is not supported"
        )
    return list(layers)


def check_layers(blocks: list[nn.Module], config: PreTrainedConfig, name: str) -> None:
    """Layers that carry state along a row, or cut it into chunks, would mix the samples packed into it: refuse them.

    Families that do not say so in ``layer_types`` (RecurrentGemma, code that comes with a model) have convolutions.
    """
    odd = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not odd and any(isinstance(module, nn.Conv1d) for block in blocks for module in block.modules()):
        odd = {"convolution"}
    if odd:
        raise ConfigError(f"model {name} has {min(odd)} layers, which this version does not train")


def check_head(hf: nn.Module, name: str) -> None:
    """Our head computes plain W h; models that scale, cap or shift logits would be trained wrongly: refuse them."""
    head = hf.get_output_embeddings()
    config = hf.config.get_text_config()
    odd = [
        key
        for key in ("final_logit_softcapping", "logits_soft_cap", "logits_scaling", "logit_scale")
        if getattr(config, key, None)
    ]
    if head is None or getattr(head, "bias", None) is not None or odd:
        what = ", ".join(odd) or "a bias in its head"
        raise ConfigError(f"model {name} has {what}, which this version does not train")


def init_buffers(hf: nn.Module) -> None:
    """Fill buffers that no file holds (rotary frequencies, scales) by the model's own initialiser.

    It may also fill parameters of those modules with noise; the files overwrite them afterwards.
    """
    for module in hf.modules():
        if module._non_persistent_buffers_set:
            hf._init_weights(module)


def reshard(policy: Policy) -> None:
    """Give back gathered weights after a forward without backward.

    Until then the model's parameters are the gathered ones, which a later save would take for the shards.
    """
    for module in fsdp_modules(policy):
        module.reshard()


def fsdp_modules(policy: Policy) -> list[FSDPModule]:
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]


def is_small(policy: Policy) -> bool:
    return are_small(parameter for parameter in policy.parameters() if parameter.requires_grad)


def are_small(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether all of them at once, in float32, are no burden."""
    return 4 * sum(parameter.numel() for parameter in parameters) <= SMALL_BYTES


def set_gradient_sync(policy: Policy, *, is_last: bool, small: bool) -> None:
    """Small models reduce gradients once a step; large ones scatter them in every micro-batch to save memory.

    Copies of an HSDP model are averaged once a step in either case.
    """
    if small:
        policy.set_requires_gradient_sync(is_last)
    else:
        policy.set_requires_all_reduce(is_last)
    policy.set_reshard_after_backward(is_last, recurse=False)
    policy.set_is_last_backward(is_last)
