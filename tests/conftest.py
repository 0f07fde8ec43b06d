"""For every test: an environment that no user has set (tests/support/isolation.py) and a state home of its own.

Also ``--update-golden``, and which tests stay together when workers share them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support.isolation import isolate

if TYPE_CHECKING:
    from tests.support.serving import Serving

# A property holds or not, however busy the machine is.
settings.register_profile("primerl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("primerl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write golden files anew; read the diff in review"
    )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # workers inherit what their controller has
        home = tempfile.TemporaryDirectory(prefix="primerl-test-home-", ignore_cleanup_errors=True)
        config.add_cleanup(home.cleanup)
        isolate(Path(home.name))
    # A shell starts what it puts into its background with SIGINT ignored, nohup with SIGHUP, and so would every command
    # here. What is caught is not inherited: the tests themselves continue after a hangup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get)
def no_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every filesystem refuses locks, as Lustre without ``flock`` and NFS without its lock service do."""

    def refuse(fd: int, operation: int, *_: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)


LANES = {
    "second_cluster": (
        "slurm/test_chain",
        "slurm/test_lifecycle",
        "slurm/test_real_run",
        "slurm/test_recovery",
    ),
    "warm_model": (
        *("e2e/test_adapters", "e2e/test_colocated", "e2e/test_evaluate", "e2e/test_run", "e2e/test_teacher"),
    ),
    "serving": (
        *("e2e/test_chat", "e2e/test_env_server", "e2e/test_evaluate_elsewhere", "e2e/test_inference"),
        *("e2e/test_token_route", "security/test_chat_templates", "security/test_env_servers"),
        *("security/test_flood", "security/test_listeners", "security/test_sockets"),
    ),
}
"""Half of the tests on a virtual cluster, and the users of a fixture of the session, by its name."""
LONG = (
    *("e2e/test_trainer", "e2e/test_parallel", "unit/runtime/test_supervisor", "e2e/test_served_updates"),
    *("security/test_files", "unit/roles/test_tracker", "unit/test_two_phases"),
)
"""Modules that take half a minute or more: they start before the others, so that all workers end at one time."""


def lane(nodeid: str) -> tuple[int, str]:
    """(rank, name) of the tests that one pytest-xdist worker runs in a row, because they share what is dear to start.

    Virtual clusters mostly wait, runs and engines mostly compute: started together, they fill the machine.
    """
    module = nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    shared = [name for name, modules in LANES.items() if module in modules]
    name = shared[0] if shared else "slurm" if module.startswith("slurm/") else module
    first = ("slurm", *LANES, *LONG)
    return first.index(name) if name in first else len(first), name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: lane(item.nodeid))
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        for name in LANES.keys() & fixtures.keys():
            if fixtures[name][-1].scope == "session" and lane(item.nodeid)[1] != name:
                raise pytest.UsageError(f"{item.nodeid} uses the fixture {name}: add its module to LANES")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return lane(nodeid)[1]

    return Lanes(config, log)


LOG_TAIL_CHARACTERS = 1500


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append the tails of the logs in a failed test's folder to its report."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and isinstance(folder, Path):
        for path in sorted([*folder.rglob("*.log"), *folder.rglob("slurm-*.out")])[:12]:
            with contextlib.suppress(OSError):
                report.sections.append(
                    (f"end of {path}", path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:])
                )
    return report


@pytest.fixture(scope="session", autouse=True)
def state_home_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For fixtures that outlive one test: they are made before its own state home is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRIMERL_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def own_state_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the runs, recipes and profiles of the user who runs it."""
    home = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("PRIMERL_HOME", str(home))
    for name in ("PRIMERL_PROFILE", "PRIMERL_RUNS_DIR", "PRIMERL_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return home


@pytest.fixture(scope="session")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """One engine, the router and one environment server. A test leaves them at policy version 0 of the base model."""
    from tests.support.serving import Serving

    system = Serving(tmp_path_factory.mktemp("serving"))
    try:
        system.start("inference-0", "router-0", "env_server-0")
        system.wait_for_router()
        yield system
    finally:
        system.stop()
