"""Imports of large libraries.

    with without_collections():
        import vllm

Standard library only.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block: an import creates a million permanent objects, which collections examine."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
