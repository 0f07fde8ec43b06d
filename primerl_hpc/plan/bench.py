"""Benchmark mode: what is asked of it, and the recipe that the trainer's own loop then runs on made-up data.

request = BenchRequest(lengths="512-4096", steps=8)
recipe = for_bench(recipe, request)
request.draw(3, seed=0)                              # [3970, 2089, 3616]
"""

from __future__ import annotations

import random
import re

from pydantic import field_validator

from primerl_hpc.common.block import Block, NonNegativeInt, PositiveFloat, PositiveInt
from primerl_hpc.common.errors import ConfigError
from primerl_hpc.recipe.run_schema import Recovery, Tracking
from primerl_hpc.recipe.schema import Recipe
from primerl_hpc.recipe.sft_schema import SFTData

TOKEN_IDS = range(4, 100)
"""Made-up tokens: ids that every vocabulary has."""


class BenchRequest(Block):
    lengths: str
    """Tokens of the samples: ``2048`` (each), ``512-4096`` (uniform between) or ``512,512,4096`` (these in turn)."""
    warmup: NonNegativeInt = 2
    """Steps that are run first and not counted."""
    steps: PositiveInt = 8
    save_every: PositiveInt | None = None
    """Steps between checkpoints; null: none is saved."""
    trace: str | None = None
    """Folder for a trace of one more step, which is not counted."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one device; null: the known one of its kind."""

    @field_validator("lengths")
    @classmethod
    def _lengths_are_of_one_of_the_forms(cls, text: str) -> str:
        values = [int(word) for word in re.findall(r"\d+", text)]
        is_range = re.fullmatch(r"\d+-\d+", text) and values[0] <= values[1]
        if not (is_range or re.fullmatch(r"\d+(,\d+)*", text)) or min(values) < 2:
            raise ValueError(
                f"'{text}' is not 2048 (each sample), 512-4096 (uniform) or 512,512,4096 (in turn), of 2 tokens or more"
            )
        return text

    @property
    def num_steps(self) -> int:
        return self.warmup + self.steps + (self.trace is not None)

    @property
    def longest(self) -> int:
        return max(int(word) for word in re.findall(r"\d+", self.lengths))

    def draw(self, count: int, *, seed: int) -> list[int]:
        """Tokens of each of ``count`` samples."""
        values = [int(word) for word in re.findall(r"\d+", self.lengths)]
        if "-" in self.lengths:
            generator = random.Random(seed)
            return [generator.randint(*values) for _ in range(count)]
        return [values[index % len(values)] for index in range(count)]


def for_bench(recipe: Recipe, request: BenchRequest) -> Recipe:
    """Of a recipe of kind rl or sft: so many steps in one go, no data of its own, nothing after it, no checkpoint but those asked for.

    Raises ConfigError when a sample would not fit into a row.
    """
    if request.longest > recipe.seq_len:
        raise ConfigError(
            f"samples of up to {request.longest} tokens do not fit into rows of {recipe.seq_len}",
            mend="raise seq_len of the recipe, or give other --lengths",
        )
    saves = {
        "interval": request.save_every,
        "keep_last": 1,
        "keep_interval": None,
        "at_end": False,
        "fork": None,
    }
    changes: dict[str, object] = {
        "max_steps": request.num_steps,
        "checkpoint": recipe.checkpoint.model_copy(update=saves),
        "warmup": None,
        "after": None,
        "recovery": Recovery(in_place=False),
        "tracking": Tracking(),
    }
    if recipe.sft is not None:
        changes["sft"] = recipe.sft.model_copy(update={"data": SFTData(path="made-up"), "validation": None})
    return recipe.model_copy(update=changes)
