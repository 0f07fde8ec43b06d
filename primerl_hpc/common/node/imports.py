"""Imports of large libraries.

    with without_collections():
        import vllm
    with without_torch():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

Standard library only.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage in the block: an import creates a million permanent objects, which collections examine."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def without_torch() -> Iterator[None]:
    """Let transformers find no torch while it is imported, and forget its modules afterwards.

    It imports torch if that is installed: seconds of CPU time and 300 MiB, of which a tokenizer uses nothing. Code that
    imports transformers later gets the complete package. Does nothing if one of the two is imported already.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that there is no torch
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None  # import and find_spec then report that it does not exist
    try:
        yield
    finally:
        del modules["torch"]
        for name in [name for name in modules if name.partition(".")[0] == "transformers"]:
            del modules[name]
