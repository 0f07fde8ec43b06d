"""Fixtures for every test: a state home of its own, and ``--update-golden``."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A property holds or not, however busy the machine is.
settings.register_profile("primerl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("primerl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write golden files anew; read the diff in review"
    )


@pytest.fixture(autouse=True)
def own_state_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the runs, recipes and profiles of the user who runs it."""
    home = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("PRIMERL_HOME", str(home))
    for name in ("PRIMERL_PROFILE", "PRIMERL_RUNS_DIR", "PRIMERL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return home
