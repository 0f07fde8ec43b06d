"""color-squares: an image shows squares in a row, the answer is their colors from left to right.

    environments: {train: [{id: color-squares, args: {squares: 2}}]}

The smallest task that cannot be solved without looking at an image. Each square has a color of `COLORS` with a random
shade. The reward is the share of squares whose color is named at their place.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.types import ImageUrlContentPart, ImageUrlSource, TextContentPart, UserMessage

from primerl_hpc.envs.generated import draw_distinct

COLORS = {
    "red": (200, 40, 40), "green": (40, 160, 40), "blue": (40, 40, 200), "yellow": (210, 210, 40),
    "white": (220, 220, 220), "black": (30, 30, 30),
}  # fmt: skip
QUESTION = "which colors?"
SHADE = 25
"""Largest change of each of a square's three values."""
_DEFAULT_TASKS = {"train": 4096, "test": 256}


class ColorSquaresData(vf.TaskData):
    answer: str


class ColorSquaresTask(vf.Task[ColorSquaresData]):
    @vf.reward(weight=1.0)
    async def named_squares(self, trace: vf.Trace) -> float:
        expected, named = self.data.answer.split(), (trace.last_reply or "").split()
        return sum(map(str.__eq__, expected, named)) / max(len(expected), len(named))


class ColorSquaresConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "train"
    num_tasks: int | None = Field(None, ge=1)
    """Default: 4096 for train, 256 for test."""
    seed: int = 0
    squares: int = Field(2, ge=1, le=16)
    size: int = Field(16, ge=1)
    """Width and height of a square in pixels."""


class ColorSquares(vf.Taskset[ColorSquaresTask, ColorSquaresConfig]):
    def load(self) -> Iterator[ColorSquaresTask]:
        for names, shades in draw_squares(self.config):
            prompt = [
                UserMessage(
                    content=[
                        ImageUrlContentPart(
                            image_url=ImageUrlSource(url=image_url(shades, self.config.size))
                        ),
                        TextContentPart(text=QUESTION),
                    ]
                )
            ]
            # verifiers passes the default of artifact_max_bytes by position, which type checkers do not see
            data = ColorSquaresData(prompt=prompt, answer=" ".join(names))  # pyright: ignore[reportCallIssue]
            yield ColorSquaresTask(data, self.config.task)


def draw_squares(config: ColorSquaresConfig) -> Iterator[tuple[list[str], list[tuple[int, ...]]]]:
    """Yield names and shades of the squares of each task. No image is in both splits."""
    rng = random.Random(config.seed)
    num_tasks = config.num_tasks or _DEFAULT_TASKS[config.split]

    def draw() -> tuple[list[str], list[tuple[int, ...]]]:
        names = [rng.choice(list(COLORS)) for _ in range(config.squares)]
        return names, [tuple(value + rng.randint(-SHADE, SHADE) for value in COLORS[name]) for name in names]

    return draw_distinct(
        draw,
        str,
        split=config.split,
        test_share=16,
        num_tasks=num_tasks,
        max_draws=1000 * num_tasks,
        shortage=f"there are fewer than {num_tasks} distinct {config.split} images",
    )


def image_url(colors: list[tuple[int, ...]], size: int) -> str:
    """Return a ``data:`` URL of squares with these colors in a row, each ``size`` pixels wide and high."""
    from PIL import Image

    row = Image.new("RGB", (len(colors), 1))
    row.putdata(colors)
    file = io.BytesIO()
    row.resize((len(colors) * size, size), Image.Resampling.NEAREST).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


__all__ = ["ColorSquares"]
