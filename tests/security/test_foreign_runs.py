"""A run directory that a colleague prepared gets no key and no prompt of the user who opens it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import DataError, NotFoundError, OccupiedError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.launch.cancel import cancel_run
from primerl_hpc.observe.inside.engine_traces import find_engines
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.lock import identify_process
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import PATIENCE_S, make_plan, process_plan
from tests.support.serving import make_recipe
from tests.support.stranger import NOBODY, as_stranger

VICTIM, COLLEAGUE = NOBODY - 1, NOBODY


@contextmanager
def plain_server() -> Iterator[tuple[str, list[str]]]:
    """A colleague's server without TLS: its URL, and the authorization of each request."""
    received: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.headers.get("Authorization", ""))
            self.send_error(404)

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def make_run(root: Path, tmp_path: Path, owner: int) -> RunDir:
    roles = (Role.INFERENCE, Role.ROUTER)
    make_plan(root, make_recipe(tmp_path), processes=[process_plan(role) for role in roles])
    give(root, owner)
    return RunDir(root)


def give(folder: Path, owner: int) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what the forked users execute: they may not be able to read this installation."""
    root = tmp_path_factory.mktemp("imported")
    run = make_run(root / "run", root, os.geteuid())
    run_keys(run, 1)
    publish(run, "https://127.0.0.1:9")
    chat(run)
    find_engines(run, ["inference"])


@pytest.fixture
def own(tmp_path: Path) -> RunDir:
    """The victim's own running run."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o055 != 0o055:
            folder.chmod(0o755)  # pytest's own
    run = make_run(tmp_path / "own", tmp_path, VICTIM)
    as_stranger(lambda: run_keys(run, 1).api_key, VICTIM)
    return run


def publish(run: RunDir, url: str, attempt: Any = 1) -> None:
    for process in ("router-0", "inference-0"):
        content = {"url": url, "host": socket.gethostname(), "pid": 1, "attempt": attempt, "incarnation": 0}
        write_json(run.endpoint(process), {**content, "model": "m"})


def keys_by_link(run: RunDir, url: str, own: RunDir) -> None:
    publish(run, url)
    run.keys(1).parent.mkdir(parents=True)
    run.keys(1).symlink_to(own.keys(1))


def keys_by_path(run: RunDir, url: str, own: RunDir) -> None:
    (run.control / "keys" / "attempt_1").mkdir(parents=True)
    publish(run, url, f"1/../../../../{own.root.name}/control/keys/attempt_1")


def control_by_link(run: RunDir, url: str, own: RunDir) -> None:
    publish(run, url)
    (run.control / "keys").symlink_to(own.control / "keys")
    run.control.rename(run.root / "other")
    run.control.symlink_to("other")


def chat(run: RunDir) -> BaseException | None:
    return CliRunner().invoke(cli, ["chat", str(run.root), "--prompt", "secret"]).exception


@pytest.mark.parametrize("owner", [COLLEAGUE, VICTIM], ids=["his directory", "extracted from his archive"])
@pytest.mark.parametrize("prepare", [keys_by_link, keys_by_path, control_by_link])
def test_chat_and_profile_send_nothing_to_the_server_that_a_colleagues_directory_names(
    own: RunDir, tmp_path: Path, prepare: Callable[[RunDir, str, RunDir], None], owner: int
) -> None:
    lure = make_run(tmp_path / "lure", tmp_path, COLLEAGUE)
    with plain_server() as (url, received):
        as_stranger(lambda: prepare(lure, url, own), COLLEAGUE)
        give(lure.root, owner)
        refusals = (OccupiedError, NotFoundError) if owner == VICTIM else OccupiedError
        assert isinstance(as_stranger(lambda: chat(lure), VICTIM), refusals)
        with pytest.raises((OccupiedError, DataError)):
            as_stranger(lambda: find_engines(lure, ["inference"]), VICTIM)
    assert received == []


@pytest.mark.parametrize("place", ["directory", "endpoints", "file"])
def test_an_address_that_a_colleague_can_write_gets_no_key(own: RunDir, tmp_path: Path, place: str) -> None:
    """The user's own directory, which was copied or changed so that a group can write a part of it."""
    as_stranger(lambda: publish(own, "https://127.0.0.1:9"), VICTIM)
    path = {"directory": own.root, "endpoints": own.endpoints, "file": own.endpoint("router-0")}[place]
    path.chmod(0o770)
    refused = as_stranger(lambda: chat(own), VICTIM)
    assert isinstance(refused, OccupiedError) and "chmod go-w" in str(refused)


@pytest.mark.parametrize("attempt", [1, "1", "1/../attempt_1", None])
def test_a_key_travels_over_https_only_and_an_attempt_is_a_number(own: RunDir, attempt: Any) -> None:
    with plain_server() as (url, received):
        address = url if attempt == 1 else url.replace("http", "https")
        as_stranger(lambda: publish(own, address, attempt), VICTIM)
        refused = as_stranger(lambda: chat(own), VICTIM)
        assert isinstance(refused, NotFoundError), refused
        assert ("no https address" if attempt == 1 else "is not a number") in str(refused)
    assert received == []


@contextmanager
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user that has nothing to do with a run."""
    with subprocess.Popen(["sleep", "900"]) as process:
        try:
            yield process
        finally:
            process.kill()


def write_job(run: RunDir, process: subprocess.Popen[bytes], **facts: Any) -> None:
    now = {"attempt": 1, "submitted": time.time()}
    write_json(run.job, {"scheduler": "local", "job_id": str(process.pid), **now, **facts})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_cancel_ends_no_process_or_job_that_a_colleague_names(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tmp_path, COLLEAGUE)
    with bystander() as process:
        for scheduler in ("local", "slurm"):
            write_job(run, process, scheduler=scheduler)
            os.chown(run.job, COLLEAGUE, COLLEAGUE)
            with pytest.raises(OccupiedError, match="which process of yours"):
                cancel_run(run, now=False, wait=False)
        assert process.poll() is None


def test_cancel_ends_the_process_of_a_local_run_but_no_later_one_with_its_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", tmp_path, os.geteuid())
    with bystander() as process:
        own = identify_process(process.pid)
        for other in ({**own, "started": "1"}, {**own, "host": "another-node"}):
            write_job(run, process, **other)
            run.state.unlink(missing_ok=True)
            assert cancel_run(run, now=False, wait=False) == RunState.CANCELLED
            assert process.poll() is None
        write_job(run, process, **own)
        run.state.unlink()
        assert cancel_run(run, now=False, wait=False) == RunState.CANCELLED
        assert process.wait(PATIENCE_S) == -signal.SIGTERM
