"""A trainer of one rank in the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.one_rank import one_rank_world


@pytest.fixture
def one_rank() -> Iterator[Any]:
    """The process group of one rank, as a `World`."""
    with one_rank_world() as world:
        yield world
