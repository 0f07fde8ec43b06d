"""Throughput, model FLOP/s utilization (MFU), peak memory, traces of steps on request, and memory snapshots."""

from __future__ import annotations

import contextlib
import logging
import re
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.profiler
from transformers import PreTrainedConfig

from primerl_hpc.common.files import create_exclusive, is_there, read_json_or_none
from primerl_hpc.common.safety.decoding import is_count
from primerl_hpc.plan.predict.flops import FROZEN, TRAINED, AttentionFlops, Flops
from primerl_hpc.plan.predict.hardware import spec_of_device
from primerl_hpc.run.rundir import RunDir
from primerl_hpc.trainer.batch import predicted_tokens
from primerl_hpc.trainer.model.families import head_dims, head_weight, num_routed_experts
from primerl_hpc.trainer.model.policy import Policy
from primerl_hpc.transport.rollouts.micro_batch import MicroBatch

log = logging.getLogger("primerl_hpc.trainer")
MAX_SNAPSHOTS = 4
"""Ranks of an attempt that write a memory snapshot. Usually all ranks run out of memory in the same way."""


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bf16 peak of a GPU in FLOP/s; None for the CPU or an unknown device."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """Return the peak by device name, e.g. 989.4e12 for ``NVIDIA H100 80GB HBM3``; None if it is unknown.

    Source: the planner's data files of GPU types.
    """
    spec = spec_of_device(name)
    return None if spec is None else spec.peak_flops.get("bfloat16")


class FlopCounter:
    """Count FLOP of forward and backward of a loaded policy with `plan.predict.flops`: its matrices, which of them are
    trained, and attention within each sample. The head processes only the predicted tokens.
    """

    def __init__(self, policy: Policy) -> None:
        config = policy.hf.config.get_text_config()
        per_pair = TRAINED * config.num_attention_heads * sum(head_dims(config))
        blocks, head = matmul_flops(policy)
        self.flops = Flops(blocks, head, (AttentionFlops(per_pair, windows_of(config)),))
        self.naive_attention = 12 * config.num_hidden_layers * config.hidden_size

    def __call__(self, rows: list[MicroBatch]) -> float:
        tokens = sum(row.num_tokens for row in rows)
        predicted = sum(len(predicted_tokens(row)) for row in rows)
        lengths = [int(length) for row in rows for length in row.sample_lengths]
        return self.flops.count(lengths, predicted, tokens)

    def prime_rl(self, num_tokens: int, seq_len: int) -> float:
        """Return FLOP as prime-rl counts them, to compare measurements: 12·layers·hidden_size·seq_len for attention.

        There, each token is predicted and attends to ``seq_len`` tokens, later ones too, and hidden_size / heads stands
        for head_dim (half of the true value for Qwen3-0.6B).
        """
        return (self.flops.blocks + self.flops.head + self.naive_attention * seq_len) * num_tokens


def windows_of(config: PreTrainedConfig) -> Counter[int | None]:
    """Return the number of layers with each window (None: full attention).

    Without ``layer_types`` all layers have the model's window, if it has one.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return Counter(window if kind == "sliding_attention" else None for kind in kinds)


def matmul_flops(policy: Policy) -> tuple[float, float]:
    """Return FLOP of the blocks per token and of the head per predicted token."""
    config = policy.hf.config.get_text_config()
    experts = num_routed_experts(config)
    share = config.num_experts_per_tok / experts if experts else 1.0
    head = head_weight(policy.hf)
    total = 0.0
    for name, parameter in policy.hf.named_parameters():
        if parameter.ndim < 2 or "embed_tokens" in name or ".visual." in name or parameter is head:
            continue
        active = share if ".experts." in name else 1.0
        total += parameter.numel() * active * (TRAINED if parameter.requires_grad else FROZEN)
    return total, float(head.numel()) * (TRAINED if head.requires_grad else FROZEN)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that the clock measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak of reserved memory on the GPU; the process's peak resident memory on the CPU."""
    peak = peak_memory(device)
    return peak.get("reserved", peak["resident"])


def peak_memory(device: torch.device) -> dict[str, float]:
    """Return GiB: ``resident`` memory of this process; on a GPU also ``allocated`` and ``reserved`` by torch."""
    peak = {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        peak["allocated"] = torch.cuda.max_memory_allocated(device) / 2**30
        peak["reserved"] = torch.cuda.max_memory_reserved(device) / 2**30
    return peak


def _is_request(request: Any) -> bool:
    """True for a request as `observe.inside.profiles` writes it. Its id becomes the name of a folder."""
    return (
        isinstance(request, dict)
        and isinstance(request.get("id"), str)
        and re.fullmatch(r"[\w-]{1,64}", request["id"]) is not None
        and is_count(request.get("steps"))
        and isinstance(request.get("ranks"), list)
        and all(map(is_count, request["ranks"]))
    )


class StepProfiler:
    """Traces the steps of this rank that ``control/profile.json`` requests, with torch's profiler.

    Rank 0 looks for a request (`control.read_requests`), and all ranks receive it after the same step. A trace that
    cannot be written is reported, and training continues.
    """

    def __init__(self, run: RunDir, rank: int) -> None:
        self.run, self.rank = run, rank
        self._seen = ""  # id of the last request
        self._is_requested = False
        self._left = 0
        self._profile: torch.profiler.profile | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Trace the step in this context if it is requested; write the trace after the last requested one."""
        if self._is_requested:
            self._begin()
        yield
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self._end(self._profile)

    def find_request(self) -> dict[str, Any] | None:
        """Return the request in the run directory if it is new. ``ranks`` is empty if an earlier attempt began it: a
        trace that ended its trainer, e.g. for lack of memory, is not repeated."""
        request = read_json_or_none(self.run.profile_request)
        if request is None or not _is_request(request) or request["id"] == self._seen:
            return None
        name, ranks = request["id"], request["ranks"]
        is_old = any(is_there(self.run.profile_trace(name, rank).parent) for rank in ranks)
        return {"id": name, "steps": request["steps"], "ranks": [] if is_old else ranks}

    def accept(self, request: dict[str, Any] | None) -> None:
        """Trace the steps from now on that a result of `find_request` requests from this rank."""
        if request is None:
            return
        self._seen = request["id"]
        if self._profile is None and self.rank in request["ranks"]:
            self._is_requested, self._left = True, int(request["steps"])

    def _begin(self) -> None:
        self._is_requested = False
        folder = self.run.profile_trace(self._seen, self.rank).parent
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        profile = torch.profiler.profile(activities=kinds, profile_memory=True)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profile.start()
        except (OSError, RuntimeError) as error:
            log.warning("Rank %d cannot trace its steps: %s", self.rank, error)
        else:
            self._profile = profile

    def _end(self, profile: torch.profiler.profile) -> None:
        self._profile = None
        path = self.run.profile_trace(self._seen, self.rank)
        temporary = path.with_name(f"tmp-{path.name}")  # torch compresses files that end in .gz
        try:
            profile.stop()
            profile.export_chrome_trace(str(temporary))
            temporary.rename(path)
        except (OSError, RuntimeError) as error:
            log.warning("The trace of rank %d could not be written to %s: %s", self.rank, path, error)
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextmanager
def memory_snapshots(path: Path, history: int, *, recorder: Any = torch.cuda.memory) -> Iterator[None]:
    """Write ``path`` if the code in this context raises torch.OutOfMemoryError, which is raised again.

    The file contains all blocks of torch's allocator, the last ``history`` events and the Python stacks of both; open
    it at https://pytorch.org/memory_viz. Recording costs about 2 µs for each allocation or free (torch's documentation,
    "Understanding CUDA Memory Usage"); with ``history`` 0 nothing is recorded, and the file has blocks without stacks.
    """
    if history > 0:
        recorder._record_memory_history(enabled="all", stacks="python", max_entries=history)
    try:
        yield
    except torch.OutOfMemoryError:
        _write_snapshot(path, recorder)
        raise
    finally:
        if history > 0:
            recorder._record_memory_history(enabled=None)


def _write_snapshot(path: Path, recorder: Any) -> None:
    """Write the snapshot, unless `MAX_SNAPSHOTS` ranks of the attempt have written theirs."""
    temporary = path.with_name(f"tmp-{path.name}")
    try:
        slots = (path.with_name(f".slot-{number}") for number in range(MAX_SNAPSHOTS))
        if not any(create_exclusive(slot, path.name) for slot in slots):
            return
        recorder._dump_snapshot(str(temporary))
        temporary.rename(path)
    except (OSError, RuntimeError) as error:
        log.warning("The memory snapshot could not be written to %s: %s", path, error)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    else:
        log.error("Out of GPU memory; snapshot: %s (open it at https://pytorch.org/memory_viz)", path)
