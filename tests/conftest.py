"""For every test: a state home of its own, ``--update-golden``, and which tests stay together when two workers run them."""

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


def lane(item: pytest.Item) -> tuple[int, str]:
    """(rank, name) of the tests that one pytest-xdist worker runs in a row, because they share what is dear to start.

    The virtual cluster mostly waits, runs and engines mostly compute: started together, they fill the machine.
    """
    folder, module = item.path.parent.name, item.path.stem
    fixtures = getattr(item, "fixturenames", ())
    if folder == "slurm":
        return 0, "slurm"
    if folder == "e2e":
        shared = next((name for name in ("warm_model", "serving") if name in fixtures), module)
        return 1, shared
    return 2, f"{folder}/{module}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lane)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(lane(item)[1]))


@pytest.fixture(autouse=True)
def own_state_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the runs, recipes and profiles of the user who runs it."""
    home = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("PRIMERL_HOME", str(home))
    for name in ("PRIMERL_PROFILE", "PRIMERL_RUNS_DIR", "PRIMERL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return home
