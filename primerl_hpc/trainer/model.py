"""The policy: an HF causal LM from a folder, sharded by FSDP2, with our log-probability head on top.

Built on the meta device, sharded, then filled: each rank reads from the safetensors files only the rows it owns.
Mixture-of-experts files hold one tensor per expert while the model holds them fused; transformers' own conversion
is applied per fused tensor, so at most one of those is whole in a rank's memory.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from primerl_hpc.common.errors import ConfigError, DataError
from primerl_hpc.recipe.schema import Model as ModelBlock
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.trainer.head import ChunkedLogprob, auto_chunk_tokens
from primerl_hpc.trainer.setup import World

log = logging.getLogger("primerl_hpc.trainer")

UNSHARDED_GRAD_BYTES = 2 << 30
"""Up to this size of all float32 gradients, they stay whole until the last micro-batch and are reduced once."""


class Policy(nn.Module):
    """FSDP root around an HF causal LM, so that the head's weight is gathered when `forward` uses it."""

    def __init__(self, hf: nn.Module, chunk_tokens: int) -> None:
        super().__init__()
        self.hf, self.chunk_tokens = hf, chunk_tokens

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        predictors: Tensor,
        targets: Tensor,
        temperatures: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """ids and positions [B, N]; predictors, targets, temperatures [T] → log π [T], entropy [T], float32.

        No attention mask and no cache: transformers then keeps attention inside each run of positions.
        """
        hidden = self.hf.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        hidden = hidden.flatten(0, 1)[predictors]
        weight = self.hf.get_output_embeddings().weight
        return ChunkedLogprob.apply(hidden, weight, targets, temperatures, self.chunk_tokens)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and persistent buffers by their HF names; tied ones once."""
        parameters = dict(self.hf.named_parameters())
        yield from parameters.items()
        tied = set(self.hf.all_tied_weights_keys) if hasattr(self.hf, "all_tied_weights_keys") else set()
        for name, value in self.hf.state_dict().items():
            if name not in parameters and name not in tied:
                yield name, value


def model_folder(model_path: str, world: World) -> Path:
    """``model_path`` as a folder: itself, or the hub snapshot, fetched by one rank of each node.

    Raises DataError when it is neither.
    """
    path = Path(model_path)
    if path.is_absolute() or path.is_dir():
        if not (path / "config.json").is_file():
            raise DataError("not a model folder: config.json is missing", place=str(path))
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken"]
    if world.local_rank:
        dist.barrier()
    try:
        folder = snapshot_download(model_path, allow_patterns=patterns)
    except (RepositoryNotFoundError, LocalEntryNotFoundError, HfHubHTTPError) as error:
        raise DataError(f"model {model_path} is neither a folder nor on the hub ({error})") from error
    if not world.local_rank:
        dist.barrier()
    return Path(folder)


def build_policy(recipe: Recipe, folder: Path, world: World) -> Policy:
    """Meta init, checkpointing, compile, FSDP2, load. Weights are float32; see `Trainer.param_dtype`."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=recipe.model.trust_remote_code)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=choose_attention(recipe.model, world.device),
            trust_remote_code=recipe.model.trust_remote_code,
        )
    check_head(hf, recipe.model.name)
    hf.train()
    blocks = decoder_blocks(hf)
    if recipe.trainer.activation_checkpointing == "full":
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    if recipe.trainer.compile:
        for block in blocks:
            block.compile()
    chunk = recipe.trainer.head_chunk_tokens
    policy = Policy(
        hf, auto_chunk_tokens(hf.get_output_embeddings().weight.shape[0]) if chunk == "auto" else chunk
    )
    dtypes = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    precision = MixedPrecisionPolicy(
        param_dtype=dtypes[recipe.trainer.param_dtype],
        reduce_dtype=dtypes[recipe.trainer.reduce_dtype],
        cast_forward_inputs=False,  # temperatures stay float32; hidden states follow the weights anyway
    )
    for block in blocks:
        fully_shard(
            block,
            mesh=world.mesh,
            mp_policy=precision,
            reshard_after_forward=recipe.trainer.reshard_after_forward,
        )
    fully_shard(policy, mesh=world.mesh, mp_policy=precision)
    policy.to_empty(device=world.device)
    init_buffers(hf)
    load_weights(policy, folder, world)
    return policy


def choose_attention(block: ModelBlock, device: torch.device) -> str:
    if block.attention != "auto":
        return block.attention
    from importlib.util import find_spec

    return "flash_attention_2" if device.type == "cuda" and find_spec("flash_attn") else "sdpa"


def decoder_blocks(hf: nn.Module) -> list[nn.Module]:
    layers = getattr(hf.base_model, "layers", None)
    if layers is None:
        raise ConfigError(
            f"{type(hf).__name__} has no list of decoder layers: this architecture is not supported"
        )
    return list(layers)


def check_head(hf: nn.Module, name: str) -> None:
    """Our head computes plain W h; models that scale, cap or shift logits would be trained wrongly: refuse them."""
    head = hf.get_output_embeddings()
    config = hf.config.get_text_config()
    odd = [
        key
        for key in ("final_logit_softcapping", "logits_scaling", "logit_scale")
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


# -- loading -------------------------------------------------------------------------------------------------------------


def load_weights(policy: Policy, folder: Path, world: World) -> None:
    """Copy each rank's rows out of the folder's safetensors files.

    Raises DataError naming the first tensor that is missing, unreadable or of another shape.
    """
    targets = dict(policy.tensors())
    files = weight_files(folder)
    groups = group_sources(policy.hf, sorted(files))
    missing = set(targets)
    with ExitStack() as stack, torch.no_grad():
        handles = {
            path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(files.values()))
        }
        for target, (converter, sources) in groups.items():
            if converter is None:
                if target not in targets:
                    continue  # a tied head, or a buffer of older versions
                (source,) = [key for key, _ in sources]
                copy_rows(targets[target], handles[files[source]].get_slice(source), target, folder, world)
                missing.discard(target)
                continue
            for key, pattern in sources:
                converter.add_tensor(target, key, pattern, handles[files[key]].get_tensor(key))
            for name, value in converter.convert(target, model=policy.hf, config=policy.hf.config).items():
                whole = value[0] if isinstance(value, list) else value
                copy_rows(targets[name], whole, name, folder, world)
                missing.discard(name)
    if missing:
        raise DataError(
            f"{len(missing)} weights of {type(policy.hf).__name__} are in no file, e.g. {min(missing)}",
            place=str(folder),
        )


def weight_files(folder: Path) -> dict[str, Path]:
    """Tensor name → file, from the index or by looking into every safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {key: folder / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    if not found:
        raise DataError("no safetensors weights here", place=str(folder), mend="convert them to safetensors")
    return found


def group_sources(
    hf: nn.Module, keys: list[str]
) -> dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]]:
    """Model tensor → (conversion or None, its file tensors with the pattern each matched)."""
    transforms = get_model_conversion_mapping(hf)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = hf.state_dict()
    groups: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
    for key in sorted(keys, key=_natural):
        target, pattern = rename_source_key(key, renamings, converters, hf.base_model_prefix, known)
        if target not in known and key in known:
            target, pattern = key, None
        if pattern is None:
            groups[target] = (None, [(key, "")])
        else:
            if target not in groups:
                groups[target] = (deepcopy(by_pattern[pattern]), [])
            groups[target][1].append((key, pattern))
    return groups


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort key that counts: expert 2 before expert 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def copy_rows(target: Tensor, source: Any, name: str, folder: Path, world: World) -> None:
    """Copy ``source`` (tensor or safetensors slice), or this rank's rows of it, into ``target``."""
    shape = list(source.get_shape() if hasattr(source, "get_shape") else source.shape)
    if shape != list(target.shape):
        raise DataError(
            f"{name} has shape {shape} in the file, {list(target.shape)} in the model", place=str(folder)
        )
    if not isinstance(target, DTensor):
        target.copy_(source[...])
        return
    local = target.to_local()
    # FSDP cuts dim 0 into chunks of ceil(rows / ranks), the last ones shorter or empty
    chunk = -(-shape[0] // world.shard_mesh.size())
    start = min(world.shard_mesh.get_local_rank() * chunk, shape[0])
    local.copy_(source[start : start + local.shape[0]])


def reshard(policy: Policy) -> None:
    """Give back gathered weights after a forward without backward.

    Until then the model's parameters are the gathered ones, which a later save would take for the shards.
    """
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_small(policy: Policy) -> bool:
    return 4 * sum(parameter.numel() for parameter in policy.parameters()) <= UNSHARDED_GRAD_BYTES


def set_gradient_sync(policy: Policy, *, is_last: bool, small: bool) -> None:
    """Small models reduce gradients once a step; large ones scatter them in every micro-batch to save memory.

    Copies of an HSDP model are averaged once a step in either case.
    """
    if small:
        policy.set_requires_gradient_sync(is_last)
    else:
        policy.set_requires_all_reduce(is_last)
    policy.set_is_last_backward(is_last)
