"""Weights as they cross from the trainer to the engines: one folder per policy version.

``weights/step_N/`` is an HF model folder (safetensors shards, index, config, tokenizer) plus ``manifest.json``
(every file's size and CRC-32) and, written last, ``STABLE``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class WeightReader(Protocol):
    def newest(self) -> int | None:
        """Highest policy version that is stable; None before the first."""

    def open(self, version: int, reader: str) -> Path:
        """The folder of a version, checked against its manifest's sizes and held by a lease until `close`.

        Raises DataError naming file, expected and found size.
        """

    def close(self, version: int, reader: str) -> None:
        """Give the lease back."""
