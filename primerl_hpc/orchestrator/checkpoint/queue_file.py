"""The finished rollouts that wait for a batch, as one file of a checkpoint.

    write_queue(path, builder.queue)
    builder.restore(state, read_queue(path))        # raises DataError if the file is missing or damaged

The token streams of all samples are concatenated in a safetensors file; everything else is JSON in its header. A sample
shared by a rollout and its training samples is written once. Messages are not saved here; they are in the traces.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from primerl_hpc.common.errors import DataError
from primerl_hpc.common.files import fsync_dir
from primerl_hpc.common.safety.decoding import decoding, is_count, is_number, parse_json
from primerl_hpc.orchestrator.rollout_data import (
    AgentTrace,
    Rollout,
    Sample,
    ScoredGroup,
    TaskRef,
    TrainSample,
)
from primerl_hpc.transport.rollouts.micro_batch import Picture, PlacedPicture
from primerl_hpc.transport.tensor_file import write_parts

# [N] per sample; all after the third may be None
SAMPLE_STREAMS = {
    "token_ids": np.int32,
    "loss_mask": np.bool_,
    "logprobs": np.float32,
    "ref_logprobs": np.float32,
    "roles": np.uint8,
}
ROUTED = "routed_experts"  # of samples; in parts [n, layers, k], uint8 or uint16
TRAIN_STREAMS = {"ce_weights": np.float32, "ref_logprobs": np.float32}  # may be None


def write_queue(path: Path, groups: Sequence[ScoredGroup]) -> None:
    """Replace ``path`` atomically."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    trained = [sample for group in groups for samples in group.samples for sample in samples]
    samples = list(
        {
            id(sample): sample
            for sample in [
                *(sample for rollout in rollouts for sample in rollout.samples),
                *(train_sample.sample for train_sample in trained),
            ]
        }.values()
    )
    index_of = {id(sample): index for index, sample in enumerate(samples)}
    tensors = {
        "sample_tokens": [np.asarray([sample.num_tokens for sample in samples], np.int64)],
        "trained_tokens": [np.asarray([sample.sample.num_tokens for sample in trained], np.int64)],
        **_parts("sample", samples, SAMPLE_STREAMS),
        **_parts("trained", trained, TRAIN_STREAMS),
    }
    routed = [sample.routed_experts for sample in samples]
    if any(routed):
        tensors[f"sample.{ROUTED}.has"] = [np.asarray([parts is not None for parts in routed], np.bool_)]
        tensors[f"sample.{ROUTED}"] = [part for parts in routed for part in parts or ()]
    pictures = {image.picture.key: image.picture for sample in samples for image in sample.images}
    tensors |= {f"picture.{key}": [picture.pixels] for key, picture in pictures.items()}
    header = {
        "groups": [_group_row(group, index_of) for group in groups],
        "samples": [
            [
                sample.temperature,
                sample.trace,
                [(image.picture.key, image.start, image.length) for image in sample.images],
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
    """Return the groups. Raises DataError naming the file if it is missing or damaged."""
    try:
        return _read(path)
    except FileNotFoundError:
        raise DataError(
            "the checkpoint's queue of finished rollouts is missing", location=str(path)
        ) from None


def _read(path: Path) -> list[ScoredGroup]:
    with decoding("not a complete queue of finished rollouts", location=path, more=(SafetensorError,)):
        with safe_open(path, framework="np") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no Mapping)
        sample_streams = _split("sample", tensors, SAMPLE_STREAMS)
        if f"sample.{ROUTED}" in tensors:
            for streams, routed in zip(
                sample_streams, _split("sample", tensors, {ROUTED: np.uint8}), strict=True
            ):
                streams[ROUTED] = None if routed[ROUTED] is None else [routed[ROUTED]]
        pictures = {
            key: Picture(key, tensors[f"picture.{key}"], tuple(grid))
            for key, grid in parse_json(header["pictures"]).items()
        }
        samples = [
            Sample(
                **streams,
                temperature=temperature,
                trace=trace,
                images=tuple(PlacedPicture(pictures[key], start, length) for key, start, length in images),
            )
            for streams, (temperature, trace, images) in zip(
                sample_streams, parse_json(header["samples"]), strict=True
            )
        ]
        trained = iter(_split("trained", tensors, TRAIN_STREAMS))
        return [_group_of(row, samples, trained) for row in parse_json(header["groups"])]


def _parts(
    prefix: str, items: Sequence[Sample | TrainSample], streams: dict[str, type]
) -> dict[str, list[NDArray]]:
    """Concatenate each stream over all items, and record which items have it."""
    tensors: dict[str, list[NDArray]] = {}
    for name, dtype in streams.items():
        values = [getattr(item, name) for item in items]
        tensors[f"{prefix}.{name}.has"] = [np.asarray([value is not None for value in values], np.bool_)]
        known = [np.asarray(value, dtype) for value in values if value is not None]
        tensors[f"{prefix}.{name}"] = known or [np.empty(0, dtype)]
    return tensors


def _split(prefix: str, tensors: dict[str, NDArray], streams: Mapping[str, type]) -> list[dict[str, Any]]:
    """Invert `_parts`: return the streams of each item.

    Raises ValueError for streams of unexpected type or length.
    """
    lengths = tensors[f"{prefix}_tokens"]
    if lengths.dtype != np.int64 or lengths.ndim != 1 or lengths.min(initial=0) < 0:
        raise ValueError(f"{prefix}_tokens is not a list of counts")
    items: list[dict[str, Any]] = [{} for _ in lengths]
    for name, dtype in streams.items():
        has, values = tensors[f"{prefix}.{name}.has"], tensors[f"{prefix}.{name}"]
        if (
            has.dtype != np.bool_
            or has.shape != lengths.shape
            or lengths.max(initial=0, where=has) > len(values)
        ):
            raise ValueError(f"{prefix}.{name}.has does not match {prefix}_tokens and {prefix}.{name}")
        is_typed = values.dtype == dtype or (name == ROUTED and values.dtype == np.uint16)
        if not is_typed or values.ndim != (3 if name == ROUTED else 1):
            raise ValueError(f"{prefix}.{name} has dtype {values.dtype} and shape {list(values.shape)}")
        ends = np.cumsum(np.where(has, lengths, 0))
        if len(values) != (ends[-1] if len(ends) else 0):
            raise ValueError(
                f"{prefix}.{name} has {len(values)} tokens, which does not match {prefix}_tokens"
            )
        for item, has_stream, end, length in zip(items, has, ends, lengths, strict=True):
            item[name] = values[end - length : end] if has_stream else None
    return items


def _group_row(group: ScoredGroup, index_of: dict[int, int]) -> dict[str, Any]:
    return {
        "group_id": group.group_id,
        "task": [group.task.env, group.task.index],
        "versions": group.versions,
        "trace_advantages": [advantages.tolist() for advantages in group.trace_advantages],
        "num_failed": group.num_failed,
        "is_frozen": group.is_frozen,
        "rollouts": [_rollout_row(rollout, index_of) for rollout in group.rollouts],
        "trained": [[_trained_row(sample, index_of) for sample in samples] for samples in group.samples],
    }


def _rollout_row(rollout: Rollout, index_of: dict[int, int]) -> dict[str, Any]:
    row = {name: value for name, value in vars(rollout).items() if name not in ("samples", "text", "traces")}
    return row | {
        "samples": [index_of[id(sample)] for sample in rollout.samples],
        "traces": [asdict(trace) for trace in rollout.traces],
    }


def _trained_row(sample: TrainSample, index_of: dict[int, int]) -> list[Any]:
    return [
        index_of[id(sample.sample)],
        sample.advantage,
        sample.env_id,
        sample.rl_weight,
        sample.ref_kl_weight,
    ]


def _index(value: Any) -> int:
    """Return a list index. Raises ValueError for anything that is not a non-negative integer."""
    if not is_count(value):
        raise ValueError(f"{value!r:.80} is not an index")
    return value


def _check_numbers(values: list[Any]) -> None:
    if not all(map(is_number, values)):
        raise ValueError(f"{values!r:.80} are not all numbers")


def _group_of(row: dict[str, Any], samples: list[Sample], trained: Iterable[dict[str, Any]]) -> ScoredGroup:
    """Decode a group. Raises LookupError, TypeError, ValueError or StopIteration if the row is malformed."""
    rollouts = [
        Rollout(
            **row_of_rollout
            | {
                "samples": [samples[_index(index)] for index in row_of_rollout["samples"]],
                "traces": [AgentTrace(**trace) for trace in row_of_rollout["traces"]],
            }
        )
        for row_of_rollout in row["rollouts"]
    ]
    for rollout in rollouts:
        _check_numbers([rollout.reward, rollout.output_tokens, rollout.input_tokens, rollout.num_turns])
        _check_numbers([rollout.last_version, rollout.seconds, *(trace.reward for trace in rollout.traces)])
        _check_numbers([*rollout.rewards.values(), *rollout.metrics.values()])
    for trained_rows in row["trained"]:
        for _, *numbers in trained_rows:
            _check_numbers(numbers)
    streams = iter(trained)
    # earlier versions wrote only the mean over each rollout's traces
    advantages = (
        row["trace_advantages"] if "trace_advantages" in row else [[mean] for mean in row["advantages"]]
    )
    return ScoredGroup(
        row["group_id"],
        TaskRef(*row["task"]),
        rollouts,
        row["versions"],
        trace_advantages=[np.asarray(values, np.float64) for values in advantages],
        samples=[
            [
                TrainSample(
                    samples[_index(index)], advantage, env_id, rl_weight, ref_kl_weight, **next(streams)
                )
                for index, advantage, env_id, rl_weight, ref_kl_weight in trained_rows
            ]
            for trained_rows in row["trained"]
        ],
        num_failed=row["num_failed"],
        is_frozen=row["is_frozen"],
    )
