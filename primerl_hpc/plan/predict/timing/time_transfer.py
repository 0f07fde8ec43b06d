"""Durations of what leaves the trainer: weight updates by transport, and checkpoints.

    rates = StorageRates(write_total=20e9)          # what is known about the shared filesystem; the rest is estimated
    filesystem_update(weights_bytes, writers=8, reader_nodes=4, rates=rates)
    broadcast_update(weights_bytes, gpu)
    delta_update(weights_bytes, 0.02, writers=8, rates=rates)
    checkpoint(shape, setup, rates)

Rates of filesystems and broadcasts differ by factors between sites: the intervals are wide until a run or
``primerl-hpc calibrate`` has measured them.
"""

from __future__ import annotations

from dataclasses import dataclass

from primerl_hpc.plan.predict.figure import Figure, Tier, add, divide, estimate, exact, multiply
from primerl_hpc.plan.predict.hardware import GpuSpec
from primerl_hpc.plan.predict.layouts import DTYPE_BYTES, TrainerSetup
from primerl_hpc.plan.predict.shape import ModelShape
from primerl_hpc.plan.predict.timing.time_trainer import PCIE_SHARE, STATES_PER_WEIGHT

WRITE_SOURCE = (
    "prime-rl benchmarks of 2026-01: one rank wrote 2·N bytes at 1.36–1.77 GB/s in 11 rows of 3 GPU types"
)
BROADCAST_SHARE, BROADCAST_FACTOR = 0.075, 3.0
BROADCAST_SOURCE = (
    "verl checkpoint_engine and delta_weight_sync pages of 2026: 8 NCCL updates of 0.6B–235B at 0.02–0.28 of a GPU's "
    "network rate, median 0.07, six of them within a factor of 3"
)
DELTA_SOURCE = (
    "verl delta_weight_sync page of 2026-08: 5.5–11.6 GB of weights a second for 8B–72B, 0.6 s for 0.6B"
)
KV_RATE = 4.3e9
KV_SOURCE = (
    "vllm-project/vllm issue 50913 of 2026-08: NixlConnector pulled 167 MB in 38.7 ms, mean of 2,018 transfers; the "
    "number of blocks matters as much as the bytes, so the interval is a factor of 3"
)


@dataclass(frozen=True)
class StorageRates:
    """Bytes per second of the shared filesystem. None: not known, estimated with a wide interval."""

    write_per_rank: float | None = None
    write_total: float | None = None
    read_per_node: float | None = None


def weight_bytes_of(shape: ModelShape, setup: TrainerSetup, dtype: str = "bfloat16") -> Figure:
    """Return the size of a policy version: the model, or with adapters only these."""
    if setup.lora_rank:
        number = shape.adapter_parameters(setup.lora_rank, setup.lora_targets)
    else:
        number = shape.total
    inputs = {"parameters": number, "bytes": DTYPE_BYTES[dtype]}
    return exact("transfer.weights.size", number * DTYPE_BYTES[dtype], "B", "parameters × bytes", inputs)


def filesystem_update(
    size: Figure, writers: int, reader_nodes: int, gpu: GpuSpec, rates: StorageRates
) -> Figure:
    """Return the time of a version in files: ranks write, each engine's node reads once, engines load."""
    name = "time.weights.filesystem"
    loaded = estimate(
        f"{name}.load",
        size.value / (gpu.pcie_bytes_per_s * PCIE_SHARE),
        1.5,
        "s",
        "size / PCIe",
        {"size": size},
        source=gpu.name,
    )
    read = divide(f"{name}.read", "s", size, _read_rate(rates, reader_nodes))
    return add(name, "s", [write(size, writers, rates, f"{name}.write"), read, loaded])


def broadcast_update(size: Figure, gpu: GpuSpec, rate: float | None = None) -> Figure:
    """Return the time of a broadcast from rank 0 to all engines. ``rate``: measured bytes per second, if known.

    Without one, the rate is the share of the network that published updates reached in the median. They differ by a
    factor of 15, with software more than with size, so the interval is wide.
    """
    name = "time.weights.broadcast"
    if rate is not None:
        speed = exact("transfer.broadcast.rate", rate, "B/s", "measured", tier=Tier.CALIBRATED)
    else:
        speed = estimate(
            "transfer.broadcast.rate",
            BROADCAST_SHARE * gpu.network_bytes_per_s,
            BROADCAST_FACTOR,
            "B/s",
            "0.075 × network",
            {"network": gpu.network_bytes_per_s},
            source=BROADCAST_SOURCE,
        )
    return divide(name, "s", size, speed)


def kv_transfer(size: float, gpu: GpuSpec, name: str = "time.kv_transfer") -> Figure:
    """Return the time in which a GPU pulls ``size`` bytes of KV blocks from a prefill engine through NIXL."""
    rate = min(KV_RATE, gpu.network_bytes_per_s)
    text = "min(4.3 GB/s, network)"
    speed = estimate("transfer.kv.rate", rate, 3.0, "B/s", text, source=KV_SOURCE)
    moved = exact("transfer.kv.size", size, "B", "KV cache of a prompt on a GPU of the decoding engine")
    return divide(name, "s", moved, speed)


def delta_update(size: Figure, changed: float, writers: int, rates: StorageRates) -> Figure:
    """Return the time of a difference. ``size``: of the complete version; ``changed``: share of its bytes that is
    written (0.01–0.03 at usual learning rates; verl measured 0.0002–0.0005 for early steps of 235B).

    All bytes are compared, wherever they changed.
    """
    name = "time.weights.delta"
    compared = estimate(
        f"{name}.compare",
        0.5 + size.value / 1e10,
        1.6,
        "s",
        "0.5 s + size / (10 GB/s)",
        {"size": size},
        source=DELTA_SOURCE,
    )
    share = estimate("transfer.delta.share", changed, 2.0, "1", "changed bytes / bytes", source=DELTA_SOURCE)
    written = multiply("transfer.delta.size", "B", [size, share])
    return add(name, "s", [compared, write(written, writers, rates, f"{name}.write")])


def checkpoint_bytes(shape: ModelShape, setup: TrainerSetup) -> Figure:
    """Return the size of a checkpoint: float32 weights and optimizer states, with adapters only of these."""
    number = shape.adapter_parameters(setup.lora_rank, setup.lora_targets) if setup.lora_rank else shape.total
    per_weight = 4 * (1 + STATES_PER_WEIGHT[setup.optimizer])
    inputs = {"parameters": number, "bytes per parameter": per_weight}
    return exact("checkpoint.size", number * per_weight, "B", "parameters × 4 × (1 + states)", inputs)


def checkpoint(shape: ModelShape, setup: TrainerSetup, rates: StorageRates) -> Figure:
    """Return the time of writing a checkpoint by all ranks."""
    return write(checkpoint_bytes(shape, setup), setup.ranks, rates, "time.checkpoint")


def write(size: Figure, writers: int, rates: StorageRates, name: str) -> Figure:
    """Return the time in which ``writers`` ranks write ``size`` bytes together."""
    return divide(name, "s", size, _write_rate(rates, writers))


def _write_rate(rates: StorageRates, writers: int) -> Figure:
    if rates.write_per_rank is not None:
        one = exact("transfer.write_per_rank", rates.write_per_rank, "B/s", "given", tier=Tier.CALIBRATED)
    else:
        one = estimate(
            "transfer.write_per_rank",
            1.55e9,
            1.15,
            "B/s",
            "published median",
            source=WRITE_SOURCE,
            tier=Tier.TABLE,
        )
    ranks = writers
    value = one.value * ranks
    # what many ranks reach together is a property of the filesystem: unknown, it can be one rank's rate
    low, high = one.low, one.high * ranks
    tier = Tier.FORMULA if rates.write_total is None else Tier.CALIBRATED
    if rates.write_total is not None:
        low = value = high = min(value, rates.write_total)
    elif ranks > 1:
        value = one.value * ranks**0.5
    inputs = {one.name: one, "ranks": ranks, "write_total": rates.write_total or "not known"}
    text = "min(ranks × write_per_rank, write_total); √ranks × write_per_rank if the total is not known"
    return Figure("transfer.write_rate", value, low, high, "B/s", text, inputs, WRITE_SOURCE, tier)


def _read_rate(rates: StorageRates, nodes: int) -> Figure:
    """Return the rate at which each of ``nodes`` nodes reads the same files."""
    if rates.read_per_node is not None:
        return exact("transfer.read_rate", rates.read_per_node, "B/s", "given", tier=Tier.CALIBRATED)
    text = "4 GB/s a node, judgment: one client of a parallel filesystem"
    return estimate("transfer.read_rate", 4e9, 2.5, "B/s", text, {"nodes": nodes})
