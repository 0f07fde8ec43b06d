"""Images as the trainer's pixels, made by the model's own image processor.

    pictures = Pictures(recipe.model.name)
    picture = pictures.get(key, lambda: image)          # an RGB image of Pillow

A picture has `Pictures.num_tokens` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from primerl_hpc.transport.rollouts.micro_batch import Picture


class Pictures:
    """Processes images, and remembers a result for as long as something holds it."""

    def __init__(self, model: str, *, trust_remote_code: bool = False) -> None:
        self.model, self.trust_remote_code = model, trust_remote_code
        self._known: WeakValueDictionary[str, Picture] = WeakValueDictionary()

    @cached_property
    def processor(self) -> Any:
        """The image processor of the model, without torch. Raises OSError if the model has none."""
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(
            self.model, backend="pil", trust_remote_code=self.trust_remote_code
        )

    def get(self, key: str, open_image: Callable[[], Any]) -> Picture:
        """Return the picture with this key (SHA-256 of the image). ``open_image`` is called if it is not known."""
        if (known := self._known.get(key)) is not None:
            return known
        processed = self.processor(images=[open_image()], return_tensors="np")
        (grid,) = processed["image_grid_thw"].tolist()
        picture = Picture(key, np.ascontiguousarray(processed["pixel_values"], np.float32), tuple(grid))
        self._known[key] = picture
        return picture

    def num_tokens(self, picture: Picture) -> int:
        return int(np.prod(picture.grid)) // self.processor.merge_size**2
