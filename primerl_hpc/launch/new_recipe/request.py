"""The answers that `primerl-hpc new` collects."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from primerl_hpc.cluster.load import LoadedProfile
from primerl_hpc.common.names import Kind

DraftKind = Literal["rl", "sft", "distillation", "evaluation"]
KINDS: tuple[DraftKind, ...] = ("rl", "sft", "distillation", "evaluation")
RUN_KINDS = {"rl": Kind.RL, "sft": Kind.SFT, "distillation": Kind.RL, "evaluation": Kind.EVAL}
"""Kind of the recipe for each kind of draft: distillation is a run of kind rl whose algorithm has a teacher."""
NEEDS: dict[DraftKind, tuple[str, ...]] = {
    "rl": ("model", "env", "profile"),
    "sft": ("model", "data", "profile"),
    "distillation": ("model", "env", "teacher", "profile"),
    "evaluation": ("model", "env", "profile"),
}
"""Options without a default, by kind, in the order in which they are asked for."""
METHODS = ("opd", "sft_distill")
MAX_SEQ_LEN = 4096
"""Default of ``seq_len`` for models that allow as much."""
DEFAULT_BATCHES = {Kind.RL: 256, Kind.SFT: 16}
SPLIT_ENVIRONMENTS = ("alphabet-sort", "color-squares", "local-search", "math-problems", "reverse-text")
"""Shipped environments whose argument ``split`` has the values train and test."""


@dataclass(frozen=True)
class RecipeRequest:
    kind: DraftKind
    model: str
    """Hub id or folder."""
    profile: LoadedProfile
    environment: str | None = None
    data: str | None = None
    """SFT rows: a file, a folder or a hub id."""
    teacher: str | None = None
    method: str = "opd"
    """Algorithm of a distillation."""
    gpus: int | None = None
    """None: all GPUs of the profile."""
    name: str | None = None
    seq_len: int | None = None
    max_steps: int = 200
    batch_size: int | None = None
    """Rollouts, or packed rows, of a step; None: `DEFAULT_BATCHES`."""
    group_size: int = 16
    lora_rank: int | None = None
    environment_args: dict[str, Any] = field(default_factory=dict)

    @property
    def run_kind(self) -> Kind:
        return RUN_KINDS[self.kind]

    @property
    def step_size(self) -> int:
        """``batch_size``, or its default."""
        return self.batch_size or DEFAULT_BATCHES.get(self.run_kind, 1)

    @property
    def has_test_split(self) -> bool:
        """True if the environment has tasks for training and others for evaluation, by its argument ``split``."""
        module = (self.environment or "").rsplit("/", 1)[-1].split("@", 1)[0]
        return module in SPLIT_ENVIRONMENTS and "split" not in self.environment_args

    @property
    def profile_name(self) -> str:
        return self.profile.profile.name

    @property
    def recipe_name(self) -> str:
        """``name``, or one made of the task and the model, such as ``math-problems-qwen3-4b``."""
        if self.name is not None:
            return self.name
        subject = self.environment if self.run_kind != Kind.SFT else "sft"
        words = [subject or "", self.model.rstrip("/").rsplit("/", 1)[-1]]
        text = re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower()).strip("-.")
        return text[:100] or "new"
