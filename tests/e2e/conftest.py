"""Fixtures that several end-to-end tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.serving import Serving


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One engine, the router and one environment server. A test leaves them at policy version 0 of the base model."""
    system = Serving(tmp_path_factory.mktemp("serving"))
    try:
        system.start("inference-0", "router-0", "env_server-0")
        system.wait_for_router()
        yield system
    finally:
        system.stop()
