"""Dynamic loss scaling: keeps the gradients of float16 training inside the range of float16.

    scale = LossScale(config)               # trainer.param_dtype: float16
    (loss * scale.value).backward()
    scale.update(is_overflow=...)           # once per step, with the same argument on all ranks

The rules are those of torch.amp.GradScaler: an overflow halves the scale and skips the update, `loss_scale_growth`
consecutive steps without one double it. GradScaler itself is not used: it looks for overflows on each rank and mesh
separately, while the trainer's gradient norm is already the same number on all ranks and meshes.
"""

from __future__ import annotations

from typing import Any

from primerl_hpc.recipe.schema.training import TrainerConfig

MIN_SCALE = 1.0
"""A smaller scale would shrink gradients instead of enlarging them, so the overflow has another cause."""


class LossScale:
    """The factor of the loss, a power of two times ``trainer.loss_scale``, and the steps since it last changed."""

    def __init__(self, config: TrainerConfig) -> None:
        self.value, self.growth_interval = config.loss_scale, config.loss_scale_growth
        self.good_steps = 0

    @property
    def can_shrink(self) -> bool:
        return self.value / 2 >= MIN_SCALE

    def update(self, *, is_overflow: bool) -> None:
        """Halve the scale after an overflow; double it after ``growth_interval`` steps without one."""
        self.good_steps = 0 if is_overflow else self.good_steps + 1
        if is_overflow:
            self.value /= 2
        elif self.good_steps == self.growth_interval:
            self.value, self.good_steps = self.value * 2, 0

    def state(self) -> dict[str, Any]:
        return {"scale": self.value, "good_steps": self.good_steps}

    def load(self, state: dict[str, Any]) -> None:
        self.value, self.good_steps = state["scale"], state["good_steps"]
