"""Packed rollouts sent from the orchestrator to the trainer's data-parallel ranks, and the interface of a transport.

A **micro-batch** is one packed row of at most ``seq_len`` tokens that holds complete samples one after another. Its
streams define what is trained and how: the trainer does not know the RL algorithm. Values that all tokens of a sample
share are stored once per sample, so a token of RL takes nine bytes. Token t of a sample is *predicted* from tokens < t.
Every stream is aligned with the token it belongs to (no shift here), and the first token of a sample is never trained.

How to add a transport: implement `RolloutSender` and `RolloutReceiver` in a module of this folder, and construct them
where `filesystem.FilesystemSender` (`primerl_hpc.orchestrator.train_loop`) and `filesystem.FilesystemReceiver`
(`primerl_hpc.trainer.rl_loop`) are constructed; all other code takes the protocols. A batch stays available until
`RolloutReceiver.forget`, because the trainer may restart after it was sent.
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
"""Streams that may be None, which means zero for every token."""
MAPPED_STREAMS = frozenset(("routed_experts",))
"""Streams of hundreds of bytes per token. They are memory-mapped instead of copied; uint16 if uint8 is too small."""


@dataclass(frozen=True)
class Picture:
    """An image preprocessed for the model. Samples that contain the same image share it."""

    key: str  # SHA-256 of the image
    pixels: NDArray[np.float32]  # [patches, values per patch]
    grid: tuple[int, int, int]  # number of patches in time, height, width


@dataclass(frozen=True)
class PlacedPicture:
    """The position of a picture in the tokens of a sample or row."""

    picture: Picture
    start: int
    length: int


@dataclass
class MicroBatch:
    """One packed row of N tokens from S samples. Raises ValueError if streams differ in length."""

    # [N]
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]  # True for trained tokens, all of which the policy sampled
    inference_logprobs: NDArray[np.float32]  # log μ, temperature-scaled; 0 where not sampled
    # [S]
    sample_lengths: NDArray[np.int64]  # tokens per sample, sum = N
    temperatures: NDArray[np.float32]
    advantages: NDArray[np.float32]
    rl_weights: NDArray[np.float32]  # weight of the sample's loss_mask tokens in the RL loss; 0: not included
    ref_kl_weights: NDArray[np.float32]
    env_ids: NDArray[np.int32]  # index into StepInfo.env_names
    # [N]
    ce_weights: NDArray[np.float32] | None = (
        None  # weight in the cross-entropy loss, of any token; 0: not included
    )
    ref_logprobs: NDArray[np.float32] | None = None  # log-probability under the reference model of ref_kl
    # [N, layers, k], uint8 or uint16: experts that the engine selected for each token; all zeros: unknown
    routed_experts: NDArray | None = None
    images: tuple[PlacedPicture, ...] = ()  # in token order

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
        """Position of each token in its sample. [N]"""
        starts = np.cumsum(self.sample_lengths) - self.sample_lengths
        return np.arange(self.num_tokens) - np.repeat(starts, self.sample_lengths)

    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """Index of the sample that each token belongs to. [N]"""
        return np.repeat(np.arange(len(self.sample_lengths)), self.sample_lengths)

    def weights(self, component: str) -> NDArray[np.float32]:
        """Weight of each token in the loss ``rl``, ``ce`` or ``ref_kl``. [N]"""
        if component == "ce":
            return np.zeros(self.num_tokens, np.float32) if self.ce_weights is None else self.ce_weights
        sample_weights = self.rl_weights if component == "rl" else self.ref_kl_weights
        return np.repeat(sample_weights, self.sample_lengths) * self.loss_mask


def empty_row() -> MicroBatch:
    """Return a row with one untrained token, so that a rank without samples takes part in the collectives."""
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
    """Description of a batch, the same for every rank."""

    step: int
    env_names: list[str] = field(default_factory=list)
    policy_version_min: int = 0  # oldest version any trained token was sampled from
    policy_version_max: int = 0
    num_samples: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class RolloutSender(Protocol):
    def send(self, info: StepInfo, ranks: list[list[MicroBatch]]) -> None:
        """Send batch ``info.step``. ``ranks[r]``: the rows of data-parallel rank r; all ranks have the same number.

        A step that was sent completely before is not replaced.
        """


class RolloutReceiver(Protocol):
    def is_ready(self, step: int) -> bool:
        """True if batch ``step`` is complete."""
        ...

    def receive(
        self, step: int, rank: int, *, timeout_s: float | None
    ) -> tuple[StepInfo, list[MicroBatch]] | None:
        """Return this rank's rows of batch ``step``; None if the batch is not complete after ``timeout_s`` seconds."""

    def forget(self, step: int) -> None:
        """Discard the batches up to and including ``step``."""
