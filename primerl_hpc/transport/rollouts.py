"""Packed rollouts as they cross from the orchestrator to the trainer's data-parallel ranks.

A **micro-batch** is one packed row of at most ``seq_len`` tokens: whole samples one after another, positions
restarting at 0 in each. Per-token streams say what to train on and how: the trainer knows no algorithm. Token t of a
sample is *predicted* from tokens < t; every stream is aligned with the token it belongs to (no shift here), and the
first token of a sample is never trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1


@dataclass
class MicroBatch:
    """One packed row of N tokens holding S samples. All streams have shape [N] but ``sample_lengths`` [S]."""

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]  # tokens the policy sampled and that are trained
    advantages: NDArray[np.float32]
    inference_logprobs: NDArray[
        np.float32
    ]  # log μ of the sampled token, temperature-scaled; 0 where not sampled
    temperatures: NDArray[np.float32]
    rl_weights: NDArray[np.float32]  # membership and weight in each loss component; 0 = not a member
    ce_weights: NDArray[np.float32]
    ref_kl_weights: NDArray[np.float32]
    ref_logprobs: NDArray[np.float32]  # log-probability under the reference of ref_kl; 0 where unused
    env_ids: NDArray[np.int32]  # index into StepInfo.env_names
    sample_lengths: NDArray[np.int64]  # tokens of each sample, sum = N

    def __post_init__(self) -> None:
        n = len(self.input_ids)
        for each in fields(self):
            if each.name != "sample_lengths" and len(getattr(self, each.name)) != n:
                raise ValueError(
                    f"stream {each.name} has {len(getattr(self, each.name))} tokens, input_ids {n}"
                )
        if int(self.sample_lengths.sum()) != n:
            raise ValueError(f"sample_lengths sum to {int(self.sample_lengths.sum())}, input_ids {n}")

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


def empty_row() -> MicroBatch:
    """One token that nobody trains: a rank without work still takes part in the collectives."""
    zero = np.zeros(1, np.float32)
    return MicroBatch(
        input_ids=np.zeros(1, np.int64),
        position_ids=np.zeros(1, np.int64),
        loss_mask=np.zeros(1, np.bool_),
        advantages=zero,
        inference_logprobs=zero,
        temperatures=np.ones(1, np.float32),
        rl_weights=zero,
        ce_weights=zero,
        ref_kl_weights=zero,
        ref_logprobs=zero,
        env_ids=np.zeros(1, np.int32),
        sample_lengths=np.ones(1, np.int64),
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
