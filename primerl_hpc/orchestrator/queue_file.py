"""The finished rollouts that wait for a batch, as one file of a checkpoint.

    write_queue(path, cutter.queue)
    cutter.restore(read_queue(path))        # raises DataError when the file is not what it was

Token streams of all samples lie one after another in a safetensors file; what is no stream is JSON in its header. A
sample that a rollout and what is trained of it share is written once. Messages stay out: they are in the traces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import fsync_dir
from primerl_hpc.orchestrator.packing import TrainSample
from primerl_hpc.orchestrator.sampler import TaskRef
from primerl_hpc.orchestrator.scoring import ScoredGroup
from primerl_hpc.orchestrator.trajectories import AgentTrace, Rollout, Sample
from primerl_hpc.transport.rollouts import Picture, PlacedPicture
from primerl_hpc.transport.tensor_file import write_parts

# [N] of each sample; those after the third may be None in some
SAMPLE_STREAMS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "ref_logprobs": np.float32,
    "roles": np.uint8,
}
ROUTED = "routed_experts"  # of samples; in parts, [n, layers, k], uint8 or uint16
TRAIN_STREAMS = {"ce_weights": np.float32, "ref_logprobs": np.float32}  # may be None


def write_queue(path: Path, groups: Sequence[ScoredGroup]) -> None:
    """``path`` is the old file or the whole new one."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trained = [each for group in groups for samples in group.samples for each in samples]
    samples = list(
        {
            id(each): each
            for each in [
                *(sample for rollout in rollouts for sample in rollout.samples),
                *(each.sample for each in trained),
            ]
        }.values()
    )
    places = {id(sample): place for place, sample in enumerate(samples)}
    tensors = {
        "sample_tokens": [np.asarray([sample.num_tokens for sample in samples], np.int64)],
        "trained_tokens": [np.asarray([each.sample.num_tokens for each in trained], np.int64)],
        **_parts("sample", samples, SAMPLE_STREAMS),
        **_parts("trained", trained, TRAIN_STREAMS),
    }
    routed = [sample.routed_experts for sample in samples]
    if any(routed):
        tensors[f"sample.{ROUTED}.has"] = [np.asarray([parts is not None for parts in routed], np.bool_)]
        tensors[f"sample.{ROUTED}"] = [part for parts in routed for part in parts or ()]
    pictures = {each.picture.key: each.picture for sample in samples for each in sample.images}
    tensors |= {f"picture.{key}": [picture.pixels] for key, picture in pictures.items()}
    header = {
        "groups": [_group_row(group, places) for group in groups],
        "samples": [
            [
                sample.temperature,
                sample.trace,
                [(each.picture.key, each.start, each.length) for each in sample.images],
            ]
            for sample in samples
        ],
        "pictures": {key: picture.grid for key, picture in pictures.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    write_parts(temporary, tensors, metadata={name: json.dumps(rows) for name, rows in header.items()})
    os.replace(temporary, path)
    fsync_dir(path.parent)


def read_queue(path: Path) -> list[ScoredGroup]:
    """Raises DataError naming the file when it is missing or damaged."""
    try:
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no Mapping)
        sample_streams = _cut("sample", tensors, SAMPLE_STREAMS)
        if f"sample.{ROUTED}" in tensors:
            for streams, cut in zip(sample_streams, _cut("sample", tensors, (ROUTED,)), strict=True):
                streams[ROUTED] = None if cut[ROUTED] is None else [cut[ROUTED]]
        pictures = {
            key: Picture(key, tensors[f"picture.{key}"], tuple(grid))
            for key, grid in json.loads(header["pictures"]).items()
        }
        samples = [
            Sample(
                **streams,
                temperature=temperature,
                trace=trace,
                images=tuple(PlacedPicture(pictures[key], start, length) for key, start, length in images),
            )
            for streams, (temperature, trace, images) in zip(
                sample_streams, json.loads(header["samples"]), strict=True
            )
        ]
        trained = iter(_cut("trained", tensors, TRAIN_STREAMS))
        return [_group_of(row, samples, trained) for row in json.loads(header["groups"])]
    except FileNotFoundError:
        raise DataError("the checkpoint's queue of finished rollouts is missing", place=str(path)) from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"not a whole queue of finished rollouts ({error})", place=str(path)) from error


def _parts(
    prefix: str, items: Sequence[Sample | TrainSample], streams: dict[str, type]
) -> dict[str, list[NDArray]]:
    """Every stream of all items, one after another, and which of them have it."""
    tensors: dict[str, list[NDArray]] = {}
    for name, dtype in streams.items():
        values = [getattr(each, name) for each in items]
        tensors[f"{prefix}.{name}.has"] = [np.asarray([value is not None for value in values], np.bool_)]
        there = [np.asarray(value, dtype) for value in values if value is not None]
        tensors[f"{prefix}.{name}"] = there or [np.empty(0, dtype)]
    return tensors


def _cut(prefix: str, tensors: dict[str, NDArray], streams: Iterable[str]) -> list[dict[str, Any]]:
    """What `_parts` put one after another: per item, its streams."""
    lengths = tensors[f"{prefix}_tokens"]
    items: list[dict[str, Any]] = [{} for _ in lengths]
    for name in streams:
        has = tensors[f"{prefix}.{name}.has"]
        ends = np.cumsum(np.where(has, lengths, 0))
        values = tensors[f"{prefix}.{name}"]
        if len(values) != (ends[-1] if len(ends) else 0):
            raise ValueError(f"{prefix}.{name} has {len(values)} tokens")
        for item, is_there, end, length in zip(items, has, ends, lengths, strict=True):
            item[name] = values[end - length : end] if is_there else None
    return items


def _group_row(group: ScoredGroup, places: dict[int, int]) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task": [group.task.env, group.task.index],
        "versions": group.versions,
        "trace_advantages": [each.tolist() for each in group.trace_advantages],
        "num_failed": group.num_failed,
        "is_frozen": group.is_frozen,
        "rollouts": [_rollout_row(rollout, places) for rollout in group.rollouts],
        "trained": [[_trained_row(each, places) for each in samples] for samples in group.samples],
    }


def _rollout_row(rollout: Rollout, places: dict[int, int]) -> dict[str, Any]:
    row = {name: value for name, value in vars(rollout).items() if name not in ("samples", "text", "traces")}
    return row | {
        "samples": [places[id(sample)] for sample in rollout.samples],
        "traces": [asdict(trace) for trace in rollout.traces],
    }


def _trained_row(each: TrainSample, places: dict[int, int]) -> list[Any]:
    return [places[id(each.sample)], each.advantage, each.env_id, each.rl_weight, each.ref_kl_weight]


def _group_of(row: dict[str, Any], samples: list[Sample], trained: Iterable[dict[str, Any]]) -> ScoredGroup:
    rollouts = [
        Rollout(
            **each
            | {
                "samples": [samples[place] for place in each["samples"]],
                "traces": [AgentTrace(**trace) for trace in each["traces"]],
            }
        )
        for each in row["rollouts"]
    ]
    streams = iter(trained)
    # earlier versions wrote a rollout's mean alone
    advantages = (
        row["trace_advantages"] if "trace_advantages" in row else [[each] for each in row["advantages"]]
    )
    return ScoredGroup(
        row["group_id"],
        TaskRef(*row["task"]),
        rollouts,
        row["versions"],
        trace_advantages=[np.asarray(each, np.float64) for each in advantages],
        samples=[
            [
                TrainSample(samples[place], advantage, env_id, rl_weight, ref_kl_weight, **next(streams))
                for place, advantage, env_id, rl_weight, ref_kl_weight in each
            ]
            for each in row["trained"]
        ],
        num_failed=row["num_failed"],
        is_frozen=row["is_frozen"],
    )
