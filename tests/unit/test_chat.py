"""`chat` before it speaks: why nobody serves, whose key it is, and how it gets to a node that keeps to itself."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from primerl_hpc.cli.chat import command
from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.common.rundir import RunDir, ensure_api_key
from primerl_hpc.observe.chat import Answer, find_server, hop_command
from tests.e2e.serving import make_recipe
from tests.support import make_plan, process_plan


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    roles = (Role.INFERENCE, Role.ROUTER)
    make_plan(tmp_path / "run", make_recipe(tmp_path), processes=[process_plan(role) for role in roles])
    return RunDir(tmp_path / "run")


def publish(run: RunDir, *, url: str, host: str) -> None:
    write_json(run.endpoint("router-0"), {"url": url, "host": host, "model": "tiny"})


def test_a_run_that_serves_nothing_says_why(run: RunDir) -> None:
    with pytest.raises(NotFoundError, match="nothing of run serves"):
        find_server(run)
    ended = {
        "state": RunState.DONE,
        "attempt": 1,
        "phase": "main",
        "processes": {"router-0": {"state": "ended"}},
    }
    write_json(run.state, ended)
    with pytest.raises(NotFoundError, match="it is done, its router is not up"):
        find_server(run)
    done = CliRunner().invoke(cli, ["chat", str(run.root), "--prompt", "hello"])
    assert isinstance(done.exception, NotFoundError)


def test_without_stdin_a_question_needs_prompt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.UsageError, match="--prompt"):
        command.callback(str(run.root), None, None, None, None, False)  # type: ignore[misc]


def test_a_key_that_is_not_there_is_said_so_and_one_that_is_is_used(run: RunDir) -> None:
    publish(run, url="http://127.0.0.1:9", host=socket.gethostname())
    with pytest.raises(NotFoundError, match="only who started it"):
        find_server(run)
    key = ensure_api_key(run)
    assert find_server(run).key == key and find_server(run).model == "tiny"


def test_a_node_that_listens_to_itself_is_reached_by_one_more_step_of_its_job(run: RunDir) -> None:
    words = ["chat", "run", "--prompt", "hi; rm -rf /"]
    publish(run, url="http://127.0.0.1:9", host=socket.gethostname())
    assert hop_command(run, words, is_terminal=False) is None
    publish(run, url="http://10.0.0.7:9", host="node7.cluster")
    assert hop_command(run, words, is_terminal=False) is None
    publish(run, url="http://127.0.0.1:9", host="node7.cluster")
    assert hop_command(run, words, is_terminal=False) is None, "no job is known"
    write_json(run.state, {"state": RunState.RUNNING, "job_id": "412"})
    command = hop_command(run, words, is_terminal=True)
    assert command is not None and command[:2] == ["srun", "--jobid=412"]
    assert "--nodelist=node7" in command and "--pty" in command and "--overlap" in command
    assert command[-7:] == [sys.executable, "-m", "primerl_hpc", *words]


def test_an_answer_names_one_version_or_the_two_it_lies_between() -> None:
    assert Answer(versions=(12, 12)).label == "policy v12"
    assert Answer(versions=(12, 13)).label == "policy v12 to v13"
