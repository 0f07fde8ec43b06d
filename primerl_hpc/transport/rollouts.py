"""Packed rollouts as they cross from the orchestrator to the trainer's data-parallel ranks.

A **micro-batch** is one packed row of at most ``seq_len`` tokens: whole samples one after another. Streams say what to
train on and how: the trainer knows no algorithm. What is the same for all tokens of a sample is there once per sample, so
a token of RL costs nine bytes. Token t of a sample is *predicted* from tokens < t; every stream is aligned with the token
it belongs to (no shift here), and the first token of a sample is never trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 2

TOKEN_STREAMS: dict[str, type] = {
    "input_ids": np.int32,
    "loss_mask": np.bool_,
    "inference_logprobs": np.float32,
    "ce_weights": np.float32,
    "ref_logprobs": np.float32,
    "routed_experts": np.uint8,
}
SAMPLE_STREAMS: dict[str, type] = {
    "sample_lengths": np.int64,
    "temperatures": np.float32,
    "advantages": np.float32,
    "rl_weights": np.float32,
    "ref_kl_weights": np.float32,
    "env_ids": np.int32,
}
OPTIONAL_STREAMS = frozenset(("ce_weights", "ref_logprobs", "routed_experts"))
"""May be None: zero for every token."""
MAPPED_STREAMS = frozenset(("routed_experts",))
"""Of hundreds of bytes a token: not copied on their way, but read from the mapped file. uint16 where uint8 is too small."""


@dataclass(frozen=True)
class Picture:
    """An image as its model's processor made it. Samples that show the same image share it."""

    key: str  # SHA-256 of the image
    pixels: NDArray[np.float32]  # [patches, numbers of a patch]
    grid: tuple[int, int, int]  # patches in time, height, width


@dataclass(frozen=True)
class PlacedPicture:
    """A picture in a sample or row of tokens."""

    picture: Picture
    start: int
    length: int


@dataclass
class MicroBatch:
    """One packed row of N tokens, which are S samples."""

    # [N]
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]  # tokens the policy sampled and that are trained
    inference_logprobs: NDArray[np.float32]  # log μ, temperature-scaled; 0 where not sampled
    # [S]
    sample_lengths: NDArray[np.int64]  # tokens of each, sum = N
    temperatures: NDArray[np.float32]
    advantages: NDArray[np.float32]
    rl_weights: NDArray[np.float32]  # membership and weight in a loss of the masked tokens; 0 = not a member
    ref_kl_weights: NDArray[np.float32]
    env_ids: NDArray[np.int32]  # index into StepInfo.env_names
    # [N]
    ce_weights: NDArray[np.float32] | None = None  # membership and weight in cross-entropy, of any tokens
    ref_logprobs: NDArray[np.float32] | None = None  # log-probability under the reference of ref_kl
    # [N, layers, k], uint8 or uint16: experts the engine chose for each token; zeros alone: not known
    routed_experts: NDArray | None = None
    images: tuple[PlacedPicture, ...] = ()  # in the order of their tokens

    def __post_init__(self) -> None:
        for streams, count in (
            (TOKEN_STREAMS, len(self.input_ids)),
            (SAMPLE_STREAMS, len(self.sample_lengths)),
        ):
            for name in streams:
                values = getattr(self, name)
                if values is not None and len(values) != count:
                    raise ValueError(f"stream {name} has {len(values)} values, not {count}")
        if int(self.sample_lengths.sum()) != len(self.input_ids):
            raise ValueError(
                f"sample_lengths sum to {int(self.sample_lengths.sum())}, input_ids {len(self.input_ids)}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def position_ids(self) -> NDArray[np.int64]:
        """Of each token in its sample. [N]"""
        starts = np.cumsum(self.sample_lengths) - self.sample_lengths
        return np.arange(self.num_tokens) - np.repeat(starts, self.sample_lengths)

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """Which sample each token is of. [N]"""
        return np.repeat(np.arange(len(self.sample_lengths)), self.sample_lengths)

    def weights(self, component: str) -> NDArray[np.float32]:
        """Of each token in the loss ``rl``, ``ce`` or ``ref_kl``. [N]"""
        if component == "ce":
            return np.zeros(self.num_tokens, np.float32) if self.ce_weights is None else self.ce_weights
        of_samples = self.rl_weights if component == "rl" else self.ref_kl_weights
        return np.repeat(of_samples, self.sample_lengths) * self.loss_mask


def empty_row() -> MicroBatch:
    """One token that nobody trains: a rank without work still takes part in the collectives."""
    zero = np.zeros(1, np.float32)
    return MicroBatch(
        input_ids=np.zeros(1, np.int32),
        loss_mask=np.zeros(1, np.bool_),
        inference_logprobs=zero,
        sample_lengths=np.ones(1, np.int64),
        temperatures=np.ones(1, np.float32),
        advantages=zero,
        rl_weights=zero,
        ref_kl_weights=zero,
        env_ids=np.zeros(1, np.int32),
    )


@dataclass
class StepInfo:
    """What a batch is, the same for every rank."""

    step: int
    env_names: list[str] = field(default_factory=list)
    policy_version_min: int = 0  # oldest version any trained token was sampled from
    policy_version_max: int = 0
    num_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutSender(Protocol):
    def send(self, info: StepInfo, ranks: list[list[MicroBatch]]) -> None:
        """Ship batch ``info.step``: ``ranks[r]`` goes to data-parallel rank r, the same number of rows for each.

        Sending a step that was sent before replaces it only if it was never complete.
        """


class RolloutReceiver(Protocol):
    def receive(
        self, step: int, rank: int, *, timeout_s: float | None
    ) -> tuple[StepInfo, list[MicroBatch]] | None:
        """This rank's rows of batch ``step``; None after ``timeout_s`` without a complete batch."""

    def forget(self, step: int) -> None:
        """Batches up to ``step`` will not be asked for again."""
