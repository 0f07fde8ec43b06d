"""Drop what vLLM's reload reports as not loaded although the update wrote it.

    with without_false_warnings(record):        # a `LoadRecord` of worker.reload
        worker.reload_weights(...)

vLLM 0.31 and 0.32 compare names that a model's ``load_weights`` returns with names of parameters, and warn about each
layer that received nothing. Both are wrong for a correct update: ``load_weights`` does not report attention sinks, and
in 0.31 not all experts; tables of rotary embeddings are computed; and a tied head shares the embedding's tensor.
`LoadRecord` counts what each parameter received. A warning is dropped if the count disproves it, and reduced to the
parameters for which the count does not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

NOT_LOADED = "Following weights were not loaded from checkpoint: %s"
"""Its argument is a set of names of parameters."""
NO_WEIGHTS = "%s: Failed to load weights"
"""Its argument is the name of a layer's class."""
LOGGERS = (
    "vllm.v1.worker.gpu_model_runner",  # `NOT_LOADED` in 0.31
    "vllm.model_executor.model_loader.reload.inplace",  # `NOT_LOADED` in 0.32
    "vllm.model_executor.model_loader.reload.layerwise",  # `NO_WEIGHTS`
)
"""Loggers of these messages."""


class Written(Protocol):
    """Parameters and layers that an update is known to have written."""

    def written_names(self) -> set[str]:
        """Return the names of the parameters that were written completely."""
        ...

    def has_written_layers(self, class_name: str) -> bool:
        """True if all layers of a class are known to be written."""
        ...


class FalseWarnings(logging.Filter):
    """Rejects a record that ``written`` disproves."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) != 1:
            return True
        (argument,) = record.args
        if record.msg == NO_WEIGHTS:
            return not self.written.has_written_layers(str(argument))
        if record.msg == NOT_LOADED and isinstance(argument, set | frozenset):
            remaining = argument - self.written.written_names()
            record.args = (remaining,)
            return bool(remaining)
        return True


@contextmanager
def without_false_warnings(written: Written) -> Iterator[None]:
    """Install `FalseWarnings` in the block, for the loggers of these two messages only."""
    false_warnings = FalseWarnings(written)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addFilter(false_warnings)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(false_warnings)
