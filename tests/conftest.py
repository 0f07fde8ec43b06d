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


# end-to-end modules that share a fixture of the session; the longest row first, so that all workers end at one time
SHARED = {
    "warm_model": ("test_adapters", "test_evaluate", "test_run", "test_teacher"),
    "serving": (
        *("test_chat", "test_env_server", "test_evaluate_elsewhere", "test_inference", "test_prefill"),
        *("test_listeners", "test_sockets"),
    ),
}
LONG = ("e2e/test_trainer", "e2e/test_parallel", "runtime/test_supervisor")
"""Modules that take minutes: before the others, for the same reason."""


def lane(nodeid: str) -> tuple[int, str]:
    """(rank, name) of the tests that one pytest-xdist worker runs in a row, because they share what is dear to start.

    The virtual cluster mostly waits, runs and engines mostly compute: started together, they fill the machine.
    """
    folder, module = Path(nodeid.partition("::")[0]).with_suffix("").parts[-2:]
    if folder == "slurm":
        return 0, "slurm"
    if folder in ("e2e", "security"):
        for rank, (name, modules) in enumerate(SHARED.items(), start=1):
            if module in modules:
                return rank, name
    name = f"{folder}/{module}"
    return 3 if name in LONG else 4, name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: lane(item.nodeid))


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
