"""Open images safely: only PNG, JPEG, WebP and GIF of at most 16,777,216 pixels.

Images come from models, tools and datasets. Without these limits Pillow would open 43 formats, one of them by starting
Ghostscript, and decode 20 KB into half a gibibyte.

    restrict_pillow()                      # once in a process whose libraries open images
    image = open_image(data)               # raises ValueError
"""

from __future__ import annotations

import io
import os
import struct
import warnings
from typing import Any

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 4096 * 4096
_DAMAGED = (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError, struct.error)
"""Exceptions that Pillow's decoders raise for damaged data, in addition to OSError."""


def restrict_pillow(*, for_vllm: bool = False) -> None:
    """Remove all other formats from Pillow in this process, and make it reject larger images before decoding.

    ``for_vllm``: vLLM checks the size (``VLLM_MAX_IMAGE_PIXELS``) and responds with status 400; an error of Pillow
    would be a server error.
    """
    from PIL import Image

    Image.init()  # registers all plugins once, so that none is added later
    Image.ID[:] = [name for name in Image.ID if name in FORMATS]
    for name in [*Image.OPEN]:
        if name not in FORMATS:
            del Image.OPEN[name]
    if for_vllm:
        os.environ["VLLM_MAX_IMAGE_PIXELS"] = str(MAX_PIXELS)
        Image.MAX_IMAGE_PIXELS = None
        return
    # Pillow warns above this number, and raises above twice this number
    Image.MAX_IMAGE_PIXELS = MAX_PIXELS // 2
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def open_image(data: bytes) -> Any:
    """Return the first frame as an RGB image of Pillow. Raises ValueError for other formats, sizes and damaged data."""
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)  # reads only the header
    except UnidentifiedImageError:
        raise ValueError(f"not an image in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{error}; at most {MAX_PIXELS} pixels are accepted") from None
    except (OSError, *_DAMAGED) as error:
        raise ValueError(f"a damaged image: {error}") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"an image of {width} x {height} pixels; at most {MAX_PIXELS} are accepted")
    try:
        return image.convert("RGB")
    except (OSError, *_DAMAGED) as error:
        raise ValueError(f"a damaged image: {error}") from error
