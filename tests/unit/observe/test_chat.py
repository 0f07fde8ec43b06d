"""`chat` before its first request: why a run serves nothing, the choice of the key, engines on another node's
loopback."""

from __future__ import annotations

import itertools
import json
import socket
import sys
from pathlib import Path

import click
import httpx
import pytest
from click.testing import CliRunner

from primerl_hpc.cli.chat import command
from primerl_hpc.cli.main import cli
from primerl_hpc.common.errors import NotFoundError
from primerl_hpc.common.files import read_json, write_json
from primerl_hpc.common.names import Role, RunState
from primerl_hpc.observe.chat import Answer, find_server, lines_of, router_node_command
from primerl_hpc.run.access.keys import run_keys
from primerl_hpc.run.rundir import RunDir
from tests.support.helpers import make_plan, process_plan
from tests.support.serving import make_recipe

MPI = ("--mpi=none",)  # as in the plans of a SLURM profile


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    roles = (Role.INFERENCE, Role.ROUTER)
    processes = [process_plan(role, srun_args=MPI) for role in roles]
    make_plan(tmp_path / "run", make_recipe(tmp_path), processes=processes)
    return RunDir(tmp_path / "run")


def publish(run: RunDir, *, url: str, host: str) -> None:
    write_json(run.endpoint("router-0"), {"url": url, "host": host, "model": "tiny", "attempt": 1})


def test_a_run_without_engines_reports_why_it_serves_nothing(run: RunDir) -> None:
    with pytest.raises(NotFoundError, match="cannot chat with run"):
        find_server(run)
    processes = {"router-0": {"state": "ended"}}
    write_json(run.state, {"state": RunState.DONE, "attempt": 1, "phase": "main", "processes": processes})
    with pytest.raises(NotFoundError, match="the run is done, its router is not up"):
        find_server(run)
    done = CliRunner().invoke(cli, ["chat", str(run.root), "--prompt", "hello"])
    assert isinstance(done.exception, NotFoundError)


def test_without_stdin_a_question_needs_prompt(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(click.UsageError, match="--prompt"):
        command.callback(str(run.root), None, None, None, None, False)  # type: ignore[misc]


def test_a_missing_key_is_reported_and_an_existing_one_is_used(run: RunDir) -> None:
    publish(run, url="https://127.0.0.1:9", host=socket.gethostname())
    with pytest.raises(NotFoundError, match="only the user who submitted it"):
        find_server(run)
    key = run_keys(run).api_key
    server = find_server(run)
    assert server.router.headers == {"Authorization": f"Bearer {key}"} and server.model == "tiny"


def test_a_run_whose_engines_start_is_reported_once_with_the_command_that_shows_them(run: RunDir) -> None:
    publish(run, url="https://127.0.0.1:9", host=socket.gethostname())
    assert run_keys(run).api_key
    text = str(find_server(run)._refusal(httpx.Response(503, json={"error": "no engine is ready"})))
    assert text.count("no engine is ready") == 1 and "primerl-hpc status run shows" in text


def test_an_engine_on_loopback_is_reached_by_a_step_of_its_job(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step shares the memory of the job as those of `exec` do: by default it would wait for memory indefinitely."""
    monkeypatch.setenv("PATH", str(tmp_path))  # without SLURM: the files decide
    words = ["chat", "run", "--prompt", "hi; rm -rf /"]
    run_keys(run)
    publish(run, url="https://127.0.0.1:9", host=socket.gethostname())
    assert router_node_command(run, words, is_terminal=False) is None
    publish(run, url="https://10.0.0.7:9", host="node7.cluster")
    assert router_node_command(run, words, is_terminal=False) is None
    publish(run, url="https://127.0.0.1:9", host="node7.cluster")
    with pytest.raises(NotFoundError, match="it has no processes"):
        router_node_command(run, words, is_terminal=False)
    write_json(run.plan, {**read_json(run.plan), "scheduler": "slurm"})
    write_json(run.state, {"state": RunState.RUNNING, "job_id": "412", "host": "node7", "attempt": 1})
    run.supervisor_lock.write_text("")
    command = router_node_command(run, words, is_terminal=True)
    assert command is not None and command[:2] == ["srun", "--jobid=412"]
    assert {"--nodelist=node7", "--pty", "--overlap", "--mem=0", *MPI} <= set(command)
    assert command[-7:] == [sys.executable, "-m", "primerl_hpc", *words]


@pytest.mark.parametrize("text", ["a\u2028b", "a\x85b\x0bc", "a\r\nb"])
def test_separators_of_lines_in_a_reply_are_part_of_its_text(run: RunDir, text: str) -> None:
    publish(run, url="https://127.0.0.1:9", host=socket.gethostname())
    assert run_keys(run).api_key
    event = json.dumps({"choices": [{"delta": {"content": text}}]}, ensure_ascii=False)
    response = httpx.Response(200, content=f"data: {event}\r\n\ndata: [DONE]\n\n".encode())
    assert [*itertools.chain(*map(find_server(run)._piece, lines_of(response)))] == [text]


def test_a_reply_names_its_version_or_the_two_it_was_sampled_from() -> None:
    assert Answer(versions=(12, 12)).label == "policy v12"
    assert Answer(versions=(12, 13)).label == "policy v12 to v13"
