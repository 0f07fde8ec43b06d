"""Access to vLLM's internals; only `worker.reload` and `stores` import them as well. Written for vLLM 0.31 and 0.32.

All other modules use vLLM's public interfaces: command-line flags, ``--middleware``, ``--worker-extension-cls`` and the
methods of its engine client. Except for `stores`, vLLM is patched only for CPUs: expert parallelism
(docs/decisions/0013-experts-over-cpus.md), and imports of models without torchvision.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from primerl_hpc.common.errors import RoleError
from primerl_hpc.common.log import MalformedRequests
from primerl_hpc.inference.stores import secure_stores
from primerl_hpc.run.access.admission import Admission
from primerl_hpc.transport.rollouts.token_arrays import SampledTokens

MALFORMED = ("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket", "connection rejected")
"""Messages of uvicorn about requests that are malformed or no part of a run."""


def parse_serve_args(argv: list[str]) -> Namespace:
    """Parse ``vllm serve`` arguments with vLLM's parser. Raises SystemExit (argparse) or ValueError if invalid."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(argv)
    assert isinstance(args, Namespace)  # vLLM's annotation allows None, argparse never returns it
    validate_parsed_serve_args(args)
    args.api_server_count = None  # as `vllm serve` does for a single API server in its own process
    return args


def has_nixl() -> bool:
    """True if the package nixl is installed, with which vLLM's NixlConnector transfers KV blocks."""
    from vllm.distributed.nixl_utils import is_nixl_available

    return bool(is_nixl_available())


def serve(
    args: Namespace,
    listener: socket.socket,
    companion: Callable[[], Coroutine[Any, Any, None]],
    admission: Admission,
) -> None:
    """Run vLLM's OpenAI server on a bound socket until ``companion()`` returns or SIGTERM interrupts the start.

    ``companion()`` runs concurrently in the same event loop. An exception in it stops the server and is raised here.
    Raises RoleError if the server exits by itself, which means that its engine died.
    """
    import uvloop
    from vllm.utils.system_utils import set_ulimit

    secure_stores()
    logging.getLogger("uvicorn.error").addFilter(MalformedRequests(texts=MALFORMED))

    def interrupt(*_: object) -> None:  # loading blocks the event loop, so its signal handlers would not run
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    set_ulimit()
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(args, listener, companion, admission))


def serve_headless(args: Namespace) -> None:
    """Run a headless worker node of the engine until SIGTERM. Raises RoleError if the engine exits by itself."""
    from vllm.entrypoints.cli.serve import run_headless
    from vllm.utils.system_utils import set_ulimit

    set_ulimit()
    secure_stores()
    args.api_server_count = 0
    with contextlib.suppress(SystemExit):  # raised by vLLM's SIGTERM handler
        run_headless(args)
        raise RoleError(
            "vLLM's headless process on this node exited by itself", hint="see the log lines above"
        )


async def _serve(
    args: Namespace,
    listener: socket.socket,
    companion: Callable[[], Coroutine[Any, Any, None]],
    admission: Admission,
) -> None:
    admission.guard(asyncio.get_running_loop())
    args.host, args.port = listener.getsockname()[:2]
    server = asyncio.ensure_future(_serve_openai(args, listener))
    companion_task = asyncio.ensure_future(companion())
    try:
        await asyncio.wait({server, companion_task}, return_when=asyncio.FIRST_COMPLETED)
        if not companion_task.done():
            server.result()
            raise RoleError("vLLM's server exited because its engine died", hint="see the log lines above")
        companion_task.result()
    finally:
        companion_task.cancel()
        server.cancel()
        await asyncio.wait({companion_task, server})


async def _serve_openai(args: Namespace, listener: socket.socket) -> None:
    """Run the server as vLLM's `run_server_worker` does, except for how engine processes are started on CPUs."""
    from vllm.entrypoints.launchers.api_server import entry

    if args.tool_parser_plugin:
        entry.ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        entry.ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    engine_args = _engine_args().from_cli_args(args)
    async with entry.build_async_engine_client_from_engine_args(engine_args) as client:
        url = f"https://{args.host}:{args.port}"
        # the application must see the address of the connection, which no header changes
        is_over = await entry.build_and_serve(client, url, listener, args, proxy_headers=False)
    await is_over


def _engine_args() -> Any:
    """Return vLLM's AsyncEngineArgs, on CPUs a subclass that makes vLLM fork the engine's processes.

    Forked processes share the memory of the imported vLLM, whose import takes half of an engine's start. vLLM's CPU
    platform selects spawn while it creates the configuration, because a parent may have OpenMP threads; this process
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
    prepare_cpu_models()
    # pages of objects that no process collects as garbage stay shared after the fork
    os.register_at_fork(before=gc.freeze)
    # otherwise a signal to a forked child would wake the event loop of this process
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    return Forked


class _AnyName(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class _TorchvisionNames(MetaPathFinder, Loader):
    """Finds modules of torchvision whose names stand for nothing.

    vLLM and transformers import it with every model that can process images, also if text alone is served. Images are
    processed with Pillow, which transformers chooses because it finds no torchvision.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        is_part = fullname.partition(".")[0] == "torchvision"
        return ModuleSpec(fullname, self, is_package=True) if is_part else None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = partial(getattr, _AnyName(module.__name__, (), {}))


def prepare_cpu_models() -> None:
    """Let vLLM import every model family in an installation for CPUs, which has no torchvision.

    vLLM inspects a model's class in a process of its own, so that CUDA is not initialized in this one. That process
    would not have the replacement, and on CPUs there is nothing to avoid.
    """
    import transformers
    from transformers.utils.import_utils import is_torchvision_available
    from vllm.model_executor.models import registry

    if not is_torchvision_available():  # transformers remembers the answer
        sys.meta_path.append(_TorchvisionNames())
        # without torchvision, transformers hides what processors of Qwen-VL have for videos
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
        from transformers.video_processing_utils import BaseVideoProcessor

        for each in (BaseVideoProcessor, Qwen2VLVideoProcessor, Qwen3VLVideoProcessor):
            setattr(transformers, each.__name__, each)
    registry._run_in_subprocess = lambda inspect: inspect()


async def load_adapter(state: Any, name: str, folder: str) -> None:
    """Serve the adapter in ``folder`` (PEFT's format) as the model ``name``, replacing an adapter with that name.

    ``state``: the server's application state. Raises vLLM's exception if it cannot load the adapter; the old one is
    then still served. vLLM's own route is not used, because it leaves ``load_inplace`` set in the request that it
    attaches to every later batch, which would read the files again for each batch.
    """
    from vllm.lora.request import LoRARequest

    models = state.openai_serving_models
    known = models.lora_requests.get(name)
    number = known.lora_int_id if known is not None else models.lora_id_counter.inc(1)
    await state.engine_client.add_lora(LoRARequest(name, number, folder, load_inplace=True))
    models.lora_requests[name] = LoRARequest(name, number, folder)


async def unload_adapter(state: Any, name: str) -> None:
    """Stop serving the adapter ``name``. Requests in flight end with it: its files must stay until then."""
    known = state.openai_serving_models.lora_requests.pop(name)
    await state.engine_client.remove_lora(known.lora_int_id)


def adapter_names(state: Any) -> set[str]:
    """Return the names of the adapters that are served."""
    return set(state.openai_serving_models.lora_requests)


def base_model_names(state: Any) -> set[str]:
    """Return the names of the base model."""
    return {path.name for path in state.openai_serving_models.base_model_paths}


def array_handler(serving: Any) -> Any:
    """Return a handler like ``serving``, vLLM's handler of token requests, that returns the engine's output itself."""
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens

    class ArrayTokens(ServingTokens):
        async def serve_tokens_full_generator(self, request: Any, result_generator: Any, *_: Any) -> Any:
            outputs = [output async for output in result_generator]
            return outputs[-1]

    handler = copy.copy(serving)
    handler.__class__ = ArrayTokens
    return handler


@contextlib.contextmanager
def counted_request(state: Any) -> Iterator[None]:
    """Count a request in ``GET /load``, as vLLM's routes do. ``state``: the server's application state."""
    state.server_load_metrics = getattr(state, "server_load_metrics", 0) + 1
    try:
        yield
    finally:
        state.server_load_metrics -= 1


async def sample_arrays(handler: Any, body: dict[str, Any], request: Any) -> SampledTokens | None:
    """Sample one completion with a handler of `array_handler`; None if the engine reports an error.

    ``body``: vLLM's ``GenerateRequest`` as JSON, with ``logprobs`` 0. Raises vLLM's exception for a request that it
    refuses.
    """
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.outputs import RequestOutput

    parsed = GenerateRequest.model_validate(body)
    parsed.sampling_params.flat_logprobs = True  # lists of numbers instead of one object per token
    found = await handler.serve_tokens(parsed, request)
    output = found.outputs[0] if isinstance(found, RequestOutput) else None
    if output is None or output.finish_reason == "error":
        return None
    header = {"request_id": found.request_id, "finish_reason": output.finish_reason or "stop"}
    if output.sampling_mask is not None:
        header["sampling_mask"] = output.sampling_mask.token_ids
    logprobs: Any = output.logprobs  # FlatLogprobs: one entry per token
    return SampledTokens(list(output.token_ids), list(logprobs.logprobs), header)


async def ask_workers(client: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """Call ``method`` on every worker of the engine. Returns the results in the order of data-parallel ranks.

    vLLM's ``collective_rpc`` returns the results of the first data-parallel rank only.
    """
    core = getattr(client, "engine_core", None)
    engines = getattr(core, "core_engines", ())
    if core is None or len(engines) < 2:
        return await client.collective_rpc(method, args=args)
    call = ("collective_rpc", method, None, args, None)
    ranks = await asyncio.gather(*(core._call_utility_async(*call, engine=engine) for engine in engines))
    return [result for rank in ranks for result in rank]


# -- inside a worker -------------------------------------------------------------------------------


def model_config(worker: Any) -> Any:
    """Return vLLM's ModelConfig: ``model``, ``hf_config``, …"""
    return worker.model_runner.model_config


def worker_index(worker: Any) -> int:
    """Return the index among all workers of the engine, ordered by data-parallel rank."""
    parallel = worker.parallel_config
    return int(parallel.data_parallel_index * parallel.world_size + worker.rank)


def device(worker: Any) -> Any:
    """Return the device of the model's parameters."""
    return next(worker.model_runner.get_model().parameters()).device


def patch_cpu_expert_parallelism() -> None:
    """Patch vLLM in this process to support expert parallelism on CPUs. Call before the model is created.

    vLLM's CPU kernel ignores which experts a rank holds and reads out of bounds, and its CPU communicator lacks the
    collectives with which data-parallel ranks exchange tokens.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.apply = _with_local_experts(CPUUnquantizedExperts.apply)
    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _with_local_experts(apply: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``apply`` to map global expert ids to local ones; experts of other ranks get weight 0."""

    def apply_local(  # vLLM passes keyword arguments with these names
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
            local_ids = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local_ids < 0, 0)
            topk_ids = local_ids.clamp_min(0).to(topk_ids.dtype)
        experts = (w1, w2, topk_weights, topk_ids, activation, global_num_experts, None)
        apply(self, output, hidden_states, *experts, *args, **more)

    return apply_local


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """All-gather parts of different length along dimension 0. ``input_``: one tensor [n, …] or a list of them."""
    import torch

    if isinstance(input_, list):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    lengths: list[int] = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros((max(lengths), *input_.shape[1:]))
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in lengths]
    torch.distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def _reduce_scatterv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Sum ``input_`` over ranks and return this rank's part, split along dimension 0 by ``sizes``."""
    import torch

    lengths: list[int] = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    start = sum(lengths[: self.rank_in_group])
    return total[start : start + lengths[self.rank_in_group]].contiguous()
