"""Replace the weights of a served model in place, in vLLM's worker, and verify that every parameter was written.

    num_parameters = reload_weights(worker, stream)       # raises DataError if a parameter was not written

vLLM 0.31 moves every layer to the meta device, counts the elements that the model's ``load_weights`` passes to the
parameters' ``weight_loader``, and copies a layer into the served tensors once it is complete. A layer that received no
elements gets its old tensors back with a log warning; a parameter that received only a part has uninitialized memory in
the rest. `LoadRecord` compares the number of elements that each parameter received with its size.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from primerl_hpc.common.errors import DataError
from primerl_hpc.inference.worker.false_warnings import without_false_warnings
from primerl_hpc.inference.worker.stacked_experts import StackedExperts

MAX_NAMED = 3  # parameters that an error message names


def reload_weights(worker: Any, weights: Iterator[tuple[str, Any]]) -> int:
    """Replace the model's weights by ``weights`` (Hugging Face names). Returns the number of parameters written.

    Raises DataError if the load did not write all parameters. The model is then a mixture of two versions, as after any
    other exception, and the engine must exit. Callers therefore check everything that they can before they call this.
    """
    model = worker.model_runner.get_model()
    _forget_cpu_moe_kernels(model)
    record, experts = LoadRecord(model), StackedExperts()
    with record.counting(), experts.observing(), without_false_warnings(record):
        stream = record.watch(_through_loaders(model, weights))
        worker.reload_weights(weights_iterator=experts.through(stream))
    record.check()
    _repack_cpu_tied_heads(model)
    _copy_cpu_convolutions(model)
    return len(record.expected)


@dataclass(frozen=True)
class Expected:
    """A parameter or buffer that a load must write."""

    name: str
    parameters: list[Any]
    """The parameter's objects: on the meta device, each layer that shares the parameter has a separate object."""
    num_elements: int
    """Number of elements that a complete load writes to one of the objects."""


class LoadRecord:
    """Number of elements that one load passed to each parameter.

    ``expected``: the parameters and buffers that the load must write.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.expected: list[Expected] = []
        self._received: Counter[int] = Counter()  # by id() of the parameter, which `expected` keeps alive
        self._in_place: list[tuple[Any, Callable[..., Any] | None]] = []
        self._buffers: dict[str, Any] = {}
        self._by_class: dict[str, list[Expected | None]] = {}  # None: a tensor that need not be written

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the elements that vLLM accepts. It silently drops what arrives after a layer is complete."""
        from vllm.model_executor.model_loader.reload import layerwise

        plain = layerwise.get_numel_loaded

        def counted(loader: Callable[..., Any], args: Any) -> tuple[int, Any]:
            num_elements, result = plain(loader, args)
            self._received[id(args.arguments["param"])] += num_elements
            return num_elements, result

        layerwise.get_numel_loaded = counted
        try:
            yield
        finally:
            layerwise.get_numel_loaded = plain
            for parameter, loader in self._in_place:
                if loader is None:
                    del parameter.weight_loader
                else:
                    parameter.weight_loader = loader

    def watch(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pass ``weights`` through and record what is expected.

        vLLM requests the first element once the layers are on the meta device, in the checkpoint's layout.
        """
        self._expect_all()
        for name, tensor in weights:
            if (buffer := self._buffers.pop(name, None)) is not None:
                self.expected.append(Expected(name, [buffer], buffer.numel()))
            yield name, tensor

    def is_written(self, entry: Expected) -> bool:
        """True if the load has written the parameter completely."""
        return self._num_received(entry) >= entry.num_elements

    def written_names(self) -> set[str]:
        """Return the names of the parameters that the load has written completely."""
        # vLLM's warning names the base layers of adapters as the checkpoint does
        return {entry.name.replace(".base_layer.", ".") for entry in self.expected if self.is_written(entry)}

    def has_written_layers(self, class_name: str) -> bool:
        """True if the load is known to have written all tensors of the class's layers that a checkpoint can contain.

        Layers without such tensors count as written, for example computed tables of rotary embeddings.
        """
        entries = self._by_class.get(class_name, [None])
        return all(entry is not None and self.is_written(entry) for entry in entries)

    def _num_received(self, entry: Expected) -> int:
        return max(self._received[id(parameter)] for parameter in entry.parameters)

    def check(self) -> None:
        """Raise DataError naming the parameters that the load did not write completely."""
        missing = [
            f"{entry.name} ({self._num_received(entry)} of {entry.num_elements} elements)"
            for entry in self.expected
            if not self.is_written(entry)
        ]
        if not self.expected or missing:
            some = ", ".join(missing[:MAX_NAMED]) + (", …" if len(missing) > MAX_NAMED else "")
            model = type(self.model).__name__
            raise DataError(
                f"the update did not write {len(missing)} of {len(self.expected)} parameters of {model}: {some}"
                if self.expected
                else f"the update wrote no parameter of {model}",
                hint="this version of vLLM cannot update this model family in place; docs/models.md lists the "
                "tested families",
            )

    def _expect_all(self) -> None:
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        by_served: dict[int, Expected] = {}
        is_tied = _is_tied(self.model)
        for path, layer in self.model.named_modules():
            of_class = self._by_class.setdefault(type(layer).__name__, [])
            served, _ = get_layerwise_info(layer).kernel_tensors or ({}, {})
            # a checkpoint need not contain the scales of the KV cache, or a head that shares the embedding
            if is_deferred_attention_layer(layer) or (is_tied and _is_head(layer)):
                of_class.append(by_served.get(id(served.get("weight"))))
                continue
            prefix = f"{path}." if path else ""
            for name, parameter in layer._parameters.items():
                if parameter is None:
                    continue
                if not (num_elements := _num_loaded(layer, name, parameter)):
                    of_class.append(None)
                    continue
                entry = by_served.get(id(served.get(name, parameter)))
                if entry is not None:
                    entry.parameters.append(parameter)
                else:
                    self._count_in_place(name, parameter)
                    entry = Expected(prefix + name, [parameter], num_elements)
                    by_served[id(served.get(name, parameter))] = entry
                    self.expected.append(entry)
                of_class.append(entry)
            persistent = layer._buffers.keys() - layer._non_persistent_buffers_set
            buffers = {
                prefix + name: layer._buffers[name]
                for name in persistent
                if layer._buffers[name] is not None and layer._buffers[name].is_meta
            }
            self._buffers |= buffers
            of_class += [None] * len(buffers)

    def _count_in_place(self, name: str, parameter: Any) -> None:
        """Count the elements of a parameter that vLLM loads in place, without wrapping its loader."""
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        if name not in SKIP_LOAD_TENSORS:
            return
        own = parameter.__dict__.get("weight_loader")
        loader = own or default_weight_loader

        def counted(target: Any, tensor: Any, *args: Any, **more: Any) -> Any:
            result = loader(target, tensor, *args, **more)
            self._received[id(target)] += tensor.numel()
            return result

        self._in_place.append((parameter, own))
        parameter.weight_loader = counted


def _num_loaded(layer: Any, name: str, parameter: Any) -> int:
    """Return how many elements of ``parameter`` a checkpoint contains; 0 if it need not contain the parameter."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

    method = getattr(layer, "quant_method", None)
    if method is not None and not type(method).__name__.startswith("Unquantized"):
        # Quantized tensors may be padded. Scales and zero points may be computed, or keep a default.
        return (
            1
            if name in ("weight", "bias") or (name.startswith(("w13_", "w2_")) and "scale" not in name)
            else 0
        )
    if isinstance(layer, VocabParallelEmbedding):  # rows are padded to a multiple of 64
        return int(layer.shard_indices.num_org_elements * (parameter.numel() // parameter.shape[0]))
    return int(get_tensor_load_numel(parameter))


def _is_tied(model: Any) -> bool:
    config = getattr(model, "config", None)
    configs = (config, getattr(config, "text_config", None))
    return any(getattr(candidate, "tie_word_embeddings", False) for candidate in configs)


def _is_head(layer: Any) -> bool:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return isinstance(layer, ParallelLMHead)


# -- workarounds for what vLLM's reload does not handle --------------------------------------------


_GPT_OSS_EXPERTS = re.compile(r"(.+\.mlp\.experts\.)(gate_up_proj|down_proj)(_bias)?")
_GPT_OSS_SINKS = re.compile(r"(.+\.)self_attn\.sinks")


def _through_loaders(model: Any, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Convert ``weights`` to a form that the model's ``load_weights`` passes to the parameters' loaders.

    In vLLM 0.31, GPT-OSS copies fused experts and attention sinks without calling the loaders (vLLM PRs 52209 and
    57805). Experts are therefore passed one by one, for which it calls them, and the sinks are loaded here.
    """
    if type(model).__name__ != "GptOssForCausalLM":
        yield from weights
        return
    for name, tensor in weights:
        if sinks := _GPT_OSS_SINKS.fullmatch(name):
            _load_sinks(model, f"{sinks[1]}attn.sinks", tensor)
        elif experts := _GPT_OSS_EXPERTS.fullmatch(name):
            prefix, projection, bias = experts.groups()
            part = ("w13" if projection == "gate_up_proj" else "w2") + (bias or "_weight")
            for expert, value in enumerate(tensor):
                yield f"{prefix}{expert}.{part}", value
        else:
            yield name, tensor


def _load_sinks(model: Any, name: str, tensor: Any) -> None:
    """Load this tensor-parallel rank's part of the attention sinks. ``tensor``: [heads]."""
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.model_executor.models.utils import is_pp_missing_parameter

    if is_pp_missing_parameter(name, model):
        return
    parameter = model.get_parameter(name)
    heads = parameter.numel()
    parameter.weight_loader(parameter, tensor.narrow(0, get_tensor_model_parallel_rank() * heads, heads))


def _forget_cpu_moe_kernels(model: Any) -> None:
    """Delete the kernels of expert layers on CPUs, so that they pack the new weights.

    vLLM packs the experts of a layer only if the layer has no kernel yet.
    """
    if next(model.parameters()).device.type != "cpu":
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_cpu_tied_heads(model: Any) -> None:
    """Pack tied LM heads on CPUs again: they hold a packed copy of the old embedding."""
    if not _is_tied(model):
        return
    for layer in model.modules():
        if _is_head(layer) and getattr(layer, "cpu_linear", None) is not None:
            layer.quant_method.process_weights_after_loading(layer)


def _copy_cpu_convolutions(model: Any) -> None:
    """Copy the new filters of Mamba2's convolutions on CPUs to where the layer reads them.

    The layer has a view of the filters from before vLLM packed them; a reload writes only the packed ones.
    """
    for layer in model.modules():
        filters = getattr(getattr(layer, "conv1d", None), "_cpu_unpacked_conv_weight", None)
        view = layer._buffers.get("conv_weights")
        if filters is not None and view is not None:
            view.copy_(filters)
